"""The text of a results.json, or of an evaluation alone, held against the types that it was written from, which are also those of the published schema."""

from __future__ import annotations

import functools
import json
import math
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from qforge.types import Evaluation, Results

LEVELS = 64  # of objects and lists in one another; ours have about ten
DIGITS = 18  # of an integer
MOST_NLL = 1e100  # nats per token: of sums of squares there are still numbers


def load(text: str) -> Any:
    """A JSON text's value, if its numbers can be computed with and it is not nested without end.

    Raises:
        ValueError: it is not (the message says what is wrong).
    """
    try:
        data = json.loads(text, parse_constant=_float, parse_float=_float, parse_int=_integer)
    except RecursionError:
        raise ValueError(f"it is nested more than {LEVELS} levels deep") from None
    level = [data]
    for _ in range(LEVELS):
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ())]
        if not level:
            return data
    raise ValueError(f"it is nested more than {LEVELS} levels deep")


def problem(data: Mapping[str, Any]) -> str | None:
    """What keeps an object from being results.json (it has `evaluation`) or an evaluation, or None. Parts of results.json that are missing or unknown are nobody's harm."""
    whole = "evaluation" in data
    evaluation = data["evaluation"] if whole else data
    if not isinstance(evaluation, dict):
        return "the evaluation is no JSON object"
    parts = [(f.name, data[f.name]) for f in fields(Results) if f.name in data] if whole else [("", data)]
    return next((told for name, value in parts if (told := _mismatch(name, value))), None) or next(_contradictions(evaluation), None)


def _float(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:20]} is no number that can be used")
    return value


def _integer(text: str) -> int:
    if len(text) > DIGITS:
        raise ValueError(f"{text[:DIGITS]}... is too large a number")
    return int(text)


@functools.cache
def _adapter(name: str) -> TypeAdapter[Any]:
    return TypeAdapter(get_type_hints(Results, include_extras=True)[name] if name else Evaluation)


def typed(name: str, value: Any) -> Any:
    """A part of results.json by name (of an evaluation alone: "") as what it was written from.

    Raises:
        ValidationError: it is not of its type.
    """
    return _adapter(name).validate_json(json.dumps(value), strict=True)


def _mismatch(name: str, value: Any) -> str | None:
    try:
        typed(name, value)
    except ValidationError as e:
        found = e.errors(include_url=False)
        if missing := [str(x["loc"][-1]) for x in found if x["type"] == "missing" and len(x["loc"]) == 1 and name in ("", "evaluation")]:
            return f"this is no evaluation: {', '.join(missing)} is missing"
        first = found[0]
        where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in (*([name] if name else []), *first["loc"])).lstrip(".")
        given = "" if first["type"] == "missing" else f" is {reprlib.repr(first['input'])}"
        return f"{where}{given}: {first['msg'][0].lower()}{first['msg'][1:]}"
    return None


def _contradictions(evaluation: Mapping[str, Any]) -> Iterator[str]:
    """What each type allows and all together do not."""
    clusters = evaluation["clusters"]
    if not clusters:
        yield "clusters is empty"
    perplexity = evaluation["candidate"].get("perplexity")
    if isinstance(perplexity, bool) or not isinstance(perplexity, int | float) or perplexity <= 0:
        yield f"candidate.perplexity is {reprlib.repr(perplexity)}, not a number above 0"
    names = ("nll_candidate", *(("nll_reference", "kl_sum", "agree") if evaluation.get("kl_mean") is not None else ()))
    for index, cluster in enumerate(clusters):
        for name in names:
            value = cluster.get(name)
            if value is None:
                yield f"clusters[{index}].{name} is missing"
            elif abs(value) > (1 if name == "agree" else MOST_NLL) * cluster["tokens"]:
                yield f"clusters[{index}].{name} is {value!r}, too much for {cluster['tokens']} tokens"
    for name, task in evaluation.get("tasks", {}).items():
        for metric, m in task["metrics"].items():
            if (right := m.get("right")) is not None and (len(right) != task["questions"] or not set(right) <= set("01")):
                yield f"tasks.{name}.metrics.{metric}.right is no 0 or 1 for each of {task['questions']} questions"
            elif right is not None and not math.isclose(right.count("1"), m["candidate"] * len(right), abs_tol=1e-6):
                yield f"tasks.{name}.metrics.{metric}.right has {right.count('1')} of {len(right)} questions right, and candidate is {m['candidate']!r}"
            if m.get("lost") is not None and not (0 <= m["candidate"] <= 1 and task["questions"] > 0):
                yield f"tasks.{name}.metrics.{metric}.candidate is {m['candidate']!r}, no share of {task['questions']} questions"
    if evaluation["tokens"] != (held := sum(c["tokens"] for c in clusters)):
        yield f"tokens is {evaluation['tokens']}, and the clusters hold {held}"
