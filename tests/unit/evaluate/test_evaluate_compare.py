"""`compare`: verdicts with words, exit codes, refusals, and gates that test the interval."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import numpy as np
import pytest
from evaluations import evaluation, task

from qforge.cli.main import main
from qforge.errors import DataError
from qforge.evaluate.compare import compare
from qforge.evaluate.sides import read

DOCS = Path(__file__).resolve().parents[3] / "docs"


def write(folder: Path, name: str, data: object) -> Path:
    path = folder / name
    path.write_text(json.dumps(data))
    return path


def run(*args: object) -> int:
    with pytest.raises(SystemExit) as e:
        main(["compare", *map(str, args)])
    return int(e.value.code or 0)


def verdicts(a: dict[str, Any], b: dict[str, Any], folder: Path) -> dict[str, str]:
    result = compare(read(write(folder, "a.json", a)), read(write(folder, "b.json", b)))
    return {r.name: str(r.verdict) for r in result.rows}


def test_an_identical_pair_is_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write(tmp_path, "a.json", evaluation()), write(tmp_path, "b.json", evaluation())
    assert run(a, b) == 0
    out = capsys.readouterr().out
    assert out.startswith("PASSED: the same")
    assert out.count(" same") >= 3
    assert verdicts(evaluation(clusters=2), evaluation(clusters=2), tmp_path) == {"perplexity": "same", "kl_mean": "same", "top1_agreement": "same"}


def both_ways(a: Path, b: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """What is said where the first comparison fails and the way back passes."""
    assert run(a, b) == 1
    forth = capsys.readouterr().out
    assert run(b, a) == 0
    return forth, capsys.readouterr().out


def test_worse_fails_and_the_way_back_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write(tmp_path, "a.json", evaluation()), write(tmp_path, "b.json", evaluation(seed=1, nll=0.02, kl=0.005, agree=-0.02))
    forth, back = both_ways(a, b, capsys)
    assert forth.startswith("FAILED: significantly worse in perplexity, KL divergence, top-1 agreement")
    assert "+2." in forth
    assert back.startswith("PASSED: better")


@pytest.mark.parametrize(("change", "name"), [({"nll": 0.01}, "perplexity"), ({"kl": 0.002}, "kl_mean"), ({"agree": -0.02}, "top1_agreement")])
def test_each_figure_can_fail_alone(tmp_path: Path, change: dict[str, float], name: str) -> None:
    got = verdicts(evaluation(), evaluation(**change), tmp_path)  # type: ignore[arg-type]
    assert {k for k, v in got.items() if v == "worse"} == {name}
    assert run(tmp_path / "a.json", tmp_path / "b.json") == 1


def test_a_difference_below_the_margin_is_the_same(tmp_path: Path) -> None:
    assert verdicts(evaluation(), evaluation(nll=0.0005), tmp_path)["perplexity"] == "same"
    assert verdicts(evaluation(), evaluation(nll=0.0015), tmp_path)["perplexity"] == "worse"


def test_a_short_text_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write(tmp_path, "a.json", evaluation(clusters=1)), write(tmp_path, "b.json", evaluation(clusters=1, seed=1, nll=0.01))
    assert run(a, b) == 0
    out = capsys.readouterr().out
    assert out.startswith("PASSED, but this text is too short to tell")
    assert "not enough data (needs about" in out
    noisy = verdicts(evaluation(clusters=30), evaluation(clusters=30, seed=1, noise=0.1), tmp_path)["perplexity"]
    assert noisy.startswith("not enough data (needs about ")
    # 1.96 * 0.1 / sqrt(n windows) = 0.001 at about 38,000 windows of 228 tokens
    assert 8.8e6 / 1.5 < int(noisy.split("about ")[1].split(" ")[0].replace(",", "")) < 8.8e6 * 1.5


def test_gates_decide_by_the_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write(tmp_path, "a.json", evaluation()), write(tmp_path, "b.json", evaluation(seed=1, nll=0.02))
    assert run(a, b, "--gate", "perplexity_ratio <= 1.05") == 0
    assert run(a, b, "--gate", "perplexity_ratio <= 1.01") == 1
    assert "FAILED: perplexity_ratio beyond the limit" in capsys.readouterr().out
    assert run(a, b, "--gate", "perplexity_ratio <= 1.05", "--gate", "kl_mean_change <= -0.01") == 1
    assert run(a, b, "--gate", "top1_agreement >= 0.8", "--gate", "kl_mean <= 0.2", "--gate", "perplexity <= 100", "--gate", "top1_agreement_change >= -0.01") == 0
    capsys.readouterr()
    ratio = compare(read(a), read(b)).rows[0].change
    assert run(a, b, "--gate", f"perplexity_ratio <= {ratio - 1e-6}") == 0
    assert "not sure" in capsys.readouterr().out


def test_what_another_calibration_alone_makes_is_the_same_and_more_is_worse(tmp_path: Path) -> None:
    def found(kl: float, sha256: str, text: str = "t") -> str:
        sides = (("a.json", 0.0, {"sha256": "a", "text_sha256": "t"}), ("b.json", kl, {"sha256": sha256, "text_sha256": text}))
        result = compare(*(read(write(tmp_path, name, {"evaluation": evaluation(kl=k), "calibration": c})) for name, k, c in sides))
        assert sum("calibrated with different tokens" in n for n in result.notes) == (sha256 != "a" and text == "t")
        return result.rows[1].verdict.word

    assert evaluation()["kl_mean"] == pytest.approx(0.07, abs=0.005)
    assert found(0.006, "b") == "same"
    assert found(0.009, "b") == "worse"
    assert found(0.002, "a") == "worse"
    assert found(0.002, "b", "another text") == "worse"


def test_results_json_and_what_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write(tmp_path, "a.json", {"evaluation": evaluation(), "recipe": {"quantize": {"scheme": "int4-g64-sym"}}, "model": {"source": "m"}, "artifact": {"bits_per_weight": 4.25}})
    b = write(tmp_path, "b.json", {"evaluation": evaluation(), "recipe": {"quantize": {"scheme": "int4-g32-sym"}}, "model": {"source": "m"}, "artifact": {"bits_per_weight": 4.5}})
    assert run(a, b) == 0
    out = capsys.readouterr().out
    assert "recipe: quantize.scheme: int4-g64-sym -> int4-g32-sym" in out
    assert "bits per weight: 4.25 -> 4.5" in out
    assert "weights:" not in out
    assert run(a, write(tmp_path, "c.json", evaluation())) == 0


def test_perplexity_alone_is_compared_where_one_side_has_no_reference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write(tmp_path, "a.json", evaluation(alone=True)), write(tmp_path, "b.json", evaluation(seed=1, nll=0.02))
    assert run(a, b) == 1
    assert "at least one side was evaluated without --against" in capsys.readouterr().out
    assert run(a, b, "--gate", "kl_mean <= 1") == 2
    assert "kl_mean is not known here; allowed are perplexity_ratio, perplexity" in capsys.readouterr().err


def test_that_one_document_tells_of_itself_alone_is_said(tmp_path: Path) -> None:
    for cluster, told in (("window", 1), ("document", 0)):
        side = read(write(tmp_path, "a.json", changed(protocol={"window": 256, "cluster": cluster})))
        assert sum("the text is one document" in n for n in compare(side, side).notes) == told


def test_another_original_is_named(tmp_path: Path) -> None:
    other = evaluation()
    for c in other["clusters"]:
        c["nll_reference"] *= 1.1
    result = compare(read(write(tmp_path, "a.json", evaluation())), read(write(tmp_path, "b.json", other)))
    assert "different originals" in result.notes[0]


def changed(**values: object) -> dict[str, Any]:
    return {**evaluation(), **values}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (changed(text_sha256="cd" * 32), "different texts"),
        (changed(protocol={"window": 512, "bos": True}), "window: 256 and 512"),
        (evaluation(clusters=299), "different clusters of tokens"),
        ({"evaluation": None}, "was not evaluated"),
        ({"evaluation": []}, "no JSON object"),
        ({"outputs": []}, "no evaluation: text_sha256, protocol, engine, tokens, candidate, clusters is missing"),
        ([1, 2], "no JSON object"),
        (changed(clusters=[]), "clusters is empty"),
        (changed(clusters=[{"tokens": 0, "nll_candidate": 1.0}], kl_mean=None), r"clusters\[0\]\.tokens is 0"),
        (changed(clusters=[{"tokens": 5, "nll_candidate": float("nan")}], kl_mean=None), "NaN is no number"),
        (changed(clusters=[{"tokens": 5, "nll_candidate": 1.0}]), r"clusters\[0\]\.nll_reference is missing"),
    ],
)
def test_refuses_with_exit_2(tmp_path: Path, capsys: pytest.CaptureFixture[str], data: object, message: str) -> None:
    a, b = write(tmp_path, "a.json", evaluation()), write(tmp_path, "b.json", data)
    with pytest.raises(DataError, match=message):
        compare(read(a), read(b))
    assert run(a, b) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_refuses_what_is_no_json_or_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write(tmp_path, "a.json", evaluation())
    (tmp_path / "text").write_bytes(b"\xff\xfe not json")
    assert run(a, tmp_path / "text") == 2
    assert run(a, tmp_path / "missing.json") == 2
    assert run(tmp_path, a) == 2
    for gate in ("about one", "perplexity_ratio", "size_ratio <= 1", "perplexity_ratio == 1"):
        assert run(a, a, "--gate", gate) == 2
    assert "internal" not in capsys.readouterr().err


def test_a_gate_may_only_warn_and_says_how_far_and_how_sure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write(tmp_path, "a.json", evaluation()), write(tmp_path, "b.json", evaluation(seed=1, nll=0.02))
    assert run(a, b, "--gate", "warn: perplexity_ratio <= 1.01") == 0
    out = capsys.readouterr().out
    assert out.startswith("PASSED with warnings: perplexity_ratio beyond the limit")
    assert "WARNING: 0.0091" in out
    assert "beyond the limit with >99.9 % confidence" in out
    ratio = compare(read(a), read(b)).rows[0].change
    near = compare(read(a), read(b), [f"perplexity_ratio <= {ratio}"]).gates[0]
    assert near.confidence == pytest.approx(0.5)
    assert not near.sure


def test_exact_figures_can_be_gated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (write(tmp_path, f"{n}.json", {"evaluation": evaluation(), "artifact": {"size_bytes": n, "bits_per_weight": n / 100}}) for n in (400, 500))
    assert run(a, b, "--gate", "size_change <= 1.2", "--gate", "bits_per_weight <= 5") == 1
    assert "FAILED: size_change beyond the limit" in capsys.readouterr().out


def test_the_files_that_a_pull_request_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write(tmp_path, "a.json", evaluation()), write(tmp_path, "b.json", evaluation(seed=1, nll=0.02, kl=0.005, agree=-0.02))
    assert run(a, b, "--out", tmp_path / "out", "--json", "-") == 1
    streams = capsys.readouterr()
    data = json.loads(streams.out)
    assert streams.err.startswith("FAILED: significantly worse")
    assert json.loads((tmp_path / "out" / "comparison.json").read_text()) == data
    jsonschema.validate(data, json.loads((DOCS / "comparison.schema.json").read_text()), cls=jsonschema.Draft202012Validator)
    assert data["passed"] is False
    assert [r["name"] for r in data["rows"]] == ["perplexity", "kl_mean", "top1_agreement"]
    comment = (tmp_path / "out" / "comparison.md").read_text()
    assert comment.splitlines()[:2] == ["<!-- qforge compare -->", "### qforge: FAILED: significantly worse in perplexity, KL divergence, top-1 agreement"]
    assert f"qforge compare {a} {b}" in comment
    suites = ElementTree.parse(tmp_path / "out" / "junit.xml").getroot()
    assert (suites.get("tests"), suites.get("failures")) == ("3", "3")
    page = (tmp_path / "out" / "comparison.html").read_text()
    assert "significantly worse" in page
    assert "<script" not in page


def test_two_hundred_tokens_are_not_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short, other = evaluation(clusters=1), evaluation(clusters=1, seed=1, nll=0.02, kl=0.01, agree=-0.02)
    assert 200 <= short["tokens"] <= 256
    assert run(write(tmp_path, "a.json", short), write(tmp_path, "b.json", other), "--out", tmp_path / "out") == 0
    assert "not enough data (needs about" in capsys.readouterr().out
    assert ElementTree.parse(tmp_path / "out" / "junit.xml").getroot().get("skipped") == "3"


def test_a_gate_that_cannot_be_judged_is_no_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whether the value is beyond the limit or not: neither a false alarm nor a pass."""
    a, b = write(tmp_path, "a.json", evaluation(clusters=1)), write(tmp_path, "b.json", evaluation(clusters=1, seed=1, nll=0.005, kl=0.4))
    for gate in ("perplexity_ratio <= 1.05", "kl_mean_change <= 0.01", "kl_mean <= 1"):
        assert run(a, b, "--gate", gate, "--out", tmp_path / "out") == 2
        streams = capsys.readouterr()
        assert streams.out.startswith(f"NO VERDICT: not enough data to judge {gate.split()[0]} (needs about ")
        assert streams.err.startswith("error: NO VERDICT")
        assert "PASSED" not in (tmp_path / "out" / "comparison.md").read_text()
        assert ElementTree.parse(tmp_path / "out" / "junit.xml").getroot().get("skipped") == "1"
    assert run(a, b, "--gate", f"warn: {gate}") == 0
    assert capsys.readouterr().out.startswith("PASSED with warnings: not enough data to judge kl_mean")
    exact = {"artifact": {"size_bytes": 400}}
    c, d = (write(tmp_path, f"{n}.json", {"evaluation": json.loads(f.read_text()), **exact}) for n, f in (("c", a), ("d", b)))
    assert run(c, d, "--gate", "size_change <= 1") == 0  # nothing is sampled
    assert run(c, d, "--gate", "size_change <= 0.9", "--gate", "kl_mean <= 1") == 1
    assert "FAILED: size_change beyond the limit; not enough data to judge kl_mean" in capsys.readouterr().out
    assert run(a, b, "--gate", "top1_agreement_change >= -0.01") == 2  # as many agree, and that is chance
    assert run(a, a, "--gate", "perplexity_ratio <= 1.01", "--gate", "kl_mean_change <= 0.01") == 0  # the same sums: nothing to be unsure of


def with_tasks(folder: Path, name: str, **tasks: dict[str, Any]) -> Path:
    return write(folder, name, {**evaluation(clusters=20), "tasks": tasks})


@pytest.mark.parametrize("kept", [True, False])
def test_a_task_that_got_worse_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str], kept: bool) -> None:
    a, b = (with_tasks(tmp_path, name, sums=task(right, kept=kept)) for name, right in (("a.json", "1" * 90 + "0" * 10), ("b.json", "1" * 10 + "0" * 90)))
    forth, back = both_ways(a, b, capsys)
    assert forth.startswith("FAILED: significantly worse in task sums.acc")
    assert "tasks: sums.bits: 1.1 -> 1.9" in forth
    assert back.startswith("PASSED: better in task sums.acc")
    assert run(a, a) == 0
    for gate, status in (("acc >= 0.5", 1), ("sums.acc >= 0.05", 0), ("sums.acc_change >= -0.1", 1), ("acc_change >= -0.9", 0)):
        assert run(a, b, "--gate", gate) == status, gate
    row = compare(read(a), read(b)).rows[-1]
    assert (row.name, row.baseline, row.candidate, row.unit) == ("sums.acc", 0.9, 0.1, "questions")


def test_answers_are_paired_and_few_are_not_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def found(kept: bool) -> tuple[str, float]:
        a, b = (with_tasks(tmp_path, name, sums=task(right, kept=kept)) for name, right in (("a.json", "1" * 400 + "0" * 400), ("b.json", "1" * 370 + "0" * 430)))
        row = compare(read(a), read(b)).rows[-1]
        assert row.interval is not None
        return row.verdict.word, row.interval[1] - row.interval[0]

    assert found(True)[0] == "worse"
    assert found(False)[0] == "not enough data"
    assert found(True)[1] < found(False)[1] / 2
    assert run(tmp_path / "a.json", tmp_path / "b.json") == 0
    assert " questions" in capsys.readouterr().out


def test_equal_answers_of_few_questions_are_not_enough_unless_the_artifact_is_the_same(tmp_path: Path) -> None:
    def found(sha: str) -> tuple[str, bool]:
        paths = [
            write(tmp_path, f"{i}.json", {"evaluation": {**evaluation(clusters=20, seed=i), "tasks": {"sums": task("1" * 18 + "00")}}, "artifact": {"sha256": own}})
            for i, own in enumerate(("a", sha))
        ]
        result = compare(read(paths[0]), read(paths[1]), ["acc_change >= -0.001"])
        return result.rows[-1].verdict.word, result.gates[0].sure

    assert found("b") == ("not enough data", False)
    assert found("a") == ("same", True)


@pytest.mark.parametrize("gate", ["parts.acc_change >= -0.01", "acc_change >= -0.01"])
def test_no_gate_passes_over_parts_of_questions(tmp_path: Path, gate: str) -> None:
    """An accuracy of which no answers are kept as right or wrong has no figure, and another task's does not stand for it."""
    parts = ({"questions": 50, "metrics": {"acc": {"reference": 0.45, "candidate": x}}, "protocol": {}} for x in (0.45, 0.3))
    a, b = (with_tasks(tmp_path, name, sums=task("1" * 50), parts=x) for name, x in zip(("a.json", "b.json"), parts, strict=True))
    assert compare(read(a), read(b)).changed == {"tasks": ["parts.acc: 0.45 -> 0.3"]}
    with pytest.raises(DataError, match=rf"--gate: {gate.split()[0]} is not known here; allowed are .*sums\.acc_change"):
        compare(read(a), read(b), [gate])


def test_of_many_equal_tasks_none_fails_by_chance(tmp_path: Path) -> None:
    """40 tasks, each side's answers drawn anew: alone, one in 20 intervals leaves out zero."""
    draw = np.random.default_rng(5)

    def side(name: str) -> Path:
        return with_tasks(tmp_path, name, **{f"t{i}": task("".join(draw.choice(["0", "1"], 100))) for i in range(40)})

    assert sum(r.verdict.word == "worse" for _ in range(5) for r in compare(read(side("a.json")), read(side("b.json"))).rows) <= 1


def test_tasks_that_were_asked_otherwise_are_named(tmp_path: Path) -> None:
    a, b = with_tasks(tmp_path, "a.json", x=task("1" * 50), y=task("1" * 50)), with_tasks(tmp_path, "b.json", x=task("0" * 50, fewshot=5), z=task("1" * 50))
    result = compare(read(a), read(b))
    assert {r.name for r in result.rows} == {"perplexity", "kl_mean", "top1_agreement"}
    assert result.notes == [
        "task y is not compared: only the baseline has it",
        "task z is not compared: only the candidate has it",
        "task x is not compared: it was asked otherwise (fewshot: 0 and 5)",
    ]
    assert result.changed == {"tasks": ["x.bits: 1 -> 2"]}
    assert compare(read(a), read(write(tmp_path, "c.json", evaluation(clusters=20)))).changed == {}


def test_a_candidate_whose_own_run_failed_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exports = [{"format": "gguf", "verified_by": [{"engine": "llama.cpp", "version": "1", "weights_equal": False}]}]
    gates = [{"name": "kl_mean", "limit": "<= 0.05", "value": 0.07, "passed": False, "on": on} for on in ("error", "warn")]
    a = write(tmp_path, "a.json", evaluation())
    told = "the candidate's own run failed (gate kl_mean is 0.07, the limit is <= 0.05; export gguf is not the artifact, as read by llama.cpp)"
    b = write(tmp_path, "b.json", {"evaluation": evaluation(), "exports": exports, "gates": gates})
    assert run(a, b, "--out", tmp_path / "out") == 1
    assert capsys.readouterr().out.startswith(f"FAILED: {told}\n")
    assert ElementTree.parse(tmp_path / "out" / "junit.xml").getroot().get("failures") == "2"
    assert run(a, b, "--gate", "perplexity_ratio <= 1.01") == 1
    assert capsys.readouterr().out.startswith(f"FAILED: {told}\n")
    assert run(b, a) == 0  # how the baseline came about is over
    assert run(a, write(tmp_path, "c.json", {"evaluation": evaluation(), "gates": gates[1:]})) == 0


def test_words_of_a_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = write(tmp_path, "a.json", evaluation())
    assert run(a, a) == 0
    out = capsys.readouterr().out
    assert "The two do not differ in any part of this text." in out
    assert "300 pieces, paired" in out
    data = {**evaluation(clusters=1), "protocol": {"window": 256, "bos": True, "cluster": "document"}}
    one = write(tmp_path, "one.json", data)
    assert run(one, one) == 0
    assert "1 document, paired" in capsys.readouterr().out
    assert run(a, write(tmp_path, "b.json", evaluation(kl=0.0001))) == 0
    assert "same (differs by less than matters)" in capsys.readouterr().out
    b = write(tmp_path, "b.json", evaluation(seed=1, nll=0.02))
    ratio = compare(read(a), read(b)).rows[0].change
    assert run(a, b, "--gate", f"perplexity_ratio <= {ratio - 1e-5}") == 0
    out = capsys.readouterr().out
    assert out.startswith("PASSED, not for sure: perplexity_ratio beyond the limit, by less than this text can tell")
    assert "passed: 1e-05 beyond the limit, but not sure (5" in out


def test_an_export_that_is_gone_is_one_line(tmp_path: Path) -> None:
    def results(*exports: dict[str, Any]) -> dict[str, Any]:
        return {"evaluation": evaluation(clusters=20), "recipe": {"export": list(exports)}, "exports": [{"format": e["format"]} for e in exports]}

    gguf, onnx = {"format": "gguf", "type": "q4_0"}, {"format": "onnx"}

    def changed(before: dict[str, Any], after: dict[str, Any]) -> dict[str, list[str]]:
        return compare(read(write(tmp_path, "a.json", before)), read(write(tmp_path, "b.json", after))).changed

    assert changed(results(gguf, onnx), results(onnx)) == {"exports": ["gguf: no longer made"]}
    assert changed(results(gguf), results()) == {"exports": ["gguf: no longer made"]}
    assert changed(results(onnx), results(gguf, onnx)) == {"exports": ["gguf: new"]}
    assert changed(results(gguf), results({**gguf, "type": "q8_0"})) == {"recipe": ["export.gguf.type: q4_0 -> q8_0"]}


def test_what_stands_above_is_not_said_again(tmp_path: Path) -> None:
    a, b = (write(tmp_path, f"{n}.json", {"evaluation": evaluation(), "artifact": {"size_bytes": n}}) for n in (400, 500))
    assert run(a, b, "--out", tmp_path / "out") == 0
    assert "What changed besides" not in (tmp_path / "out" / "comparison.md").read_text()


def test_a_layer_whose_error_grew_is_named(tmp_path: Path) -> None:
    def results(error: float) -> dict[str, Any]:
        layers = [{"name": f"model.layers.{i}.mlp.up_proj", "scheme": "int4-g64-sym", "relative_error": 0.1 + 0.02 * (i == 1) * error} for i in range(3)]
        return {"evaluation": evaluation(), "layers": layers}

    found = compare(read(write(tmp_path, "a.json", results(0))), read(write(tmp_path, "b.json", results(1)))).changed
    assert found == {"layers": ["model.layers.1.mlp.up_proj: error of weights 0.1000 -> 0.1200 (+20.0%)"]}


def test_what_a_reviewer_reads_is_short(tmp_path: Path) -> None:
    """Layers that changed alike are one line; sizes stand before the details, with digits that mean something."""

    def results(scheme: str, bits: float, size: int) -> dict[str, Any]:
        layers = [{"name": f"model.layers.{i}.mlp.up_proj", "scheme": scheme if i else "int8-g64-sym"} for i in range(30)]
        return {"evaluation": evaluation(), "layers": layers, "artifact": {"size_bytes": size, "bits_per_weight": bits}}

    a, b = write(tmp_path, "a.json", results("int4-g64-sym", 4.127034505, 115_484_431)), write(tmp_path, "b.json", results("int3-g64-sym", 3.25, 99_000))
    assert run(a, b, "--out", tmp_path / "out") == 0
    comment = (tmp_path / "out" / "comparison.md").read_text()
    before, details = comment.split("<details>")
    assert "- size in bytes: 115,484,431 -\\> 99000\n- bits per weight: 4.12703 -\\> 3.25\n" in before
    assert "- **layers**: model.layers.1.mlp.up\\_proj and 28 more: int4-g64-sym -\\> int3-g64-sym\n" in details
    assert details.count("**layers**") == 1


def test_a_disk_that_is_full_leaves_no_comparison_that_looks_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    a = write(tmp_path, "a.json", {"evaluation": evaluation()})
    sync, calls = os.fsync, []

    def synced(handle: int) -> None:
        calls.append(handle)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(handle)

    monkeypatch.setattr(os, "fsync", synced)
    assert run(a, a, "--out", tmp_path / "out") == 2
    assert "the disk is full" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []
