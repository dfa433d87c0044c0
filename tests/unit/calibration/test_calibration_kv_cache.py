"""Scales of keys and values against what transformers' own cache holds of the same model."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from qforge import numerics
from qforge.calibration import kv_cache
from qforge.calibration.room import Room
from qforge.calibration.store import Piece
from qforge.errors import NumericalError, UnsupportedError
from qforge.methods import Options, find
from qforge.models.blocks import BlockModel
from qforge.models.model import open_model
from qforge.progress import SILENT
from qforge.scheme import parse
from qforge.types import KvScales

WINDOWS = torch.randint(3, 380, (6, 40), generator=torch.Generator().manual_seed(0))
FAMILIES = {"llama": {}, "qwen3": {}, "gemma3_text": {"sliding_window": 20}, "phi3": {}, "mixtral": {"num_local_experts": 4}}
NEAR = 1e-2  # of a scale: its 8 bits, and products in bf16 where the CPU has them


def measured(folder: Path, piece: Piece | None = None, batch_tokens: int = 100) -> KvScales:
    blocks = BlockModel(open_model(str(folder)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_cache, "BATCH_TOKENS", batch_tokens)
        return kv_cache.measure(blocks, lambda index: piece if piece and index == 0 else Piece({}, []), WINDOWS, Room(), SILENT)


@torch.no_grad()
def held(theirs: PreTrainedModel) -> list[tuple[float, float]]:
    """The largest key and value of each layer in transformers' cache, divided by the largest number of E4M3."""
    cache = DynamicCache()
    theirs(WINDOWS, **{next(n for n in ("cache", "past_key_values") if n in inspect.signature(theirs.forward).parameters): cache})  # since transformers 5.24, and before
    return [(float(layer.keys.abs().max()) / 448, float(layer.values.abs().max()) / 448) for layer in cache.layers]


@pytest.mark.parametrize("family", FAMILIES)
def test_scales_are_those_of_what_transformers_caches(tmp_path: Path, family: str) -> None:
    folder = tiny.make(tmp_path / family, family, layers=2, **FAMILIES[family])  # type: ignore[arg-type]
    found = measured(folder)
    assert list(found) == ["model.layers.0.self_attn", "model.layers.1.self_attn"] == BlockModel(open_model(str(folder))).caching()  # known beforehand
    torch.testing.assert_close(torch.tensor(list(found.values())), torch.tensor(held(AutoModelForCausalLM.from_pretrained(folder).eval())), rtol=NEAR, atol=0)
    assert all(float(torch.tensor(s).to(kind)) == s for pair in found.values() for s in pair for kind in (torch.float16, torch.bfloat16))


def test_they_are_the_quantized_models(tmp_path: Path) -> None:
    folder, name = tiny.make(tmp_path / "model", layers=2), "model.layers.0.self_attn.v_proj"
    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    module, norm = theirs.get_submodule(name), theirs.get_submodule("model.layers.0.input_layernorm")
    quantizer = find("rtn")
    assert quantizer is not None
    q, _ = quantizer.quantize(module.weight.detach() * 3, parse("int4-g32-sym"), None, Options())
    with torch.no_grad():
        module.weight.copy_(numerics.dequantize(q))
        norm.weight *= 0.5
    found = measured(folder, Piece({name: q}, [], {"model.layers.0.input_layernorm.weight": norm.weight.detach()}))
    torch.testing.assert_close(torch.tensor(list(found.values())), torch.tensor(held(theirs)), rtol=NEAR, atol=0)
    assert found["model.layers.0.self_attn"][1] > 1.2 * measured(folder)["model.layers.0.self_attn"][1]


def test_batches_do_not_matter(tmp_path: Path) -> None:
    folder = tiny.make(tmp_path / "model", layers=2)
    one, many = (torch.tensor(list(measured(folder, batch_tokens=n).values())) for n in (1000, 40))
    torch.testing.assert_close(one, many, rtol=NEAR, atol=0)


def changed(folder: Path, name: str, value: float) -> Path:
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        theirs.get_parameter(name).fill_(value)
    theirs.save_pretrained(folder)
    return folder


def test_values_that_are_all_zero_have_a_scale(tmp_path: Path) -> None:
    folder = changed(tiny.make(tmp_path / "model", layers=2), "model.layers.1.self_attn.v_proj.weight", 0.0)
    assert measured(folder)["model.layers.1.self_attn"][1] == 1.0


def test_keys_that_are_not_finite_are_named(tmp_path: Path) -> None:
    folder = changed(tiny.make(tmp_path / "model", layers=2), "model.layers.1.self_attn.k_proj.weight", 1e38)
    with pytest.raises(NumericalError, match=r"keys of model\.layers\.1 are not finite"):
        measured(folder)


def test_blocks_that_take_no_cache_are_known_before_and_named(tmp_path: Path) -> None:
    folder = tiny.make(tmp_path / "model", "bloom", layers=2)
    assert not BlockModel(open_model(str(folder))).caches()
    with pytest.raises(UnsupportedError, match=r"transformer\.h\.0 stores no keys and values"):
        measured(folder)
