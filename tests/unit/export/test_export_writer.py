"""Streaming safetensors: readable by the safetensors package, aligned, sharded, one piece in memory at a time."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from qforge.errors import OutputError
from qforge.export.writer import Piece, write_safetensors
from qforge.models.weights import TensorInfo


def piece(tensors, log=None):
    def read():
        if log is not None:
            log.append(sorted(tensors))
        return tensors

    return Piece({name: TensorInfo(tuple(t.shape), t.dtype) for name, t in tensors.items()}, read)


def some(seed, rows):
    g = torch.Generator().manual_seed(seed)
    return {
        f"t{seed}.codes": torch.randint(0, 9, (rows, 3), generator=g).to(torch.int8),
        f"t{seed}.words": torch.randint(0, 9, (rows,), generator=g).int(),
        f"t{seed}.scales": torch.randn(rows, 1, generator=g).to(torch.bfloat16),
        f"t{seed}.shape": torch.tensor([rows, 3]),
        f"t{seed}.float": torch.randn(rows, generator=g).to(torch.float8_e4m3fn),
    }


@pytest.mark.parametrize("rows", [8, 5, 1])
def test_the_safetensors_package_reads_it(tmp_path, rows):
    tensors = [some(i, rows) for i in range(3)]
    (path,) = write_safetensors(tmp_path, [piece(t) for t in tensors])
    found = load_file(path)
    assert set(found) == {name for t in tensors for name in t}
    assert all(torch.equal(found[n].view(torch.uint8), v.view(torch.uint8)) and found[n].dtype == v.dtype for t in tensors for n, v in t.items())
    with safe_open(path, "pt") as f:
        assert f.metadata() == {"format": "pt"}


def test_a_piece_is_read_once_where_widths_are_usual(tmp_path):
    log = []
    write_safetensors(tmp_path, [piece(some(i, 8), log) for i in range(3)])
    assert log == [sorted(some(i, 8)) for i in range(3)]


def test_shards_and_index(tmp_path):
    tensors = [some(i, 8) for i in range(4)]
    paths = write_safetensors(tmp_path, [piece(t) for t in tensors], shard_bytes=250)
    assert [p.name for p in paths] == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    index = json.loads(paths[-1].read_text())
    assert index["metadata"]["total_size"] == sum(v.nbytes for t in tensors for v in t.values())
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / file)[name].view(torch.uint8), next(t[name] for t in tensors if name in t).view(torch.uint8))


def test_an_unwritable_folder_is_one_message_and_a_failed_read_leaves_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write"):
        write_safetensors(tmp_path / "file", [piece(some(0, 8))])

    def fail():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        write_safetensors(tmp_path / "out", [Piece({"a": TensorInfo((1,), torch.float32)}, fail)])
    assert list((tmp_path / "out").iterdir()) == []
