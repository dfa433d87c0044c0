"""The few lines that close a run on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from qforge.report.facts import by_value, gather, lossless, verification
from qforge.report.numbers import figure, interval, number, percent, seconds, size


def summary(results: Any) -> list[tuple[str, str]]:
    """Label and value, a row each. `results`: the object of results.json, or the dataclass that it was made from."""
    r: Mapping[str, Any] = asdict(results) if is_dataclass(results) and not isinstance(results, type) else results
    artifact = r.get("artifact") or {}
    rows = [("result", gather(r).verdict), *_quality(r.get("evaluation"))]
    rows.append(("size", f"{size(artifact.get('size_bytes'))}{_share(artifact)}, {number(artifact.get('bits_per_weight'), 3)} bits per weight in quantized layers"))
    rows += [_gate(g, by_value(g, r)) for g in r.get("gates") or []]
    rows += [_export(e) for e in r.get("exports") or []]
    work = r.get("work") or {}
    rows.append(("time", f"{seconds(sum((r.get('timings') or {}).values()))}, {work.get('computed', 0)} pieces computed, {work.get('resumed', 0)} taken up from before"))
    rows.append(("peak memory", size(r.get("peak_rss_bytes"))))
    return rows


def _share(artifact: Mapping[str, Any]) -> str:
    return "" if artifact.get("size_ratio") is None else f" ({percent(artifact['size_ratio'], 1)} of the weights at 16 bits)"


def _quality(e: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if e is None:
        return [("perplexity", "not evaluated")]
    rows = []
    if e.get("reference"):
        rows.append(("perplexity, original", number(e["reference"]["perplexity"])))
    rows.append(("perplexity, quantized", f"{number(e['candidate']['perplexity'])} ({e['tokens']:,} tokens, {e['engine']})"))
    for label, name in (("perplexity ratio", "perplexity_ratio"), ("KL divergence", "kl_mean"), ("top-1 agreement", "top1_agreement")):
        if e.get(name) is not None:
            ends = e.get(f"{name}_ci95")
            rows.append((label, number(e[name]) + (f" (95 %: {interval(ends)})" if ends else " (too few documents or windows for an interval)")))
    return rows


def _gate(g: Mapping[str, Any], alone: bool) -> tuple[str, str]:
    word = "passed" if g["passed"] else "WARNING" if g.get("on") == "warn" else "FAILED"
    told = f"{word}: {figure(g['name'], g['value'])} {'' if g['passed'] else 'is not '}{g['limit']}"
    return f"gate {g['name']}", told + " (by the value alone: too little text for an interval)" * alone


def _export(e: Mapping[str, Any]) -> tuple[str, str]:
    parts = [str(e["path"])] if e.get("path") else []
    parts += filter(None, [lossless(e)])
    parts += [verification(v) for v in e.get("verified_by") or []]
    if e.get("skipped_because"):
        parts.append(f"skipped: {e['skipped_because']}")
    return f"export {e['format']}", ", ".join(parts)
