"""What a user should look at although the run succeeded: notes, layers that calibration hardly reached or that fare far worse than their kind, a divergence that was not kept."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from qforge.models.weights import listed
from qforge.plan import Plan
from qforge.recipe import parse_budget
from qforge.types import Evaluation, LayerResult

FEWEST = 4  # layers of a kind before their median means something
RATIO, LEAST = 3.0, 0.05  # times the median, and an error below which nobody cares
MOST_NAMED = 8  # experts in one sentence; results.json has the tokens of every layer


def noted(layers: Sequence[LayerResult]) -> list[str]:
    """The methods' notes, each with the layers that it is about."""
    about: dict[str, list[str]] = {}
    for layer in layers:
        if layer.note:
            about.setdefault(layer.note, []).append(layer.name)
    return [f"{listed(names)}: {note}" for note, names in about.items()]


def starved(layers: Sequence[LayerResult], plan: Plan) -> list[str]:
    """A sentence on the parts (experts, mostly) with a linear that was given fewer calibration tokens than it has inputs, with a number of samples that may help."""
    widths = {p.name: p.in_features for p in plan.layers}
    parts: dict[str, tuple[float, str]] = {}
    for layer in layers:
        if layer.tokens is not None and layer.tokens < widths[layer.name]:
            share, part = layer.tokens / widths[layer.name], layer.name.rpartition(".")[0] or layer.name
            parts[part] = min(parts.get(part, (1.0, "")), (share, f"{part} ({layer.tokens} tokens for {widths[layer.name]} inputs)"))
    if not parts:
        return []
    worst = sorted(parts.values())
    none = sum(share == 0 for share, _ in worst)
    middle = statistics.median(share for share, _ in worst)
    advice = f"about {2 ** math.ceil(-math.log2(middle))} times the calibration.samples would reach half of them" if middle else "more calibration.samples may reach them"
    where = f"{len(worst)} of {len({layer.name.rpartition('.')[0] for layer in layers})} parts were given fewer calibration tokens than they have inputs, {none} of them none"
    return [f"{where}: {listed((text for _, text in worst), MOST_NAMED)}; {advice}"]


def outliers(layers: Sequence[LayerResult]) -> list[str]:
    """A sentence for each layer whose output error is beyond `RATIO` times the median of those with the same last name (all `down_proj`, ...), with an override that helps."""
    kinds: dict[str, list[LayerResult]] = {}
    for layer in layers:
        if layer.output_error is not None:
            kinds.setdefault(layer.name.rpartition(".")[2], []).append(layer)
    found = []
    for kind in kinds.values():
        middle = statistics.median(layer.output_error or 0.0 for layer in kind)
        for layer in kind:
            error = layer.output_error or 0.0
            if len(kind) >= FEWEST and error > LEAST and error > RATIO * middle:
                mixes = (layer.scheme or "").startswith("int")  # an artifact of NF4 or FP4 holds nothing else
                advice = f'; quantize.overrides: [{{match: "{layer.name}", scheme: int8-channel-sym}}] would keep it close' if mixes else ""
                beside = f"{error / middle:.1f} times the median of its kind" if middle else "where the median of its kind is 0"
                found.append(f"{layer.name}: output error {error:.3f}, {beside}{advice}")
    return found


def missed(budget: str | None, evaluation: Evaluation | None) -> list[str]:
    """A sentence where the KL divergence that `method: auto` was to keep is exceeded after all."""
    floor = None if budget is None else parse_budget(budget).divergence
    if floor is None or evaluation is None or evaluation.kl_mean is None or evaluation.kl_mean <= floor:
        return []
    return [f"quantize.budget: {budget} was asked for and {evaluation.kl_mean:.4f} measured; ask for {floor * floor / evaluation.kl_mean:.2g}, which costs no new measurement"]
