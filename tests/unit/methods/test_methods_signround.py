"""Learned rounding on a block that is written down here, in fp64: never worse than its start on what it did not learn from, codes move by one at most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch

from qforge import numerics
from qforge.methods import Options, Stats, available, find, find_transforms, find_tuner
from qforge.methods.gptq import GPTQ
from qforge.methods.signround import SignRound
from qforge.qlinear import QuantizedLinear
from qforge.scheme import parse

WIDTH, MIDDLE, ROWS, PARTS = 64, 96, 96, 16


class TwoLayers:
    """down(tanh(up(x))) with a quantized input; errors and gradients in fp64."""

    def __init__(self, method: str, scheme: str, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        mixing = torch.randn(WIDTH, WIDTH, generator=g) * torch.linspace(2, 0.1, WIDTH)
        self.inputs = [torch.randn(ROWS, WIDTH, generator=g) @ mixing / 8 for _ in range(2 * PARTS)]  # the second half is never shown to a method
        self.targets: Mapping[str, torch.Tensor] = {"up": torch.randn(MIDDLE, WIDTH, generator=g) / 8, "down": torch.randn(WIDTH, MIDDLE, generator=g) / 8}
        self.parts: Sequence[object] = range(PARTS)
        self.wanted = [self.forward(x.double(), {n: w.double() for n, w in self.targets.items()}) for x in self.inputs]
        quantizer, x = find(method), torch.cat(self.inputs[:PARTS])
        assert quantizer is not None
        middle = torch.tanh(x @ self.targets["up"].T)
        start = {
            name: quantizer.quantize(self.targets[name], parse(scheme), Stats(len(x), fed.T @ fed), Options(error_correction=False))[0]
            for name, fed in (("up", x), ("down", middle))
        }
        self.start: Mapping[str, QuantizedLinear] = start

    @staticmethod
    def forward(x: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return torch.tanh(x @ weights["up"].T) @ weights["down"].T

    def _error(self, part: int, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return (self.forward(self.inputs[part].double(), weights) - self.wanted[part]).square().sum(-1).mean()

    def error(self, part: int, weights: Mapping[str, torch.Tensor]) -> float:
        return float(self._error(part, {n: w.double() for n, w in weights.items()}))

    def gradients(self, part: int, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        given = {n: w.double().requires_grad_() for n, w in weights.items()}
        return {n: g.float() for n, g in zip(given, torch.autograd.grad(self._error(part, given), list(given.values())), strict=True)}

    def unseen(self, linears: Mapping[str, QuantizedLinear]) -> float:
        weights = {n: numerics.dequantize(q) for n, q in linears.items()}
        return sum(self.error(i, weights) for i in range(PARTS, 2 * PARTS))


@pytest.mark.parametrize("start", ["rtn", "gptq"])
@pytest.mark.parametrize("scheme", ["int4-g32-sym", "int3-g32-asym", "int2-g32-sym", "int4-channel-sym"])
def test_it_gains_on_text_that_it_never_saw(start: str, scheme: str) -> None:
    block = TwoLayers(start, scheme)
    found = SignRound().tune(block, Options(steps=100))
    assert block.unseen(found) < 0.97 * block.unseen(block.start)


@pytest.mark.parametrize("scheme", ["int4-g32-sym", "int3-g32-asym", "int2-g32-sym", "int8-channel-sym"])
def test_codes_move_by_one_at_most_and_scales_stay_storable(scheme: str) -> None:
    block = TwoLayers("rtn", scheme)
    found = SignRound().tune(block, Options(steps=60))
    low, high = parse(scheme).code_range
    for name, q in found.items():
        before = block.start[name]
        moved = (q.codes.int() - before.codes.int()).abs()
        assert int(moved.sum()) > 0
        assert int(moved.max()) == 1
        assert low <= int(q.codes.min())
        assert int(q.codes.max()) <= high
        assert q.scheme == before.scheme
        assert torch.equal(q.scales, numerics.round_scale(q.scales, q.scheme.scale.type))
        assert float((q.scales / before.scales - 1).abs().max()) < 0.3
        assert (q.zeros is None) == (before.zeros is None)
        assert q.zeros is None or before.zeros is None or torch.equal(q.zeros, before.zeros)


def test_what_only_spoils_is_not_taken() -> None:
    block = TwoLayers("gptq", "int4-g32-sym")
    true = block.gradients
    block.gradients = lambda part, weights: {n: -g for n, g in true(part, weights).items()}  # type: ignore[method-assign]
    assert all(q.equals(block.start[n]) for n, q in SignRound().tune(block, Options(steps=20)).items())


def test_the_same_twice() -> None:
    first, second = (SignRound().tune(TwoLayers("gptq", "int4-g32-sym"), Options(steps=20)) for _ in range(2))
    assert all(q.equals(second[n]) for n, q in first.items())


def test_it_says_what_it_can_do() -> None:
    assert isinstance(find_tuner(["awq", "signround"]), SignRound)
    assert isinstance(find("signround"), SignRound)
    assert find_tuner("gptq") is None
    for scheme, fine in (("int4-g32-sym", True), ("int2-g64-asym", True), ("w8a8-int8", True), ("fp8-dynamic", False), ("nf4", False), ("mxfp4", False)):
        assert (SignRound().supports(parse(scheme)) is None) == fine, scheme
    assert {"targets", "cross", "hessian"} <= SignRound().needs(Options())
    assert "outputs" in SignRound().needs(Options(fisher=True))


@pytest.mark.parametrize("name", available())
def test_estimates_tell_methods_by_what_they_are(name: str) -> None:
    """Whoever asks for the unquantized blocks' outputs tunes blocks; who solves is of GPTQ's kind, which not all are that ask for Hessians (AWQ)."""
    quantizer, transforms = find(name), find_transforms(name)
    needs = frozenset().union(*(m.needs(Options()) for m in (quantizer, *transforms) if m is not None))
    assert ("targets" in needs) == (find_tuner(name) is not None)
    assert isinstance(quantizer, GPTQ) == (name in ("gptq", "signround", "auto"))
    assert isinstance(quantizer, GPTQ) == ("hessian" in needs) or name == "awq"


@pytest.mark.parametrize(("parts", "learned"), [(PARTS, PARTS - 2), (8, 7), (5, 5)])
def test_what_judges_is_never_learned_from(parts: int, learned: int) -> None:
    """One part of eight; with fewer than eight there is none to spare, and all do both."""
    block = TwoLayers("gptq", "int4-g32-sym")
    block.parts = range(parts)
    asked: dict[str, set[int]] = {"learns": set(), "judges": set()}
    gradients, error = block.gradients, block.error

    def learns(part: int, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        asked["learns"].add(part)
        return gradients(part, weights)

    def judges(part: int, weights: Mapping[str, torch.Tensor]) -> float:
        asked["judges"].add(part)
        return error(part, weights)

    block.gradients, block.error = learns, judges  # type: ignore[method-assign]
    SignRound().tune(block, Options(steps=3 * parts))
    assert asked["learns"] == set(range(learned))
    assert asked["judges"] == (set(range(learned, parts)) or set(range(parts)))
