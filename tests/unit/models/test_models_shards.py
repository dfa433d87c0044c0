"""Safetensors: values equal the reference reader's, and every damaged or lying header is refused by name before anything is allocated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import save_file

from qforge.errors import ModelError
from qforge.models.model import open_model
from qforge.models.shards import INDEX, SINGLE, Shards, check_index, find

TENSORS = {
    "a": torch.arange(12.0).reshape(3, 4),
    "b": torch.arange(5).to(torch.bfloat16),
    "c": torch.tensor(7),
    "d": torch.zeros(0, 4),
    "e": torch.ones(3, 2).to(torch.float8_e4m3fn),
}


def raw(header: dict[str, Any] | bytes, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(shape: list[Any], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_reads_what_safetensors_wrote(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / SINGLE)
    shards = Shards(find(tmp_path))
    assert set(shards.names()) == set(TENSORS)
    for name, want in TENSORS.items():
        got = shards.read(name)
        assert shards.info(name).shape == tuple(want.shape)
        assert got.dtype == shards.info(name).dtype == want.dtype
        assert torch.equal(got.to(torch.float64), want.to(torch.float64))
    assert shards.read("a").data_ptr() != shards.read("a").data_ptr()


def test_an_index_joins_files_and_its_lies_are_found(tmp_path: Path) -> None:
    save_file({"a": TENSORS["a"]}, tmp_path / "x-1.safetensors")
    save_file({"b": TENSORS["b"]}, tmp_path / "x-2.safetensors")
    index = {"weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    shards = Shards(find(tmp_path))
    check_index(tmp_path, shards)
    assert torch.equal(shards.read("a"), TENSORS["a"])
    first = shards.fingerprint()
    index["weight_map"]["z"] = "x-2.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match="do not hold: z"):
        check_index(tmp_path, shards)
    save_file({"b": TENSORS["b"] + 1}, tmp_path / "x-2.safetensors")
    assert Shards(find(tmp_path)).fingerprint() != first
    (tmp_path / "x-2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"1 are not there: x-2\.safetensors"):
        find(tmp_path)


@pytest.mark.parametrize(
    "content", ["[]", "{", '{"weight_map": {}}', '{"weight_map": {"a": "../../etc/passwd"}}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "sub/x.safetensors"}}']
)
def test_a_malformed_index_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        find(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("x", "y"):
        save_file({"a": TENSORS["a"]}, tmp_path / f"{name}.safetensors")
    with pytest.raises(ModelError, match="in two files"):
        Shards([tmp_path / "x.safetensors", tmp_path / "y.safetensors"])
    with pytest.raises(ModelError, match=r"no model\.safetensors\.index\.json"):
        find(tmp_path)


def test_pickles_are_never_loaded(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match="pickle"):
        find(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(ModelError, match="holds no weights"):
        find(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"abc", "cut short"),
        ((2**60).to_bytes(8, "little") + b"{}", "cut short"),
        (raw(b"{]"), "not JSON"),
        (raw(b"[" * 100_000), "not JSON"),
        (raw(b"[]"), "not a JSON object"),
        (raw(b'{"a": {}, "a": {}}'), "occurs twice"),
        (raw({"a": 3}), "malformed"),
        (raw({"a": {"dtype": "F32", "shape": [1]}}), "malformed"),
        (raw({"a": entry([-1], 0, 4)}, bytes(4)), "malformed"),
        (raw({"a": entry([True], 0, 4)}, bytes(4)), "malformed"),
        (raw({"a": entry([1], 4, 0)}, bytes(4)), "malformed"),
        (raw({"a": entry([1], 0, 4, "F12")}, bytes(4)), "type 'F12'"),
        (raw({"a": entry([2**40, 2**40], 0, 4)}, bytes(4)), "needs"),
        (raw({"a": entry([1], 0, 4)}), "cut short"),
        (raw({"a": entry([1], 0, 4)}, bytes(8)), "4 bytes after its last tensor"),
        (raw({"a": entry([1], 4, 8)}, bytes(8)), "gap or an overlap"),
        (raw({"a": entry([2], 0, 8), "b": entry([1], 4, 8)}, bytes(8)), "gap or an overlap"),
    ],
)
def test_a_header_that_does_not_fit_its_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / SINGLE
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message) as e:
        Shards([path])
    assert SINGLE in str(e.value)


def test_any_cut_is_found(tmp_path: Path) -> None:
    path = tmp_path / SINGLE
    save_file(TENSORS, path)
    whole = path.read_bytes()
    for length in [*range(0, len(whole), 37), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(ModelError):
            Shards([path])


def test_a_file_that_shrinks_after_it_was_opened_is_no_half_tensor(tmp_path: Path) -> None:
    path = tmp_path / SINGLE
    save_file({"a": TENSORS["a"]}, path)
    shards = Shards([path])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ModelError, match="ended early"):
        shards.read("a")


@pytest.mark.parametrize("name", [SINGLE, "m.gguf", "tokenizer.json"])
def test_a_pointer_of_git_lfs_is_told_from_a_damaged_file(tmp_path: Path, name: str) -> None:
    folder = tiny.make(tmp_path / "model", layers=1)
    (folder / name).write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 269060552\n")
    with pytest.raises(ModelError, match=f"it is a Git LFS pointer, not the file itself; `git lfs pull` in {folder} fetches") as e:
        (open_model(str(folder / name)) if name == "m.gguf" else open_model(str(folder))).tokenizer()
    assert str(folder / name) in str(e.value)
