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
def fast_products(module: nn.Module) -> Iterator[None]:
    """While open, the linears in a module multiply in bf16, where that is faster; inputs and outputs stay what they are."""
    linears: list[Any] = [m for m in module.modules() if type(m) is nn.Linear] if native.has_bf16_products() else []
    for linear in linears:
        linear.forward = functools.partial(_forward, linear)
    try:
        yield
    finally:
        for linear in linears:
            del linear.forward


def _forward(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    if torch.is_grad_enabled():
        return multiply(x, factor(linear.weight), linear.bias)
    y: torch.Tensor = _multiply(x.reshape(-1, x.shape[-1]).float().contiguous(), linear.weight.contiguous())
    out = y.view(*x.shape[:-1], -1).to(x.dtype)
    return out if linear.bias is None else out + linear.bias


@torch.library.custom_op("qforge::multiply", mutates_args=())  # an operation, so that modes which watch operations see what it reads (`Parking`)
def _multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return native.multiply(x, weight)


def factor(weight: torch.Tensor) -> torch.Tensor:
    """A weight as it is multiplied with: in bf16, where that is faster."""
    return weight.bfloat16() if native.has_bf16_products() else weight


def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`x @ weight.T + bias` in the precision of `weight` `[O, I]`, as `factor` gives it; shape and dtype of the result are those of a linear for `x`."""
    out = nn.functional.linear(x.to(weight.dtype), weight).to(x.dtype)
    return out if bias is None else out + bias
