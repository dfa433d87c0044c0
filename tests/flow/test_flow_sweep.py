"""A recipe with variants: each as it would be alone, what they share computed once, a kill survived, one table and a Pareto front at the end."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tiny
from flows import write_recipe

import qforge
from qforge.cli.main import main
from qforge.engines.transformers_engine import TransformersEngine
from qforge.errors import NumericalError, OutputError, RecipeError
from qforge.progress import Silent
from qforge.recipe import load_members
from qforge.search.front import Variant, ranked
from qforge.search.sweep import Sweep
from qforge.stages.journal import Journal

SWEEP: dict[str, Any] = {
    "matrix": {"quantize.method": ["rtn", "gptq"], "quantize.scheme": ["int4-g32-sym", "int8-g32-sym"]},
    "include": [{"name": "few", "set": {"calibration.samples": 4}}, {"set": {"quantize.method": ["awq", "gptq"]}}],
}
NAMES = ["rtn-int4-g32-sym", "rtn-int8-g32-sym", "gptq-int4-g32-sym", "gptq-int8-g32-sym", "few", "awq+gptq"]


def prepared(folder: Path, **changes: object) -> Path:
    tiny.make(folder / "model")
    return write_recipe(folder, **{"export": [], "sweep": SWEEP, **changes})


def measured(folder: Path) -> dict[str, Any]:
    """Everything that a sweep says but times and speeds, and the front that follows from them."""
    found: dict[str, Any] = json.loads((folder / "sweep.json").read_text())
    for v in found["variants"]:
        del v["seconds"], v["tokens_per_second"], v["front"]
    return found


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Sweep]:
    folder = tmp_path_factory.mktemp("sweep")
    return folder, qforge.sweep(prepared(folder), out=folder / "out")


def test_variants_are_named_by_what_they_change(tmp_path: Path) -> None:
    recipes = load_members(prepared(tmp_path), ["calibration.seed=3"])
    assert [r.name for r in recipes] == NAMES
    assert recipes[0].quantize.method == ("rtn",)
    assert recipes[5].quantize.method == ("awq", "gptq")
    assert recipes[4].calibration.samples == 4
    assert all(r.sweep is None and r.calibration.seed == 3 for r in recipes)


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ({}, "a sweep has a matrix"),
        ({"include": [{"name": "a", "set": {"quantize.method": "rtn"}}, {"name": "a", "set": {"quantize.method": "gptq"}}]}, "two variants are called a"),
        ({"matrix": {"model.source": ["a", "b"]}}, "model.source cannot differ between variants"),
        ({"matrix": {"quantize.method": ["rtn", "magic"]}}, "variant magic: quantize.method=\"magic\": quantize.method: given 'magic'; unknown method"),
        ({"matrix": {"quantize.metod": ["rtn"]}}, "did you mean method"),
        ({"matrix": {"quantize.method": []}}, "at least 1 item"),
    ],
)
def test_a_wrong_sweep_is_refused(tmp_path: Path, sweep: object, message: str) -> None:
    path = write_recipe(tmp_path, sweep=sweep)
    with pytest.raises(RecipeError, match=message.replace("(", r"\(")):
        load_members(path)


def test_a_sweep_is_measured(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="nothing compares the variants"):
        load_members(write_recipe(tmp_path, sweep=SWEEP, evaluate=None))
    with pytest.raises(RecipeError, match="has a sweep, which is several runs"):
        qforge.quantize(write_recipe(tmp_path, sweep=SWEEP), out=tmp_path / "out")


def test_each_variant_is_what_it_is_alone(swept: tuple[Path, Sweep], tmp_path: Path) -> None:
    """Same artifact and figures, bit for bit, as a run of its own without anything shared."""
    folder, sweep = swept
    assert [v.name for v in sweep.variants] == NAMES
    for member in load_members(folder / "recipe.yaml"):
        alone = qforge.quantize(member, out=tmp_path / member.name)
        found = next(v for v in sweep.variants if v.name == member.name)
        assert found.artifact_sha256 == alone.artifact["sha256"]
        together = json.loads((folder / "out" / found.path / "results.json").read_text())
        assert alone.evaluation is not None
        assert together["evaluation"] == json.loads(json.dumps(asdict(alone.evaluation)))
        assert (folder / "out" / found.path / "report.html").exists()


def test_the_reference_is_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    hidden = TransformersEngine.hidden
    monkeypatch.setattr(TransformersEngine, "hidden", lambda self, windows, *args: calls.append(len(windows[0])) or hidden(self, windows, *args))
    qforge.sweep(prepared(tmp_path, quantize={"method": "rtn", "scheme": "int4-g32-sym"}), out=tmp_path / "out")
    assert calls.count(64) == 1  # the text's windows; what variants wrote is their own
    assert len(calls) > 1


def test_the_front_and_the_best(swept: tuple[Path, Sweep]) -> None:
    variants = {v.name: v for v in swept[1].variants}
    assert not variants["rtn-int4-g32-sym"].front  # others are as small and nearer
    assert any(v.front for v in variants.values())
    best = min(variants.values(), key=lambda v: v.kl_mean or 9)
    assert best.against_best == "best"
    assert variants["rtn-int4-g32-sym"].against_best == "worse"
    assert best.tokens_per_second is not None


def test_equal_variants_are_the_same_and_both_on_the_front(swept: tuple[Path, Sweep]) -> None:
    one = swept[1].variants[0]
    results = qforge.quantize(load_members(swept[0] / "recipe.yaml")[0], out=swept[0] / "again")
    a, b = ranked([one, one], [results, results])
    assert a.front
    assert b.front
    assert {a.against_best, b.against_best} == {"best", "same"}
    assert ranked([Variant("x", {}, "x", error="no")], [None])[0].against_best is None


def test_a_killed_sweep_goes_on(swept: tuple[Path, Sweep], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in the fourth variant, then resumed: the first three compute nothing, and everything is as without the kill."""
    recipe, saves = prepared(tmp_path), []
    save = Journal.save

    def dies(self: Journal, name: str, *args: Any, **kwargs: Any) -> None:
        if name.startswith("artifact"):
            saves.append(name)
            if len(saves) == 4:
                raise KeyboardInterrupt
        save(self, name, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "save", dies)
        with pytest.raises(KeyboardInterrupt):
            qforge.sweep(recipe, out=tmp_path / "out")
    assert not (tmp_path / "out" / "sweep.json").exists()
    qforge.sweep(recipe, out=tmp_path / "out")
    work = [json.loads((tmp_path / "out" / "variants" / n / "results.json").read_text())["work"]["computed"] for n in NAMES]
    assert work[:3] == [0, 0, 0]
    assert 0 < work[3] < json.loads((swept[0] / "out" / "variants" / NAMES[3] / "results.json").read_text())["work"]["computed"]
    mine, whole = measured(tmp_path / "out"), measured(swept[0] / "out")
    mine["model"]["source"] = whole["model"]["source"]
    assert mine == whole
    before = (tmp_path / "out" / "sweep.json").read_bytes()
    qforge.sweep(recipe, out=tmp_path / "out")
    assert (tmp_path / "out" / "sweep.json").read_bytes() == before


def test_reports_name_every_variant(swept: tuple[Path, Sweep]) -> None:
    out = swept[0] / "out"
    schema = json.loads((Path(__file__).parents[2] / "docs" / "sweep.schema.json").read_text())
    jsonschema.validate(json.loads((out / "sweep.json").read_text()), schema, cls=jsonschema.Draft202012Validator)
    markdown, page = (out / "sweep.md").read_text(), (out / "sweep.html").read_text()
    for v in swept[1].variants:
        assert v.name.replace("_", "\\_") in markdown
        assert v.name in page
    assert page.count("<circle") == 6
    assert "http" not in page.replace("http://www.w3.org", "")


def test_a_variant_that_fails_is_listed_and_the_others_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from qforge import pipeline

    quantize = pipeline.quantize

    def broken(recipe: Any, **kwargs: Any) -> Any:
        if recipe.name == NAMES[0]:
            raise NumericalError("weights are broken")
        return quantize(recipe, **kwargs)

    monkeypatch.setattr(pipeline, "quantize", broken)
    sweep = qforge.sweep(prepared(tmp_path), out=tmp_path / "out")
    assert sweep.variants[0].error == "weights are broken"
    assert sweep.exit_code == 2
    assert all(v.error is None for v in sweep.variants[1:])
    assert "NOT COMPUTED: weights are broken" in (tmp_path / "out" / "sweep.md").read_text()


def test_a_budget_that_cannot_be_kept_is_listed_and_the_others_are_there(tmp_path: Path) -> None:
    sweep = {"matrix": {"quantize.budget": ["kl <= 1e-9", "kl <= 0.02"]}}
    found = qforge.sweep(prepared(tmp_path, quantize={"method": "auto", "budget": "4.5 bits"}, sweep=sweep), out=tmp_path / "out")
    assert found.exit_code == 2
    assert [v.error is None for v in found.variants] == [False, True]
    assert "the best choice of these candidates is predicted to reach" in str(found.variants[0].error)


def test_what_another_sweep_left_is_removed(tmp_path: Path) -> None:
    """Beside a sweep.json without it, it would look like one of its variants; what is not a run's stays."""
    quick = {"quantize": {"method": "rtn", "scheme": "int4-g32-sym"}}
    out = tmp_path / "out"
    told: list[str] = []
    qforge.sweep(prepared(tmp_path, sweep={"matrix": {"quantize.scheme": ["int4-g32-sym", "int8-g32-sym"]}}, **quick), out=out)
    (out / "variants" / "notes").mkdir()

    class Heard(Silent):
        def note(self, text: str) -> None:
            told.append(text)

    qforge.sweep(prepared(tmp_path, sweep={"matrix": {"quantize.scheme": ["int8-g32-sym", "int8-channel-sym"]}}, **quick), out=out, progress=Heard())
    assert sorted(p.name for p in (out / "variants").iterdir()) == ["int8-channel-sym", "int8-g32-sym", "notes"]
    assert "removed what an earlier sweep left: int4-g32-sym" in told


def test_other_peoples_files_stay(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "sweep.md").write_text("mine")
    with pytest.raises(OutputError, match="not an output folder of qforge"):
        qforge.sweep(prepared(tmp_path), out=tmp_path / "out")


def command(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(list(args))
    return int(left.value.code or 0), *capsys.readouterr()


def test_exit_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0 with all gates kept, 1 where a variant's gate fails, 2 for a variant that cannot be: before any work."""
    recipe = str(prepared(tmp_path, sweep={"matrix": {"quantize.scheme": ["int4-g32-sym", "int8-g32-sym"]}}, quantize={"method": "rtn", "scheme": "int4-g32-sym"}))
    code, out, err = command(capsys, "quantize", "--recipe", recipe, "--out", str(tmp_path / "out"))
    assert code == 0, err
    assert out.startswith("DONE: 2 variants; on the front of size, divergence and speed: int4-g32-sym, int8-g32-sym")
    code, out, err = command(capsys, "quantize", "--recipe", recipe, "--out", str(tmp_path / "out"), "--set", "gates.kl_mean=<= 1e-9")
    assert code == 1, err
    assert "FAILED: kl_mean" in out
    wrong = "sweep={matrix: {quantize.scheme: [int4-g32-sym, int4-g48-sym]}}"
    code, _, err = command(capsys, "quantize", "--recipe", recipe, "--out", str(tmp_path / "new"), "--set", wrong)
    assert code == 2
    assert "variant int4-g48-sym" in err
    assert not (tmp_path / "new").exists()
    code, out, _ = command(capsys, "quantize", "--recipe", recipe, "--dry-run")
    assert code == 0
    assert "variant int8-g32-sym" in out
