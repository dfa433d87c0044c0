"""The automatic choice of schemes, from the `auto` object of results.json: what the budget bought, what more or less of it would do, and why each layer has its bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qforge.report.numbers import MISSING, number, percent, size

SHOWN = 8  # layers at either end
NEAR = 1.01  # bits per weight around the choice within which the curve is shown
Row = tuple[str, ...]
Unit = Mapping[str, Any]


def curve_words(auto: Mapping[str, Any]) -> str:
    """What was asked for, what was predicted and what came out."""
    words = f"Budget: {auto['budget']}. Chosen: {number(auto['bits_per_weight'], 3)} bits per weight, predicted KL divergence {number(auto['predicted_kl'])}"
    if auto.get("measured_kl") is not None:
        words += f", measured {number(auto['measured_kl'])}"
    if auto.get("correction") is not None:
        words += f"; a first try measured {number(auto['correction'], 2)} times its prediction, which this choice allows for"
    return f"{words}. Predictions are sums over layers that are rounded alone; another budget needs no new measurement."


def curve_rows(auto: Mapping[str, Any]) -> list[Row]:
    """A row for each uniform scheme and each near point of the curve, by size; the choice between them."""
    near = [p for p in auto["curve"] if abs(p["bits_per_weight"] - auto["bits_per_weight"]) < NEAR]
    points = [("best choice", p) for p in near] + [(f"{p['scheme']} everywhere", p) for p in auto["uniform"]] + [("THIS MODEL", auto)]
    ordered = sorted(points, key=lambda x: (x[1]["bits_per_weight"], x[0] == "THIS MODEL"))
    chosen = auto["predicted_kl"]
    return [
        (name, number(p["bits_per_weight"], 3), size(p["size_bytes"]), number(p["predicted_kl"]), percent(p["predicted_kl"] / chosen - 1, 0, sign=True) if chosen else MISSING)
        for name, p in ordered
    ]


def layers_words(auto: Mapping[str, Any]) -> str:
    """How to read the table of layers."""
    count = len(auto["units"])
    shown = f"The {SHOWN} with most and the {SHOWN} with fewest bits of {count}; all are in results.json. " if count > 2 * SHOWN else ""
    return (
        f"{shown}Layers that read the same input share a scheme. A layer gets more bits where each bit saves most: what the next larger and the next smaller scheme would change."
    )


def layers_rows(auto: Mapping[str, Any]) -> list[Row]:
    """A row for each set of layers that share a scheme, most bits first, then by the divergence that they cost."""
    units = sorted(auto["units"], key=lambda u: (-u["bits_per_weight"], -u["predicted_kl"] / u["weights"]))
    rows: list[Row] = [(_names(u["layers"]), u["scheme"], number(u["bits_per_weight"], 3), number(u["predicted_kl"], 5), _step(u, 1), _step(u, -1)) for u in units]
    return rows if len(rows) <= 2 * SHOWN else rows[:SHOWN] + rows[-SHOWN:]


def _names(layers: list[str]) -> str:
    """`model.layers.0.self_attn.q_proj, k_proj, v_proj`."""
    return ", ".join([layers[0], *(name.rpartition(".")[2] for name in layers[1:])])


def _step(unit: Unit, direction: int) -> str:
    """What the next scheme up (1) or down (-1) would change."""
    further = [c for c in unit["candidates"] if (c["bits_per_weight"] - unit["bits_per_weight"]) * direction > 0]
    if not further:
        return MISSING
    nearest = min(further, key=lambda c: abs(c["bits_per_weight"] - unit["bits_per_weight"]))
    bits = (nearest["bits_per_weight"] - unit["bits_per_weight"]) * unit["weights"] / 8
    change = nearest["predicted_kl"] - unit["predicted_kl"]
    return f"{nearest['scheme']}: {'+' if bits > 0 else '-'}{size(abs(bits))}, KL {'+' if change > 0 else '-'}{number(abs(change), 5)}"
