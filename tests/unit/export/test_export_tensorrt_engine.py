"""TensorRT engines executed: by a TensorRT that is not there, in which ONNX Runtime computes from the addresses that it is given; and, where there is a GPU, by the real one."""

from __future__ import annotations

import importlib.util
import json
import shutil

import fake_tensorrt
import numpy as np
import pytest
import tiny
import torch
from quantized_models import quantized

from qforge import pipeline
from qforge.cli.main import main
from qforge.engines.onnx_runtime import OnnxRuntimeEngine
from qforge.engines.runtime_engine import RuntimeEngine
from qforge.engines.tensorrt_build import ARCHITECTURES, FULL, RTX, Profile, build, profiles
from qforge.engines.tensorrt_runtime import TensorrtEngine, missing
from qforge.errors import MissingCapabilityError, ModelError, UnsupportedError
from qforge.export.onnx import OnnxExporter
from qforge.export.tensorrt import TensorrtExporter
from qforge.export.verify import verify
from qforge.models.model import open_model
from qforge.stages.exported import foreign

# Prompts of at most 7 tokens, then one by one: 30 in all.
SHORT = [Profile((1, 1, 8), (1, 4, 7), (0, 0, 0)), Profile((1, 1, 8), (1, 1, 1), (0, 15, 29))]
# The same, but text may also follow the cache in pieces of 5.
PIECES = [*SHORT, Profile((1, 1, 1), (1, 5, 5), (1, 15, 25))]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return quantized(open_model(str(tiny.make(tmp_path_factory.mktemp("source") / "llama", "llama", layers=2))))


@pytest.fixture(scope="module")
def graph(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("graph") / "onnx"
    OnnxExporter("qdq-f16").write(model, folder)
    return folder


def export(tmp_path, graph, spec, limits=None, **options):
    """An export whose engine the fake made."""
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "onnx").symlink_to(graph)
    (folder / "model.engine").write_bytes(fake_tensorrt.engine(graph, spec, limits or profiles(spec), **options))
    return folder


def tokens(count, seed=0):
    return torch.randint(3, 380, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def by_onnxruntime(graph, window, sizes):
    """Logits of all positions but the last, computed by ONNX Runtime alone in pieces of these sizes."""
    engine, cache, start, made = OnnxRuntimeEngine(graph, threads=1), (), 0, []
    for size in sizes:
        logits, cache = engine.step(np.array([window[start : start + size]]), np.ones((1, start + size), np.int64), cache)
        made.append(logits[0])
        start += size
    assert start == len(window) - 1
    return torch.from_numpy(np.concatenate(made))


@pytest.mark.parametrize(
    ("limits", "length", "calls"),
    [
        (None, 200, [(0, 199)]),
        (None, 2, [(0, 1)]),
        (SHORT, 8, [(0, 7)]),
        (SHORT, 31, [(0, 7)] + [(1, 1)] * 23),
        (PIECES, 31, [(0, 7), *[(2, 5)] * 4, *[(1, 1)] * 3]),
        (PIECES, 24, [(0, 7), *[(2, 5)] * 3, (2, 1)]),
    ],
)
def test_an_engine_gives_what_onnxruntime_gives(tmp_path, monkeypatch, model, graph, limits, length, calls):
    fake_tensorrt.install(monkeypatch)
    engine = TensorrtEngine(export(tmp_path, graph, model.spec, limits))
    assert (engine.name, engine.version) == ("tensorrt-rtx", "1.7.1.116")
    window = tokens(length)
    pieces = list(engine.score([window]))
    past = np.cumsum([0, *(n for _, n in calls)]).tolist()
    assert fake_tensorrt.Runtime.calls == [(p, (1, n), c) for (p, n), c in zip(calls, past, strict=False)]
    assert [len(p) for p in pieces] == ([128, length - 129] if length > 129 else [length - 1])
    assert all(p.dtype == torch.float32 and p.device.type == "cpu" for p in pieces)
    assert (torch.cat(pieces) - by_onnxruntime(graph, window, [n for _, n in calls])).abs().max() < 1e-6
    ours = torch.cat(list(RuntimeEngine(model).score([window])))
    p, q = torch.log_softmax(ours.double(), -1), torch.log_softmax(torch.cat(pieces).double(), -1)
    assert (p.exp() * (p - q)).sum(-1).mean() < 1e-4


def test_windows_do_not_see_each_other(tmp_path, monkeypatch, model, graph):
    fake_tensorrt.install(monkeypatch)
    engine = TensorrtEngine(export(tmp_path, graph, model.spec, PIECES))
    windows = [tokens(20, 1), tokens(9, 2), tokens(25, 3)]
    together, alone = list(engine.score(windows)), [next(engine.score([w])) for w in windows]
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))


def test_several_sequences_at_once(tmp_path, monkeypatch, model, graph):
    fake_tensorrt.install(monkeypatch)
    engine = TensorrtEngine(export(tmp_path, graph, model.spec))
    rows = torch.tensor([tokens(12, seed) for seed in range(3)])
    logits, cache = engine.step(rows[:, :11], {})
    after, _ = engine.step(rows[:, 11:], cache, 1)
    for row, first, second in zip(rows.tolist(), logits, after, strict=True):
        want = by_onnxruntime(graph, [*row, 0], [11, 1])
        assert (torch.cat([first, second]) - want).abs().max() < 1e-3  # fp16 products of several rows are summed otherwise
    with pytest.raises(ModelError, match=r"input_ids \(9, 2\) is outside of profile 0"):
        engine.step(torch.ones(9, 2, dtype=torch.long), {})


def test_a_sequence_beyond_the_profiles_is_refused(tmp_path, monkeypatch, model, graph):
    fake_tensorrt.install(monkeypatch)
    engine = TensorrtEngine(export(tmp_path, graph, model.spec, SHORT))
    with pytest.raises(ModelError, match="at most 30 tokens; use shorter windows"):
        list(engine.score([tokens(32)]))


def test_the_engine_is_verified_where_it_can_be_executed(tmp_path, monkeypatch, model, graph):
    fake_tensorrt.install(monkeypatch)
    folder = export(tmp_path, graph, model.spec)
    done, left_out = verify("tensorrt", [*graph.iterdir(), folder / "onnx" / "model.onnx", folder / "model.engine"], model, RuntimeEngine(model), [tokens(20), tokens(40, 1)])
    last = done[-1]
    assert (last.engine, last.executed, last.positions) == ("tensorrt-rtx", True, 2)
    assert last.kl_mean < 1e-4
    assert last.top1_agreement == 1
    assert "model.engine on Fake RTX (sm89)" in last.note
    assert not any("not executed" in reason for reason in left_out)
    assert foreign("tensorrt", folder).name == "tensorrt-rtx"


@pytest.mark.parametrize(
    ("options", "card", "says"),
    [
        ({"diagnostics": 2}, (8, 6), r"built for other GPUs than Fake RTX \(sm86\); export with type sm86"),
        ({"diagnostics": 1}, (8, 9), r"another version of TensorRT-RTX than 1\.7\.1\.116"),
        ({"diagnostics": 4}, (8, 9), "OLD_CUDA_DRIVER"),
        ({}, (9, 0), r"does not support the GPU here, Fake RTX \(sm90\); it supports sm75, .*type auto"),
        ({"magic": b"ftrt"}, (9, 0), "TensorRT, which built model.engine, is not installed here: pip install tensorrt"),
    ],
)
def test_what_lacks_is_named_and_left_out_of_the_report(tmp_path, monkeypatch, model, graph, options, card, says):
    fake_tensorrt.install(monkeypatch, architecture=card)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == FULL else find(name, *rest))
    folder = export(tmp_path, graph, model.spec, **options)
    with pytest.raises(MissingCapabilityError, match=says) as error:
        TensorrtEngine(folder)
    assert error.value.exit_code == 3
    done, left_out = verify("tensorrt", [folder / "onnx" / "model.onnx", folder / "model.engine"], model, RuntimeEngine(model), [tokens(20)])
    assert {v.engine for v in done if v.executed} <= {"onnxruntime", "onnxruntime-genai"}
    assert "model.engine itself was not executed: " in left_out[-1]
    assert str(error.value) in left_out[-1]


def test_tensorrt_itself_opens_what_it_built(tmp_path, monkeypatch, model, graph):
    module = fake_tensorrt.install(monkeypatch, FULL, (9, 0))
    monkeypatch.delattr(fake_tensorrt.Runtime, "get_engine_validity")  # it has none
    folder = export(tmp_path, graph, model.spec, magic=b"ftrt")
    assert missing(folder) is None
    engine = TensorrtEngine(folder)
    assert engine.name == "tensorrt"
    assert len(next(engine.score([tokens(9)]))) == 8
    says = "The engine plan file is generated on an incompatible device, expecting compute 9.0 got compute 8.9, please rebuild."
    (folder / "model.engine").write_bytes(fake_tensorrt.engine(graph, model.spec, SHORT, magic=b"ftrt", says=says))
    with pytest.raises(MissingCapabilityError, match=r"another GPU or by another version.*expecting compute 9\.0"):
        TensorrtEngine(folder)
    monkeypatch.setattr(module.Runtime, "starts", "CUDA initialization failure with error: 35")
    with pytest.raises(MissingCapabilityError, match="TensorRT does not start here: CUDA initialization failure"):
        TensorrtEngine(folder)
    fake_tensorrt.install(monkeypatch)
    monkeypatch.setattr(module.Runtime, "starts", "no libcudart")
    (folder / "model.engine").write_bytes(fake_tensorrt.engine(graph, model.spec, SHORT))
    assert missing(folder) == "TensorRT-RTX does not start here: no libcudart"


def test_a_damaged_engine_is_named(tmp_path, monkeypatch, model, graph):
    fake_tensorrt.install(monkeypatch)
    folder = export(tmp_path, graph, model.spec)
    path = folder / "model.engine"
    whole = path.read_bytes()
    refused = [(whole[: len(whole) // 2], "TensorRT-RTX refuses .*blobSize failed"), (whole[:20] + b"x" * 300, "refuses")]
    for data, says in (*refused, (b"PK\3\4" + whole[4:], "no engine of TensorRT, or damaged"), (b"", "damaged")):
        path.write_bytes(data)
        with pytest.raises(ModelError, match=says):
            TensorrtEngine(folder)
    path.unlink()
    with pytest.raises(ModelError, match="cannot read"):
        TensorrtEngine(folder)
    with pytest.raises(UnsupportedError, match=r"engine tensorrt: .* holds no model\.engine; give the folder of a tensorrt export"):
        foreign("tensorrt", folder)


def test_another_graph_is_no_decoder(tmp_path, monkeypatch, model, graph):
    import onnx
    from onnx import TensorProto, helper

    fake_tensorrt.install(monkeypatch)
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", 4]) for n in ("x", "y")]
    other = helper.make_model(helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", ends[:1], ends[1:]), opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    (tmp_path / "other").mkdir()
    onnx.save(other, str(tmp_path / "other" / "model.onnx"))
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "model.engine").write_bytes(fake_tensorrt.engine(tmp_path / "other", model.spec, SHORT))
    with pytest.raises(ModelError, match="no decoder of ours: it takes x; export again"):
        TensorrtEngine(folder)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_the_command_ends_with_3(tmp_path, monkeypatch, capsys, model, graph):
    find = importlib.util.find_spec
    there = {RTX}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: json.__spec__ if name in there else None if name == RTX else find(name, *rest))
    folder = export(tmp_path, graph, model.spec)
    source = str(tiny.make(tmp_path / "source"))
    for says in ("model.engine needs an NVIDIA GPU, and torch finds none here", "TensorRT-RTX, which built model.engine, is not installed here: pip install 'qforge[tensorrt]'"):
        with pytest.raises(SystemExit) as ended:
            main(["eval", str(folder), "--against", source, "--engine", "tensorrt"])
        assert ended.value.code == 3
        assert says in capsys.readouterr().err
        there.clear()


def test_the_fake_has_only_what_the_real_package_has():
    real = pytest.importorskip("tensorrt_rtx")
    for name in fake_tensorrt.NAMES:
        kind = getattr(fake_tensorrt, name)
        named = set(getattr(kind, "__members__", None) or [n for n in vars(kind) if not n.startswith("_")]) - {"calls", "starts"}
        assert named <= set(dir(getattr(real, name))), name
    values = fake_tensorrt.EngineInvalidityDiagnostics.__members__
    assert {n: int(getattr(real.EngineInvalidityDiagnostics, n)) for n in values} == {n: int(v) for n, v in values.items()}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_run_says_that_the_engine_was_not_executed_until_it_is(tmp_path, monkeypatch, model):
    pytest.importorskip("tensorrt_rtx")
    monkeypatch.setenv("QFORGE_CACHE", str(tmp_path / "cache"))
    tiny.make(tmp_path / "source")
    (tmp_path / "text.txt").write_text("\n".join(tiny.TEXT))
    asked = {"evaluate": {"text": "text.txt", "window": 32, "exports": True}, "export": [{"format": "tensorrt", "type": "sm89"}]}
    recipe = {"version": 1, "model": {"source": "source"}, "quantize": {"method": "rtn", "scheme": "int4-g32-sym"}, **asked}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    (result,) = pipeline.quantize(tmp_path / "recipe.yaml", out=tmp_path / "out").exports
    assert result.lossless
    assert result.measured is None
    for says in ("model.engine itself was not executed: model.engine needs an NVIDIA GPU", "not measured: model.engine needs an NVIDIA GPU"):
        assert says in result.skipped_because
        assert says in (tmp_path / "out" / "report.md").read_text()
    folder = tmp_path / "out" / result.path
    fake = fake_tensorrt.engine(folder / "onnx", model.spec, profiles(model.spec))
    fake_tensorrt.install(monkeypatch)
    monkeypatch.setattr(fake_tensorrt.Runtime, "get_engine_validity", lambda *a: (fake_tensorrt.EngineValidity.VALID, 0))
    opened = fake_tensorrt.Runtime.deserialize_cuda_engine
    monkeypatch.setattr(fake_tensorrt.Runtime, "deserialize_cuda_engine", lambda self, plan: opened(self, fake))
    (result,) = pipeline.quantize(tmp_path / "recipe.yaml", out=tmp_path / "out").exports
    assert next(v for v in result.verified_by if v.engine == "tensorrt-rtx").executed
    assert result.measured.engine.startswith("tensorrt-rtx")
    assert "not executed" not in (result.skipped_because or "")


@pytest.mark.slow
def test_the_real_package_says_that_there_is_no_gpu(tmp_path, monkeypatch, model):
    pytest.importorskip("tensorrt_rtx")
    monkeypatch.setenv("QFORGE_CACHE", str(tmp_path / "cache"))
    paths = TensorrtExporter("sm89").write(model, tmp_path / "out")
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    _, left_out = verify("tensorrt", paths, model, RuntimeEngine(model), [tokens(20)])
    assert "model.engine itself was not executed: model.engine needs an NVIDIA GPU" in left_out[-1]
    for name, value in (("is_available", True), ("get_device_name", "RTX"), ("get_device_capability", (8, 9))):
        monkeypatch.setattr(torch.cuda, name, lambda *a, value=value: value)
    with pytest.raises(MissingCapabilityError, match=r"TensorRT-RTX [0-9.]+ cannot run model\.engine on RTX \(sm89\): .*CUDA driver version is insufficient"):
        TensorrtEngine(tmp_path / "out")


@pytest.mark.gpu
@pytest.mark.parametrize("text", ["int4-g32-sym", "int8-channel-sym", "fp8-e4m3-tensor"])
@pytest.mark.parametrize("package", [RTX, FULL])
def test_a_gpu_gives_the_logits_of_our_runtime(tmp_path, monkeypatch, package, text):
    pytest.importorskip(package)
    monkeypatch.setenv("QFORGE_CACHE", str(tmp_path / "cache"))
    architecture = "sm{}{}".format(*torch.cuda.get_device_capability())
    if package == RTX and architecture not in ARCHITECTURES:
        pytest.skip(f"TensorRT-RTX does not support {architecture}")
    model = quantized(open_model(str(tiny.make(tmp_path / "source", "llama", layers=2))), text)
    paths = TensorrtExporter(architecture if package == RTX else "auto").write(model, tmp_path / "out")
    done, left_out = verify("tensorrt", paths, model, RuntimeEngine(model), [tokens(n, n) for n in (2, 20, 100)])
    assert done[-1].engine == package.replace("_", "-"), left_out
    assert done[-1].executed
    assert done[-1].kl_mean < 1e-3
    limited = tmp_path / "limited"
    shutil.copytree(tmp_path / "out" / "onnx", limited / "onnx")
    monkeypatch.setattr("qforge.engines.tensorrt_build.profiles", lambda spec: SHORT)
    shutil.copyfile(build(limited / "onnx", model.spec, (architecture,) if package == RTX else ()), limited / "model.engine")
    window = tokens(30)
    whole, pieces = (torch.cat(list(TensorrtEngine(folder).score([window]))) for folder in (tmp_path / "out", limited))
    assert (whole - pieces).norm() / whole.norm() < 1e-2
