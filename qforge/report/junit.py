"""The report as JUnit XML, which every CI system reads: one test case for each gate and each check of an export."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from typing import Any

from qforge.report.facts import Facts, lossless, rounded, too_far, verification
from qforge.report.numbers import figure, interval

_ILLEGAL = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # XML 1.0, production 2


def junit(facts: Facts) -> str:
    """The text of junit.xml. A failed gate of `error` is a failure, one of `warn` passes and says so in system-out; what was left out is skipped with its reason."""
    results = facts.results
    root = ET.Element("testsuites", name="qforge")
    evaluation = (results.get("timings") or {}).get("evaluate", 0.0)
    _suite(root, "gates", [_gate(g) for g in results.get("gates") or []], evaluation)
    _suite(root, "exports", [case for e in results.get("exports") or [] for case in _export(e)], (results.get("timings") or {}).get("export", 0.0))
    totals = {name: sum(int(suite.get(name, "0")) for suite in root) for name in ("tests", "failures", "errors", "skipped")}
    for name, value in totals.items():
        root.set(name, str(value))
    ET.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _suite(root: ET.Element, name: str, cases: list[ET.Element], time: float) -> None:
    suite = ET.SubElement(root, "testsuite", name=f"qforge.{name}", tests=str(len(cases)), errors="0", time=f"{time:.3f}")
    suite.set("failures", str(sum(c.find("failure") is not None for c in cases)))
    suite.set("skipped", str(sum(c.find("skipped") is not None for c in cases)))
    suite.extend(cases)


def _case(suite: str, name: str) -> ET.Element:
    return ET.Element("testcase", classname=f"qforge.{suite}", name=legal(name), time="0")


def _gate(gate: Mapping[str, Any]) -> ET.Element:
    case = _case("gates", f"{gate['name']} {gate['limit']}")
    told = f"{gate['name']} is {figure(gate['name'], gate['value'])}, the limit is {gate['limit']}, the 95 % interval {interval(gate.get('interval'))}"
    if not gate["passed"] and gate.get("on", "error") == "error":
        ET.SubElement(case, "failure", type="gate", message=legal(told)).text = legal(told)
        return case
    ET.SubElement(case, "system-out").text = legal(told if gate["passed"] else f"warning: {told}")
    return case


def _export(export: Mapping[str, Any]) -> list[ET.Element]:
    """Losslessness, then each verifier, then what was left out."""
    name, cases = export["format"], []
    if export.get("lossless") is not None:
        case = _case("exports", f"{name}: integers and scales as in the artifact")
        if rounded(export):
            ET.SubElement(case, "system-out").text = legal(str(lossless(export)))
        elif not export["lossless"]:
            ET.SubElement(case, "failure", type="export", message="what was written differs from the artifact")
        cases.append(case)
    for check in export.get("verified_by") or []:
        case = _case("exports", f"{name}: {'executed' if check.get('executed') else 'read'} by {check['engine']}")
        told = legal(verification(check))
        if check.get("weights_equal") is False or check.get("text_equal") is False or too_far(check):
            ET.SubElement(case, "failure", type="export", message=told)
        else:
            ET.SubElement(case, "system-out").text = told
        cases.append(case)
    if export.get("skipped_because"):
        case = _case("exports", f"{name}: left out")
        ET.SubElement(case, "skipped", message=legal(str(export["skipped_because"])))
        cases.append(case)
    return cases or [_case("exports", f"{name}: written")]


def legal(text: str) -> str:
    """Without characters that XML 1.0 cannot hold."""
    return _ILLEGAL.sub("\ufffd", text)
