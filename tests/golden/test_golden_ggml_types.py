"""llama.cpp's own C code beside ours, for every block type: what bytes mean, how large the error of its quantizer is, and which types its mixes are made of."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
import transformers
import xllamacpp
from ggml_by_c import dequantized_by_c
from real_models import STORIES, needs_stories

from qforge.export.gguf_types import MIXES, tensor_type
from qforge.layouts.gguf_superblocks import pack, unpack
from qforge.methods import superblock
from qforge.superblocks import TYPES, Superblocks

CASES = {
    "wide": {"layers": 17, "hidden": 256, "intermediate": 512, "heads": 4, "kv_heads": 1, "tied": False},
    "narrow": {"layers": 17, "hidden": 96, "intermediate": 256, "heads": 4, "kv_heads": 2, "tied": True},
}
K_TYPES = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
MIXED = json.loads(Path(__file__).with_name("llama_mixes.json").read_text())


def quantized_by_c(kind: str, weight: torch.Tensor, importance: torch.Tensor) -> torch.Tensor:
    library = ctypes.CDLL(str(next(Path(xllamacpp.__file__).parent.glob("xllamacpp*.so"))))
    function = library.ggml_quantize_chunk
    function.argtypes, function.restype = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p], ctypes.c_size_t
    rows, inputs = weight.shape
    out = np.zeros((weight.numel() // TYPES[kind].block, TYPES[kind].nbytes), dtype=np.uint8)
    source, weighed = np.ascontiguousarray(weight.numpy()), np.ascontiguousarray(importance.numpy())
    assert function(int(gguf.GGMLQuantizationType[kind]), source.ctypes.data, out.ctypes.data, 0, rows, inputs, weighed.ctypes.data) == out.nbytes
    return torch.from_numpy(out)


def anything(kind: str, count: int = 300) -> Superblocks:
    """Every field over its whole range."""
    t, g = TYPES[kind], torch.Generator().manual_seed(7)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high + 1, shape, generator=g).to(torch.int16)

    d, dmin = (torch.randn(2, count, generator=g) * 10 ** torch.randn(count, generator=g)).half()
    scales = None if t.scales is None else integers(*t.scales, count, t.groups)
    minima = None if t.scales is None or not t.minimum else integers(*t.scales, count, t.groups)
    return Superblocks(t, integers(*t.codes, count, t.groups, t.group), d, scales, dmin if t.minimum else None, minima)


@pytest.mark.parametrize("kind", TYPES)
def test_blocks_mean_to_ggml_and_to_the_gguf_package_what_they_mean_to_us(kind: str) -> None:
    blocks = anything(kind)
    packed = pack(blocks)
    assert unpack(kind, packed).equals(blocks)
    values = blocks.values().flatten(1)
    assert torch.equal(dequantized_by_c(kind, packed.numpy(), tuple(values.shape)), values)
    assert torch.equal(torch.from_numpy(gguf.quants.dequantize(packed.numpy(), gguf.GGMLQuantizationType[kind])), values)


@pytest.mark.parametrize("kind", TYPES)
def test_what_its_quantizer_wrote_is_written_again_byte_for_byte(kind: str) -> None:
    weight = torch.randn(6, 512, generator=torch.Generator().manual_seed(1)) * torch.logspace(-3, 1, 6)[:, None]
    theirs = quantized_by_c(kind, weight, torch.ones(512))
    assert torch.equal(pack(unpack(kind, theirs)), theirs)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("tails", ["normal", "heavy"])
def test_our_error_is_below_that_of_its_quantizer(kind: str, tails: str) -> None:
    """Weighed by the importance of inputs, log-normal as activations have them."""
    g = torch.Generator().manual_seed(3)
    weight = torch.randn(48, 512, generator=g) * 0.02
    if tails == "heavy":
        weight /= (torch.randn(48, 512, 4, generator=g).square().sum(-1) / 4).sqrt()  # Student's t, 4 degrees of freedom
    importance = torch.randn(512, generator=g).exp()
    ratio = _ratio(kind, weight, importance)
    print(f"{kind} {tails}: ratio {ratio:.4f}")
    assert ratio < 0.995


@needs_stories
def test_our_error_is_below_that_of_its_quantizer_on_every_real_tensor() -> None:
    """stories15M's down projections, 768 wide, weighed by the mean squares of what they read in a story."""
    model = transformers.AutoModelForCausalLM.from_pretrained(STORIES, dtype=torch.float32)
    projections, squares = [layer.mlp.down_proj for layer in model.model.layers], {}
    for projection in projections:
        projection.register_forward_hook(lambda module, given, out: squares.__setitem__(module, given[0].flatten(0, -2).square().mean(0)))
    story = "Once upon a time, there was a little girl who liked to play in the park with her dog. One day they found a big red ball. " * 4
    with torch.no_grad():
        model(transformers.AutoTokenizer.from_pretrained(STORIES)(story, return_tensors="pt")["input_ids"])
        ratios = {(kind, i): _ratio(kind, module.weight.detach(), squares[module]) for kind in K_TYPES for i, module in enumerate(projections)}
    print({kind: [round(ratios[kind, i], 3) for i in range(len(projections))] for kind in K_TYPES})
    assert max(ratios.values()) < 0.995


def _ratio(kind: str, weight: torch.Tensor, importance: torch.Tensor) -> float:
    """Our weighted squared error, as a part of ggml's."""
    both = superblock.quantize(weight, importance, kind), unpack(kind, quantized_by_c(kind, weight, importance))
    ours, theirs = (float(((blocks.values().view(weight.shape) - weight).square() * importance).sum()) for blocks in both)
    return ours / theirs


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mix", MIXES)
def test_mixes_are_those_of_its_quantizer(case: str, mix: str) -> None:
    shape = CASES[case]
    spec = SimpleNamespace(family="llama", num_layers=shape["layers"], num_heads=shape["heads"], num_kv_heads=shape["kv_heads"], experts=None)
    widths = {"ffn_down.weight": shape["intermediate"]}
    for part, told in MIXED[case][mix].items():
        of_layers = part not in ("token_embd.weight", "output.weight")
        for layer, expected in enumerate([told] * (shape["layers"] if of_layers else 1) if isinstance(told, str) else told):
            name = f"blk.{layer}.{part}" if of_layers else part
            assert tensor_type(MIXES[mix], name, widths.get(part, shape["hidden"]), spec, shape["tied"]) == expected, name
