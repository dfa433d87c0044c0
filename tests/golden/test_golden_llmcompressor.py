"""GPTQ beside llm-compressor's own (make_llmcompressor.py), given the same weights, Hessians, scales and damping: the same integers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qforge import numerics
from qforge.methods import Options, Stats, find, scales
from qforge.scheme import parse

GOLDEN = load_file(Path(__file__).with_name("llmcompressor_gptq.safetensors"))
TOKENS, DAMPING = 2000, 0.01  # as there


@pytest.mark.parametrize("order", ["plain", "static"])
@pytest.mark.parametrize("case", ["int4-g32-sym", "int3-g32-asym", "int8-channel-sym"])
def test_gptq(case: str, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = {name: GOLDEN[f"{case}.{name}"] for name in ("weight", "hessian", "scale", "zero", order)}
    scheme, method = parse(case), find("gptq")
    zero = None if scheme.symmetric else (told["zero"] + 2 ** (scheme.bits - 1)).to(torch.uint8)
    monkeypatch.setattr(scales, "choose", lambda *_, **__: (told["scale"], zero))
    assert method is not None
    options = Options(damping=DAMPING, act_order=order == "static", refine=0)
    q, note = method.quantize(told["weight"], scheme, Stats(TOKENS, told["hessian"]), options)
    assert note is None
    different = (numerics.dequantize(q) - told[order]).abs() > 1e-4 * told["scale"].max()
    assert not different.any()
    nearest = numerics.dequantize(numerics.quantize(told["weight"], scheme, told["scale"], zero))
    assert ((nearest - told[order]).abs() > 1e-4 * told["scale"].max()).float().mean() > 0.1  # which rounding to nearest is not
