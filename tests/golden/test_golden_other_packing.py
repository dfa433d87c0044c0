"""Integers as Model Optimizer's, msmodelslim's and MLX's own packing code writes them (make_other_packing.py): read as what went in, and written again byte for byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qforge.layouts.ascend import Ascend
from qforge.layouts.bits import pack_words, unpack_words
from qforge.layouts.trtllm import TrtLlm
from qforge.qlinear import QuantizedLinear
from qforge.scheme import parse

GOLDEN = load_file(Path(__file__).with_name("other_packing.safetensors"))
CODES, SCALES = GOLDEN["codes"], GOLDEN["scales"]


def test_model_optimizer_packs_pairs_of_outputs() -> None:
    q = QuantizedLinear(parse("int4-g64-sym"), CODES, SCALES)
    packed = TrtLlm().pack(q)
    assert torch.equal(packed["weight"], GOLDEN["modelopt"])
    assert TrtLlm().unpack(packed | {"weight": GOLDEN["modelopt"]}, q.scheme).equals(q)


@pytest.mark.parametrize(("case", "text", "scales"), [("group", "int4-g64-sym", SCALES), ("channel", "int4-channel-sym", SCALES[:, :1].contiguous())])
def test_msmodelslim_packs_outputs_with_groups_and_inputs_without(case, text, scales) -> None:
    q = QuantizedLinear(parse(text), CODES, scales)
    packed = Ascend().pack(q)
    assert torch.equal(packed["weight"], GOLDEN[f"msmodelslim.{case}"])
    assert Ascend().unpack(packed | {"weight": GOLDEN[f"msmodelslim.{case}"]}, q.scheme).equals(q)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_mlx_words_hold_codes_as_ours_do(bits) -> None:
    words, scales, biases, values = (GOLDEN[f"mlx.{bits}.{n}"] for n in ("weight", "scales", "biases", "values"))
    codes = unpack_words(words, bits, CODES.shape[1])
    spread = (v.repeat_interleave(64, 1) for v in (scales, biases))
    scale, bias = spread
    assert torch.allclose(codes.float() * scale + bias, values, rtol=1e-6, atol=1e-6)
    assert torch.equal(pack_words(codes, bits), words)
