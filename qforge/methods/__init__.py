"""Quantization methods, one file each: they produce `QuantizedLinear`s, one linear at a time."""

from __future__ import annotations

from qforge.errors import UnsupportedError
from qforge.methods.awq import AWQ
from qforge.methods.base import Options, Quantizer, Stats, statistics_needed
from qforge.methods.gptq import GPTQ
from qforge.methods.rtn import RTN
from qforge.methods.signround import SignRound
from qforge.methods.smoothquant import SmoothQuant
from qforge.methods.transform import Transform
from qforge.methods.tuning import BlockTuner

__all__ = ["BlockTuner", "Options", "Quantizer", "Stats", "Transform", "available", "find", "find_transforms", "find_tuner", "statistics_needed"]

_QUANTIZERS: dict[str, Quantizer] = {
    q.name: q for q in (RTN(), GPTQ(), SignRound(), RTN("fp8"), RTN("nf4", search=False), RTN("awq", weighted=True), RTN("smoothquant", search=False), RTN("rotate"))
}
_QUANTIZERS["auto"] = _QUANTIZERS["gptq"]  # what rounds, once schemes are chosen
_TUNERS: dict[str, BlockTuner] = {"signround": SignRound()}
_TRANSFORMS: dict[str, Transform] = {t.name: t for t in (AWQ(), SmoothQuant())}


def available() -> list[str]:
    """Names of the methods that run today, `none` first."""
    return ["none", *_QUANTIZERS]


def find(names: str | list[str] | tuple[str, ...]) -> Quantizer | None:
    """The quantizer that a recipe's `quantize.method` ends in; None for `none`. A transform at the end stands for rounding to nearest after it.

    Raises:
        UnsupportedError: a method that is not available yet, by name.
    """
    chain = [names] if isinstance(names, str) else list(names)
    for name in chain:
        if name != "none" and name not in _QUANTIZERS:
            raise UnsupportedError(f"method {name} is not available yet; available: {', '.join(available())}")
    return _QUANTIZERS.get(chain[-1])


def find_transforms(names: str | list[str] | tuple[str, ...]) -> tuple[Transform, ...]:
    """The transforms among the methods that a recipe names, in their order (`rotate` is none of them: it turns the whole model first, `models/rotation.py`)."""
    return tuple(_TRANSFORMS[name] for name in ([names] if isinstance(names, str) else names) if name in _TRANSFORMS)


def find_tuner(names: str | list[str] | tuple[str, ...]) -> BlockTuner | None:
    """What improves whole blocks after the quantizer that a recipe's `quantize.method` ends in; None for most methods."""
    return _TUNERS.get(names if isinstance(names, str) else names[-1])
