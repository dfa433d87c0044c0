"""TensorRT engines: what TensorRT does not take is refused, what this machine lacks is named with exit code 3, and TensorRT-RTX builds for GPUs that are not here."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace

import pytest
import tiny
import torch
from quantized_models import quantized
from real_models import STORIES, needs_stories

from qforge import pipeline
from qforge.engines import tensorrt_build
from qforge.engines.tensorrt_build import build, missing, profiles
from qforge.engines.transformers_engine import TransformersEngine
from qforge.errors import MissingCapabilityError, UnsupportedError
from qforge.export.onnx import OnnxExporter
from qforge.export.tensorrt import TensorrtExporter
from qforge.export.verify import verify
from qforge.models.model import open_model


def opened(tmp_path, family="llama", **options):
    return open_model(str(tiny.make(tmp_path / f"source-{family}", family, **{"layers": 2, **options})))


def without(monkeypatch, *names):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in names else find(name, *rest))


@pytest.mark.parametrize(
    ("text", "kind", "reason"),
    [
        ("int4-g32-asym", "sm89", "no zero points"),
        ("fp8-e5m2-channel", "sm89", "e4m3 only"),
        ("int8-g32-sym", "sm89", "one scale a channel or tensor"),
        ("w8a8-int8", "sm89", "stored scales only"),
        ("nf4-g64@f32", "sm89", "not nf4"),
        ("int4-g32-sym", "sm90", "type 'sm90' is not available.*sm75, sm80, sm86, sm89, sm120"),
        ("int4-g32-sym", "sm89+h200", "is not available"),
    ],
)
def test_what_tensorrt_does_not_take(tmp_path, text, kind, reason):
    exporter = TensorrtExporter(kind)
    with pytest.raises(UnsupportedError, match=reason):
        exporter.write(quantized(opened(tmp_path), text), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_missing_is_named_before_work_starts(tmp_path, monkeypatch):
    without(monkeypatch, "tensorrt_rtx", "tensorrt")
    tiny.make(tmp_path / "source")
    recipe = {"version": 1, "model": {"source": "source"}, "quantize": {"method": "rtn", "scheme": "int4-g32-sym"}, "evaluate": None}
    for kind, says in (("sm89", r"pip install 'qforge\[tensorrt\]'"), (None, "no NVIDIA GPU here.*type sm89")):
        if kind is None and torch.cuda.is_available():
            continue
        (tmp_path / "recipe.yaml").write_text(json.dumps(recipe | {"export": [{"format": "tensorrt", "type": kind}]}))
        with pytest.raises(MissingCapabilityError, match=says) as error:
            pipeline.quantize(tmp_path / "recipe.yaml", out=tmp_path / "out")
        assert error.value.exit_code == 3
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("positions", [256, 131072])
def test_profiles_cover_prompt_and_generation(tmp_path, positions):
    spec = replace(opened(tmp_path).spec, max_positions=positions)
    for p in profiles(spec):
        for name in ("input_ids", "attention_mask", "position_ids", "past_key_values.0.key"):
            small, best, large = p.shapes(name, spec)
            assert all(a <= b <= c for a, b, c in zip(small, best, large, strict=True))
        assert [m[1] for m in p.shapes("attention_mask", spec)] == [s[1] + c[2] for s, c in zip(p.shapes("input_ids", spec), p.shapes("past_key_values.0.key", spec), strict=True)]
        assert p.shapes("attention_mask", spec)[2][1] == min(spec.max_positions, 8192)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm89", "sm120"])
@pytest.mark.parametrize("text", ["int4-g32-sym", "int8-channel-sym", "fp8-e4m3-tensor"])
def test_tensorrt_rtx_builds_ahead_of_time_what_onnxruntime_checks(tmp_path, monkeypatch, target, text):
    pytest.importorskip("tensorrt_rtx")
    monkeypatch.setenv("QFORGE_CACHE", str(tmp_path / "cache"))
    model = quantized(opened(tmp_path), text)
    exporter = TensorrtExporter(target)
    paths = exporter.write(model, tmp_path / "out")
    engine = tmp_path / "out" / "model.engine"
    assert engine in paths
    assert engine.stat().st_size > 10_000
    done, left_out = verify("tensorrt", paths, model, TransformersEngine(model), [[5, 6, 7, 8]])
    assert done[0].weights_equal
    assert done[1].kl_mean < 1e-4
    assert "not executed" in left_out[-1]
    monkeypatch.setattr(tensorrt_build, "_built", lambda *a: pytest.fail("built again"))
    assert build(tmp_path / "out" / "onnx", model.spec, (target,)).read_bytes() == engine.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3_text"])
def test_tensorrt_rtx_takes_every_family_and_two_architectures_at_once(tmp_path, monkeypatch, family):
    pytest.importorskip("tensorrt_rtx")
    monkeypatch.setenv("QFORGE_CACHE", str(tmp_path / "cache"))
    model = quantized(opened(tmp_path, family, **({"layers": 7, "sliding_window": 16, "query_pre_attn_scalar": 16} if family == "gemma3_text" else {})))
    built_for_two(model, tmp_path / "out")
    assert missing(("sm89",)) is None
    assert OnnxExporter("qdq-f16").check(model) is None


@pytest.mark.slow
@needs_stories
@pytest.mark.parametrize("text", ["int4-g32-sym", "int8-channel-sym", "fp8-e4m3-tensor"])
def test_tensorrt_rtx_builds_a_real_model(tmp_path, monkeypatch, text):
    pytest.importorskip("tensorrt_rtx")
    monkeypatch.setenv("QFORGE_CACHE", str(tmp_path / "cache"))
    built_for_two(quantized(open_model(str(STORIES)), text), tmp_path / "out")


def built_for_two(model, folder):
    """An engine of its own for each of two architectures in one file, and the ONNX file's numbers by ONNX Runtime."""
    paths = TensorrtExporter("sm89+sm120").write(model, folder)
    assert (folder / "model.engine").stat().st_size > 10_000
    done, left_out = verify("tensorrt", paths, model, TransformersEngine(model), [[5, 6, 7, 8], list(range(9, 60))])
    assert done[0].weights_equal
    assert done[1].executed
    assert done[1].kl_mean < 1e-4
    assert "not executed" in left_out[-1]
