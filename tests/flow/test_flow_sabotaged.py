"""Sabotaged models and texts through the whole flow: finite results that JSON can hold, or one message with exit code 2 that names the layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from flows import with_outliers, write_recipe
from safetensors.torch import load_file, save_file

import qforge
from qforge.errors import NumericalError, QforgeError
from qforge.models.model import open_model
from qforge.types import Results

METHODS: list[tuple[Any, str]] = [
    ("rtn", "int4-g32-sym"),
    ("gptq", "int4-g32-sym"),
    ("gptq", "int3-g32-asym"),
    ("gptq", "mxfp4"),
    ("fp8", "fp8-dynamic"),
    ("nf4", "nf4-g64@u8/g256:f32"),
    ("smoothquant", "int8-channel-sym+int8-tensor-static"),
    (["awq", "gptq"], "int4-g32-sym"),
    (["smoothquant", "gptq"], "w8a8-int8"),
]
Tensors = dict[str, torch.Tensor]


def changed(folder: Path, change: Callable[[Tensors], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})


def run(folder: Path, method: object, scheme: str, **recipe: object) -> Results:
    return qforge.quantize(write_recipe(folder, quantize={"method": method, "scheme": scheme}, export=[], **recipe), out=folder / "out")


def check_sound(results: Results, folder: Path) -> None:
    assert "NaN" not in results.to_json()
    assert results.evaluation is not None
    assert math.isfinite(results.evaluation.candidate["perplexity"])
    assert results.evaluation.kl_mean is not None
    assert math.isfinite(results.evaluation.kl_mean)
    artifact = open_model(str(folder / "out"))
    assert all(artifact.weights.read(n).float().isfinite().all() for n in artifact.weights.names())


def dead_parts(t: Tensors) -> None:
    """A dead channel behind every norm, a layer of zeros, an attention whose inputs are all zero."""
    for name in t:
        if "layernorm" in name:
            t[name][7] = 0
    t["model.layers.0.mlp.down_proj.weight"] *= 0
    t["model.layers.1.input_layernorm.weight"] *= 0


def equal_embeddings(t: Tensors) -> None:
    """Every token is the same, so that all activations are constant."""
    t["model.embed_tokens.weight"][:] = t["model.embed_tokens.weight"][5]


@pytest.mark.parametrize(("method", "scheme"), METHODS, ids=str)
@pytest.mark.parametrize("sabotage", [dead_parts, equal_embeddings])
def test_a_sabotaged_model_ends_in_a_sound_result(tmp_path: Path, sabotage: Callable[[Tensors], None], method: object, scheme: str) -> None:
    changed(tiny.make(tmp_path / "model", layers=2, tied=False), sabotage)
    check_sound(run(tmp_path, method, scheme), tmp_path)


@pytest.mark.parametrize(("method", "scheme"), METHODS, ids=str)
def test_outliers_of_1e4_end_in_a_sound_result(tmp_path: Path, method: object, scheme: str) -> None:
    with_outliers(tiny.make(tmp_path / "model", layers=2), 1e4)
    check_sound(run(tmp_path, method, scheme), tmp_path)


def test_outlier_channels_show_in_the_report(tmp_path: Path) -> None:
    """The largest input in units of the root mean square: a few for the model as it is, and more where two channels behind every norm are 1e4 times as large."""
    plain, wild = tmp_path / "plain", tmp_path / "wild"
    for folder in (plain, wild):
        tiny.make(folder / "model", layers=2)
    with_outliers(wild / "model", 1e4)
    peaks = [{x.name: x.input_peak or 0.0 for x in run(folder, "gptq", "int4-g32-sym").layers if x.scheme} for folder in (plain, wild)]
    assert all(2 < p < 30 for p in peaks[0].values()), peaks
    grown = {name.rpartition(".")[2] for name, p in peaks[1].items() if p > 2 * peaks[0][name]}
    assert grown == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    assert "largest input / RMS" in (wild / "out" / "report.md").read_text()


@pytest.mark.parametrize(("method", "scheme"), METHODS, ids=str)
def test_three_calibration_tokens_end_in_a_sound_result(tmp_path: Path, method: object, scheme: str) -> None:
    tiny.make(tmp_path / "model", layers=2)
    results = run(tmp_path, method, scheme, calibration={"source": "calibration.txt", "samples": 1, "sequence_length": 3})
    check_sound(results, tmp_path)
    calibrated = method not in ("rtn", "fp8", "nf4")
    assert any("fewer calibration tokens" in w for w in results.warnings) == calibrated


@pytest.mark.parametrize(("method", "scheme"), METHODS, ids=str)
def test_weights_whose_scales_overflow_fp16_are_refused_by_name_or_held(tmp_path: Path, method: object, scheme: str) -> None:
    changed(tiny.make(tmp_path / "model", layers=2), lambda t: t["model.layers.1.mlp.up_proj.weight"].mul_(1e8))
    try:
        results = run(tmp_path, method, scheme)
    except QforgeError as e:
        assert e.exit_code == 2  # noqa: PT017  # scales of nf4 and mxfp4 are wider
        assert "model.layers.1.mlp.up_proj" in str(e)  # noqa: PT017
        assert len(str(e).splitlines()) == 1  # noqa: PT017
        return
    check_sound(results, tmp_path)
    assert scheme in ("mxfp4", "nf4-g64@u8/g256:f32", "fp8-dynamic")


@pytest.mark.parametrize(("method", "scheme"), [m for m in METHODS if m[0] not in ("rtn", "fp8", "nf4")], ids=str)
def test_activations_that_overflow_are_refused_by_name(tmp_path: Path, method: object, scheme: str) -> None:
    changed(tiny.make(tmp_path / "model", layers=2), lambda t: t["model.layers.0.post_attention_layernorm.weight"].fill_(3e38))
    with pytest.raises(NumericalError, match=r"^model\.layers\.0\.mlp\.\w+: .*NaN or infinite; the model overflows on this text") as raised:
        run(tmp_path, method, scheme)
    assert raised.value.exit_code == 2


@pytest.mark.parametrize(("method", "scheme"), [m for m in METHODS if m[0] in ("rtn", "fp8", "nf4")], ids=str)
def test_a_model_that_computes_nan_is_not_measured(tmp_path: Path, method: object, scheme: str) -> None:
    changed(tiny.make(tmp_path / "model", layers=2), lambda t: t["model.layers.0.post_attention_layernorm.weight"].fill_(3e38))
    with pytest.raises(QforgeError, match=r"(?i)nan|infinite|finite") as raised:
        run(tmp_path, method, scheme)
    assert raised.value.exit_code == 2
