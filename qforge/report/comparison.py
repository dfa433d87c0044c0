"""A comparison of two runs in words, from the JSON object that `qforge compare` makes: text for a terminal, Markdown for one updating pull-request comment, JUnit."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Mapping
from typing import Any

from qforge.report.junit import legal
from qforge.report.markdown import cell, words

TITLES = {"perplexity": "perplexity", "kl_mean": "KL divergence (nats per token)", "top1_agreement": "top-1 agreement"}
SHORT = {"perplexity": "perplexity", "kl_mean": "KL divergence", "top1_agreement": "top-1 agreement"}
MARK = "<!-- qforge compare -->"  # a CI job finds its comment by it, and updates it
HEADER = ("", "verdict", "base", "head", "difference", "95 % interval", "matters from")
GATES = ("gate", "verdict", "limit", "value", "95 % interval")
Data = Mapping[str, Any]


def headline(data: Data) -> str:
    """The verdict, first of all."""
    broken = [f"the candidate's own run failed ({'; '.join(data['failures'])})"] * bool(data["failures"])
    told = _gated(data, broken) if data["gates"] else _compared(data, broken)
    return "; ".join(told)


def _gated(data: Data, broken: list[str]) -> list[str]:
    hard, soft = ([g for g in data["gates"] if not g["passed"] and (g["on"] == "error") == errors] for errors in (True, False))
    failed, undecided = [g["name"] for g in hard if g["needs"] is None], [g for g in hard if g["needs"] is not None]
    needs = ", ".join(f"{g['name']} (needs about {g['needs']:,} {g['unit']})" for g in undecided)
    lacking = [f"not enough data to judge {needs}"] * bool(undecided)
    if failed or broken:
        found = [*([f"{', '.join(failed)} beyond the limit"] if failed else []), *broken, *lacking]
        return [f"FAILED: {found[0]}", *found[1:]]
    if undecided:
        return [f"NO VERDICT: {lacking[0]}"]
    if soft:
        warned, short = [g["name"] for g in soft if g["needs"] is None], [g["name"] for g in soft if g["needs"] is not None]
        found = [f"{', '.join(warned)} beyond the limit"] * bool(warned) + [f"not enough data to judge {', '.join(short)}"] * bool(short)
        return [f"PASSED with warnings: {found[0]}", *found[1:]]
    unsure = [g["name"] for g in data["gates"] if g["beyond"] > 0]
    if unsure:
        return [f"PASSED, not for sure: {', '.join(unsure)} beyond the limit, by less than this text can tell"]
    return ["PASSED: the gate holds" if len(data["gates"]) == 1 else f"PASSED: all {len(data['gates'])} gates hold"]


def _compared(data: Data, broken: list[str]) -> list[str]:
    found = {word: [_short(r["name"]) for r in data["rows"] if r["verdict"]["word"] == word] for word in ("worse", "better", "same", "not enough data")}
    if found["worse"] or broken:
        told = [f"significantly worse in {', '.join(found['worse'])}"] * bool(found["worse"]) + broken
        return [f"FAILED: {told[0]}", *told[1:]]
    if found["better"]:
        rest = [f"the same in {', '.join(found['same'])}"] * bool(found["same"]) + [f"not enough data on {', '.join(found['not enough data'])}"] * bool(found["not enough data"])
        return [f"PASSED: better in {', '.join(found['better'])}", *rest]
    return ["PASSED, but this text is too short to tell" if found["not enough data"] else "PASSED: the same, as far as this text can show"]


def _short(name: str) -> str:
    return SHORT.get(name, f"task {name}")


def row(r: Data) -> tuple[str, ...]:
    """A figure's cells, as HEADER."""
    ends, digits, title = r["interval"], 6 if r["name"] == "kl_mean" else 4, TITLES.get(r["name"], f"task {r['name']}")
    verdict = r["verdict"]["word"]
    if r["verdict"]["needs_tokens"] is not None:
        between = "" if r["verdict"]["needs_between"] is None else "; {:,} to {:,}".format(*r["verdict"]["needs_between"])
        verdict += f" (needs about {r['verdict']['needs_tokens']:,} {r['unit']}{between})"
    if verdict == "same" and ends is not None and not ends[0] <= (1 if r["kind"] == "ratio" else 0) <= ends[1]:
        verdict = "same (differs by less than matters)"
    if r["kind"] == "ratio":
        told = "none" if ends is None else f"{ends[0] - 1:+.2%} .. {ends[1] - 1:+.2%}"
        return title, verdict, f"{r['baseline']:.4f}", f"{r['candidate']:.4f}", f"{r['change'] - 1:+.2%}", told, f"{r['margin']:.2%}"
    told = "none" if ends is None else f"{ends[0]:+.{digits}f} .. {ends[1]:+.{digits}f}"
    return title, verdict, f"{r['baseline']:.{digits}f}", f"{r['candidate']:.{digits}f}", f"{r['change']:+.{digits}f}", told, f"{r['margin']:.{digits}f}"


def gate(g: Data) -> tuple[str, ...]:
    """A gate's cells, as GATES: the verdict says how far and how sure."""
    ends = "none" if g["interval"] is None else f"{g['interval'][0]:.6g} .. {g['interval'][1]:.6g}"
    return g["name"], _judged(g), g["limit"], f"{g['value']:.6g}", ends


def _judged(g: Data) -> str:
    if g["needs"] is not None:
        return f"not enough data (needs about {g['needs']:,} {g['unit']})"
    word = "passed" if g["passed"] else "FAILED" if g["on"] == "error" else "WARNING"
    side = f"{word}: {abs(g['beyond']):.4g} {'beyond' if g['beyond'] > 0 else 'inside'} the limit"
    if g["confidence"] is None:
        return side
    if g["confidence"] < 0.975:
        return f"{side}, {'but ' if g['beyond'] > 0 else ''}not sure ({g['confidence']:.1%}): the interval holds the limit"
    percent = ">99.9 %" if g["confidence"] > 0.999 else f"{g['confidence']:.1%}"
    return f"{side} with {percent} confidence"


def power(data: Data) -> str:
    """What this text can show at all."""
    shown = {r["name"]: r["detectable"] for r in data["rows"] if r["detectable"]}
    told = [f"{_short(n)} {v:.2%}" if n == "perplexity" else f"{_short(n)} {v:.2g}" for n, v in shown.items()]
    if told:
        return f"Of two models like these, this text shows differences from: {', '.join(told)} (in four of five comparisons)."
    if all(r["detectable"] == 0 for r in data["rows"]):
        return "The two do not differ in any part of this text."
    return "One piece of text says nothing of its own spread; give a longer one."


def measured(data: Data) -> str:
    """How much was compared."""
    return f"{data['tokens']:,} tokens in {data['clusters']:,} {data['cluster']}{'' if data['clusters'] == 1 else 's'}, paired"


def text(data: Data) -> list[str]:
    """Lines for a terminal."""
    lines = [headline(data), "", f"baseline   {data['baseline']}", f"candidate  {data['candidate']}"]
    lines += [f"text       {measured(data)}", "", *_aligned([HEADER, *map(row, data["rows"])]), "", power(data)]
    if data["gates"]:
        lines += ["", *_aligned([GATES, *map(gate, data["gates"])])]
    if data["changed"]:
        lines += ["", "changed besides:", *(f"  {group}: {line}" for group, found in data["changed"].items() for line in found)]
    return lines + [f"note: {note}" for note in data["notes"]]


def command(data: Data) -> str:
    """How to have the same once more."""
    gates = "".join(f" --gate '{'warn: ' if g['on'] == 'warn' else ''}{g['name']} {g['limit']}'" for g in data["gates"])
    return f"qforge compare {data['baseline']} {data['candidate']}{gates}"


def markdown(data: Data) -> str:
    """One comment for a pull request or a step summary: the verdict, what was measured, only what changed, how to reproduce it."""
    lines = [MARK, f"### qforge: {words(headline(data))}", ""]
    lines += _rows([HEADER, *map(row, data["rows"])])
    if data["gates"]:
        lines += ["", *_rows([GATES, *map(gate, data["gates"])])]
    lines += ["", f"{measured(data)}. {words(power(data))}"]
    sizes = [line for line in data["changed"].get("artifact", []) if not line.startswith("sha256")]
    lines += ["", *(f"- {words(line)}" for line in [*sizes, *data["notes"]])]
    besides = [(group, line) for group, found in data["changed"].items() for line in found if line not in sizes]
    if besides:
        lines += ["", "<details><summary>What changed besides</summary>", ""]
        lines += [f"- **{words(group)}**: {words(line)}" for group, line in besides]
        lines += ["", "</details>"]
    return "\n".join([*lines, "", "Reproduce:", "", f"    {command(data)}"]) + "\n"


def junit(data: Data) -> str:
    """One case for each gate; without gates, one for each figure. What cannot be told is skipped, and says why. What failed in the candidate's own run is a case, too."""
    cases = [*([_gate_case(g) for g in data["gates"]] or [_row_case(r) for r in data["rows"]]), *map(_failure_case, data["failures"])]
    root = ET.Element("testsuites", name="qforge compare")
    suite = ET.SubElement(root, "testsuite", name="qforge.compare", tests=str(len(cases)), errors="0", time="0")
    for element in (suite, root):
        element.set("failures", str(sum(c.find("failure") is not None for c in cases)))
        element.set("skipped", str(sum(c.find("skipped") is not None for c in cases)))
    root.set("tests", str(len(cases)))
    root.set("errors", "0")
    suite.extend(cases)
    ET.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _case(name: str) -> ET.Element:
    return ET.Element("testcase", classname="qforge.compare", name=legal(name), time="0")


def _gate_case(g: Data) -> ET.Element:
    _, verdict, _, value, ends = gate(g)
    case, told = _case(f"{g['name']} {g['limit']}"), ", ".join((value, ends, verdict))
    if g["needs"] is not None:
        ET.SubElement(case, "skipped", message=legal(told))
    elif not g["passed"] and g["on"] == "error":
        ET.SubElement(case, "failure", type="gate", message=legal(f"{g['name']} {g['limit']}: {told}"))
    else:
        ET.SubElement(case, "system-out").text = legal(told)
    return case


def _failure_case(failure: str) -> ET.Element:
    case = _case("the candidate's own run")
    ET.SubElement(case, "failure", type="run", message=legal(failure))
    return case


def _row_case(r: Data) -> ET.Element:
    case, told = _case(f"{_short(r['name'])} not worse"), "; ".join(f"{h}: {c}" for h, c in zip(HEADER[1:], row(r)[1:], strict=True))
    kind = {"worse": "failure", "not enough data": "skipped"}.get(r["verdict"]["word"])
    if kind is None:
        ET.SubElement(case, "system-out").text = legal(told)
    else:
        ET.SubElement(case, kind, message=legal(f"{_short(r['name'])}: {told}"))
    return case


def _rows(rows: list[tuple[str, ...]]) -> list[str]:
    head, *body = rows
    return [f"| {' | '.join(map(cell, head))} |", f"|{' --- |' * len(head)}", *(f"| {' | '.join(map(cell, r))} |" for r in body)]


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    return ["  ".join(c.ljust(width) for c, width in zip(r, widths, strict=True)).rstrip() for r in rows]
