"""What a gate's limit is in text ("<= 1.30"), and which figures a gate can name."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

# Figures that need an evaluation beside the original, an evaluation at all, or only a run.
COMPARED = ("perplexity_ratio", "kl_mean", "kl_p99", "top1_agreement")
EVALUATED = ("perplexity", *COMPARED)
MEASURED = ("size_ratio", "size_bytes", "bits_per_weight", "peak_rss_bytes")
FIGURES = (*EVALUATED, *MEASURED)

_NUMBER = r"[+-]?(?:\d+(?:[\d_]*\d)?(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
_LIMIT = re.compile(rf"\s*(<=|>=|<|>)\s*({_NUMBER})\s*")
_GATE = re.compile(r"\s*([A-Za-z_][\w.]*)\s*((?:<|>|=|!).*)", re.DOTALL)


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
