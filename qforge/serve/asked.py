"""What a client may ask for: bodies of OpenAI's API as far as the runtime does what they say. What it does not do is refused by name, and never left out without a word."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from qforge.errors import DataError, UnsupportedError
from qforge.runtime.sequence import SamplingParams

# Fields that are taken when they ask for nothing, or whatever they say (None).
_IDLE: dict[str, tuple[Any, ...] | None] = {
    "logprobs": (False,), "top_logprobs": (0,), "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,), "logit_bias": ({},), "best_of": (1,),
    "echo": (False,), "suffix": ("",), "response_format": ({"type": "text"},), "tools": ([],), "tool_choice": ("none", "auto"), "parallel_tool_calls": None, "user": None,
    "metadata": None, "store": None, "service_tier": None, "safety_identifier": None, "prompt_cache_key": None,
}  # fmt: skip
MOST_CHOICES = 128
_T = TypeVar("_T", bound="Asked")


class StreamOptions(BaseModel):
    """What a stream says at its end."""

    include_usage: bool = False


class Asked(BaseModel):
    """What both kinds of request have; `top_k`, `min_p`, `stop_token_ids` and `ignore_eos` are not OpenAI's but vLLM's."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = Field(default=None, ge=1, le=MOST_CHOICES)
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def sampling(self, usual_tokens: int) -> list[SamplingParams]:
        """One for each choice; `usual_tokens`: the most where the client names none. A temperature that is not named is 1, as with OpenAI.

        Raises:
            DataError: a value is not possible.
        """
        top_k = max(0, self.top_k or 0)  # -1 is all, as vLLM has it
        most, temperature = usual_tokens if self.max_tokens is None else self.max_tokens, 1.0 if self.temperature is None else self.temperature
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return [
            SamplingParams(
                max_tokens=most, temperature=temperature, top_k=top_k, top_p=1.0 if self.top_p is None else self.top_p, min_p=self.min_p or 0.0,
                seed=None if self.seed is None else self.seed + i, stop=stop, stop_token_ids=tuple(self.stop_token_ids or ()), ignore_eos=bool(self.ignore_eos),
            )
            for i in range(self.n or 1)
        ]  # fmt: skip

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with counts of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    def check(self) -> None:
        """Refuse what is not done here.

        Raises:
            UnsupportedError: a field asks for it.
        """
        for name, value in (self.model_extra or {}).items():
            if name not in _IDLE:
                raise UnsupportedError(f"`{name}` is not known here")
            idle = _IDLE[name]
            if value is not None and idle is not None and not any(value == one and isinstance(value, bool) is isinstance(one, bool) for one in idle):
                raise UnsupportedError(f"`{name}` is not supported here, only {' or '.join(json.dumps(one) for one in idle)}")


class Completion(Asked):
    """POST /v1/completions."""

    prompt: str | list[str] | list[int] | list[list[int]]

    def prompts(self) -> list[str | list[int]]:
        """Each prompt, a text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if all(isinstance(token, int) for token in self.prompt):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [one for one in self.prompt if not isinstance(one, int)]


class Part(BaseModel):
    """A part of a message's content."""

    model_config = ConfigDict(strict=True)

    type: str
    text: str | None = None


class Message(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    content: str | list[Part] | None = None

    def plain(self) -> dict[str, str]:
        """As chat templates take it.

        Raises:
            UnsupportedError: it is not text.
        """
        more = [name for name, value in (self.model_extra or {}).items() if value is not None and name != "name"]
        if more or self.content is None:
            raise UnsupportedError(f"a message of {self.role!r} has {', '.join(more) or 'no content'}; messages of text are taken here")
        if isinstance(self.content, str):
            return {"role": self.role, "content": self.content}
        if any(part.type != "text" or part.text is None for part in self.content):
            raise UnsupportedError(f"a message of {self.role!r} has a part that is no text")
        return {"role": self.role, "content": "".join(part.text or "" for part in self.content)}


class Chat(Asked):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = None

    def sampling(self, usual_tokens: int) -> list[SamplingParams]:
        """See `Asked.sampling`; `max_completion_tokens` is the newer name of `max_tokens`."""
        return super().sampling(usual_tokens if self.max_completion_tokens is None or self.max_tokens is not None else self.max_completion_tokens)


def read(kind: type[_T], body: bytes) -> _T:
    """A request's body.

    Raises:
        DataError: it is no JSON, or a field is missing or of another type; all of them are named.
        UnsupportedError: see `Asked.check`.
    """
    try:
        asked = kind.model_validate_json(body)
    except ValidationError as e:
        found = dict.fromkeys(f"{'.'.join(str(p) for p in error['loc'][:1]) or 'body'}: {error['msg']}" for error in e.errors())
        raise DataError("; ".join(found)) from None
    asked.check()
    return asked
