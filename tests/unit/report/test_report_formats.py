"""Every figure that a person needs is in the reports; the files are well-formed and hold no markup from elsewhere."""

from __future__ import annotations

import copy
import json
import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args

import pytest

from qforge.recipe.model import ReportSection
from qforge.report import FORMATS, write
from qforge.report.facts import gather
from qforge.report.html import html
from qforge.report.junit import junit
from qforge.report.markdown import markdown
from qforge.report.summary import summary

VOID = {"meta", "link"}
FIGURES = [
    "1.0417", "0.0441 to 0.0472", "0.3211 to 0.3444", "1.1876 to 1.2991", "3.4567", "9.8765", "0.8101 to 0.8145", "-1.230%", "9.870%", "4.03%", "2.030% to 2.210%",
    "1.0833", "1.0789 to 1.0877", "0.1257 to 0.1362", "1.2346", "0.7754", "31.4159", "113.0 MB", "269.0 MB", "42.0%", "4.250", "6.720", "134,515,008",
    "89,250 scored tokens", "350 windows", "1.2 GB", "151.0 MB", "3 min 07 s", "4 min 51 s", "31 pieces computed", "4 pieces resumed", "qforge 0.1.0",
    "transformers 5.23.0", "llama.cpp b6500", "KL 0.000310", "top-1 99.21%", "4,096 positions", "weights equal bit for bit", "WEIGHTS DIFFER",
    "onnxruntime is not installed", "rsLoRA", "0.0123", "builtin", "c4" * 32, "e5" * 32, "different texts by hash", "fa" * 32, "ab" * 32, "210", "Some CPU", "2.13.0",
    "FAILED", "capped at the model's context", "qforge quantize --recipe recipe.yaml", "209 x int4-g64-sym", "1 x int8-g64-sym", "1 x as it was",
]  # fmt: skip


class Page(HTMLParser):
    """Collects text and checks that elements close in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "head" not in self.open:
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def page(text: str) -> Page:
    parsed = Page()
    parsed.feed(text)
    parsed.close()
    assert parsed.open == []
    return parsed


def unescaped(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)


def test_a_recipe_names_the_formats_that_are_written() -> None:
    """Reports are made without recipes' code, so that both have the list."""
    field = ReportSection.model_fields["formats"]
    assert get_args(get_args(field.annotation)[0]) == field.default == FORMATS


@pytest.mark.parametrize("figure", FIGURES)
def test_a_reader_finds(results: dict[str, Any], figure: str) -> None:
    facts = gather(results)
    assert figure in unescaped(markdown(facts))
    assert figure in page(html(facts)).text


def test_the_verdict_comes_first(results: dict[str, Any]) -> None:
    text = markdown(gather(results))
    assert text.splitlines()[2] == "**FAILED: 1 of 3 gates, export gptq**"
    assert unescaped(text.splitlines()[4]) == "- top1_agreement is 0.7754, the limit is >= 0.80"
    assert page(html(gather(results))).text.startswith("qforge: demo FAILED: 1 of 3 gates, export gptq")


@pytest.mark.parametrize(
    ("gates", "verdict", "good"),
    [
        ([], "DONE: nothing was gated", None),
        ([("error", True)], "PASSED: the gate holds", True),
        ([("error", True), ("warn", True)], "PASSED: all 2 gates hold", True),
        ([("error", True), ("warn", False)], "PASSED with 1 warning", True),
        ([("error", False), ("warn", False)], "FAILED: 1 of 2 gates", False),
    ],
)
def test_verdicts(results: dict[str, Any], gates: list[tuple[str, bool]], verdict: str, good: bool | None) -> None:
    changed = {**results, "exports": [], "gates": [{"name": "kl_mean", "limit": "<= 1", "value": 0.5, "passed": p, "on": on, "interval": [0.4, 0.6]} for on, p in gates]}
    facts = gather(changed)
    assert (facts.verdict, facts.good) == (verdict, good)
    assert verdict in markdown(facts)
    assert verdict in html(facts)
    assert summary(changed)[0] == ("result", verdict)
    assert ET.fromstring(junit(facts)).get("failures") == str(sum(on == "error" and not p for on, p in gates))


def test_a_gate_on_too_little_text_says_so(results: dict[str, Any]) -> None:
    """The recipe's gates test the value; where a text gives no interval of it, no reader takes the value for more than it is."""
    gates = [
        {"name": name, "limit": "<= 9", "value": 1.0, "passed": True, "on": "error", "interval": ends}
        for name, ends in (("kl_mean", None), ("kl_p99", (0.9, 1.1)), ("size_ratio", None))
    ]
    short = {**results, "gates": gates, "exports": []}
    verdict = "PASSED: all 3 gates hold; by the value alone: kl_mean (too little text for an interval)"
    assert gather(short).verdict == verdict
    assert f"{markdown(gather(short))}".count("none: too little text") == 1
    rows = dict(summary(short))
    assert rows["result"] == verdict
    assert [name for name, told in rows.items() if name.startswith("gate") and "by the value alone" in told] == ["gate kl_mean"]


def test_an_export_with_other_weights_fails(results: dict[str, Any]) -> None:
    facts = gather({**results, "gates": []})
    assert (facts.verdict, facts.good) == ("FAILED: export gptq", False)
    assert facts.reasons == ["the weights of export gptq are not the artifact's; see Exports"]
    from conftest import sample

    assert not replace(sample(), gates=[]).passed
    assert replace(sample(), gates=[], exports=sample().exports[:1]).passed


def test_the_page_needs_nothing_from_outside(results: dict[str, Any]) -> None:
    text = html(gather(results))
    tags = page(text).seen
    assert not {t for t, _ in tags} & {"script", "img", "iframe", "object", "embed", "video"}
    for tag, attributes in tags:
        for name in ("src", "href", "srcset", "data", "action"):
            assert attributes.get(name) in (None, "data:,"), (tag, name)
    assert "url(" not in text
    assert "@import" not in text
    assert "http" not in text
    assert len(text.encode()) < 3_000_000
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in tags


def test_plots_hold_their_numbers(results: dict[str, Any]) -> None:
    parsed = page(html(gather(results)))
    labels = [a["aria-label"] for t, a in parsed.seen if t == "svg"]
    assert labels[:2] == ["KL divergence by position", "histogram of the KL divergence of tokens"]
    assert labels[2:] == ["perplexity of each window, original and quantized", "histogram of KL divergence", "relative error of each layer"]
    assert sum(t == "circle" for t, _ in parsed.seen) == 350 + 8
    assert "1 to 1 tokens before: 0.2000 (350 tokens)" in parsed.text
    assert "0.01 to 0.1 nats: 40,000 tokens" in parsed.text
    assert "original expected" in parsed.text
    assert "91.2% → 0.1%" in parsed.text
    layer = results["layers"][0]
    assert f"{layer['name']}: {layer['relative_error']:.4f} (int4-g64-sym)" in parsed.text
    for tag, attributes in parsed.seen:
        if tag in ("rect", "circle", "line"):
            assert all(math.isfinite(float(v or "nan")) for k, v in attributes.items() if k in ("x", "y", "cx", "cy", "width", "height", "x1", "y1", "x2", "y2"))


def test_text_from_elsewhere_stays_text(results: dict[str, Any]) -> None:
    facts = gather(results)
    for text in (html(facts), markdown(facts).partition("## Reproduce")[0]):
        assert "<script>" not in text
    table = [line for line in markdown(facts).splitlines() if line.startswith("|") and "alert" in line]
    assert table
    assert all(len(re.findall(r"(?<!\\)\|", line)) in (6, 7) for line in table)
    tricky = gather({**results, "recipe": {"note": "```\n# heading\n````"}})
    assert "`````yaml" in markdown(tricky)


def test_junit_is_what_ci_systems_read(results: dict[str, Any]) -> None:
    root = ET.fromstring(junit(gather(results)))
    assert root.tag == "testsuites"
    assert {k: root.get(k) for k in ("tests", "failures", "errors", "skipped")} == {"tests": "9", "failures": "3", "errors": "0", "skipped": "1"}
    for suite in root:
        cases = suite.findall("testcase")
        assert suite.get("tests") == str(len(cases))
        assert suite.get("failures") == str(len(suite.findall("testcase/failure")))
        assert suite.get("skipped") == str(len(suite.findall("testcase/skipped")))
        assert len({c.get("name") for c in cases}) == len(cases)
        assert all(c.get("classname") for c in cases)
    failures = [f.get("message") or "" for f in root.iter("failure")]
    assert any("top1_agreement is 0.7754, the limit is >= 0.80" in f for f in failures)
    assert [s.get("message") for s in root.iter("skipped")] == ["onnxruntime is not installed; pip install 'qforge[onnx]'"]
    assert any("warning: size_ratio is 0.4201" in (o.text or "") for o in root.iter("system-out"))


def test_a_run_that_was_not_evaluated(results: dict[str, Any]) -> None:
    bare = {**copy.deepcopy(results), "evaluation": None, "calibration": None, "gates": [], "exports": [], "adapters": [], "warnings": [], "layers": []}
    facts = gather(bare)
    assert "Quality" not in [t.title for t in facts.tables]
    assert "<svg" not in html(facts)
    page(html(facts))
    assert ET.fromstring(junit(facts)).get("tests") == "0"
    assert ("perplexity", "not evaluated") in summary(bare)
    assert "Plots" not in html(facts)


def test_an_evaluation_without_intervals_or_reference(results: dict[str, Any]) -> None:
    lean = copy.deepcopy(results)
    e = lean["evaluation"]
    e.update(dict.fromkeys(("reference", "perplexity_ratio", "kl_mean", "kl_p99", "top1_agreement", "reference_engine", "base", *(k for k in e if k.endswith("_ci95")))))
    e["clusters"] = [{"tokens": 5, "nll_candidate": 9.0, "nll_reference": None, "kl_sum": None, "agree": None}]
    text = html(gather(lean))
    assert "resample 1 window." in page(text).text
    assert 'aria-label="relative error of each layer"' in text
    e.update(perplexity_ratio=1.5)
    assert ("perplexity ratio", "1.5000 (too few documents or windows for an interval)") in summary(lean)


def test_the_same_text_twice_is_said_aloud(results: dict[str, Any]) -> None:
    same = {**results, "calibration": {**results["calibration"], "text_sha256": results["evaluation"]["text_sha256"]}}
    assert "THE SAME TEXT" in markdown(gather(same))


def test_summary_rows(results: dict[str, Any]) -> None:
    rows = dict(summary(results))
    assert rows["result"] == "FAILED: 1 of 3 gates, export gptq"
    assert rows["perplexity ratio"].endswith("(95 %: 1.0789 to 1.0877)")
    assert rows["gate top1_agreement"] == "FAILED: 0.7754 is not >= 0.80"
    assert rows["gate size_ratio"].startswith("WARNING")
    assert rows["size"].startswith("113.0 MB (42.0% of the weights at 16 bits), 4.250 bits")
    assert rows["export onnx"].startswith("skipped: onnxruntime")
    assert "llama.cpp b6500" in rows["export gguf"]
    assert rows["peak memory"] == "1.2 GB"


def test_summary_reads_the_dataclass_too(results: dict[str, Any]) -> None:
    from conftest import sample

    assert summary(sample()) == summary(results)


def test_write(results_path: Path, tmp_path: Path) -> None:
    results = results_path.read_text()
    written = write(results, tmp_path, ["json", "markdown", "html", "junit"])
    assert [p.name for p in written] == ["report.md", "report.html", "junit.xml"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["junit.xml", "report.html", "report.md", "results.json"]
    first = [p.read_bytes() for p in written]
    write(results, tmp_path, ["junit", "html", "markdown"])
    assert [p.read_bytes() for p in written] == first
    with pytest.raises(ValueError, match="'pdf'; allowed are json, markdown, html, junit"):
        write(results, tmp_path, ["pdf"])


def test_the_report_reads_only_results_json() -> None:
    code = "import sys, json, qforge.report, qforge.report.summary; print(json.dumps([m for m in sys.modules if m.split('.')[0] in ('qforge', 'torch', 'numpy')]))"
    loaded = json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert {m for m in loaded if not m.startswith("qforge.report")} == {"qforge", "qforge.errors", "qforge.files", "qforge.yaml_text"}
