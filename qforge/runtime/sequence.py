"""One request: its sampling parameters, its tokens, how far they are computed, and what comes out. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Integral, Real
from typing import NamedTuple

from qforge.errors import DataError

_GREEDY = 1e-5  # temperatures below it: the second most likely token would need logits as near as 1e-3 to be drawn once in e^100 times
MOST_LOGPROBS = 20  # of a position


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when a continuation ends.

    Attributes:
        max_tokens: most tokens that are generated; None: as many as the model's context and the cache have room for.
        temperature: 0 is greedy, and so is what is below 1e-5.
        top_k: sample among this many most likely tokens; 0: all.
        top_p: smallest set of tokens whose probabilities reach this sum.
        min_p: only tokens at least this fraction as likely as the most likely one.
        seed: random numbers depend on the seed and the token's position alone; None draws a fresh seed.
        stop: strings that end a continuation; the text ends before them.
        stop_token_ids: tokens that end a continuation, besides the model's own end tokens.
        ignore_eos: go on after the model's end tokens.
        logprobs: give the log-probability of every generated token, and those of so many most likely ones there; before temperature and whatever else tokens are drawn by.
        prompt_logprobs: the same for the prompt's tokens, all of which are then computed, whatever the cache has of them.
    """

    max_tokens: int | None = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for name, single, kind in (("stop", str, "strings"), ("stop_token_ids", Integral, "token ids")):
            given = getattr(self, name)
            several = () if given is None else (given,) if isinstance(given, single) else tuple(given) if isinstance(given, Iterable) and not isinstance(given, bytes) else (given,)
            if not all(isinstance(one, single) and not isinstance(one, bool) for one in several):
                raise DataError(f"{name} is {given!r}; it must be {kind}")
            object.__setattr__(self, name, several)
        for name in ("max_tokens", "top_k", "seed", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if (not isinstance(value, Integral) or isinstance(value, bool)) and not (name != "top_k" and value is None):
                raise DataError(f"{name} is {value!r}; it must be a whole number")
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            if not isinstance(value, Real) or isinstance(value, bool):
                raise DataError(f"{name} is {value!r}; it must be a number")
        rules: tuple[tuple[str, float, bool, str], ...] = (
            ("max_tokens", self.max_tokens or 0, self.max_tokens is None or self.max_tokens >= 1, "at least 1"),
            ("temperature", self.temperature, math.isfinite(self.temperature) and self.temperature >= 0, "0 (greedy) or a positive number"),
            ("top_k", self.top_k, 0 <= self.top_k < 1 << 31, "0 (all tokens) or a positive number below 2**31"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", self.min_p, 0 <= self.min_p <= 1, "from 0 to 1"),
            ("seed", self.seed or 0, 0 <= (self.seed or 0) < 1 << 64, "from 0 to 2**64 - 1"),
            ("logprobs", self.logprobs or 0, 0 <= (self.logprobs or 0) <= MOST_LOGPROBS, f"from 0 to {MOST_LOGPROBS}"),
            ("prompt_logprobs", self.prompt_logprobs or 0, 0 <= (self.prompt_logprobs or 0) <= MOST_LOGPROBS, f"from 0 to {MOST_LOGPROBS}"),
        )
        for name, value, good, allowed in rules:
            if not good:
                raise DataError(f"{name} is {value}; it must be {allowed}")
        if any(not s for s in self.stop):
            raise DataError("a stop string is empty; it would stop every text at once")
        if self.temperature < _GREEDY:
            object.__setattr__(self, "temperature", 0.0)


class Draw(NamedTuple):
    """What the choice of a token depends on, besides its logits."""

    params: SamplingParams
    seed: int
    position: int


class Logprob(NamedTuple):
    """A token's log-probability where it stands, and the most likely tokens there with theirs."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class FinishReason(StrEnum):
    """Why a continuation ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Output:
    """A finished request. `prompt`: the text given (rendered, for chat messages), or None for token ids. `token_ids` include the token that ended it. `cached_tokens`: of the
    prompt, that were in the cache; two outputs are equal whatever it was. `logprobs`, `prompt_logprobs`: of each token, where asked for; the prompt's first has none."""

    prompt: str | None
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    cached_tokens: int = field(default=0, compare=False)
    logprobs: list[Logprob] | None = None
    prompt_logprobs: list[Logprob | None] | None = None


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """A request while it runs; only the scheduler and the engine change it.

    Attributes:
        limit: tokens at which it ends, prompt included (max_tokens, or the model's context).
        end_ids: tokens that end it.
        computed: leading tokens whose keys and values are in the cache.
        block_table: its cache blocks, in order.
        preemptions: how often its blocks were taken away and computed again.
        block_names, named_blocks: of its full blocks, as far as they were needed, and how many of its blocks the pool knows by them.
        cached: tokens that were in the cache when it began.
        logprobs, prompt_logprobs: so far.
    """

    id: int
    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    seed: int
    limit: int
    end_ids: frozenset[int]
    computed: int = 0
    block_table: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    preemptions: int = 0
    block_names: list[bytes] = field(default_factory=list)
    named_blocks: int = 0
    cached: int = 0
    logprobs: list[Logprob] = field(default_factory=list)
    prompt_logprobs: list[Logprob | None] = field(default_factory=lambda: [None])

    @property
    def generated(self) -> list[int]:
        """Tokens after the prompt."""
        return self.tokens[self.num_prompt :]
