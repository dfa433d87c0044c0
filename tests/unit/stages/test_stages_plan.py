"""Plans: schemes by pattern, sizes as written, what is refused and how it is said."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from pathlib import Path

import pytest
import tiny
from transformers import AutoModelForCausalLM

from qforge import pipeline
from qforge.cli.main import main
from qforge.errors import DataError, MissingCapabilityError, OutputError, QforgeError, RecipeError, UnsupportedError
from qforge.plan import Plan
from qforge.progress import Silent
from qforge.recipe import load_members
from qforge.runtime import running

QUANTIZE = {"method": "rtn", "scheme": "int4-g32-sym"}
GPTQ = {"method": "gptq", "scheme": "int4-g32-sym"}


def recipe(folder: Path, **changes: object) -> Path:
    if not (folder / "model").exists():
        tiny.make(folder / "model")
    path = folder / "recipe.yaml"
    path.write_text(json.dumps({"version": 1, "model": {"source": "model"}, "quantize": QUANTIZE, "evaluate": None, **changes}))
    return path


def planned(folder: Path, **changes: object) -> Plan:
    return pipeline.plan(recipe(folder, **changes))[1]


def test_a_plan_writes_nothing_and_predicts_the_size(tmp_path: Path) -> None:
    for name, quantize in (("a", QUANTIZE), ("b", {"method": "rtn", "scheme": "int8-channel-sym", "ignore": []}), ("c", {"method": "none"})):
        folder = tmp_path / name
        folder.mkdir()
        path = recipe(folder, quantize=quantize)
        before = sorted(folder.rglob("*"))
        _, plan, estimate = pipeline.plan(path)
        assert sorted(folder.rglob("*")) == before
        assert sum(estimate.peak_bytes.values()) > 100 << 20
        results = pipeline.quantize(path, out=folder / "out")
        assert plan.size_bytes == pytest.approx(results.artifact["weights_bytes"], rel=0.15)
        assert plan.bits_per_weight == results.artifact["bits_per_weight"]


@pytest.mark.parametrize(
    ("quantize", "says"),
    [
        (QUANTIZE, None),
        ({**QUANTIZE, "scheme": "w8a8-int8"}, None),
        ({**QUANTIZE, "scheme": "int4-g32-sym+int8-token"}, "initialises their weights"),
        ({**QUANTIZE, "overrides": [{"match": "*dense_4h_to_h", "scheme": "int8-channel-sym"}]}, "initialises their weights"),
        ({"method": "nf4"}, "puts no nf4 into linears"),
    ],
)
def test_an_artifact_that_transformers_does_not_load_is_said_to_be_one(tmp_path: Path, quantize: dict[str, object], says: str | None) -> None:
    """And it does not, or the note is wrong."""
    for family in ("falcon", "gptj"):
        (tmp_path / family).mkdir()
        tiny.make(tmp_path / family / "model", family, layers=1, **({"new_decoder_architecture": True} if family == "falcon" else {"rotary_dim": 8, "tied": False}))
    path = recipe(tmp_path / "falcon", quantize=quantize)
    told = [n for n in pipeline.plan(path)[1].notes if "transformers 5.23 does not load this artifact" in n]
    assert len(told) == (says is not None)
    assert all("FalconLinear" in n and str(says) in n for n in told)
    pipeline.quantize(path, out=tmp_path / "out")
    with pytest.raises((AttributeError, RuntimeError)) if told else contextlib.nullcontext():
        AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    if "overrides" not in quantize:
        assert not any("does not load this artifact:" in n for n in planned(tmp_path / "gptj", quantize=quantize).notes)


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"quantize": {"method": "signround", "scheme": "nf4"}}, UnsupportedError, "learned rounding is for integers"),
        ({"quantize": {"method": "gptq", "scheme": "fp8-e4m3-channel", "options": {"fisher": True}}}, UnsupportedError, "fisher is for integers.*use fisher: false"),
        ({"quantize": {**GPTQ, "options": {"fisher": True, "refine": 0}}}, UnsupportedError, "fisher weighs outputs in the sweeps of refine.*refine: 3"),
        ({"quantize": {**QUANTIZE, "options": {"fisher": True}}}, UnsupportedError, "fisher is for methods gptq, signround and auto, not rtn; use fisher: false, or method: gptq"),
        ({"quantize": {**QUANTIZE, "options": {"refine": 10}}}, UnsupportedError, "refine is for methods .*not rtn; use refine: 0"),
        ({"quantize": {**QUANTIZE, "options": {"damping": 0.5}}}, UnsupportedError, "damping is for methods"),
        ({"quantize": {**QUANTIZE, "options": {"error_correction": True}}}, UnsupportedError, "error_correction is for methods"),
        ({"quantize": {"method": "none", "options": {"damping": 0.5}}}, UnsupportedError, "damping is for methods .*not none"),
        ({"quantize": {**GPTQ, "options": {"steps": 1000}}}, UnsupportedError, "steps is for method signround, not gptq; use no steps, or method: signround"),
        ({"quantize": {**GPTQ, "options": {"smoothing": 0.9}}}, UnsupportedError, "smoothing is for method smoothquant, not gptq"),
        ({"quantize": {"method": "awq", "scheme": "int4-g32-sym", "options": {"refine": 10}}}, UnsupportedError, "refine is for methods .*not awq"),
        ({"quantize": {**GPTQ, "scheme": "int4-tensor-sym", "options": {"refine": 10}}}, UnsupportedError, "refine is for numbers with one scale .*not int4-tensor-sym"),
        ({"quantize": {**GPTQ, "scheme": "fp8-e4m3-block32", "options": {"refine": 10}}}, UnsupportedError, "refine is for numbers with one scale .*not fp8-e4m3-block32"),
        ({"quantize": {"method": "nf4", "scheme": "int4-g32-sym"}}, UnsupportedError, "method nf4 makes nf4, not int4-g32-sym; leave scheme out, or use method: rtn"),
        ({"quantize": {"method": "fp8", "scheme": "int4-g32-sym"}}, UnsupportedError, "method fp8 makes fp8, not int4-g32-sym; leave scheme out, or use method: rtn"),
        ({"quantize": {"method": ["smoothquant", "fp8"], "scheme": "w8a8-int8"}}, UnsupportedError, "method fp8 makes fp8, not int8-.*give an fp8 scheme, or use method: rtn"),
        ({"quantize": {"method": ["smoothquant", "gptq"], "scheme": "int4-g32-sym"}}, UnsupportedError, r"method smoothquant: int4-g32-sym: .*add.*\+int8-token"),
        ({"quantize": {**QUANTIZE, "scheme": "int4-g48-sym"}}, RecipeError, r"q_proj.*48 does not divide.*64.*32"),
        ({"quantize": {**QUANTIZE, "scheme": "int4-g32-sym@u8/tensor:f32"}}, UnsupportedError, "two-level"),
        ({"quantize": {**QUANTIZE, "scheme": "int8-channel-sym+int8-tensor"}}, UnsupportedError, "depends on the whole batch"),
        ({"quantize": {**QUANTIZE, "scheme": "int4-g32-offset"}}, UnsupportedError, "artifact cannot hold int4-g32-offset: .*no offsets"),
        ({"quantize": {"method": "nf4", "overrides": [{"match": "*.down_proj", "scheme": "w8a16"}]}}, UnsupportedError, "cannot hold .*int8-channel-sym.* together: .*nf4"),
        ({"quantize": {**QUANTIZE, "scheme": "nf4-g32"}}, UnsupportedError, "bitsandbytes holds scales as u8/g256:f32 or f32"),
        ({"quantize": {**QUANTIZE, "scheme": "mxfp4", "overrides": [{"match": "*.down_proj", "scheme": "w8a16"}]}}, UnsupportedError, "cannot multiply in float32"),
        ({"quantize": {**QUANTIZE, "scheme": "fp8-block"}}, RecipeError, r"q_proj.*activations in groups of 128 do not divide.*64"),
        ({"quantize": {**QUANTIZE, "scheme": "fp8-block"}}, RecipeError, "or set quantize.options.group_fallback: ignore$"),
        ({"quantize": {**QUANTIZE, "scheme": "fp8-block", "options": {"group_fallback": "adjust"}}}, RecipeError, "or set quantize.options.group_fallback: ignore$"),
        ({"quantize": {**QUANTIZE, "scheme": "int4-g48-sym"}}, RecipeError, "or set quantize.options.group_fallback: adjust or ignore$"),
        ({"quantize": {**QUANTIZE, "ignore": ["*.nothing"]}}, RecipeError, r"'\*.nothing' matches no linear layer.*model.layers.0"),
        ({"quantize": {**QUANTIZE, "overrides": [{"match": "down_proj", "scheme": "int8-g32-sym"}]}}, RecipeError, "'down_proj' matches no linear layer"),
        ({"quantize": {**QUANTIZE, "ignore": ["*"]}}, RecipeError, "every linear layer is ignored"),
        ({"export": [{"format": "bitsandbytes"}]}, UnsupportedError, "bitsandbytes checkpoint does not hold int4-g32-sym"),
        ({"export": [{"format": "gguf", "type": "q4_0"}], "quantize": {"method": "rtn", "scheme": "int8-g32-sym"}}, UnsupportedError, "(?i)q4_0"),
        ({"run": {"device": "cuda"}}, MissingCapabilityError, "no usable CUDA device"),
        ({"run": {"workers": 2}, "quantize": {"method": "signround", "scheme": "int4-g32-sym"}}, UnsupportedError, "workers: 2 .*signround takes gradients.*use method: gptq"),
        ({"run": {"workers": 40}, "quantize": GPTQ, "calibration": {"samples": 8}}, RecipeError, "workers: 40, but the calibration text has 8 sequences"),
        ({"run": {"memory_limit": "100MiB"}}, RecipeError, r"memory_limit: 100 MiB, but quantizing takes about \d+ MiB"),
        ({"model": {"source": "model", "revision": "v9"}}, RecipeError, "model.revision: v9 is of a model of the hub, but model is a path on this machine; remove it"),
        ({"calibration": {"source": "nosuch.jsonl"}}, DataError, "nosuch.jsonl: no such file in .*allowed are builtin"),
        ({"calibration": {"source": "model"}}, DataError, "model: this is a folder"),
        ({"calibration": {"source": "model/config.json"}}, DataError, "config.json: .json is not read as text"),
        ({"run": {"activations": "int8"}, "evaluate": {"engine": "transformers"}}, UnsupportedError, "run.activations: int8 is for the built-in runtime"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name_before_anything_is_written(tmp_path: Path, changes: dict[str, object], error: type[QforgeError], says: str) -> None:
    path = recipe(tmp_path, **changes)
    for run in (pipeline.plan, pipeline.quantize):
        with pytest.raises(error, match=says):
            run(path, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "quantize",
    [
        {**QUANTIZE, "options": {"refine": 0, "act_order": False, "error_correction": False, "scale_search": False}},
        {**GPTQ, "scheme": "nvfp4", "options": {"refine": 0}},
        {**GPTQ, "options": {"refine": 1, "fisher": True, "damping": 0.5}},
        {"method": ["smoothquant", "gptq"], "scheme": "w8a8-int8", "options": {"smoothing": 0.5, "damping": 0.1}},
        {"method": "signround", "scheme": "int4-g32-sym", "options": {"steps": 3, "refine": 1}},
        {"method": "auto", "budget": "5 bits", "options": {"damping": 0.02}},
    ],
)
def test_an_option_that_says_what_is_so_is_not_refused(tmp_path: Path, quantize: dict[str, object]) -> None:
    planned(tmp_path, quantize=quantize)


def test_a_variant_of_a_sweep_goes_without_an_option_of_other_methods(tmp_path: Path) -> None:
    """Whoever crosses methods with one set of options means the methods that have them."""
    path = recipe(tmp_path, quantize={**GPTQ, "options": {"damping": 0.5}}, evaluate={"window": 64}, sweep={"matrix": {"quantize.method": ["rtn", "gptq"]}})
    rtn, gptq = (pipeline.plan(member)[1].notes for member in load_members(path))
    assert any("damping is for methods" in note and "goes without" in note for note in rtn)
    assert not any("damping" in note for note in gptq)


def test_a_runtime_that_does_not_run_the_model_is_refused_before_work(tmp_path: Path) -> None:
    tiny.make(tmp_path / "model", "stablelm")
    path = recipe(tmp_path, evaluate={"engine": "runtime"})
    for run in (pipeline.plan, pipeline.quantize):
        with pytest.raises(UnsupportedError, match=r"evaluate\.engine: runtime, but the built-in runtime does not list this family.*; use engine: auto or transformers"):
            run(path, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_plan_says_and_refuses_what_the_run_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("The small mill stands by the river. " * 60)
    path = recipe(tmp_path, evaluate={"text": "text.txt"})
    told: list[str] = []

    class Heard(Silent):
        def note(self, text: str) -> None:
            told.append(text)

    _, plan, _ = pipeline.plan(path)
    pipeline.quantize(path, out=tmp_path / "out", progress=Heard())
    assert list(plan.notes) == told
    assert any("capped" in note for note in told)
    (tmp_path / "file").write_text("mine")
    for out in ("file", "."):  # OUT/model is the base model
        for run in (pipeline.plan, pipeline.quantize):
            with pytest.raises(OutputError, match=r"is a file|not an output folder"):
                run(path, out=tmp_path / out)
        with pytest.raises(SystemExit) as left:
            main(["quantize", "--recipe", str(path), "--dry-run", "--out", str(tmp_path / out)])
        assert left.value.code == 2
        assert "choose another --out" in capsys.readouterr().err


def test_workers_need_ray_and_a_method_that_reads_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    several = {"run": {"workers": 2}}
    plan = planned(tmp_path, **several)
    assert plan.workers == 1
    assert any("this recipe needs none: one process does the work" in note for note in plan.notes)
    plan = planned(tmp_path, quantize=GPTQ, **several)
    assert plan.workers == 2
    assert not any("workers" in note for note in plan.notes)
    assert any("fisher one process works alone" in note for note in planned(tmp_path, quantize={**GPTQ, "options": {"fisher": True}}, **several).notes)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "ray" else find(name, *more))
    with pytest.raises(MissingCapabilityError, match=r"workers: 2 needs Ray.*pip install 'qforge\[ray\]', or use workers: 1"):
        planned(tmp_path, quantize=GPTQ, **several)


def test_workers_are_counted_in_memory(tmp_path: Path) -> None:
    alone, several = (pipeline.plan(recipe(tmp_path, quantize=GPTQ, run={"workers": n}))[2].peak_bytes for n in (1, 3))
    more = {name: size for name, size in several.items() if name not in alone}
    assert {name.partition(":")[0] for name in more} == {"Ray", "3 workers"}
    assert sum(several.values()) > sum(alone.values()) + 3 * (400 << 20)
    with pytest.raises(RecipeError, match="memory_limit"):
        pipeline.plan(recipe(tmp_path, quantize=GPTQ, run={"workers": 3, "memory_limit": "1GiB"}))


def test_errors_of_rounded_activations_are_not_corrected_unless_asked(tmp_path: Path) -> None:
    def corrects(scheme: str, **more: object) -> bool:
        plan = planned(tmp_path, quantize={"method": "gptq", "scheme": scheme, **more})
        assert plan.options.error_correction == ("cross" in plan.needs)
        return plan.options.error_correction

    assert corrects("int4-g32-sym")
    assert not corrects("w8a8-int8")
    assert not corrects("w8a8-int8", overrides=[{"match": "*.down_proj", "scheme": "int8-channel-sym"}])  # rounding before it reaches it, too
    assert corrects("w8a8-int8", options={"error_correction": True})
    assert not corrects("int4-g32-sym", options={"error_correction": False})


def test_an_optional_export_that_cannot_be_made_is_listed(tmp_path: Path) -> None:
    results = pipeline.quantize(recipe(tmp_path, export=[{"format": "bitsandbytes", "optional": True}, {"format": "gptq"}]), out=tmp_path / "out")
    assert results.exports[0].path is None
    assert "does not hold int4-g32-sym" in (results.exports[0].skipped_because or "")
    assert results.exports[1].lossless is True


def test_a_run_measures_with_the_activations_that_it_names(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The small mill stands by the river, and the miller grinds wheat. " * 40)
    said = {"evaluate": {"text": str(text), "window": 64}}
    fp, int8 = (pipeline.quantize(recipe(tmp_path, **said, run={"activations": a}), out=tmp_path / "out").evaluation for a in ("fp", "int8"))
    assert [e.engine.rsplit(" ", 1)[0] for e in (fp, int8)] == ["qforge", "qforge (int8 activations)"]
    assert 0 < abs(int8.kl_mean / fp.kl_mean - 1) < 0.1
    alone = pipeline.evaluate(tmp_path / "out" / "model", text=str(text), window=64, activations="int8")
    assert alone.candidate == int8.candidate


@pytest.mark.parametrize(("fallback", "scheme"), [("adjust", "int4-g32-sym"), ("ignore", None)])
def test_group_fallback_is_said_in_the_report(tmp_path: Path, fallback: str, scheme: str | None) -> None:
    quantize = {"method": "rtn", "scheme": "int4-g128-sym", "options": {"group_fallback": fallback}, "ignore": ["lm_head"]}
    results = pipeline.quantize(recipe(tmp_path, quantize={**quantize, "scheme": "int4-g96-sym" if fallback == "adjust" else "int4-g128-sym"}), out=tmp_path / "out")
    schemes = {layer.name: layer.scheme for layer in results.layers}
    assert schemes["model.layers.0.self_attn.q_proj"] == ("int4-g64-sym" if fallback == "adjust" else None)
    assert schemes["model.layers.0.mlp.down_proj"] == ("int4-g64-sym" if fallback == "adjust" else "int4-g128-sym")
    assert any("q_proj" in w for w in results.warnings)


def test_the_last_override_wins_and_ignore_wins_over_patterns(tmp_path: Path) -> None:
    down = "model.layers.{}.mlp.down_proj"
    quantize = {
        **QUANTIZE,
        "ignore": ["lm_head", "*.0.mlp.*"],
        "overrides": [{"match": down.format(0), "scheme": "int8-g64-sym"}, {"match": "*", "scheme": "int8-g32-sym"}, {"match": "*.1.*.down_proj", "scheme": "int8-g64-sym"}],
    }
    plan = planned(tmp_path, quantize=quantize)
    schemes = {name: str(scheme) for name, scheme in plan.schemes.items()}
    assert {schemes[down.format(0)], schemes[down.format(1)]} == {"int8-g64-sym"}  # named in full; the last of two patterns
    assert {schemes[n] for n in (down.format(2), "model.layers.1.mlp.up_proj", "model.layers.0.self_attn.q_proj")} == {"int8-g32-sym"}
    assert schemes["lm_head"] == "int8-g32-sym"  # what is ignored by default is not asked to stay
    assert not {"model.layers.0.mlp.up_proj", "model.layers.0.mlp.gate_proj"} & set(schemes)
    (note,) = (n for n in plan.notes if "goes before" in n)
    assert note == "model.layers.0.mlp.gate_proj and 1 more: quantize.ignore '*.0.mlp.*' goes before the override '*'; name a layer in full to quantize it"


@pytest.mark.parametrize("more", [{}, {"kv_cache": "fp8"}])
def test_a_text_for_an_export_alone_does_not_go_through_the_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, object]) -> None:
    tiny.make(tmp_path / "model", hidden=256, intermediate=256)
    given: list[object] = []

    def stop(job: object, windows: object, *rest: object) -> None:
        given.append(windows)
        raise KeyboardInterrupt

    monkeypatch.setattr("qforge.stages.artifact.quantize_blocks", stop)
    export = [{"format": "gguf", "type": "q4_k_m"}]
    path = recipe(tmp_path, quantize={**QUANTIZE, **more}, export=export, calibration={"samples": 2, "sequence_length": 16})
    with pytest.raises(KeyboardInterrupt):
        pipeline.quantize(path, out=tmp_path / "out")
    assert given == [None]


def test_that_vllm_loads_no_quantized_head_is_said(tmp_path: Path) -> None:
    def told(**quantize: object) -> bool:
        return any("vLLM" in note and "quantize.ignore: [lm_head]" in note for note in planned(tmp_path, quantize=quantize).notes)

    assert told(method="rtn", scheme="int8-channel-sym", ignore=[])
    assert told(method="rtn", scheme="int4-g32-sym", ignore=[])
    assert not told(**QUANTIZE)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"overrides": [{"match": "*.layers.1.self_attn.k_proj", "scheme": "int8-channel-sym"}]}, "model.layers.1.self_attn.q_proj, k_proj, v_proj;"),
        ({"ignore": ["lm_head", "*.up_proj"]}, "model.layers.0.mlp.gate_proj, up_proj and 2 more;"),
        ({"overrides": [{"match": "*.down_proj", "scheme": "int8-channel-sym"}]}, None),
        ({"overrides": [{"match": "*.layers.0.self_attn.[qkv]_proj", "scheme": "int8-channel-sym"}]}, None),
    ],
)
def test_that_vllm_multiplies_linears_together_is_said(tmp_path: Path, more: dict[str, object], told: str | None) -> None:
    notes = [note for note in planned(tmp_path, quantize={**QUANTIZE, **more}).notes if "as one linear" in note]
    assert bool(notes) is (told is not None)
    assert all(str(told) in note for note in notes)


def test_rounded_activations_without_native_kernels_are_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "missing", lambda: "the native module was not built")
    with pytest.raises(UnsupportedError, match=r"activations 'int8' are rounded by the native kernels.*; use fp"):
        pipeline.quantize(recipe(tmp_path, run={"activations": "int8"}), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
