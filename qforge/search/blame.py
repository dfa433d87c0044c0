"""Where a divergence comes from: restore one part of the quantized model to full precision, and measure what comes back.

Blocks first, each restored alone; then, in the blocks that brought back most, each linear alone; then, in the linear that brought back most, its groups of inputs.
All variants go through a block together, so that every block is loaded once for the quantized model and once to be restored, and a variant is computed only from its own block on.

Letters: T tokens of a window, D hidden width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import kl_div

from qforge.engines.base import Scorer, chunks
from qforge.engines.transformers_engine import TransformersEngine
from qforge.evaluate.scores import PairScores, score_windows
from qforge.models.blocks import BlockModel
from qforge.models.key_values import Passing, unrounded
from qforge.models.model import Model
from qforge.types import Blame, BlameResult

TOKENS = 512  # scored at least, where the text has them
DEEP = 3  # blocks that are taken apart
PIECES = 16  # into which a linear is taken apart, at most
SMALL = 0.1  # a share that points at nothing
OUTSIDE = "everything outside of the blocks"
CACHE = "keys and values (fp8)"
_NO_MATTER = ("_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype", "quantization_config", "use_cache", "architectures")

States = list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Variant:
    """A part to restore: tensors of one block by full name, or of a weight `[O, I]` the inputs from one to before another."""

    name: str
    block: int
    tensors: frozenset[str]
    inputs: tuple[int, int] | None = None


def blame(original: Model, quantized: Model, windows: list[list[int]], *, tokens: int = TOKENS) -> Blame:
    """Rank the parts of a quantized model by the divergence that goes when they are restored.

    Args:
        original: the unquantized model.
        quantized: the same architecture with other weights, opened from its files.
        windows: token ids; as many of them, evenly spread, as hold `tokens` scored positions.
        tokens: how much to score.

    Returns:
        Parts by returned share, largest first. Shares need not add up to one: errors of one part hide or amplify those of others.
    """
    chosen = spread(windows, tokens)
    study = _Study(original, quantized, chosen)
    whole = study.divergences(study.last({}, []))[""]
    blocks = [_Variant(name, i, frozenset(study.differing(i))) for i, name in enumerate(study.model.block_names)]
    found = study.measure([b for b in blocks if b.tensors], whole, {})
    if study.outside_differs():
        found.append(BlameResult(OUTSIDE, kl := study.outside(), _share(whole, kl)))
    if quantized.kv_scales:
        found.append(BlameResult(CACHE, kl := study.divergences(study.last({}, [], unrounded()))[""], _share(whole, kl)))
    worst = sorted((f for f in found if f.name not in (OUTSIDE, CACHE)), key=lambda f: -f.returned)[:DEEP]
    index = {name: i for i, name in enumerate(study.model.block_names)}
    parts = {v: b.name for b in worst for v in study.linears(index[b.name])}
    found += study.measure(list(parts), whole, {v.name: b for v, b in parts.items()})
    found.sort(key=_first)
    first = next((v for f in found for v in parts if v.name == f.name and f.returned >= SMALL), None)
    pieces = [] if first is None else study.pieces(first)
    groups = sorted(study.measure(pieces, whole, {p.name: first.name for p in pieces}), key=_first) if first is not None and pieces else []
    return Blame(sum(map(len, chosen)) - len(chosen), whole, found, _words(found, groups, whole, different_settings(original, quantized)), groups)


def _first(part: BlameResult) -> tuple[float, str]:
    return -part.returned, part.name


def divergence(candidate: Scorer, reference: Scorer, windows: list[list[int]]) -> float:
    """Mean KL divergence of a candidate from a reference over all scored positions, nats per token."""
    scores = [s for s in score_windows(candidate, reference, windows) if isinstance(s, PairScores)]
    return math.fsum(float(s.kl.sum()) for s in scores) / sum(len(s.kl) for s in scores)


def spread(windows: list[list[int]], tokens: int) -> list[list[int]]:
    """Evenly spread windows that hold about `tokens` scored positions; at least one."""
    count = min(len(windows), max(1, math.ceil(tokens / max(1, len(windows[0]) - 1))))
    return [windows[i * len(windows) // count] for i in range(count)]


def different_settings(original: Model, quantized: Model) -> list[str]:
    """`key: original -> quantized` for each setting of config.json that can change what a model computes."""
    a, b = (m.config.to_dict() for m in (original, quantized))
    keys = [k for k in dict.fromkeys([*a, *b]) if k not in _NO_MATTER and a.get(k) != b.get(k)]
    return [f"{k}: {a.get(k)} -> {b.get(k)}" for k in keys]


class _Study:
    """Both models' blocks, the original's hidden states, and the windows."""

    def __init__(self, original: Model, quantized: Model, windows: list[list[int]]) -> None:
        self._windows = windows
        self._original, self._quantized = original, quantized
        self._full, self.model = BlockModel(original), BlockModel(quantized)
        self._reference = TransformersEngine(original).hidden(windows)
        self._names = set(original.weights.names())

    def differing(self, block: int) -> list[str]:
        """Tensors of a block that differ between the models."""
        prefix = f"{self.model.block_names[block]}."
        return [n for n in self._quantized.weights.names() if n.startswith(prefix) and n in self._names and not self._equal(n)]

    def _equal(self, name: str) -> bool:
        return torch.equal(self._original.weights.read(name).float(), self._quantized.weights.read(name).float())

    def linears(self, block: int) -> list[_Variant]:
        """A variant for each linear that differs; none where a norm differs too, because factors were then folded between them, and one alone would not fit."""
        names, differing = list(self.model.linears(block)), self.differing(block)
        if any(n.rpartition(".")[0] not in names for n in differing):
            return []
        return [_Variant(n, block, frozenset(t for t in differing if t.rpartition(".")[0] == n)) for n in names if f"{n}.weight" in differing]

    def pieces(self, linear: _Variant) -> list[_Variant]:
        """A variant for each group of a linear's inputs, or for neighbours together where there are many; none where all inputs share a scale."""
        name = f"{linear.name}.weight"
        if name not in linear.tensors or linear.name not in self._quantized.schemes:
            return []
        inputs = self._original.weights.info(name).shape[-1]
        group = self._quantized.schemes[linear.name].granularity.group_size(inputs)
        step = group * -(-inputs // (group * PIECES))
        ranges = [(start, min(start + step, inputs)) for start in range(0, inputs, step)]
        return [_Variant(f"{linear.name}, inputs {a} to {b - 1}", linear.block, frozenset({name}), (a, b)) for a, b in ranges] if len(ranges) > 1 else []

    def measure(self, variants: list[_Variant], whole: float, part_of: Mapping[str, str]) -> list[BlameResult]:
        """What is left of the divergence with each variant restored, and what came back."""
        ends = self.last({v.name: v for v in variants}, list({v.block for v in variants}))
        left = self.divergences({v.name: ends[v.name] for v in variants})
        return [BlameResult(name, kl, _share(whole, kl), part_of.get(name)) for name, kl in left.items()]

    def last(self, variants: Mapping[str, _Variant], blocks: Collection[int], cache: Passing | None = None) -> dict[str, States]:
        """Hidden states after the last block: of the quantized model (under the empty name; keys and values through `cache`, if one is given) and of each variant."""
        streams: dict[str, States] = {"": list(self.model.embed(torch.tensor([w]) for w in self._windows))}
        for index in range(self.model.num_blocks):
            begun = {n: self._restored(index, v, streams[""]) for n, v in variants.items() if v.block == index} if index in blocks else {}
            with self.model.block(index) as module:
                streams = {n: [self.model.run(index, module, h, cache=cache) for h in states] for n, states in streams.items()} | begun
        return streams

    def _restored(self, index: int, variant: _Variant, states: States) -> States:
        """A block with the variant's tensors as the original has them; what is restored takes its inputs unrounded."""

        def replace(name: str) -> torch.Tensor | None:
            if name not in variant.tensors:
                return None
            whole = self._original.weights.read(name)
            if variant.inputs is None:
                return whole
            mixed, (start, stop) = self._quantized.weights.read(name).to(whole.dtype, copy=True), variant.inputs
            mixed[:, start:stop] = whole[:, start:stop]
            return mixed

        with self.model.block(index, replace, self._rounding(variant)) as module:
            return [self.model.run(index, module, h) for h in states]

    def _rounding(self, variant: _Variant) -> Any:
        restored = {t.rpartition(".")[0] for t in variant.tensors if variant.inputs is None}
        return lambda name: None if name in restored else self.model.own_rounding(name)

    def divergences(self, ends: Mapping[str, States], head: BlockModel | None = None) -> dict[str, float]:
        """Mean KL divergence from the original, nats per token, of each of several final hidden states; the original's logits of a chunk are computed once for all."""
        sums = dict.fromkeys(ends, 0.0)
        with self._full.head() as full, (head or self.model).head() as own:
            for window, reference in enumerate(self._reference):
                for start, stop in chunks(reference.shape[-2]):
                    expected = full(_rows(reference, start, stop)).log_softmax(-1)
                    for name, states in ends.items():
                        found = own(_rows(states[window], start, stop)).log_softmax(-1)
                        sums[name] += float(kl_div(found, expected, reduction="sum", log_target=True))
        count = sum(map(len, self._windows)) - len(self._windows)
        return {name: max(0.0, total / count) for name, total in sums.items()}

    def outside_differs(self) -> bool:
        """Whether an embedding, a final norm or a head differs."""
        inside = tuple(f"{n}." for n in self.model.block_names)
        return any(n in self._names and not n.startswith(inside) and not self._equal(n) for n in self._quantized.weights.names())

    def outside(self) -> float:
        """The divergence with the original's embedding, final norm and head around the quantized blocks."""
        states = list(self._full.embed(torch.tensor([w]) for w in self._windows))
        list(self.model.embed(torch.tensor([w]) for w in self._windows))
        for index in range(self.model.num_blocks):
            with self.model.block(index) as module:
                states = [self.model.run(index, module, h) for h in states]
        return self.divergences({OUTSIDE: states}, self._full)[OUTSIDE]


def _rows(states: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Positions of a window's hidden states `[1, T, D]`, as `[positions, D]`."""
    return states.reshape(-1, states.shape[-1])[start:stop]


def _share(whole: float, left: float) -> float:
    return 1 - left / whole if whole > 0 else 0.0


def _words(parts: list[BlameResult], groups: list[BlameResult], whole: float, settings: list[str]) -> str:
    """What the ranking comes to."""
    if whole == 0:
        return "the models do not differ"
    large = [p for p in parts if p.returned >= SMALL]
    single = [p for p in large if p.part_of or p.name == CACHE]
    named = [f"{p.name} ({p.returned:.0%})" for p in (single or large)[:DEEP]]
    told = f"the divergence that goes when a part is restored: {', '.join(named)}" if named else "no part alone accounts for a tenth of the divergence; it is spread over the model"
    shares = [g.returned for g in groups]
    if groups and shares[0] >= SMALL and shares[0] > 2 * max(0.0, shares[1]):
        told += f"; in {groups[0].part_of}, the{groups[0].name.rpartition(',')[2]} ({shares[0]:.0%})"
    if not settings:
        return told
    cause = "and what differs in config.json" if named else "no part's weights explain it; what differs in config.json"
    return f"{told if named else ''}{', ' if named else ''}{cause}: {'; '.join(settings)}"
