"""The pages in a real browser: offline, without a complaint, no wider than a phone, readable in light and dark, printable. Screenshots lie in the test's folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browser
import pytest
from conftest import sample

from qforge.evaluate.baseline import Past
from qforge.evaluate.compare import Comparison
from qforge.evaluate.interval_gates import GateCheck
from qforge.evaluate.rows import Row
from qforge.evaluate.statistics import Verdict
from qforge.report import write, write_comparison, write_sweep

pytestmark = [pytest.mark.slow, pytest.mark.skipif(browser.CHROMIUM is None, reason="no Chromium is installed")]
CONTRAST = """(() => {
  const channels = c => c.match(/[\\d.]+/g).map(v => v / 255);
  const light = c => { const [r, g, b] = channels(c).map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4); return .2126 * r + .7152 * g + .0722 * b; };
  const ground = e => { while (e) { const c = getComputedStyle(e).backgroundColor; if (!/, 0\\)|transparent/.test(c)) return c; e = e.parentElement; } return 'rgb(255,255,255)'; };
  return Math.min(...[...document.querySelectorAll('td, th, p, h1, h2, li, strong, pre, figcaption')].filter(e => e.textContent.trim()).map(e => {
    const [a, b] = [light(getComputedStyle(e).color), light(ground(e))].sort((x, y) => y - x); return (a + .05) / (b + .05); }));
})()"""

APART = """(() => {
  const boxes = [...document.querySelectorAll('text.label')].map(e => e.getBoundingClientRect());
  return boxes.length > 3 && boxes.every((a, i) => boxes.every((b, j) => i >= j || a.right <= b.left || b.right <= a.left || a.bottom <= b.top || b.bottom <= a.top)); })()"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    write(sample().to_json(), folder, ["html"])
    rows = [
        Row("perplexity", 9.1234, 9.3, "ratio", 1.019, (1.011, 1.027), 0.001, 0.004, Verdict("worse")),
        Row("kl_mean", 0.1, 0.101, "difference", 0.001, None, 0.0001, None, Verdict("not enough data", 120000, (60000, 310000))),
    ]
    history = [Past(f"{i:x}" * 40, 9 + i / 10, None) for i in range(3)]
    gates = [GateCheck("perplexity_ratio", "<= 1.01", 1.019, (1.011, 1.027), False, "error", 0.009, 0.99)]
    changed = {"recipe": ["quantize.scheme: int4 -> int3" * 9]}
    data = Comparison("a.json", "b.json", rows, gates, changed, ["a note"], 90000, 350, "document", [], False, history)
    write_comparison(data.to_json(), folder)
    write_sweep(json.dumps(sweep()), folder)
    return {name: folder / f"{name}.html" for name in ("report", "comparison", "sweep")}


def sweep() -> dict[str, Any]:
    """Seven variants: one whose gate failed, one that could not be computed; names as long as they get."""
    variants = [
        {"name": f"awq+gptq-int{b}-g64-sym{'-long' * (b == 3)}", "changes": {"quantize.method": "['awq', 'gptq']", "quantize.scheme": f"int{b}-g64-sym"}, "path": f"variants/{b}",
         "error": None, "passed": b > 2, "num_gates": int(b < 8),
         "failed_gates": [] if b > 2 else ["kl_mean"], "artifact_sha256": "a" * 64, "size_bytes": 17_000_000 * (b + 2), "size_ratio": 0.06 * b,
         "bits_per_weight": b + 0.25, "perplexity": 20 + 9 / b**2, "perplexity_ratio": 1 + 0.5 / b**2, "perplexity_ratio_ci95": [1.0, 1.2],
         "kl_mean": 2.0 / 3.5**b, "kl_mean_ci95": [1.9 / 3.5**b, 2.1 / 3.5**b],
         "top1_agreement": 1 - 0.5 / b, "top1_agreement_ci95": None, "tokens_per_second": 40.0 - b, "seconds": 60.0, "front": True,
         "against_best": "best" if b == 8 else "not enough data (needs about 1,200,000 tokens)" if b == 6 else "worse"} for b in (2, 3, 4, 5, 6, 8)
    ]  # fmt: skip
    broken = dict.fromkeys(variants[0]) | {
        "name": "nf4",
        "changes": {"quantize.method": "nf4"},
        "path": "variants/nf4",
        "error": "model.layers.3.mlp.up_proj: weights overflow",
        "front": False,
    }
    return {"qforge_version": "0.1.0", "recipe": "sweep", "model": {"source": "demo", "bytes_at_16_bits": 269_000_000}, "text_sha256": "b" * 64, "tokens": 20440, "clusters": 40,
            "reference": {"perplexity": 19.9}, "variants": [*variants, broken], "schema_version": 1}  # fmt: skip


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Browser]:
    with browser.Browser(tmp_path_factory.mktemp("browser") / "profile") as found:
        yield found


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("name", ["report", "comparison", "sweep"])
def test_a_page_in_a_browser(pages: dict[str, Path], chromium: browser.Browser, tmp_path: Path, name: str, width: int, dark: bool) -> None:
    assert pages[name].stat().st_size < 3_000_000
    chromium.open(pages[name], width, dark=dark)
    picture = chromium.screenshot(tmp_path / f"{name}-{width}-{'dark' if dark else 'light'}.png")
    print(picture)
    assert picture.stat().st_size > 20_000
    assert chromium.complaints() == []
    assert chromium.evaluate("document.documentElement.scrollWidth") <= width
    assert chromium.evaluate("[...document.querySelectorAll('.scroll, figure')].every(e => e.getBoundingClientRect().right <= innerWidth)")
    assert chromium.evaluate(CONTRAST) >= 4.5  # WCAG AA
    assert chromium.evaluate("document.querySelector('.verdict strong').getBoundingClientRect().top") < 200
    assert chromium.evaluate("[...document.querySelectorAll('td.FAILED')].every(e => e.getBoundingClientRect().left < innerWidth - 60)"), "a verdict is out of sight"
    if name == "sweep":
        assert chromium.evaluate(APART), "labels touch"
    if width == 390 and name == "comparison":
        assert chromium.evaluate("[...document.querySelectorAll('td')].every(e => e.getBoundingClientRect().right <= innerWidth)"), "a figure is out of sight"
    if width == 1280 and name != "report":
        assert chromium.evaluate("[...document.querySelectorAll('.scroll')].every(e => e.scrollWidth <= e.clientWidth)"), "a table is cut"
    sizes = "[...document.querySelectorAll('svg text')].map(e => { const m = e.getScreenCTM(); return parseFloat(getComputedStyle(e).fontSize) * Math.hypot(m.a, m.b); })"
    assert min(chromium.evaluate(sizes)) >= 10
    curves = chromium.evaluate("[...document.querySelectorAll('svg')].map(e => e.getBoundingClientRect().height)")
    assert curves
    assert min(curves) > 80


def test_a_page_prints(pages: dict[str, Path], chromium: browser.Browser) -> None:
    chromium.open(pages["report"], 1280)
    assert chromium.pdf().startswith(b"%PDF")


def test_complaints_would_be_noticed(chromium: browser.Browser, tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text("<script>undefinedFunction()</script><img src='https://example.com/x.png'><div style='width: 900px'>wide</div>")
    chromium.open(page, 390)
    assert any("undefinedFunction" in c for c in chromium.complaints())
    assert any("example.com" in c for c in chromium.complaints())
    assert chromium.evaluate("document.documentElement.scrollWidth") > 390
