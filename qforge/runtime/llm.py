"""`LLM`: open a model, generate continuations, score token windows. The public face of the runtime."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qforge.errors import DataError, UnsupportedError
from qforge.ops.native_cache import LANES
from qforge.runtime import sequence as seq
from qforge.runtime.blocks import BlockPool
from qforge.runtime.cache_turn import CacheTurn
from qforge.runtime.engine import Engine
from qforge.runtime.parallel import check_size, open_shared
from qforge.runtime.prompts import Prompt, PromptReader, known
from qforge.runtime.running import How, check_device, limits, open_whole
from qforge.runtime.scheduler import Piece
from qforge.runtime.sequence import Output, SamplingParams
from qforge.runtime.step import Runner, build_step
from qforge.runtime.tokenizer import Tokenizer
from qforge.scheme import ACTIVATIONS

_GUESSES = 8  # of 16, a load of many sequences is as fast
_MOST_THREADS = 256

if TYPE_CHECKING:
    import torch

    from qforge.models.model import Model


class LLM:
    """A model on the built-in runtime.

    Args:
        model: what `open_model` takes (a directory, hub id, `.gguf` file, `demo`), or an opened Model.
        activations: `fp` (accurate: only weights are quantized), `int16` or `int8` (products with integer weights round activations on the fly: faster), or `bf16` (both
            sides rounded: fastest for many rows on a CPU with AMX; elsewhere the same as `int16`).
        threads: of the native kernels; None: every core this process may use.
        block_size: tokens of a cache block, a multiple of 16.
        num_blocks: cache blocks; None: room for `max_num_seqs` full contexts, at most 2 GiB (or one full context, if that is more) and at most half of the memory that this
            machine, or a container's limit, has; on a GPU at most what is free.
        max_num_seqs: most sequences that run at once; None: 32, on a GPU 128.
        max_step_tokens: most tokens of one step; longer prompts are computed in pieces. None: 384, on a GPU 2048.
        kv_cache: how keys and values are stored: `fp32` (results equal the reference), `fp16` or `bf16` (half the memory; bf16 is multiplied in bf16 too, fast where the CPU can),
            `int8` (a quarter), `fp8` (E4M3, a quarter); a GPU keeps neither fp32 nor bf16 by name. None: `fp8` where the checkpoint has scales for it, else `fp32`, on a GPU the
            16-bit type of activations. fp8 takes the checkpoint's scales, else each key and each value has one of its own, as in int8.
        device: `cpu`, `cuda` or `cuda:N`: a GPU runs with activations in 16 bits, fp16 for models stored in fp16 or fp32, else bf16.
        graphs: on a GPU, record decode steps as CUDA graphs when the model is loaded.
        num_speculative_tokens: most tokens of a sequence that a step computes on a guess, namely what followed its last four where they stood before (prompt lookup decoding);
            tokens are the same as without. None: 8 on a CPU if native kernels run all products; 0 elsewhere, where more rows in a step can move a token's last bits.
        prefix_cache: whether a request begins behind those of its first tokens whose keys and values an earlier prompt or answer has left in the cache, in full blocks. None: where
            native kernels run all products on a CPU, since logits are the same bits there; elsewhere other rows in a step can move a token's last bits. `score` reads nothing
            that others left.
        tensor_parallel: processes that share the model, each with its part of every weight and of the cache: on GPUs one each (`device: cuda` takes the first N). They are
            started here and end with this object; `model` is then a source, or a Model as `open_model` gave it, which they open again.

    Raises:
        ModelError: the model cannot be read.
        UnsupportedError: its family, the kind of activations or the kind of cache is not available.
        MissingCapabilityError: there is no such device here, or what its kernels need is not installed.
    """

    def __init__(
        self, model: str | Path | Model, *, activations: str = "fp", threads: int | None = None, block_size: int = 16, num_blocks: int | None = None,
        max_num_seqs: int | None = None, max_step_tokens: int | None = None, kv_cache: str | None = None, device: str = "cpu", graphs: bool = True,
        num_speculative_tokens: int | None = None, prefix_cache: bool | None = None, tensor_parallel: int = 1,
    ) -> None:  # fmt: skip
        _check(
            activations,
            block_size,
            threads=threads,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_step_tokens=max_step_tokens,
            num_speculative_tokens=num_speculative_tokens,
        )
        check_device(device, activations, kv_cache)
        check_size(tensor_parallel, device)
        where = limits(device, block_size, num_blocks, max_num_seqs, max_step_tokens)
        how = How(activations, threads, kv_cache, graphs)
        self._opened, made = open_shared(model, where, how, tensor_parallel) if tensor_parallel > 1 else open_whole(model, where, how)
        self.runner, self.num_blocks, self.recorded, self.cache_token_bytes = made.runner, made.num_blocks, made.recorded, made.token_bytes
        self.kv_cache = made.kv_cache
        self._num_speculative_tokens = _guesses(num_speculative_tokens, made.runner)
        self.max_context = self._opened.spec.max_positions
        self.block_size, self._max_num_seqs, self._max_step_tokens = block_size, where.max_num_seqs, where.max_step_tokens
        self._prefix_cache = made.runner.batch_invariant if prefix_cache is None else prefix_cache
        self._turn = CacheTurn(BlockPool(made.num_blocks))
        self._prompts = PromptReader(self._opened.source, self._opened.tokenizer, self.max_context, self.runner.spec.vocab_size)

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, loaded when it is first needed."""
        return self._opened.tokenizer()

    def engine(self, *, speculate: bool = True, prefix_cache: bool = True) -> Engine:
        """A fresh engine over this model's weights and cache; one at a time may have requests. `speculate`, `prefix_cache`: as this object was made for, else without."""
        return Engine(
            self.runner, self.tokenizer, turn=self._turn, block_size=self.block_size, max_num_seqs=self._max_num_seqs, max_step_tokens=self._max_step_tokens,
            max_context=self.max_context, end_ids=self._opened.end_ids,
            num_speculative_tokens=self._num_speculative_tokens if speculate else 0, prefix_cache=self._prefix_cache and prefix_cache,
        )  # fmt: skip

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None) -> list[Output]:
        """Continue prompts, all in one batch; outputs in the order of the prompts. Calls of several threads go one after the other.

        Args:
            prompts: each a text (tokenized as the tokenizer does plain text), a list of token ids, or a list of chat messages (`{"role": ..., "content": ...}`).
            params: one for all, or one for each prompt; None: greedy, 128 tokens.

        Raises:
            DataError: a prompt is empty, malformed, or too long for the model or the cache.
            UnsupportedError: an engine of this object has requests, or a window is being scored.
        """
        if isinstance(prompts, str):
            prompts = [prompts]
        elif not isinstance(prompts, Sequence):
            raise DataError(f"prompts are {type(prompts).__name__}; give a list of prompts")
        given = SamplingParams() if params is None else params
        chosen = list(given) if isinstance(given, Sequence) else [given] * len(prompts)
        if not all(isinstance(one, SamplingParams) for one in chosen):
            raise DataError(f"sampling parameters are {params!r}; give a SamplingParams, or one for each prompt")
        if len(chosen) != len(prompts):
            raise DataError(f"{len(prompts)} prompts were given with {len(chosen)} sampling parameters; give one for all, or one for each")
        engine = self.engine()
        texts, requests = [], []
        try:
            for number, (prompt, one) in enumerate(zip(prompts, chosen, strict=True), 1):
                try:
                    text, ids = self.tokenize(prompt)
                    self._turn.take(engine, call=True)
                    requests.append(engine.add(ids, one))
                except DataError as e:
                    raise DataError(f"prompt {number} of {len(prompts)}: {e}") from e
                texts.append(text)
            while engine.busy():
                engine.step()
        finally:
            self._turn.give_back(engine)
        return [_output(engine, text, request) for text, request in zip(texts, requests, strict=True)]

    def kernels(self) -> dict[str, int]:
        """Which kernel runs how many of the model's products (joined ones count once)."""
        return self.runner.kernels()

    def tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """(text or None, token ids) of a prompt; see `PromptReader.tokenize`."""
        return self._prompts.tokenize(prompt)

    def score(self, windows: list[list[int]]) -> Iterator[torch.Tensor]:
        """Yield fp32 logits `[c, V]` of each window's positions `chunks(len(window))` in turn; never more than 128 positions at once.

        Raises:
            DataError: a window is longer than the model's context or the cache.
            UnsupportedError: an engine of this object has requests, or another window is being read.
        """
        from qforge.engines.base import chunks

        for window in windows:
            blocks = -(-len(window) // self.block_size)
            if len(window) > self.max_context:
                beyond = self.runner.spec.beyond and f"{self.runner.spec.beyond} (engine transformers)"
                raise DataError(f"a window of {len(window)} tokens is longer than the model's context of {self.max_context}; use a smaller window{beyond}")
            if blocks > self.num_blocks:
                raise DataError(f"a window of {len(window)} tokens is longer than the cache of {self.num_blocks * self.block_size}; use a smaller window, or more num_blocks")
            params = SamplingParams(max_tokens=1, prompt_logprobs=0)
            sequence = seq.Sequence(0, known(list(window), self.runner.spec.vocab_size), len(window), params, 0, len(window), frozenset())
            self._turn.take(sequence, call=True)
            try:
                sequence.block_table = self._turn.pool.allocate(blocks) or []
                for start, stop in chunks(len(window)):
                    yield self.runner.step(build_step([Piece(sequence, start, stop)], self.block_size))
            finally:
                self._turn.give_back(sequence)


def _output(engine: Engine, prompt: str | None, s: seq.Sequence) -> Output:
    told = s.logprobs if s.params.logprobs is not None else None
    of_prompt = s.prompt_logprobs if s.params.prompt_logprobs is not None else None
    return Output(prompt, s.tokens[: s.num_prompt], s.generated, engine.text(s), str(s.finish_reason), s.cached, told, of_prompt)


def _guesses(asked: int | None, runner: Runner) -> int:
    if asked is None:
        return _GUESSES if runner.batch_invariant else 0
    if asked < 0:
        raise UnsupportedError(f"num_speculative_tokens is {asked}; it must be at least 0")
    if asked and not runner.batch_invariant:
        raise UnsupportedError("guesses (num_speculative_tokens) need native kernels on a CPU for all products: elsewhere more rows in a step can move a token's last bits; use 0")
    return asked


def _check(activations: str, block_size: int, **counts: int | None) -> None:
    if activations not in ACTIVATIONS:
        raise UnsupportedError(f"activations '{activations}' are not known; use one of {', '.join(ACTIVATIONS)}")
    for name, value in {"block_size": block_size, **counts}.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise UnsupportedError(f"{name} is {value!r}; it must be a whole number")
    if block_size < LANES or block_size % LANES:
        raise UnsupportedError(f"a cache block of {block_size} tokens is not possible; use a multiple of {LANES}")
    for name, value in counts.items():
        if value is not None and value < 1 and name != "num_speculative_tokens":
            raise UnsupportedError(f"{name} is {value}; it must be at least 1")
    threads, most = counts["threads"], max(_MOST_THREADS, os.cpu_count() or 1)
    if threads is not None and threads > most:
        raise UnsupportedError(f"threads is {threads}; at most {most} are started here, and more than this process has cores make every step slower")
