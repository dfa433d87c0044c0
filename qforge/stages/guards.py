"""What a user should look at although the run succeeded: layers that fare far worse than others of their kind, a divergence that was asked for and not kept."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from qforge.recipe import parse_budget
from qforge.types import Evaluation, LayerResult

FEWEST = 4  # layers of a kind before their median means something
RATIO, LEAST = 3.0, 0.05  # times the median, and an error below which nobody cares


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
                found.append(f"{layer.name}: output error {error:.3f}, {error / middle:.1f} times the median of its kind{advice}")
    return found


def missed(budget: str | None, evaluation: Evaluation | None) -> list[str]:
    """A sentence where the KL divergence that `method: auto` was to keep is exceeded after all."""
    floor = None if budget is None else parse_budget(budget).divergence
    if floor is None or evaluation is None or evaluation.kl_mean is None or evaluation.kl_mean <= floor:
        return []
    return [f"quantize.budget: {budget} was asked for and {evaluation.kl_mean:.4f} measured; ask for {floor * floor / evaluation.kl_mean:.2g}, which costs no new measurement"]
