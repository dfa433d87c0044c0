"""`LLM`: open a model, generate continuations, score token windows. The public face of the runtime."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qforge.errors import DataError, UnsupportedError
from qforge.ops.native_cache import CACHE_TYPES, LANES, bytes_per_token
from qforge.ops.native_module import missing
from qforge.runtime import sequence as seq
from qforge.runtime.engine import Engine
from qforge.runtime.native_decoder import NativeDecoder
from qforge.runtime.native_model import NativeModel
from qforge.runtime.opening import Opened, of_model, open_source
from qforge.runtime.scheduler import Piece
from qforge.runtime.sequence import Output, SamplingParams
from qforge.runtime.step import Runner, build_step
from qforge.runtime.tokenizer import Tokenizer
from qforge.scheme import ACTIVATIONS

if TYPE_CHECKING:
    import torch

    from qforge.models.model import Model

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
_CACHE_BYTES = 2 << 30  # of the key/value cache by default; pages that are never written take no memory


class LLM:
    """A model on the built-in runtime.

    Args:
        model: what `open_model` takes (a directory, hub id, `.gguf` file, `demo`), or an opened Model.
        activations: `fp` (accurate: only weights are quantized), `int16` or `int8` (products with integer weights round activations on the fly: faster).
        threads: of the native kernels; None: every core this process may use.
        block_size: tokens of a cache block, a multiple of 16.
        num_blocks: cache blocks; None: room for `max_num_seqs` full contexts, at most 2 GiB (but one full context at least).
        max_num_seqs: most sequences that run at once.
        max_step_tokens: most tokens of one step; longer prompts are computed in pieces.
        kv_cache: how keys and values are stored: `fp32` (results equal the reference), `fp16` or `int8`, a half and a quarter of the memory.

    Raises:
        ModelError: the model cannot be read.
        UnsupportedError: its family, the kind of activations or the kind of cache is not available.
    """

    def __init__(
        self, model: str | Path | Model, *, activations: str = "fp", threads: int | None = None, block_size: int = 16, num_blocks: int | None = None, max_num_seqs: int = 32,
        max_step_tokens: int = 512, kv_cache: str = "fp32",
    ) -> None:  # fmt: skip
        _check(activations, kv_cache, threads, block_size, num_blocks, max_num_seqs, max_step_tokens)
        self._opened = open_source(str(model), activations, threads) if isinstance(model, str | Path) else of_model(model, activations, threads)
        spec = self._opened.spec
        size = block_size * spec.num_layers * bytes_per_token(kv_cache, spec.num_kv_heads, spec.head_dim)
        context = -(-spec.max_positions // block_size)
        self.num_blocks = num_blocks or max(context, min(max_num_seqs * context, _CACHE_BYTES // size))
        self.runner = _runner(self._opened, threads, self.num_blocks, block_size, kv_cache)
        self.kv_cache, self.max_context = kv_cache, spec.max_positions
        self._block_size, self._max_num_seqs, self._max_step_tokens = block_size, max_num_seqs, max_step_tokens

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, loaded when it is first needed."""
        return self._opened.tokenizer()

    def engine(self) -> Engine:
        """A fresh engine over this model's weights and cache; use one at a time."""
        return Engine(
            self.runner, self.tokenizer, num_blocks=self.num_blocks, block_size=self._block_size, max_num_seqs=self._max_num_seqs, max_step_tokens=self._max_step_tokens,
            max_context=self.max_context, end_ids=self._opened.end_ids,
        )  # fmt: skip

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None) -> list[Output]:
        """Continue prompts, all in one batch; outputs in the order of the prompts.

        Args:
            prompts: each a text (tokenized as the tokenizer does plain text), a list of token ids, or a list of chat messages (`{"role": ..., "content": ...}`).
            params: one for all, or one for each prompt; None: greedy, 128 tokens.

        Raises:
            DataError: a prompt is empty, malformed, or too long for the model or the cache.
        """
        if isinstance(prompts, str):
            prompts = [prompts]
        chosen = [params or SamplingParams()] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
        if len(chosen) != len(prompts):
            raise DataError(f"{len(prompts)} prompts were given with {len(chosen)} sampling parameters; give one for all, or one for each")
        engine = self.engine()
        texts, requests = [], []
        for number, (prompt, one) in enumerate(zip(prompts, chosen, strict=True), 1):
            try:
                text, ids = self.tokenize(prompt)
                requests.append(engine.add(ids, one))
            except DataError as e:
                raise DataError(f"prompt {number} of {len(prompts)}: {e}") from e
            texts.append(text)
        while engine.busy():
            engine.step()
        return [_output(engine, text, request) for text, request in zip(texts, requests, strict=True)]

    def kernels(self) -> dict[str, int]:
        """Which kernel runs how many of the model's products (joined ones count once)."""
        return self.runner.kernels()

    def tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """(text or None, token ids) of a prompt. A chat template writes its own special tokens, so none are added to its text.

        Raises:
            DataError: the prompt is empty or of no known kind, or the model has no chat template.
        """
        if isinstance(prompt, str):
            if not prompt:
                raise DataError("it is empty; give at least one character (or a list with a token id)")
            return prompt, self._known(list(self.tokenizer.encode(prompt)))
        items = list(prompt)
        if items and all(isinstance(i, int) and not isinstance(i, bool) for i in items):
            return None, self._known([i for i in items if isinstance(i, int)])
        if items and all(isinstance(i, Mapping) and isinstance(i.get("role"), str) and isinstance(i.get("content"), str) for i in items):
            text = self._render(items)
            return text, self._known(list(self.tokenizer.encode(text, add_special_tokens=False)))
        raise DataError("it is neither a text, nor a list of token ids, nor a list of messages with role and content")

    def score(self, windows: list[list[int]]) -> Iterator[torch.Tensor]:
        """Yield fp32 logits `[c, V]` of each window's positions `chunks(len(window))` in turn; never more than 128 positions at once.

        Raises:
            DataError: a window is longer than the model's context or the cache.
        """
        from qforge.engines.base import chunks

        for window in windows:
            blocks = -(-len(window) // self._block_size)
            if len(window) > self.max_context or blocks > self.num_blocks:
                raise DataError(f"a window of {len(window)} tokens is longer than the model's context of {self.max_context} (or than the cache); use a smaller window")
            params = SamplingParams(max_tokens=1)
            sequence = seq.Sequence(0, self._known(list(window)), len(window), params, 0, len(window), frozenset(), block_table=list(range(blocks)))
            for start, stop in chunks(len(window)):
                yield self.runner.step(build_step([Piece(sequence, start, stop)], self._block_size, all_logits=True))

    def _known(self, ids: list[int]) -> list[int]:
        size = self.runner.spec.vocab_size
        wrong = next((t for t in ids if not 0 <= t < size), None)
        if wrong is not None:
            raise DataError(f"token {wrong} is not in the model's vocabulary of {size}")
        return ids

    def _render(self, messages: list[Any]) -> str:
        if not self.tokenizer.chat_template:
            raise DataError(f"'{self._opened.source}' has no chat template; give a text instead of messages")
        try:
            return str(self.tokenizer.apply_chat_template([dict(m) for m in messages], tokenize=False, add_generation_prompt=True))
        except Exception as e:  # whatever a template's own code raises
            raise DataError(f"the chat template of '{self._opened.source}' refuses these messages: {e}") from e


def _runner(opened: Opened, threads: int | None, num_blocks: int, block_size: int, kv_cache: str) -> Runner:
    if isinstance(opened.weights, NativeModel):
        return NativeDecoder(opened.weights, threads=threads, num_blocks=num_blocks, block_size=block_size, kv_cache=kv_cache)
    if kv_cache != "fp32":
        raise UnsupportedError(f"a key/value cache of '{kv_cache}' needs the native kernels, and {missing()}; use fp32")
    from qforge.runtime.decoder import Decoder

    return Decoder(opened.weights, num_blocks=num_blocks, block_size=block_size)


def _output(engine: Engine, prompt: str | None, s: seq.Sequence) -> Output:
    return Output(prompt, s.tokens[: s.num_prompt], s.generated, engine.text(s), str(s.finish_reason))


def _check(activations: str, kv_cache: str, threads: int | None, block_size: int, num_blocks: int | None, max_num_seqs: int, max_step_tokens: int) -> None:
    if activations not in ACTIVATIONS:
        raise UnsupportedError(f"activations '{activations}' are not known; use one of {', '.join(ACTIVATIONS)}")
    if kv_cache not in CACHE_TYPES:
        raise UnsupportedError(f"a key/value cache of '{kv_cache}' is not known; use one of {', '.join(CACHE_TYPES)}")
    if block_size < LANES or block_size % LANES:
        raise UnsupportedError(f"a cache block of {block_size} tokens is not possible; use a multiple of {LANES}")
    for name, value in (("threads", threads), ("num_blocks", num_blocks), ("max_num_seqs", max_num_seqs), ("max_step_tokens", max_step_tokens)):
        if value is not None and value < 1:
            raise UnsupportedError(f"{name} is {value}; it must be at least 1")
