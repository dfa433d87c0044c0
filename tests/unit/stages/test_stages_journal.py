"""Pieces come back as they were, damaged ones count as absent, keys cover what decides the content; what time or memory cut short is none."""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import importlib.util
import json
import os
import resource
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import tiny
import torch

from qforge import pipeline
from qforge.calibration.room import Room
from qforge.calibration.store import Piece
from qforge.engines import checkpoints, foreign, llama_cpp
from qforge.errors import OutputError
from qforge.methods import Options, find
from qforge.scheme import parse
from qforge.stages import exports, journal
from qforge.stages.journal import Journal, key
from qforge.stages.pieces import BlockPieces
from qforge.types import ExportResult, LayerResult


def test_pieces_round_trip_and_are_counted_once(tmp_path: Path) -> None:
    first, tensors = Journal(tmp_path), {"a": torch.arange(6).view(2, 3).T, "b": torch.tensor(1.5, dtype=torch.bfloat16)}
    first.save("x", tensors, {"n": [1, 2.5, None]})
    again = Journal(tmp_path)
    for _ in range(2):
        found = again.load("x")
        assert found is not None
        assert all(torch.equal(found[0][n], t) for n, t in tensors.items())
        assert found[1] == {"n": [1, 2.5, None]}
    assert (first.computed, first.resumed, again.computed, again.resumed) == (1, 0, 0, 1)


def test_a_damaged_piece_counts_as_absent(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.save("x", {"a": torch.ones(100)}, None)
    path = next(tmp_path.glob("*.safetensors"))
    for content in (path.read_bytes()[:-50], b"", b"garbage" * 100):
        path.write_bytes(content)
        assert journal.load("x") is None
        assert not path.exists()
    assert journal.resumed == 0


@pytest.fixture
def kept(tmp_path: Path) -> Journal:
    journal = Journal(tmp_path / "work")
    journal.save("x", {"a": torch.ones(100)}, None)
    return journal


@pytest.mark.parametrize("read", [Journal.load, Journal.stored, Journal.value])
def test_a_piece_that_cannot_be_read_now_is_an_error_and_stays(kept: Journal, read: Callable[[Journal, str], object]) -> None:
    """Too many open files, a folder that may not be searched, a disk that fails: none says that the piece is damaged."""
    limits, taken = resource.getrlimit(resource.RLIMIT_NOFILE), []
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(open(os.devnull))  # noqa: SIM115
        with pytest.raises(OutputError, match=r"cannot read .*x\.safetensors, which a run has kept: Too many open files; .*run the same command again"):
            read(kept, "x")
    finally:
        for file in taken:
            file.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert kept.load("x") is not None


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
@pytest.mark.parametrize("read", [Journal.load, Journal.stored, Journal.has])
def test_nor_does_another_error_of_the_system(kept: Journal, read: Callable[[Journal, str], object], number: int) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), "x.safetensors")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "stat", fails)
        with pytest.raises(OutputError, match=os.strerror(number)):
            read(kept, "x")
    assert kept.load("x") is not None


def test_a_damaged_piece_is_removed_when_its_tensors_are_asked_for_one_by_one(kept: Journal) -> None:
    path = next(kept.folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-50])
    assert kept.stored("x") is None
    assert not path.exists()


def test_keys_differ_in_every_part_and_in_threads() -> None:
    base = key("stage", a=1, b={"x": [1, 2]})
    assert base == key("stage", b={"x": [1, 2]}, a=1)
    others = [key("other", a=1, b={"x": [1, 2]}), key("stage", a=2, b={"x": [1, 2]}), key("stage", a=1, b={"x": [2, 1]})]
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    others.append(key("stage", a=1, b={"x": [1, 2]}))
    torch.set_num_threads(threads)
    assert len({base, *others}) == 5


@pytest.mark.parametrize("of", [journal, torch, journal.transformers], ids=["qforge", "torch", "transformers"])
def test_keys_differ_in_the_versions_of_what_computes(monkeypatch: pytest.MonkeyPatch, of: ModuleType) -> None:
    base = key("stage", a=1)
    monkeypatch.setattr(of, "__version__", "0.0.0")
    assert key("stage", a=1) != base


def test_quantized_blocks_round_trip(tmp_path: Path) -> None:
    rtn = find("rtn")
    assert rtn is not None
    pieces = {}
    for i, text in enumerate(("int4-g16-sym", "int4-g16-asym", "int8-channel-sym")):
        q, _ = rtn.quantize(torch.randn(4, 32), parse(text), None, Options())
        pieces[i] = Piece({f"layer.{i}": q}, [LayerResult(f"layer.{i}", text, 0.1, None, 4.5, "note")])
    store = BlockPieces(Journal(tmp_path), "root", 3).store()
    for i, piece in pieces.items():
        store.save(i, piece)
    again = BlockPieces(Journal(tmp_path), "root", 3)
    assert again.names() == {f"layer.{i}": i for i in range(3)}
    assert all(again.linear(i, f"layer.{i}").equals(p.linears[f"layer.{i}"]) for i, p in pieces.items())
    assert again.layers() == [p.layers[0] for p in pieces.values()]
    assert BlockPieces(Journal(tmp_path), "another root", 3).store().load(0) is None


def damage(folder: Path, stage: str) -> None:
    for path in folder.glob(f"{stage}-*"):
        path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("stage", ["outputs", "block"])
def test_a_damaged_piece_is_measured_again_and_never_passed_over(tmp_path: Path, stage: str) -> None:
    """Two blocks and a head, which has none; the first block is finished."""
    pieces = BlockPieces(Journal(tmp_path), "root", 3)
    assert not pieces.weighed(2)
    pieces.save_outputs(0, {})
    pieces.save_outputs(1, {"layer.1": torch.eye(2)})
    assert pieces.weighed(2)
    assert not pieces.outputs(0)
    assert torch.equal(pieces.outputs(1)["layer.1"].load(), torch.eye(2))
    pieces.store().save(0, Piece({}, []))
    next(p for p in tmp_path.glob("outputs-*") if b"layer.1" not in p.read_bytes()).unlink()
    assert pieces.weighed(2)
    damage(tmp_path, stage)
    assert not pieces.weighed(2)
    pieces.save_outputs(1, {"layer.1": torch.eye(2)})
    damage(tmp_path, "outputs")
    for _ in range(2):
        with pytest.raises(OutputError, match=r"outputs of block 1 weigh .* damaged or gone; run the same command again"):
            pieces.outputs(1)


def test_only_the_newest_hidden_states_are_kept(tmp_path: Path) -> None:
    pieces = BlockPieces(Journal(tmp_path), "root", 3)
    store = pieces.store()
    room = Room()
    store.save_hidden(0, {"quantized.0": room.keep(torch.ones(2, 3)), "quantized.1": room.keep(torch.zeros(1, 3))})
    store.save_hidden(1, {"quantized.0": room.keep(torch.full((2, 3), 2.0))})
    assert store.load_hidden(0) is None
    found = store.load_hidden(1)
    assert found is not None
    assert torch.equal(found["quantized.0"].load(), torch.full((2, 3), 2.0))
    pieces.drop_states()
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OutputError, match=r"the disk is full.*free some space"):
        Journal(tmp_path).save("x", {"a": torch.ones(1)}, None)
    assert not list(tmp_path.iterdir())


def exported(folder: Path, quantize: dict[str, str], *formats: str) -> list[ExportResult]:
    """Of one run, and of those after it in the same folder."""
    if not (folder / "source").exists():
        tiny.make(folder / "source", dtype=torch.bfloat16)
    asked = {"version": 1, "model": {"source": "source"}, "quantize": quantize, "evaluate": None, "export": [{"format": f} for f in formats]}
    (folder / "recipe.yaml").write_text(json.dumps(asked))
    return pipeline.quantize(folder / "recipe.yaml", out=folder / "out").exports


def without(monkeypatch: pytest.MonkeyPatch, folder: Path, *packages: str) -> None:
    """As on a machine that lacks packages, also in environments of their own."""
    installed = importlib.util.find_spec
    monkeypatch.setenv("QFORGE_CACHE", str(folder / "cache"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in packages else installed(name, *rest))


def test_an_export_is_executed_once_there_are_the_package_and_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bitsandbytes")
    with monkeypatch.context() as bare:
        without(bare, tmp_path, "bitsandbytes")
        (result,) = exported(tmp_path, {"method": "nf4"}, "bitsandbytes")
    assert "pip install 'qforge[bitsandbytes]'" in str(result.skipped_because)
    with monkeypatch.context() as full:
        full.setattr(checkpoints, "free_memory", lambda: 0)
        (result,) = exported(tmp_path, {"method": "nf4"}, "bitsandbytes")
    assert "0.0 are free" in str(result.skipped_because)
    (result,) = exported(tmp_path, {"method": "nf4"}, "bitsandbytes")
    assert result.skipped_because is None
    assert [v.executed for v in result.verified_by] == [True, False]


def test_an_export_is_executed_once_the_engine_answers_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xllamacpp")
    with monkeypatch.context() as busy:
        busy.setattr(llama_cpp, "_TIMEOUT_S", 0.001)
        (result,) = exported(tmp_path, {"method": "rtn", "scheme": "int4-g32-sym"}, "gguf")
    assert [v.engine for v in result.verified_by] == ["gguf package"]
    assert str(result.skipped_because).startswith("llama.cpp: llama.cpp did not answer within 1 s")
    assert "; texts not compared: llama.cpp did not answer within 1 s" in str(result.skipped_because)
    (result,) = exported(tmp_path, {"method": "rtn", "scheme": "int4-g32-sym"}, "gguf")
    assert [v.engine for v in result.verified_by] == ["gguf package", "llama.cpp", "tokenizer in llama.cpp"]
    assert result.skipped_because is None


def test_a_check_is_kept_while_the_same_engines_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where some are not there: what the others execute is not done again for these."""
    checked, verify = [], exports.verify
    monkeypatch.setattr(exports, "verify", lambda *given: checked.append(given[0]) or verify(*given))
    formats = ("trtllm", "triton", "mlx", "gguf", "onnx")
    without(monkeypatch, tmp_path, "tritonclient", "mlx_lm", "xllamacpp", "onnxruntime_genai")
    for _ in range(2):
        results = exported(tmp_path, {"method": "rtn", "scheme": "int4-g64-sym"}, *formats)
        assert all(r.skipped_because for r in results)
        assert checked == list(formats)
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.0" if name == "onnxruntime" else version(name))
    exported(tmp_path, {"method": "rtn", "scheme": "int4-g64-sym"}, *formats)
    assert checked == [*formats] * 2


def test_a_check_is_made_again_by_another_llama_cpp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xllamacpp")
    for version in ("1", "2", "2"):
        monkeypatch.setattr(foreign, "version_of", lambda python, package, version=version: f"{package} {version}")
        (result,) = exported(tmp_path, {"method": "rtn", "scheme": "int4-g32-sym"}, "gguf")
        assert [v.version for v in result.verified_by if v.executed] == [f"xllamacpp {version}"]
