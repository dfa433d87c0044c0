"""The search for fast tiles, with a clock of its own: what is refused, that it finds the fastest of its neighbours, what it keeps, and what products then choose."""

from __future__ import annotations

import json
import math
from dataclasses import astuple, replace
from pathlib import Path

import pytest
import torch

from qforge.ops.triton import tiles, tune, tuned
from qforge.ops.triton.offline import SHARED_MEMORY, Cost
from qforge.ops.triton.tiles import Tile
from qforge.ops.triton.tune import neighbours, product_of, products_of, refusal_of, search, starts_of
from qforge.ops.triton.tuned import Product, Tuned
from qforge.scheme import parse
from qforge.types import ModelSpec

W4 = Product("w4", 4096, 2048, 128)
FREE = Cost(64, 0, 1024, 100, 8, 8, 0, 0)
BEST = Tile(16, 128, 128, 8, 5, 2)


def _distance(tile: Tile) -> float:
    """A bowl around BEST."""
    return 10 + sum(abs(math.log2(a) - math.log2(b)) for a, b in zip(astuple(tile), astuple(BEST), strict=True))


def test_the_search_goes_down_to_the_fastest_tile() -> None:
    found = search([Tile(16, 64, 128, 4, 4, 8)], lambda t: None, _distance)
    assert found.tile == BEST
    assert found.microseconds == 10 == min(found.tried.values())
    assert len(found.tried) < 80  # of the 2,000 that there are


def test_the_search_stays_where_a_neighbour_is_faster_by_noise_only() -> None:
    start = Tile(16, 64, 128, 4, 4, 8)
    assert search([start], lambda t: None, lambda t: 10.0 if t == start else 9.9).tile == start


def test_refused_tiles_are_not_timed_and_failing_ones_are_left_out() -> None:
    timed: list[Tile] = []

    def timer(tile: Tile) -> float:
        timed.append(tile)
        if tile.n == 128:
            raise RuntimeError("out of resources")
        return _distance(tile)

    found = search([replace(BEST, n=64)], lambda t: "too many warps" if t.warps == 4 else None, timer)
    assert found.tile == replace(BEST, n=64)
    assert not any(t.warps == 4 for t in timed)
    assert set(found.refused.values()) == {"too many warps", "out of resources"}


def test_without_any_tile_that_runs_the_search_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"no tile runs.*bad"):
        search([BEST], lambda t: "bad", _distance)


def test_neighbours_differ_in_one_number() -> None:
    start = Tile(16, 64, 128, 4, 4, 8)
    for tile in neighbours(start):
        assert sum(a != b for a, b in zip(astuple(tile), astuple(start), strict=True)) == 1


@pytest.mark.parametrize(
    ("product", "rows", "tile", "cost", "reason"),
    [
        (W4, 16, BEST, FREE, None),
        (W4, 16, BEST, replace(FREE, local=4), "spilled"),
        (W4, 16, BEST, replace(FREE, shared=SHARED_MEMORY[90] + 1), "shared memory"),
        (W4, 16, BEST, replace(FREE, torn=1), "other words than neighbours"),
        (W4, 16, replace(BEST, m=32), FREE, "32 rows for 16"),
        (W4, 16, replace(BEST, k=64), FREE, "packed for steps of 128"),
        (Product("w8-fp8", 64, 256, 128, 128), 16, replace(BEST, k=256), FREE, "cross groups"),
    ],
)
def test_why_tiles_are_refused(product: Product, rows: int, tile: Tile, cost: Cost, reason: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "_compiled", lambda *how: cost)
    found = tune.refusal_of(product, rows, 90)(tile)
    assert found == reason if reason is None else reason in (found or "")


@pytest.mark.parametrize(("tile", "fits"), [(Tile(16, 64, 128, 4, 4, 8), True), (Tile(128, 256, 128, 4, 3, 1), False)])
def test_the_compiler_decides(tile: Tile, fits: bool) -> None:
    """Compiled for capability 80, where no GPU is: half a megabyte of sums does not fit the registers of four warps."""
    pytest.importorskip("triton")
    assert (refusal_of(W4, 128, 80)(tile) is None) == fits


def test_products_are_those_that_the_runtime_runs() -> None:
    spec = ModelSpec("llama", 1000, 512, 1024, 2, 8, 2, 64, 2048, 1e-5, "silu", True, (0, 0), (), 0.125)
    schemes = {f"model.layers.{i}.{n}": parse("int4-g128-asym") for i in (0, 1) for n in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")}
    schemes["model.layers.1.mlp.down_proj"] = parse("nf4-g64")
    spoken = [(p.outputs, p.inputs) for p in products_of(spec, schemes)] if product_of((64, 128), parse("int4-g128-asym")) else None
    assert spoken in (None, [(768, 512), (512, 512), (2048, 512), (512, 1024)])
    fused = {f"model.layers.0.{n}": parse("int4-g128-asym") for n in ("self_attn.qkv_proj", "mlp.gate_up_proj")}
    assert spoken is None or [(p.outputs, p.inputs) for p in products_of(spec, fused)] == [(768, 512), (2048, 512)]


def test_every_product_and_row_count_is_tuned_from_the_shipped_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "_compiled", lambda *how: FREE)
    said: list[Tuned] = []
    found = tune.tune([W4, Product("w8-int8", 256, 256, 0)], 90, lambda p, n: _distance, said.append, rows=(1, 16))
    assert said == found
    assert [(t.product.kernel, t.rows) for t in found] == [("w4", 1), ("w4", 16), ("w8-int8", 1), ("w8-int8", 16)]
    assert found[1].shipped_microseconds == _distance(starts_of(W4, 16, 90)[0])
    assert all(t.microseconds <= t.shipped_microseconds for t in found)


def test_a_table_is_kept_and_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.json"
    first, second = Tuned(W4, 16, BEST, 9.0, 10.0), Tuned(W4, 64, Tile(64, 64, 64, 4, 3), 20.0, 21.0)
    tuned.write(path, [first, replace(second, microseconds=30.0)], {"device": "A GPU"})
    tuned.write(path, [second], {"device": "A GPU"})
    assert json.loads(path.read_text())["device"] == "A GPU"
    monkeypatch.setattr(tuned, "_read", lambda p, read=tuned._read: read(path))
    monkeypatch.setattr(tuned, "interpreted", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "3.9.0")
    tuned._table.cache_clear()
    gpu = torch.device("cuda")
    assert [tuned.find(gpu, W4, rows) for rows in (1, 16, 17, 64, 65)] == [BEST, BEST, second.tile, second.tile, None]
    assert tuned.find(gpu, replace(W4, group=64), 1) is None
    assert tuned.find(torch.device("cpu"), W4, 1) is None
    tuned._table.cache_clear()


def test_a_damaged_table_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "t.json"
    for text in ("{", "[]", '{"format": 1, "tiles": [{"product": {}}]}'):
        path.write_text(text)
        assert tuned._read(path) == []
    assert "cannot be read" in caplog.text
    path.write_text('{"format": 2}')
    assert tuned._read(path) == []


def test_a_table_is_named_after_device_and_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("QFORGE_CACHE", str(tmp_path))
    assert tuned.path_of("NVIDIA H200 (SXM)", "3.9.0") == tmp_path / "tiles/nvidia-h200-sxm-triton-3.9.0.json"


def test_without_a_gpu_tuning_exits_with_3_and_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    from qforge.cli.main import main

    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    with pytest.raises(SystemExit) as left:
        main(["bench", "there-is-no-such-model", "--tune"])
    assert left.value.code == 3
    said = capsys.readouterr()
    assert said.out == ""
    assert "NVIDIA GPU" in said.err
    assert len(said.err.strip().splitlines()) == 1


def test_every_class_has_a_shipped_tile_to_start_from() -> None:
    for of in tiles.CLASSES:
        for product in (W4, Product("w8-fp8", 64, 256, 128, 128), Product("w8-int8", 64, 256, 0)):
            assert all(starts_of(product, rows, of) for rows in (1, 16, 300))
