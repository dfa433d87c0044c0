"""What else differs between two runs: recipe, weights, adapters, data, layers, exports, versions, machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MOST = 12  # lines of one group; the rest are counted
_FACTS: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "weights": (("model", ("model", "source")), ("model's sha256", ("model", "sha256")), ("parameters", ("model", "parameters"))),
    "data": (("calibration", ("calibration", "source")), ("calibration text", ("calibration", "text_sha256")), ("calibration tokens", ("calibration", "sha256"))),
    "artifact": (("sha256", ("artifact", "sha256")), ("size in bytes", ("artifact", "size_bytes")), ("bits per weight", ("artifact", "bits_per_weight"))),
    "engines": (("engine", ("evaluation", "engine")), ("original's engine", ("evaluation", "reference_engine"))),
}


def changes(baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> dict[str, list[str]]:
    """Lines `what: before -> after` by group, for what both results.json tell; groups without a difference are left out."""
    found = {
        "recipe": _flat(*_recipes(baseline.get("recipe"), candidate.get("recipe"))),
        **{group: _facts(baseline, candidate, facts) for group, facts in _FACTS.items()},
        "adapters": _adapters(baseline.get("adapters"), candidate.get("adapters")),
        "tasks": _tasks(baseline, candidate),
        "layers": _layers(baseline.get("layers"), candidate.get("layers")),
        "exports": _exports(baseline.get("exports"), candidate.get("exports")),
        "versions and machine": _flat(
            {"qforge": baseline.get("qforge_version"), **(baseline.get("environment") or {})} if baseline.get("environment") or baseline.get("qforge_version") else None,
            {"qforge": candidate.get("qforge_version"), **(candidate.get("environment") or {})} if candidate.get("environment") or candidate.get("qforge_version") else None,
        ),
    }
    return {group: _first(lines) for group, lines in found.items() if lines}


def _first(lines: list[str]) -> list[str]:
    return lines if len(lines) <= MOST else [*lines[: MOST - 1], f"and {len(lines) - MOST + 1} more"]


def _facts(baseline: Mapping[str, Any], candidate: Mapping[str, Any], facts: Sequence[tuple[str, tuple[str, ...]]]) -> list[str]:
    lines = []
    for label, keys in facts:
        a, b = (find(side, keys) for side in (baseline, candidate))
        if a is not None and b is not None and a != b:
            lines.append(f"{label}: {_short(a)} -> {_short(b)}")
    return lines


def find(side: Any, keys: tuple[str, ...]) -> Any:
    """What lies in objects within objects; None where a key is not there."""
    for key in keys:
        side = side.get(key) if isinstance(side, Mapping) else None
    return side


def _flat(a: Any, b: Any) -> list[str]:
    """Differences of two trees, by dotted key; nothing when one side tells nothing."""
    if not isinstance(a, Mapping) or not isinstance(b, Mapping):
        return []
    left, right = dict(_leaves(a)), dict(_leaves(b))
    keys = [k for k in dict.fromkeys([*left, *right]) if left.get(k) != right.get(k)]
    return [f"{k}: {_short(left.get(k, 'not set'))} -> {_short(right.get(k, 'not set'))}" for k in keys]


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from _leaves(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, list) and tree and isinstance(tree[0], Mapping):
        for i, value in enumerate(tree):
            yield from _leaves(value, f"{path}[{i}]")
    else:
        yield path, tree


def _by_format(exports: Sequence[Any]) -> dict[str, Any]:
    """Exports by format; of one format the second is `gguf (2)`."""
    found: dict[str, Any] = {}
    for export in (e for e in exports if isinstance(e, Mapping)):
        name = str(export.get("format"))
        found[name if name not in found else f"{name} ({sum(n.partition(' ')[0] == name for n in found) + 1})"] = export
    return found


def _recipes(a: Any, b: Any) -> Iterator[Any]:
    """Both without the exports that only one of them asks for: the group of exports tells those."""
    asked = [_by_format(side["export"]) if isinstance(side, Mapping) and isinstance(side.get("export"), list) else {} for side in (a, b)]
    for side, exports in zip((a, b), asked, strict=True):
        shared = {name: export for name, export in exports.items() if all(name in other for other in asked)}
        yield {**side, "export": shared} if isinstance(side, Mapping) else side


def _tasks(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Figures of tasks that are no share of right answers (of those there are rows)."""
    before, after = (
        {f"{name}.{metric}": m["candidate"] for name, task in (find(side, ("evaluation", "tasks")) or {}).items() for metric, m in task["metrics"].items() if m.get("lost") is None}
        for side in (a, b)
    )
    return [f"{name}: {_short(before[name])} -> {_short(after[name])}" for name in before if name in after and before[name] != after[name]]


def _adapters(a: Any, b: Any) -> list[str]:
    if not isinstance(a, list) or not isinstance(b, list) or a == b:
        return []
    told = [", ".join(f"{x.get('source')} at {x.get('weight')}" for x in side) or "none" for side in (a, b)]
    return [f"{told[0]} -> {told[1]}"] if told[0] != told[1] else _flat({"adapters": a}, {"adapters": b})


def _layers(a: Any, b: Any) -> list[str]:
    """Other schemes, then the weights whose error grew most (the same weights and scheme give the same error, so that a damaged layer shows here first)."""
    if not isinstance(a, list) or not isinstance(b, list):
        return []
    before, after = ({x["name"]: x for x in side} for side in (a, b))
    shared = [n for n in before if n in after]
    moved: dict[str, list[str]] = {}
    for n in shared:
        if before[n].get("scheme") != after[n].get("scheme"):
            moved.setdefault(f"{before[n].get('scheme')} -> {after[n].get('scheme')}", []).append(n)
    lines = [f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {schemes}" for schemes, names in moved.items()]
    lines += [f"{n}: only in the {which}" for which, one, other in (("baseline", before, after), ("candidate", after, before)) for n in one if n not in other]
    errors = [(n, before[n].get("relative_error"), after[n].get("relative_error")) for n in shared if before[n].get("scheme") == after[n].get("scheme")]
    grown = sorted(((y / x, n, x, y) for n, x, y in errors if x and y and y > 1.01 * x), reverse=True)
    return lines + [f"{n}: error of weights {x:.4f} -> {y:.4f} ({ratio - 1:+.1%})" for ratio, n, x, y in grown]


def _exports(a: Any, b: Any) -> list[str]:
    if not isinstance(a, list) or not isinstance(b, list):
        return []
    before, after = _by_format(a), _by_format(b)
    lines = [f"{f}: {'no longer made' if f in before else 'new'}" for f in [*before, *after] if (f in before) != (f in after)]
    for name in (f for f in before if f in after):
        lines += [f"{name}, {line}" for line in _facts(before[name], after[name], [(k.replace("_", " "), (k,)) for k in ("size_bytes", "lossless", "skipped_because")])]
    return lines


def _short(value: Any) -> str:
    """As a reviewer reads it: hashes cut, floats to six digits, large integers with commas."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}" if abs(value) >= 100_000 else str(value)
    return value[:12] if isinstance(value, str) and len(value) == 64 else str(value)
