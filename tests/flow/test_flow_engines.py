"""Checkpoints run by engines that are not ours: the weights that GPTQModel and transformers make of our files are ours bit for bit, their distributions nearly so."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "export"))
from quantized_models import quantized

from qforge.engines import checkpoints
from qforge.engines.transformers_engine import TransformersEngine
from qforge.errors import ModelError
from qforge.export import exporter
from qforge.export.verify_checkpoint import verify_checkpoint, verify_in_engine
from qforge.models.model import open_model

pytestmark = pytest.mark.slow
CASES = [("compressed-tensors", "int4-g32-sym", {}), ("compressed-tensors", "int8-channel-sym+int8-token", {}), ("compressed-tensors", "fp8-e4m3-channel+fp8-e4m3-token", {}),
         ("gptq", "int4-g32-sym", {"ignore": ("v_proj",)}), ("gptq", "int4-g32-asym", {}), ("gptq", "int8-channel-sym", {}), ("awq", "int4-g32-sym", {"ignore": ("v_proj",)}),
         ("awq", "int4-g32-asym", {}), ("bitsandbytes", "nf4-g64@u8/g256:f32", {"ignore": ("v_proj",)})]  # fmt: skip


@pytest.fixture
def prompts():
    rng = random.Random(0)
    return [[rng.randrange(3, 380) for _ in range(n)] for n in (5, 16, 40)]


@pytest.mark.parametrize(("layout", "text", "options"), CASES)
def test_the_engine_makes_our_weights(tmp_path, prompts, layout, text, options):
    if checkpoints.missing(layout):
        pytest.skip(str(checkpoints.missing(layout)))
    source = open_model(str(tiny.make(tmp_path / "source", layers=2, dtype=torch.float16)))
    model = quantized(source, text, **options)
    exporter(layout).write(model, tmp_path / "out")
    found, left_out = verify_checkpoint(layout, tmp_path / "out", model, TransformersEngine(model), prompts)
    assert left_out == []
    assert all(v.weights_equal for v in found), found
    assert found[-1].executed
    assert found[-1].kl_mean < (1e-3 if layout != "compressed-tensors" else 1e-6)
    name = next(iter(model.schemes))
    flipped = model.linear(name)
    flipped.codes[0, 0] ^= 1
    exporter(layout).write(replace(model, linears=lambda n: flipped if n == name else model.linear(n)), tmp_path / "wrong")
    assert verify_in_engine(layout, tmp_path / "wrong", model, TransformersEngine(model), prompts).weights_equal is False


def test_bitsandbytes_is_exact_but_for_its_kernel_in_bf16(tmp_path, prompts):
    """The same file as on a CPU without AVX512-BF16: fp32 throughout, for a checkpoint of a model in fp32 says so."""
    if checkpoints.missing("bitsandbytes"):
        pytest.skip(str(checkpoints.missing("bitsandbytes")))
    model = quantized(open_model(str(tiny.make(tmp_path / "source", layers=2))), "nf4-g64@u8/g256:f32")
    exporter("bitsandbytes").write(model, tmp_path / "out")
    found = verify_in_engine("bitsandbytes", tmp_path / "out", model, TransformersEngine(model), prompts, engine="portable")
    assert found.engine == "transformers"
    assert found.weights_equal
    assert found.kl_mean < 1e-9


def test_transformers_runs_an_awq_checkpoint_that_leaves_linears_alone(tmp_path, prompts):
    if checkpoints.missing("awq"):
        pytest.skip(str(checkpoints.missing("awq")))
    model = quantized(open_model(str(tiny.make(tmp_path / "source", layers=2, dtype=torch.float16))), ignore=("v_proj",))
    exporter("awq").write(model, tmp_path / "out")
    found = verify_in_engine("awq", tmp_path / "out", model, TransformersEngine(model), prompts, engine="transformers")
    assert found.weights_equal
    assert found.kl_mean < 1e-3


def test_a_damaged_checkpoint_is_one_message(tmp_path, prompts):
    model = quantized(open_model(str(tiny.make(tmp_path / "source", layers=1))))
    exporter("compressed-tensors").write(model, tmp_path / "out")
    (tmp_path / "out" / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelError, match="transformers could not run out"):
        verify_in_engine("compressed-tensors", tmp_path / "out", model, TransformersEngine(model), prompts)
