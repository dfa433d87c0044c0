"""`method: auto`: each linear's effect on the model is measured once and kept in the journal; schemes are chosen from it for a budget, and the choice is explained."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from qforge.calibration.room import Room
from qforge.calibration.sensitivity import Sensitivity, Study, measure
from qforge.errors import RecipeError
from qforge.models.blocks import BlockModel
from qforge.plan import Plan
from qforge.progress import Progress
from qforge.recipe import Recipe, parse_budget
from qforge.scheme import Scheme, parse
from qforge.stages.candidates import Candidates
from qforge.stages.journal import Journal, key
from qforge.stages.knapsack import Knapsack
from qforge.stages.texts import Texts
from qforge.types import Evaluation

STEP = 0.25  # bits per weight between two points of the curve
MARGIN = 0.97  # of a KL divergence that is asked for: the part that a second try aims at, since it is not measured again before it counts


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen: the scheme of every quantized linear, and the `auto` object of results.json."""

    schemes: dict[str, Scheme]
    described: dict[str, Any]


def _key(model_sha256: str, plan: Plan, candidates: Candidates, texts: Texts) -> str:
    """The key of everything that decides the measurement; the budget does not."""
    assert texts.calibration is not None
    options = plan.options
    return key(
        "sensitivity",
        model=model_sha256,
        calibration=texts.calibration.sha256,
        candidates={name: list(map(str, candidates.options(name))) for name in candidates.shapes},
        options=[options.damping, options.act_order, options.scale_search],
    )


def recalled(model_sha256: str, plan: Plan, candidates: Candidates, texts: Texts, journal: Journal) -> list[Sensitivity] | None:
    """An earlier measurement for the same model, calibration text, candidates and options; None where there is none."""
    found = None if texts.calibration is None else journal.load(_key(model_sha256, plan, candidates, texts))
    return None if found is None else [Sensitivity(n, shared, {parse(s): kl for s, kl in by_scheme.items()}) for n, shared, by_scheme in found[1]]


def measured(model_sha256: str, plan: Plan, blocks: BlockModel, candidates: Candidates, texts: Texts, budget: int, journal: Journal, progress: Progress) -> list[Sensitivity]:
    """Measure, unless the journal knows; `budget` bytes of activations lie in memory.

    Rounding is GPTQ without its correction for the errors of other layers, since one linear at a time is rounded here, and without the descent afterwards, which
    makes the measurement half as long again (27 s instead of 19 s on stories15M) and ranks layers no better.
    """
    found = recalled(model_sha256, plan, candidates, texts, journal)
    if found is not None:
        return found
    assert plan.quantizer is not None
    assert texts.calibration is not None
    options = replace(plan.options, error_correction=False, refine=0)
    study = Study(blocks, plan.quantizer, {n: candidates.options(n) for n in candidates.shapes}, options, Room(journal.folder, budget))
    found = measure(study, texts.calibration.ids, progress)
    value = [(s.name, s.shared, {str(scheme): kl for scheme, kl in s.divergence.items()}) for s in found]
    journal.save(_key(model_sha256, plan, candidates, texts), {"count": torch.tensor(len(found))}, value)
    return found


def said(choice: Choice | None) -> str:
    """What a plan says of the choice."""
    if choice is None:
        return "the schemes above stand for the budget only: auto chooses once it has measured what each layer's rounding does"
    c, down, up = choice.described, choice.described["step_down"], choice.described["step_up"]
    steps = " and ".join(f"{x['predicted_kl']:.4f} at {x['bits_per_weight']:.2f} bits" for x in (down, up))
    return f"schemes chosen from an earlier measurement: predicted KL divergence {c['predicted_kl']:.4f} at {c['bits_per_weight']:.2f} bits; {steps}"


def choose(recipe: Recipe, candidates: Candidates, sensitivities: Sequence[Sensitivity], factor: float | None = None) -> Choice:
    """Choose schemes for the recipe's budget.

    Args:
        recipe: its budget.
        candidates: what can be chosen.
        sensitivities: as measured.
        factor: measured over predicted KL divergence of a first choice for the same budget, if there was one.

    Raises:
        RecipeError: no choice reaches the KL divergence that is asked for.
    """
    units = _units(candidates, sensitivities)
    knapsack = Knapsack([[(unit.bits(scheme), unit.divergence[scheme]) for scheme in unit.options] for unit in units])
    if candidates.capacity_bits is not None:
        places = knapsack.within(candidates.capacity_bits)
        assert places is not None, "a budget below the smallest candidates is refused before anything is measured"
    else:
        places = _reaching(recipe, knapsack, factor)
    chosen = [unit.options[place] for unit, place in zip(units, places, strict=True)]
    schemes = {name: scheme for unit, scheme in zip(units, chosen, strict=True) for name in unit.names}
    return Choice(schemes, _described(recipe, candidates, units, chosen, knapsack) | {"correction": factor})


def _reaching(recipe: Recipe, knapsack: Knapsack, factor: float | None) -> list[int]:
    floor = parse_budget(recipe.quantize.budget).divergence
    assert floor is not None
    places = knapsack.reaching(floor if factor is None else MARGIN * floor / factor)
    if places is None:
        best = knapsack.cost(knapsack.largest) * (factor or 1.0)
        raise RecipeError(f"quantize.budget: {recipe.quantize.budget}: the best choice of these candidates is predicted to reach {best:.2g}; allow more, or add larger candidates")
    return places


@dataclass(frozen=True, slots=True)
class Chooser:
    """Chooses for a run. A KL divergence that is asked for is approached in two tries: predictions are off by a factor, which the first try finds out; the journal keeps it.

    Attributes:
        recipe, candidates, sensitivities: as for `choose`.
        journal: keeps the factor.
        name: its key.
    """

    recipe: Recipe
    candidates: Candidates
    sensitivities: list[Sensitivity]
    journal: Journal
    name: str

    def choice(self) -> Choice:
        """The choice, by all that is known."""
        found = self.journal.load(self.name)
        return choose(self.recipe, self.candidates, self.sensitivities, None if found is None else found[1])

    def second(self, first: Choice, evaluation: Evaluation | None) -> Choice | None:
        """Another choice in the light of what the first one's model measured; None where it stands."""
        predicted = first.described["predicted_kl"]
        if self.candidates.capacity_bits is not None or first.described["correction"] is not None or evaluation is None or not evaluation.kl_mean or not predicted:
            return None
        self.journal.save(self.name, {"done": torch.ones(1)}, evaluation.kl_mean / predicted)
        return self.choice()


def chooser(recipe: Recipe, model_sha256: str, plan: Plan, blocks: BlockModel, candidates: Candidates, texts: Texts, budget: int, journal: Journal, progress: Progress) -> Chooser:
    """Measure, unless the journal knows; then choose."""
    sensitivities = measured(model_sha256, plan, blocks, candidates, texts, budget, journal, progress)
    evaluated = None
    if recipe.evaluate is not None and texts.evaluation is not None:
        evaluated = (texts.evaluation.sha256, texts.evaluation.protocol, recipe.evaluate.engine, recipe.run.activations, recipe.quantize.kv_cache)
    name = key(
        "correction", measured=_key(model_sha256, plan, candidates, texts), options=recipe.quantize.options.model_dump(), budget=recipe.quantize.budget, evaluation=evaluated
    )
    return Chooser(recipe, candidates, sensitivities, journal, name)


@dataclass(frozen=True, slots=True)
class _Unit:
    """Linears that get one scheme, because engines fuse those that read the same input: their shapes by name, what they can have, and the KL divergence that it costs."""

    names: dict[str, tuple[int, int]]
    options: tuple[Scheme, ...]
    divergence: dict[Scheme, float]

    @property
    def weights(self) -> int:
        return sum(o * i for o, i in self.names.values())

    def bits(self, scheme: Scheme) -> int:
        return sum(scheme.storage_bits(*shape) for shape in self.names.values())

    def described(self, scheme: Scheme) -> dict[str, Any]:
        return {"scheme": str(scheme), "bits_per_weight": self.bits(scheme) / self.weights, "predicted_kl": self.divergence[scheme]}


def _units(candidates: Candidates, sensitivities: Sequence[Sensitivity]) -> list[_Unit]:
    """Linears with the same input and the same options together; an override makes a unit of its own."""
    groups: dict[tuple[int, tuple[Scheme, ...]], list[Sensitivity]] = {}
    for s in sensitivities:
        groups.setdefault((s.shared, candidates.options(s.name)), []).append(s)
    return [
        _Unit({s.name: candidates.shapes[s.name] for s in members}, options, {scheme: sum(s.divergence[scheme] for s in members) for scheme in options})
        for (_, options), members in groups.items()
    ]


def _described(recipe: Recipe, candidates: Candidates, units: Sequence[_Unit], chosen: Sequence[Scheme], knapsack: Knapsack) -> dict[str, Any]:
    bits = sum(unit.bits(scheme) for unit, scheme in zip(units, chosen, strict=True))

    def point(capacity: int, predicted: float) -> dict[str, float]:
        return {"bits_per_weight": capacity / candidates.weights, "size_bytes": candidates.rest_bytes + capacity // 8, "predicted_kl": predicted}

    def best(average: float) -> dict[str, float]:
        capacity = min(max(int(average * candidates.weights), knapsack.smallest), knapsack.largest)
        return point(capacity, knapsack.cost(capacity))

    average = bits / candidates.weights
    low, high = (math.ceil(knapsack.smallest / candidates.weights / STEP), math.floor(knapsack.largest / candidates.weights / STEP))
    return {
        "budget": recipe.quantize.budget,
        **point(bits, sum(unit.divergence[scheme] for unit, scheme in zip(units, chosen, strict=True))),
        "step_down": best(average - STEP),
        "step_up": best(average + STEP),
        "curve": [best(i * STEP) for i in range(low, high + 1)],
        "uniform": _uniform(candidates, units, point),
        "units": [
            {"layers": list(unit.names), "weights": unit.weights, **unit.described(scheme), "candidates": [unit.described(s) for s in unit.options]}
            for unit, scheme in zip(units, chosen, strict=True)
        ],
    }


def _uniform(candidates: Candidates, units: Sequence[_Unit], point: Callable[[int, float], dict[str, float]]) -> list[dict[str, Any]]:
    """What each candidate would give everywhere."""
    found = []
    for place, scheme in enumerate(candidates.listed):
        schemes = candidates.uniform(place)
        if schemes is not None:
            found.append({"scheme": str(scheme), **point(candidates.bits(schemes), sum(unit.divergence[schemes[next(iter(unit.names))]] for unit in units))})
    return found
