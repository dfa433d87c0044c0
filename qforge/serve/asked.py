"""What a client may ask for: bodies of OpenAI's API as far as the runtime does what they say. What it does not do is refused by name, and never left out without a word."""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from qforge.errors import DataError, UnsupportedError
from qforge.runtime.sequence import SamplingParams

# Fields that are taken when they ask for nothing, or whatever they say (None).
_IDLE: dict[str, tuple[Any, ...] | None] = {
    "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,), "logit_bias": ({},), "best_of": (1,),
    "suffix": ("",), "response_format": ({"type": "text"},), "tools": ([],), "tool_choice": ("none", "auto"), "parallel_tool_calls": None, "user": None,
    "metadata": None, "store": None, "service_tier": None, "safety_identifier": None, "prompt_cache_key": None,
    "stream_options.include_obfuscation": (False,),
}  # fmt: skip
MOST_CHOICES = 128
_USUAL_TOKENS = 16
_MOST_STOPS, _LONGEST_STOP = 16, 256
_T = TypeVar("_T", bound="Asked")


_Texts = Annotated[list[str], Field(fail_fast=True)]  # else each wrong element is an error that is kept, of as many as a body holds
_Ids = Annotated[list[int], Field(fail_fast=True)]


class StreamOptions(BaseModel):
    """What a stream says at its end."""

    model_config = ConfigDict(extra="allow", strict=True)

    include_usage: bool | None = None


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
    stop: str | _Texts | None = None
    stop_token_ids: _Ids | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    def sampling(self) -> list[SamplingParams]:
        """One for each choice. A temperature that is not named is 1, as with OpenAI.

        Raises:
            DataError: a value is not possible.
        """
        top_k = 0 if self.top_k is None or self.top_k == -1 else self.top_k  # -1 is all, as vLLM has it
        told, of_prompt = self.told()
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stop) > _MOST_STOPS or any(len(s) > _LONGEST_STOP for s in stop):
            raise DataError(f"`stop` has {len(stop):,} strings; at most {_MOST_STOPS} of at most {_LONGEST_STOP} characters are looked for, after every token of everybody")
        return [
            SamplingParams(
                max_tokens=self.most(), temperature=1.0 if self.temperature is None else self.temperature, top_k=top_k,
                top_p=1.0 if self.top_p is None else self.top_p, min_p=self.min_p or 0.0,
                seed=self._seed(i), stop=stop, stop_token_ids=tuple(self.stop_token_ids or ()), ignore_eos=bool(self.ignore_eos), logprobs=told, prompt_logprobs=of_prompt,
            )
            for i in range(self.n or 1)
        ]  # fmt: skip

    def _seed(self, choice: int) -> int | None:
        """Each choice has one of its own; OpenAI's are of 64 bits with a sign."""
        return None if self.seed is None else self.seed + choice if self.seed >= 0 else (self.seed + choice) % (1 << 64)

    def most(self) -> int | None:
        """Tokens of a choice at most."""
        return self.max_tokens

    def told(self) -> tuple[int | None, int | None]:
        """Of how many most likely tokens the log-probabilities are wanted beside each generated token's, and beside each of the prompt's."""
        return None, None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with counts of tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def check(self) -> None:
        """Refuse what is not done here.

        Raises:
            UnsupportedError: a field asks for it.
        """
        if self.stream_options is not None and not self.stream:
            raise UnsupportedError("`stream_options` are of a stream, and `stream` is not asked for")
        of_stream = (self.stream_options.model_extra if self.stream_options else None) or {}
        for name, value in [*(self.model_extra or {}).items(), *((f"stream_options.{name}", value) for name, value in of_stream.items())]:
            if value is None:
                continue
            if name not in _IDLE:
                raise UnsupportedError(f"`{name[:80]}` is not known here")
            idle = _IDLE[name]
            if idle is not None and not any(value == one and isinstance(value, bool) is isinstance(one, bool) for one in idle):
                raise UnsupportedError(f"`{name}` is not supported here, only {' or '.join(json.dumps(one) for one in idle)}")


class Completion(Asked):
    """POST /v1/completions."""

    prompt: str | _Texts | _Ids | Annotated[list[_Ids], Field(fail_fast=True)]
    logprobs: int | None = None
    echo: bool | None = None

    def most(self) -> int:
        """As many as OpenAI's where none are named."""
        return _USUAL_TOKENS if self.max_tokens is None else self.max_tokens

    def told(self) -> tuple[int | None, int | None]:
        """See `Asked.told`."""
        return self.logprobs, self.logprobs if self.echo else None

    def prompts(self) -> list[str | list[int]]:
        """Each prompt, a text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if all(isinstance(token, int) for token in self.prompt):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [one for one in self.prompt if not isinstance(one, int)]


class Part(BaseModel):
    """A part of a message's content."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str
    text: str | None = None


class Message(BaseModel):
    """A message of a conversation."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    name: str | None = None
    content: str | Annotated[list[Part], Field(fail_fast=True)] | None = None

    def plain(self) -> dict[str, str]:
        """As chat templates take it.

        Raises:
            UnsupportedError: it is not text.
        """
        more = [name[:80] for name, value in (self.model_extra or {}).items() if value not in (None, [])]
        if more or (self.content is None and self.role != "assistant"):
            raise UnsupportedError(f"a message of {self.role!r} has {', '.join(more) or 'no content'}; messages of text are taken here")
        parts = self.content if isinstance(self.content, list) else []
        if any(part.type != "text" or part.text is None or part.model_extra for part in parts):
            raise UnsupportedError(f"a message of {self.role!r} has a part that is not text alone")
        text = self.content if isinstance(self.content, str) else "".join(part.text or "" for part in parts)
        return {"role": self.role, "content": text} | ({} if self.name is None else {"name": self.name})


class Chat(Asked):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def most(self) -> int | None:
        """`max_completion_tokens` is the newer name of `max_tokens`; with neither, all that there is room for."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def told(self) -> tuple[int | None, int | None]:
        """See `Asked.told`."""
        if self.top_logprobs and not self.logprobs:
            raise UnsupportedError("`top_logprobs` are of `logprobs`, and these are not asked for")
        return (self.top_logprobs or 0) if self.logprobs else None, None


def read(kind: type[_T], body: bytes) -> _T:
    """A request's body.

    Raises:
        DataError: it is no JSON, or a field is missing or of another type; all of them are named.
        UnsupportedError: see `Asked.check`.
    """
    try:
        asked = kind.model_validate_json(body)
    except ValidationError as e:
        found = dict.fromkeys(
            f"{'.'.join(str(p) for p in error['loc'][:1]) or 'body'}: {error['msg']}" for error in e.errors(include_url=False, include_context=False, include_input=False)
        )
        raise DataError("; ".join(found)) from None
    asked.check()
    return asked
