"""Products in bf16: each sum is that of the rounded factors, statistics and blocks are near the exact ones, and nothing stays changed."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch
from calibrated import Memory, schemes_of, windows
from torch import nn

from qforge.calibration.precision import fast_products
from qforge.calibration.room import Room
from qforge.calibration.sequential import Job, quantize_blocks
from qforge.calibration.statistics import Sums
from qforge.methods import Options, find, native
from qforge.models.blocks import BlockModel
from qforge.models.model import open_model
from qforge.progress import SILENT

pytestmark = pytest.mark.skipif(not native.has_bf16_products(), reason="this CPU has no AVX512-BF16")
ROUNDING = 2**-9  # largest relative error of a value that is rounded to bf16


@pytest.fixture(autouse=True, scope="module")
def products() -> None:
    """In place of the one in conftest.py: as this CPU has them."""


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (2, 31), (37, 50), (255, 64), (256, 33), (513, 97), (3, 300), (40, 600)])
def test_sums_are_those_of_rounded_factors(tokens: int, width: int) -> None:
    x, y, start = normal(tokens, width), normal(tokens, width, seed=1), normal(width, width, seed=2)
    full, lower = start.clone(), start.clone()
    native.add_products(x, y, full)
    native.add_products(x, x, lower, lower=True)
    a, b = x.bfloat16().double(), y.bfloat16().double()
    tolerance = 1e-6 * tokens
    torch.testing.assert_close(full.double(), start + a.T @ b, rtol=0, atol=tolerance)
    torch.testing.assert_close(lower.double().tril(), (start + a.T @ a).tril(), rtol=0, atol=tolerance)
    for first in range(0, width, native.tile()):
        diagonal = slice(first, first + native.tile())
        torch.testing.assert_close(lower[diagonal, diagonal].double(), (start + a.T @ a)[diagonal, diagonal], rtol=0, atol=tolerance)


@pytest.mark.parametrize(("tokens", "left", "right"), [(1, 3, 1), (300, 40, 65), (70, 96, 7)])
def test_sums_of_two_widths(tokens: int, left: int, right: int) -> None:
    x, y, into = normal(tokens, left), normal(tokens, right, seed=1), torch.zeros(left, right)
    native.add_products(x, y, into)
    torch.testing.assert_close(into.double(), x.bfloat16().double().T @ y.bfloat16().double(), rtol=0, atol=1e-6 * tokens)


@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(1, 1, 1), (5, 31, 33), (8, 32, 32), (65, 63, 70), (130, 34, 600), (64, 577, 31), (9, 96, 1100)])
def test_products_are_those_of_rounded_factors(tokens: int, inputs: int, outputs: int) -> None:
    x, weight = normal(tokens, inputs), normal(outputs, inputs, seed=1)
    found = native.multiply(x, weight)
    torch.testing.assert_close(found.double(), x.bfloat16().double() @ weight.bfloat16().double().T, rtol=0, atol=1e-6 * inputs)
    torch.testing.assert_close((x @ weight.T).double(), x.double() @ weight.double().T, rtol=0, atol=1e-6 * inputs)  # other products are in fp32 as before


def test_threads_do_not_change_bits() -> None:
    x, y, sums, products = normal(700, 130), normal(700, 130, seed=1), [], []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            sums.append(torch.zeros(130, 130))
            native.add_products(x, y, sums[-1])
            products.append(native.multiply(x, y))
    finally:
        torch.set_num_threads(1)
    for found in (sums, products):
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])


def test_a_weight_that_changes_is_multiplied_with_as_it_is() -> None:
    linear, x = nn.Linear(8, 4, bias=False), normal(3, 8)
    with torch.no_grad(), fast_products(nn.Sequential(linear)):
        before = linear(x)
        linear.weight.mul_(2)
        assert torch.equal(linear(x), 2 * before)
        linear.weight = nn.Parameter(2 * linear.weight)
        assert torch.equal(linear(x), 4 * before)


def test_statistics_are_near_the_exact_ones() -> None:
    batches = [(normal(2, 300, 70, seed=i), normal(2, 300, 70, seed=i + 9).half()) for i in range(3)]
    sums = Sums(frozenset({"hessian", "cross", "absmax", "sample"}), 70)
    for x, y in batches:
        sums.add(x, y)
    stats = sums.stats()
    assert stats.hessian is not None
    assert stats.cross is not None
    assert stats.sample is not None
    x, y = (torch.cat([b[i].reshape(-1, 70) for b in batches]).double() for i in (0, 1))
    scale = 1800 * 4 * ROUNDING
    torch.testing.assert_close(stats.hessian.double(), x.T @ x, rtol=0, atol=scale)
    torch.testing.assert_close(stats.cross.double(), (y - x).T @ x, rtol=0, atol=scale)
    assert torch.equal(stats.hessian, stats.hessian.T)
    assert stats.absmax is not None
    assert torch.equal(stats.absmax.double(), x.abs().amax(0))
    assert bool((stats.sample[0].double() == x).all(1).any()), "a row of the sample is none of the rows"


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox"])
def test_a_block_is_near_the_exact_one_and_is_itself_again(tmp_path: Path, family: str) -> None:
    blocks = BlockModel(open_model(str(tiny.make(tmp_path / "m", family))))
    hidden = next(iter(blocks.embed([windows()])))
    with blocks.block(0) as module:
        exact = blocks.run(0, module, hidden)
        with fast_products(module):
            fast = blocks.run(0, module, hidden)
        again = blocks.run(0, module, hidden)
    assert fast.dtype == torch.float32
    error = float((fast - exact).norm() / (exact - hidden).norm())
    assert 0 < error < 8 * ROUNDING
    assert torch.equal(again, exact)


def test_what_lies_on_disk_changes_no_bit(tmp_path: Path) -> None:
    blocks = BlockModel(open_model(str(tiny.make(tmp_path / "m", layers=2, hidden=256))))  # weights that are large enough to be put away
    gptq = find("gptq")
    assert gptq is not None
    found = []
    for room in (Room(), Room(tmp_path, 0)):
        memory = Memory()
        quantize_blocks(Job(blocks, gptq, schemes_of(blocks), Options(error_correction=False, refine=0), room), windows(60), memory.store(), SILENT)
        found.append(memory.linears())
    assert all(q.equals(found[1][n]) for n, q in found[0].items())


def test_a_linear_in_bf16_adds_its_bias_in_fp32() -> None:
    linear = nn.Linear(8, 4)
    nn.init.zeros_(linear.weight)
    nn.init.constant_(linear.bias, 1 + 2**-12)
    with torch.no_grad(), fast_products(nn.Sequential(linear)):
        assert torch.equal(linear(normal(3, 8)), linear.bias.expand(3, 4))
