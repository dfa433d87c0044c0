"""What a report tells, derived from results.json once for every format: the verdict, rows of text for each table, numbers for the plots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from qforge.report import choice, quality
from qforge.report.numbers import MISSING, figure, interval, number, percent, seconds, size
from qforge.yaml_text import yaml_text

WORST_LAYERS = 10
WORST_GROUPS = 3
Row = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A titled table. `words`: a sentence above it."""

    title: str
    header: Row
    rows: list[Row]
    words: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that a report needs. `good`: True, False, or None when nothing was gated."""

    title: str
    good: bool | None
    verdict: str
    reasons: list[str]
    tables: list[Table]
    warnings: list[str]
    command: str
    recipe: str
    layers: Table | None
    results: Mapping[str, Any] = field(repr=False)


def gather(results: Mapping[str, Any]) -> Facts:
    """Derive the facts from the object of results.json."""
    good, verdict, reasons = _verdict(results)
    tables = [
        _quality(results),
        _gates(results),
        _blame(results),
        _sizes(results),
        *_choice(results),
        _exports(results),
        _measured_exports(results),
        _adapters(results),
        _texts(results),
        _worst(results),
        _resources(results),
        _environment(results),
    ]
    recipe = yaml_text(results.get("recipe") or {})
    model = str((results.get("model") or {}).get("source", "model"))
    command = "qforge quantize --recipe recipe.yaml"
    return Facts(f"qforge: {model}", good, verdict, reasons, [t for t in tables if t is not None], _warnings(results), command, recipe, _all_layers(results), results)


def _verdict(results: Mapping[str, Any]) -> tuple[bool | None, str, list[str]]:
    gates = [g for g in results.get("gates") or [] if g.get("on", "error") != "off"]
    failed = [g for g in gates if not g["passed"]]
    reasons = [f"{g['name']} is {figure(g['name'], g['value'])}, the limit is {g['limit']}" + (" (a warning only)" if g.get("on") == "warn" else "") for g in failed]
    reasons += [results["blame"]["words"]] if failed and results.get("blame") else []
    suspect = ((results.get("calibration") or {}).get("likeness") or {}).get("warning")
    reasons += [f"calibration: {suspect}"] if failed and suspect else []
    broken = [e["format"] for e in results.get("exports") or [] if any(v.get("weights_equal") is False for v in e.get("verified_by") or [])]
    reasons += [f"the weights of export {name} are not the artifact's; see Exports" for name in broken]
    misread = [(e["format"], v.get("note")) for e in results.get("exports") or [] for v in e.get("verified_by") or [] if v.get("text_equal") is False]
    reasons += [f"export {name} does not read text as the artifact does: {note}" for name, note in misread]
    far = [(e["format"], v) for e in results.get("exports") or [] for v in e.get("verified_by") or [] if too_far(v)]
    reasons += [f"export {name} does not compute what our runtime does: a KL divergence of {number(v['kl_mean'], 6)} in {v['engine']}" for name, v in far]
    broken = list(dict.fromkeys([*broken, *(name for name, _ in misread), *(name for name, _ in far)]))
    hard = [g for g in failed if g.get("on", "error") == "error"]
    if hard or broken:
        told = ([f"{len(hard)} of {len(gates)} gates"] if hard else []) + [f"export {name}" for name in broken]
        return False, f"FAILED: {', '.join(told)}", reasons
    if not gates:
        return None, "DONE: nothing was gated", reasons
    alone = [g["name"] for g in gates if by_value(g, results)]
    short = f"; by the value alone: {', '.join(alone)} (too little text for an interval)" if alone else ""
    if failed:
        return True, f"PASSED with {len(failed)} {'warning' if len(failed) == 1 else 'warnings'}{short}", reasons
    return True, f"PASSED: {'the gate holds' if len(gates) == 1 else f'all {len(gates)} gates hold'}{short}", reasons


def by_value(gate: Mapping[str, Any], results: Mapping[str, Any]) -> bool:
    """Whether a gate's figure was sampled and the text gave no interval of it (the largest divergence never has one)."""
    e = results.get("evaluation") or {}
    sampled = e.keys() | (e.get("candidate") or {}).keys() | {"delta_p_rms", "lost"}
    return gate.get("interval") is None and gate["name"] in sampled - {"kl_max"}


def _quality(results: Mapping[str, Any]) -> Table | None:
    e = results.get("evaluation")
    return None if e is None else Table("Quality", ("figure", "value", "95 % interval"), quality.rows(e, bool(results.get("adapters"))), quality.described(e))


def _gates(results: Mapping[str, Any]) -> Table | None:
    rows: list[Row] = [
        (
            g["name"],
            "passed" if g["passed"] else "warning" if g.get("on") == "warn" else "FAILED",
            figure(g["name"], g["value"]),
            g["limit"],
            "none: too little text" if by_value(g, results) else interval(g.get("interval")),
        )
        for g in results.get("gates") or []
    ]
    return Table("Gates", ("figure", "verdict", "value", "limit", "95 % interval"), rows) if rows else None


def _blame(results: Mapping[str, Any]) -> Table | None:
    found = results.get("blame")
    if not found:
        return None
    nested = _nested(found["parts"], found.get("groups") or [])
    rows: list[Row] = [(("  " if p.get("part_of") else "") + p["name"], percent(p["returned"], 1, sign=True), number(p["kl_mean"])) for p in nested]
    words = f"On {found['tokens']:,} tokens the KL divergence is {number(found['kl_mean'])}. Measured: {found['words']}."
    return Table("Where the divergence comes from", ("restored to full precision", "of the divergence that goes", "KL divergence left"), rows, words)


def _nested(parts: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The worst blocks, each followed by its linears, and the first linear by its worst groups of inputs."""
    blocks = [p for p in parts if not p.get("part_of")][:WORST_LAYERS]
    linears = [row for b in blocks for row in (b, *(p for p in parts if p.get("part_of") == b["name"]))]
    return [row for p in linears for row in (p, *[g for g in groups if g["part_of"] == p["name"]][:WORST_GROUPS])]


def _sizes(results: Mapping[str, Any]) -> Table:
    model, artifact = results.get("model") or {}, results.get("artifact") or {}
    rows: list[Row] = []
    if model.get("parameters") is not None:
        rows.append(("parameters", f"{model['parameters']:,}"))
    if artifact.get("original_bytes_at_16_bits") is not None:
        rows.append(("original at 16 bits", size(artifact["original_bytes_at_16_bits"])))
    rows.append(("quantized model", size(artifact.get("size_bytes"))))
    if artifact.get("size_ratio") is not None:
        rows.append(("size ratio of the weights", percent(artifact["size_ratio"], 1)))
    rows.append(("bits per weight, quantized layers", number(artifact.get("bits_per_weight"), 3)))
    if artifact.get("kv_cache"):
        rows.append(("keys and values", f"{artifact['kv_cache']['type']}, scales calibrated for {len(artifact['kv_cache']['scales'])} layers"))
    if artifact.get("bits_per_parameter") is not None:
        rows.append(("bits per parameter, whole model", number(artifact["bits_per_parameter"], 3)))
    schemes = ", ".join(f"{count} x {scheme}" for scheme, count in _schemes(results).items())
    rows += [("layers", schemes or MISSING), ("artifact", f"{artifact.get('path', MISSING)}, sha256 {artifact.get('sha256', MISSING)}")]
    return Table("Size", ("", "value"), rows)


def _choice(results: Mapping[str, Any]) -> list[Table]:
    auto = results.get("auto")
    if auto is None:
        return []
    curve = Table(
        "Choice of schemes",
        ("schemes", "bits per weight", "size of the weights", "predicted KL divergence", "against this model"),
        choice.curve_rows(auto),
        choice.curve_words(auto),
    )
    header = ("layers", "scheme", "bits per weight", "predicted KL divergence", "next larger", "next smaller")
    return [curve, Table("Layers by bits", header, choice.layers_rows(auto), choice.layers_words(auto))]


def _schemes(results: Mapping[str, Any]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for layer in results.get("layers") or []:
        scheme = layer.get("scheme") or "as it was"
        counts[scheme] = counts.get(scheme, 0) + 1
    return counts


def _exports(results: Mapping[str, Any]) -> Table | None:
    rows: list[Row] = []
    for e in results.get("exports") or []:
        checks = [verification(v) for v in e.get("verified_by") or []]
        if e.get("skipped_because"):
            checks.append(f"skipped: {e['skipped_because']}")
        rows.append((e["format"], e.get("path") or MISSING, size(e.get("size_bytes")), lossless(e) or MISSING, "; ".join(checks) or "not checked"))
    words = "Each export is read back and compared with the artifact; 'executed' marks an engine that is not qforge's."
    return Table("Exports", ("format", "path", "size", "integers and scales", "read or executed by, and how close to our runtime"), rows, words) if rows else None


def _measured_exports(results: Mapping[str, Any]) -> Table | None:
    """The artifact and each export that was scored, one row each."""
    e, found = results.get("evaluation") or {}, [(x["format"], x["measured"]) for x in results.get("exports") or [] if x.get("measured")]
    if not found or not e:
        return None
    artifact = {**e, "perplexity": e["candidate"]["perplexity"], "perplexity_ci95": e["candidate"].get("perplexity_ci95")}
    rows: list[Row] = [
        (name, m["engine"], number(m["perplexity"]), interval(m["perplexity_ci95"]), number(m["kl_mean"]), interval(m["kl_mean_ci95"]), percent(m["top1_agreement"], 2))
        for name, m in (("artifact", artifact), *found)
    ]
    header = ("", "engine", "perplexity", "95 % interval", "KL divergence from the original", "95 % interval", "top-1 agreement")
    return Table("Exports in their own engines", header, rows, f"The same {e['tokens']:,} tokens for all.")


def lossless(e: Mapping[str, Any]) -> str | None:
    """Whether an export holds the artifact's integers and scales, in words, and what rounded them where that is all; None if nothing was compared."""
    if e.get("lossless") is None:
        return None
    return "lossless" if e["lossless"] else ": ".join(["NOT lossless", *rounded(e)])


def rounded(e: Mapping[str, Any]) -> list[str]:
    """What an export rounds as it is written, which is no failure."""
    checks = e.get("verified_by") or []
    return [] if any(v.get("weights_equal") is False for v in checks) else [str(v["rounded"]) for v in checks if v.get("rounded")]


def too_far(v: Mapping[str, Any]) -> bool:
    """Whether an engine that computes in fp32 gives other distributions than our runtime."""
    return v.get("kl_bound") is not None and v.get("kl_mean") is not None and not v["kl_mean"] <= v["kl_bound"]


def verification(v: Mapping[str, Any]) -> str:
    """One check of an export, in words."""
    parts = ["executed"] if v.get("executed") else ["read"]
    if v.get("weights_equal") is not None:
        parts.append("weights equal bit for bit" if v["weights_equal"] else "WEIGHTS DIFFER")
    if v.get("text_equal") is not None:
        parts.append("tokens and chat template equal" if v["text_equal"] else "TEXT IS READ OTHERWISE")
    if v.get("kl_mean") is not None:
        parts.append(f"KL {number(v['kl_mean'], 6)}" + (f", AND {number(v['kl_bound'], 6)} IS THE BOUND IN FP32" if too_far(v) else ""))
    if v.get("top1_agreement") is not None:
        parts.append(f"top-1 {percent(v['top1_agreement'])}")
    if v.get("positions") is not None:
        parts.append(f"{v['positions']:,} positions")
    if v.get("note"):
        parts.append(str(v["note"]))
    return f"{v['engine']} {v.get('version', '')}".strip() + (": " + ", ".join(parts) if parts else "")


def _adapters(results: Mapping[str, Any]) -> Table | None:
    names: dict[str, None] = {}
    adapters: Sequence[Mapping[str, Any]] = results.get("adapters") or []
    for a in adapters:
        names.update(dict.fromkeys(a))
    header = tuple(names)
    return Table("Merged adapters", tuple(n.replace("_", " ") for n in header), [tuple(_plain(a.get(n)) for n in header) for a in adapters]) if adapters else None


def _texts(results: Mapping[str, Any]) -> Table | None:
    rows: list[Row] = []
    calibration, evaluation = results.get("calibration"), results.get("evaluation")
    if calibration:
        rows.append(("calibration", _plain({k: v for k, v in calibration.items() if not isinstance(v, Mapping)})))
    if evaluation:
        rows.append(("evaluation", f"sha256: {evaluation['text_sha256']}, {_plain(evaluation.get('protocol'))}"))
    if calibration and evaluation:
        rows.append(("overlap", _overlap(calibration, evaluation)))
    return Table("Texts", ("text", "what"), rows) if rows else None


def _overlap(calibration: Mapping[str, Any], evaluation: Mapping[str, Any]) -> str:
    """Whether the two texts share anything, as far as results.json can tell."""
    known = calibration.get("overlap")
    if calibration.get("text_sha256") == evaluation.get("text_sha256"):
        return "THE SAME TEXT: the figures above are too good"
    return f"different texts by hash; shared parts: {_plain(known)}" if isinstance(known, Mapping) else "different texts by hash"


def _measured(results: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    layers = [x for x in results.get("layers") or [] if x.get("relative_error") is not None]
    return sorted(layers, key=lambda x: (-x["relative_error"], x["name"]))


def _layer_row(x: Mapping[str, Any]) -> Row:
    figures = number(x.get("relative_error")), number(x.get("output_error")), number(x.get("input_peak"), 3), number(x.get("bits_per_weight"), 3)
    return x["name"], *figures, x.get("scheme") or "as it was", x.get("note") or ""


_LAYER_HEADER = ("layer", "error of weights", "error of outputs", "largest input / RMS", "bits per weight", "scheme", "note")


def _worst(results: Mapping[str, Any]) -> Table | None:
    rows = [_layer_row(x) for x in _measured(results)[:WORST_LAYERS]]
    return Table("Worst layers", _LAYER_HEADER, rows, "Relative errors (Frobenius norm), largest first.") if rows else None


def _all_layers(results: Mapping[str, Any]) -> Table | None:
    rows = [_layer_row(x) for x in results.get("layers") or []]
    return Table("All layers", _LAYER_HEADER, rows) if rows else None


def _resources(results: Mapping[str, Any]) -> Table:
    work, timings = results.get("work") or {}, results.get("timings") or {}
    rows: list[Row] = [("peak memory", size(results.get("peak_rss_bytes")))]
    rows += [(f"  {name}", size(value)) for name, value in (results.get("memory") or {}).items()]
    rows.append(("time", seconds(sum(timings.values()))))
    for stage, value in timings.items():
        rows.append((f"  {stage}", seconds(value)))
        rows += [(f"    of which {part}", seconds(share)) for part, share in ((results.get("parts") or {}).get(stage) or {}).items()]
    rows.append(("work", ", ".join(f"{value} pieces {name}" for name, value in work.items()) or MISSING))
    return Table("Memory and time", ("", "value"), rows)


def _environment(results: Mapping[str, Any]) -> Table:
    rows: list[Row] = [("qforge", str(results.get("qforge_version", MISSING))), ("recipe sha256", str(results.get("recipe_sha256", MISSING)))]
    rows += [(f"model {k}", _plain(v)) for k, v in (results.get("model") or {}).items()]
    rows += [(k, _plain(v)) for k, v in (results.get("environment") or {}).items() if k != "qforge"]
    return Table("Environment", ("", "value"), rows)


def _warnings(results: Mapping[str, Any]) -> list[str]:
    return [str(w) for w in results.get("warnings") or []]


def _plain(value: Any) -> str:
    """Any JSON value in one line of words."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Mapping):
        return ", ".join(f"{k}: {_plain(v)}" for k, v in value.items()) or MISSING
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ", ".join(_plain(v) for v in value) or MISSING
    return str(value)
