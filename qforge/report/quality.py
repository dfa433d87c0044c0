"""A run's quality figures as rows of text: value and interval of each, and the words above them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qforge.report.numbers import MISSING, interval, number, percent

Row = tuple[str, ...]
_FIGURES = (
    ("perplexity ratio, quantized / original", "perplexity_ratio"),
    ("KL divergence, mean (nats per token)", "kl_mean"),
    ("KL divergence, median", "kl_median"),
    ("KL divergence, 90th percentile", "kl_p90"),
    ("KL divergence, 99th percentile", "kl_p99"),
    ("KL divergence, 99.9th percentile", "kl_p999"),
    ("KL divergence, largest", "kl_max"),
    ("top-1 agreement", "top1_agreement"),
    ("top-5 agreement", "top5_agreement"),
)


def rows(e: Mapping[str, Any], adapters: bool) -> list[Row]:
    """Figure, value, 95 % interval; from the `evaluation` object. `adapters`: whether the original is a merged one."""
    found: list[Row] = []
    reference = e.get("reference") or {}
    if e.get("base"):
        found.append(("perplexity of the base model, before adapters", number(e["base"]["perplexity"]), MISSING))
    if reference:
        found.append(("perplexity of the original" + (" (merged)" if adapters else ""), number(reference["perplexity"]), interval(reference.get("perplexity_ci95"))))
    found.append(("perplexity of the quantized model", number(e["candidate"]["perplexity"]), interval(e["candidate"].get("perplexity_ci95"))))
    bits = e["candidate"].get("bits_per_byte")
    if bits is not None:
        found.append(("bits per byte of the quantized model", number(bits), interval(e["candidate"].get("bits_per_byte_ci95"))))
    for label, name in _FIGURES:
        if e.get(name) is not None:
            found.append((label, number(e[name]), interval(e.get(f"{name}_ci95"))))
    found += _probabilities(e)
    for task, result in (e.get("tasks") or {}).items():
        found += [_task(task, result["questions"], metric, m) for metric, m in result["metrics"].items()]
    return found


def _task(task: str, questions: int, metric: str, m: Mapping[str, Any]) -> Row:
    """Both models' figures, the answers that flipped, and the interval of the difference."""
    flips = "" if m["lost"] is None else f" ({questions:,} questions: {m['lost']} lost, {m['gained']} gained)"
    ends = m["difference_ci95"]
    return (
        f"task {task}, {metric}: original / quantized",
        f"{percent(m['reference'])} / {percent(m['candidate'])}{flips}",
        MISSING if ends is None else f"difference {_percents(ends, sign=True)}",
    )


def described(e: Mapping[str, Any]) -> str:
    """How much was measured, with which engines, and what such a text can show."""
    protocol = e.get("protocol") or {}
    unit = protocol.get("cluster", "cluster")
    words = f"{e['tokens']:,} scored tokens; intervals resample {len(e['clusters']):,} {unit}{'s' if len(e['clusters']) != 1 else ''}. Quantized model: {e['engine']}."
    if protocol.get("cluster") == "window":
        words += " They are of one document and taken as independent: the intervals tell of this text, not of others like it."
    elif len(e["clusters"]) < 5:
        words += " So few give wide intervals (Student's t)."
    if e.get("reference_engine"):
        words += f" Original: {e['reference_engine']}."
    for protocol in [t["protocol"] for t in (e.get("tasks") or {}).values()][:1]:
        words += f" Tasks: lm-eval {protocol['lm_eval']}, chat template not applied, {'a BOS first' if protocol['bos'] else 'no BOS'}."
    if e.get("power"):
        words += f" Two such models would show a difference of perplexity from {percent(e['power']['perplexity_ratio'], 1)} on (in four of five comparisons)."
    return words


def _probabilities(e: Mapping[str, Any]) -> list[Row]:
    """What became of the true token's probability, and of right first choices."""
    rows: list[Row] = []
    if delta := e.get("delta_p"):
        rows.append(("change of the true token's probability, mean", percent(delta["mean"], 3, sign=True), _percents(delta["mean_ci95"], sign=True)))
        rows.append(("the same, root mean square", percent(delta["rms"], 3), _percents(delta["rms_ci95"])))
    if flips := e.get("flips"):
        rows.append(("right first choices, original / quantized", f"{percent(flips['right_reference'])} / {percent(flips['right_candidate'])}", MISSING))
        rows.append(("right first choices lost", percent(flips["lost"]), _percents(flips["lost_ci95"])))
        rows.append(("right first choices gained", percent(flips["gained"]), _percents(flips["gained_ci95"])))
    if greedy := e.get("greedy"):
        title = f"greedy tokens until the two part (of {greedy['limit']}, {len(greedy['kept'])} continuations), mean"
        rows.append((title, number(greedy["mean"], 2), interval(greedy["mean_ci95"], 2)))
        rows.append(("continuations that never part", percent(greedy["whole"], 1), MISSING))
    return rows


def _percents(ends: Sequence[float] | None, *, sign: bool = False) -> str:
    return MISSING if ends is None else f"{percent(ends[0], 3, sign=sign)} to {percent(ends[1], 3, sign=sign)}"
