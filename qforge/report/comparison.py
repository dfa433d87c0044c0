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
    if data["gates"]:
        failed = [g["name"] for g in data["gates"] if not g["passed"] and g["on"] == "error"]
        warned = [g["name"] for g in data["gates"] if not g["passed"] and g["on"] != "error"]
        if failed:
            return f"FAILED: {', '.join(failed)} beyond the limit"
        held = "the gate holds" if len(data["gates"]) == 1 else f"all {len(data['gates'])} gates hold"
        return f"PASSED with warnings: {', '.join(warned)} beyond the limit" if warned else f"PASSED: {held}"
    found = {word: [SHORT[r["name"]] for r in data["rows"] if r["verdict"]["word"] == word] for word in ("worse", "better", "same", "not enough data")}
    if found["worse"]:
        return f"FAILED: significantly worse in {', '.join(found['worse'])}"
    if found["better"]:
        rest = [f"the same in {', '.join(found['same'])}"] * bool(found["same"]) + [f"not enough data on {', '.join(found['not enough data'])}"] * bool(found["not enough data"])
        return "; ".join([f"PASSED: better in {', '.join(found['better'])}", *rest])
    return "PASSED, but this text is too short to tell" if found["not enough data"] else "PASSED: the same, as far as this text can show"


def row(r: Data) -> tuple[str, ...]:
    """A figure's cells, as HEADER."""
    ends, digits = r["interval"], 6 if r["name"] == "kl_mean" else 4
    verdict = r["verdict"]["word"]
    if r["verdict"]["needs_tokens"] is not None:
        between = "" if r["verdict"]["needs_between"] is None else "; {:,} to {:,}".format(*r["verdict"]["needs_between"])
        verdict += f" (needs about {r['verdict']['needs_tokens']:,} tokens{between})"
    if r["kind"] == "ratio":
        told = "none" if ends is None else f"{ends[0] - 1:+.2%} .. {ends[1] - 1:+.2%}"
        return TITLES[r["name"]], verdict, f"{r['baseline']:.4f}", f"{r['candidate']:.4f}", f"{r['change'] - 1:+.2%}", told, f"{r['margin']:.2%}"
    told = "none" if ends is None else f"{ends[0]:+.{digits}f} .. {ends[1]:+.{digits}f}"
    return TITLES[r["name"]], verdict, f"{r['baseline']:.{digits}f}", f"{r['candidate']:.{digits}f}", f"{r['change']:+.{digits}f}", told, f"{r['margin']:.{digits}f}"


def gate(g: Data) -> tuple[str, ...]:
    """A gate's cells, as GATES: the verdict says how far and how sure."""
    ends = "none" if g["interval"] is None else f"{g['interval'][0]:.6g} .. {g['interval'][1]:.6g}"
    word = "passed" if g["passed"] else "FAILED" if g["on"] == "error" else "WARNING"
    side = f"{abs(g['beyond']):.4g} {'beyond' if g['beyond'] > 0 else 'inside'} the limit"
    if g["confidence"] is None:
        return g["name"], f"{word}: {side}, without an interval", g["limit"], f"{g['value']:.6g}", ends
    sure = "" if g["confidence"] >= 0.975 else " (not sure: the interval holds the limit)"
    percent = ">99.9 %" if g["confidence"] > 0.999 else f"{g['confidence']:.1%}"
    return g["name"], f"{word}: {side} with {percent} confidence{sure}", g["limit"], f"{g['value']:.6g}", ends


def power(data: Data) -> str:
    """What this text can show at all."""
    shown = {r["name"]: r["detectable"] for r in data["rows"] if r["detectable"] is not None}
    told = [f"{SHORT[n]} {v:.2%}" if n == "perplexity" else f"{SHORT[n]} {v:.2g}" for n, v in shown.items()]
    if not told:
        return "One piece of text says nothing of its own spread; give a longer one."
    return f"Of two models like these, this text shows differences from: {', '.join(told)} (in four of five comparisons)."


def text(data: Data) -> list[str]:
    """Lines for a terminal."""
    lines = [headline(data), "", f"baseline   {data['baseline']}", f"candidate  {data['candidate']}"]
    lines += [f"text       {data['tokens']:,} tokens in {data['clusters']:,} clusters, paired", "", *_aligned([HEADER, *map(row, data["rows"])]), "", power(data)]
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
    lines += ["", f"{data['tokens']:,} tokens in {data['clusters']:,} clusters, paired. {words(power(data))}"]
    sizes = [line for line in data["changed"].get("artifact", []) if not line.startswith("sha256")]
    lines += ["", *(f"- {words(line)}" for line in [*sizes, *data["notes"]])]
    if data["changed"]:
        lines += ["", "<details><summary>What changed besides</summary>", ""]
        lines += [f"- **{words(group)}**: {words(line)}" for group, found in data["changed"].items() for line in found if line not in sizes]
        lines += ["", "</details>"]
    return "\n".join([*lines, "", "Reproduce:", "", f"    {command(data)}"]) + "\n"


def junit(data: Data) -> str:
    """One case for each gate; without gates, one for each figure. What cannot be told is skipped, and says why."""
    cases = [_gate_case(g) for g in data["gates"]] or [_row_case(r) for r in data["rows"]]
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
    if not g["passed"] and g["on"] == "error":
        ET.SubElement(case, "failure", type="gate", message=legal(f"{g['name']} {g['limit']}: {told}"))
    else:
        ET.SubElement(case, "system-out").text = legal(told)
    return case


def _row_case(r: Data) -> ET.Element:
    case, told = _case(f"{SHORT[r['name']]} not worse"), "; ".join(f"{h}: {c}" for h, c in zip(HEADER[1:], row(r)[1:], strict=True))
    kind = {"worse": "failure", "not enough data": "skipped"}.get(r["verdict"]["word"])
    if kind is None:
        ET.SubElement(case, "system-out").text = legal(told)
    else:
        ET.SubElement(case, kind, message=legal(f"{SHORT[r['name']]}: {told}"))
    return case


def _rows(rows: list[tuple[str, ...]]) -> list[str]:
    head, *body = rows
    return [f"| {' | '.join(map(cell, head))} |", f"|{' --- |' * len(head)}", *(f"| {' | '.join(map(cell, r))} |" for r in body)]


def _aligned(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
    return ["  ".join(c.ljust(width) for c, width in zip(r, widths, strict=True)).rstrip() for r in rows]
