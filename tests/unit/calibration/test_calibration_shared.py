"""The calibration text shared among workers, which here are pickled to and from as other processes are: the sums of one process, up to their rounding."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from calibrated import Memory, run, schemes_of, windows

from qforge import numerics
from qforge.calibration.sequential import Job, quantize_blocks
from qforge.calibration.statistics import SAMPLE, Sums
from qforge.methods import Options, find
from qforge.models.blocks import BlockModel
from qforge.models.model import Model, open_model
from qforge.progress import SILENT

METHODS = ["gptq", "awq", "awq gptq"]


@pytest.fixture(autouse=True, scope="module")
def products() -> None:
    """In place of the one in conftest.py: as this CPU has them."""


def assert_alike(one: Memory, two: Memory) -> None:
    """Sums of other parts round otherwise: now and then that turns a code, and what comes after is fitted to it. The first linears are equal, all have the same errors."""
    first = list(one.pieces[0].linears)[:3]
    assert one.linears().keys() == two.linears().keys()
    for name, q in one.linears().items():
        a, b = numerics.dequantize(q), numerics.dequantize(two.linears()[name])
        assert (a != b).float().mean() < (0.005 if name in first else 1), name
    layers = [layer for piece in two.pieces.values() for layer in piece.layers]
    for layer, other in zip([layer for piece in one.pieces.values() for layer in piece.layers], layers, strict=True):
        assert (other.name, other.tokens) == (layer.name, layer.tokens)
        for figure in ("relative_error", "output_error"):
            assert (getattr(other, figure) or 0) == pytest.approx(getattr(layer, figure) or 0, rel=0.02), (layer.name, figure)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return open_model(str(tiny.make(tmp_path_factory.mktemp("dense") / "m", layers=2, tied=False)))


@pytest.mark.parametrize("method", METHODS)
def test_workers_find_what_one_process_finds(dense: Model, method: str) -> None:
    alone = run(dense, method, 1, Memory(), head=True)
    shared = [run(dense, method, 3, Memory(), head=True) for _ in range(2)]
    assert all(q.equals(shared[1].linears()[n]) for n, q in shared[0].linears().items())
    assert_alike(alone, shared[0])


def test_experts_that_few_parts_use_are_summed_all_the_same(tmp_path: Path) -> None:
    experts = {"num_experts": 16, "num_experts_per_tok": 1, "moe_intermediate_size": 32}
    model = open_model(str(tiny.make(tmp_path / "m", "qwen3_moe", layers=2, **experts)))

    def tokens(memory: Memory) -> dict[str, int | None]:
        return {layer.name: layer.tokens for layer in memory.pieces[0].layers}

    alone, shared = (run(model, "gptq", n, Memory(), scheme="int4-g32-sym", count=3) for n in (1, 3))
    assert tokens(alone) == tokens(shared)
    parts = [Memory() for _ in range(3)]
    for i, memory in enumerate(parts):
        blocks, gptq = BlockModel(model), find("gptq")
        assert gptq is not None
        quantize_blocks(Job(blocks, gptq, {n: s for n, s in schemes_of(blocks).items() if n not in blocks.routers}, Options()), windows(3)[i : i + 1], memory.store(), SILENT)
    assert any(len({bool(tokens(p)[name]) for p in parts}) == 2 for name in tokens(alone))  # or the order of the workers' stops was not tried
    assert_alike(alone, shared)


@pytest.mark.parametrize("method", ["gptq", "awq gptq"])
@pytest.mark.parametrize("keep_hidden", [True, False])
def test_resumed_equals_uninterrupted(dense: Model, method: str, keep_hidden: bool) -> None:
    whole = run(dense, method, 2, Memory(), head=True)
    for die_after in (1, 2):
        broken = Memory(die_after)
        with pytest.raises(KeyboardInterrupt):
            run(dense, method, 2, broken, head=True)
        broken.die_after = None
        if not keep_hidden:
            broken.hidden = {}
        before = broken.saves
        run(dense, method, 2, broken, head=True)
        assert broken.saves - before == len(whole.pieces) - die_after
        assert all(q.equals(broken.linears()[n]) for n, q in whole.linears().items())


@pytest.mark.parametrize("cut", [3, 700, 1999])
def test_merged_sums_are_those_of_all_rows(cut: int) -> None:
    x, y = torch.randn(2, 2000, 48, generator=torch.Generator().manual_seed(0))
    y = y.half()
    needs = frozenset({"hessian", "cross", "absmax", "sample"})
    whole, merged, second = Sums(needs, 48), Sums(needs, 48), Sums(needs, 48, first=cut)
    whole.add(x, y)
    merged.add(x[:cut], y[:cut])
    second.add(x[cut:], y[cut:])
    merged.merge(second)
    want, got = whole.stats(), merged.stats()
    assert (got.tokens, got.peak) == (want.tokens, pytest.approx(want.peak))
    assert want.sample is not None
    assert SAMPLE / 2 < len(want.sample) <= SAMPLE
    for name in ("absmax", "sample"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    for name in ("hessian", "cross"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=1e-4, atol=1e-2)
