"""What a gate's limit is in text ("<= 1.30"), which figures a gate can name, and what sizes and budgets are in text ("8GiB", "4.5 bits")."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

# Figures that need an evaluation beside the original, an evaluation at all, or only a run.
COMPARED = ("perplexity_ratio", "kl_mean", "kl_median", "kl_p90", "kl_p99", "kl_p999", "kl_max", "top1_agreement", "top5_agreement", "delta_p_rms", "lost")
EVALUATED = ("perplexity", "bits_per_byte", *COMPARED)
MEASURED = ("size_ratio", "size_bytes", "bits_per_weight", "peak_rss_bytes")
FIGURES = (*EVALUATED, *MEASURED)

_NUMBER = r"[+-]?(?:\d+(?:[\d_]*\d)?(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
_LIMIT = re.compile(rf"\s*(<=|>=|<|>)\s*({_NUMBER})\s*")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?) ?([KMGT]i?)?B\s*", re.IGNORECASE)
_BITS = re.compile(r"\s*(\d+(?:\.\d+)?) ?bits?\s*", re.IGNORECASE)
_DIVERGENCE = re.compile(rf"\s*kl(?:_mean)?\s*<=\s*({_NUMBER})\s*", re.IGNORECASE)
_GATE = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*((?:<|>|=|!).*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Limit:
    """A bound on a figure: `value` is allowed when `value <operator> bound`. `str()` gives the text that `parse_limit` reads."""

    operator: str
    bound: float

    def allows(self, value: float) -> bool:
        """Whether a value keeps the limit; a value that is not a number never does."""
        if self.operator == "<=":
            return value <= self.bound
        if self.operator == ">=":
            return value >= self.bound
        return value < self.bound if self.operator == "<" else value > self.bound

    @property
    def upper(self) -> bool:
        """Whether small values are good."""
        return self.operator in ("<", "<=")

    def __str__(self) -> str:
        return f"{self.operator} {self.bound!r}"


def parse_limit(text: object) -> Limit:
    """Read a limit such as `<= 1.30`, `>= 0.7` or `< 2e9`.

    Raises:
        ValueError: it is no comparison with a finite number (the message says what is allowed).
    """
    found = _LIMIT.fullmatch(text) if isinstance(text, str) else None
    if found is None or not math.isfinite(float(found[2])):
        raise ValueError(f'{text!r} is no limit; write a comparison with a number, such as "<= 1.30" or ">= 0.70" (allowed: <=, <, >=, >)')
    return Limit(found[1], float(found[2]))


def parse_gate(text: str) -> tuple[str, Limit]:
    """Read a whole gate such as `perplexity_ratio <= 1.02` into its figure's name and its limit.

    Raises:
        ValueError: it is not a name followed by a limit.
    """
    found = _GATE.fullmatch(text)
    if found is None:
        raise ValueError(f'{text!r} is no gate; write a figure and a limit, such as "perplexity_ratio <= 1.02"')
    return found[1], parse_limit(found[2])


@dataclass(frozen=True, slots=True)
class Budget:
    """What an automatic choice of schemes has to keep; one of the three is set.

    Attributes:
        bits: stored bits per weight of the quantized linears, scales included.
        size_bytes: of all tensors of the artifact.
        divergence: KL divergence from the original in nats per token.
    """

    bits: float | None = None
    size_bytes: int | None = None
    divergence: float | None = None


def parse_budget(text: object) -> Budget:
    """Read a budget: `4.5 bits`, `110 MB`, `kl <= 0.05`.

    Raises:
        ValueError: it is none of them, or not above zero.
    """
    if isinstance(text, str):
        bits, size, floor = _BITS.fullmatch(text), parse_size(text), _DIVERGENCE.fullmatch(text)
        if bits and float(bits[1]) > 0:
            return Budget(bits=float(bits[1]))
        if size:
            return Budget(size_bytes=size)
        if floor and 0 < float(floor[1]) < math.inf:
            return Budget(divergence=float(floor[1]))
    raise ValueError(f'{text!r} is no budget; write bits per weight ("4.5 bits"), a size of all weights ("110 MB"), or a KL divergence to keep ("kl <= 0.05")')


def parse_size(text: str) -> int:
    """Bytes that `8GiB`, `110 MB` or `512 B` stand for; 0 for any other text."""
    match = _SIZE.fullmatch(text)
    if match is None:
        return 0
    prefix = match[2] or ""
    return int(float(match[1]) * (1024 if len(prefix) == 2 else 1000) ** " KMGT".index(prefix[:1].upper() or " "))
