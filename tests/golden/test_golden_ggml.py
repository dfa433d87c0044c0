"""llama.cpp's own C code (the symbols that the prebuilt wheel exports) reads our GGUF bytes: equal floats, bit for bit."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import tiny
import torch
from ggml_by_c import dequantized_by_c

import qforge
from qforge import numerics
from qforge.layouts.gguf_integers import layout_of
from qforge.methods import Options, find
from qforge.models.model import open_model
from qforge.models.names import gguf_names, gguf_permutes, permuted_heads, unpermute_rows
from qforge.scheme import parse


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        ("Q4_K", "int4-g256-asym"),
        ("Q4_K", "int4-channel-asym"),
        ("Q4_K", "int4-g256-sym"),
        ("Q4_K", "int3-g512-asym"),
        ("Q4_0", "int4-g32-sym"),
        ("Q4_0", "int4-g64-sym"),
        ("Q4_0", "int4-channel-sym"),
        ("Q5_0", "int4-g32-asym"),
        ("Q8_0", "int8-g32-sym"),
        ("Q8_0", "int8-channel-sym"),
    ],
)
def test_blocks_mean_to_llama_cpp_what_they_mean_to_us(kind: str, scheme: str) -> None:
    rtn = find("rtn")
    assert rtn is not None
    width = 1024 if kind == "Q4_K" else 192
    weight = torch.randn(24, width, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 1, 24)[:, None]
    weight[5] = 0
    q, _ = rtn.quantize(weight, parse(scheme), None, Options())
    packed = next(iter(layout_of(kind).pack(q).values()))
    assert torch.equal(dequantized_by_c(kind, packed.numpy(), (24, width)), numerics.dequantize(q))


@pytest.mark.parametrize("scheme", ["int4-g32-sym", "int4-g32-asym", "int8-channel-sym"])
def test_every_quantized_tensor_of_an_exported_file(tmp_path: Path, scheme: str) -> None:
    tiny.make(tmp_path / "model")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"version: 1\nmodel: {{source: model}}\nquantize: {{method: rtn, scheme: {scheme}}}\nexport: [{{format: gguf}}]\nevaluate: null\n")
    qforge.quantize(recipe, out=tmp_path / "out")
    artifact = open_model(str(tmp_path / "out"))
    tensors = {t.name: t for t in gguf.GGUFReader(next((tmp_path / "out" / "exports").rglob("*.gguf"))).tensors}
    names = gguf_names(artifact.config)
    for name in artifact.schemes:
        q, t = artifact.linear(name), tensors[names[f"{name}.weight"]]
        theirs = dequantized_by_c(t.tensor_type.name, t.data, (q.out_features, q.in_features))
        heads = permuted_heads(f"{name}.weight", artifact.config.num_attention_heads, artifact.config.num_key_value_heads)
        if heads is not None and gguf_permutes(artifact.config.model_type):
            theirs = unpermute_rows(theirs, heads)
        assert torch.equal(theirs, numerics.dequantize(q)), name
    assert len(artifact.schemes) == 21
