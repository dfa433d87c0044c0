"""In which precision calibration runs a block: what its linears multiply is rounded to bf16 where the CPU has instructions for that, twice as fast as fp32; all else is fp32.

An output then has an error of about .002 of its size, where rounding to int4 makes one of .05 and more, and independent from token to token, so that sums hardly know it.
(torch.autocast would do it, but makes outputs bf16, which modelling code that adds in place refuses.)

Letters: O output features, I input features.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from qforge.methods import native


@contextlib.contextmanager
def fast_products(module: nn.Module, *, frozen: bool = False) -> Iterator[None]:
    """While open, the linears in a module multiply in bf16, where that is faster; inputs and outputs stay what they are.

    Args:
        module: a linear, or what holds some.
        frozen: their weights stay what they are, and are rounded once.
    """
    linears: list[Any] = [m for m in module.modules() if type(m) is nn.Linear] if native.has_bf16_products() else []
    for linear in linears:
        linear.forward = functools.partial(_forward, linear, linear.weight.detach().bfloat16() if frozen else None)
    try:
        yield
    finally:
        for linear in linears:
            del linear.forward


def _forward(linear: nn.Linear, weight: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    out = nn.functional.linear(x.bfloat16(), linear.weight.bfloat16() if weight is None else weight).to(x.dtype)
    return out if linear.bias is None else out + linear.bias
