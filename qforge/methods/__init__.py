"""Quantization methods, one file each: they produce `QuantizedLinear`s, one linear at a time."""

from __future__ import annotations

from qforge.errors import UnsupportedError
from qforge.methods.base import Options, Quantizer, Stats, statistics_needed
from qforge.methods.gptq import GPTQ
from qforge.methods.rtn import RTN

__all__ = ["Options", "Quantizer", "Stats", "available", "find", "statistics_needed"]

_QUANTIZERS: dict[str, Quantizer] = {q.name: q for q in (RTN(), GPTQ(), RTN("fp8"), RTN("nf4"))}


def available() -> list[str]:
    """Names of the methods that run today, `none` first."""
    return ["none", *_QUANTIZERS]


def find(names: str | list[str] | tuple[str, ...]) -> Quantizer | None:
    """The quantizer that a recipe's `quantize.method` names; None for `none`.

    Raises:
        UnsupportedError: a method that is not available yet, by name.
    """
    chain = [names] if isinstance(names, str) else list(names)
    for name in chain:
        if name != "none" and name not in _QUANTIZERS:
            raise UnsupportedError(f"method {name} is not available yet; available: {', '.join(available())}")
    if len(chain) > 1:
        raise UnsupportedError(f"combining methods ({', '.join(chain)}) is not available yet; name one of: {', '.join(available())}")
    return _QUANTIZERS.get(chain[0])
