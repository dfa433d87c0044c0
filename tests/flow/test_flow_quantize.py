"""The whole flow on tiny models through the public API: every stage's output is there, is read by others, and survives being killed."""

from __future__ import annotations

import errno
import importlib
import json
import multiprocessing
import multiprocessing.process
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import tiny
import torch
from flows import logits, prose, write_recipe
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import qforge
from qforge import pipeline
from qforge.calibration.store import Piece
from qforge.cli.main import main
from qforge.engines.base import chunks
from qforge.engines.transformers_engine import TransformersEngine
from qforge.errors import DataError, ModelError, NumericalError, OutputError, QforgeError, UnsupportedError
from qforge.evaluate.compare import compare
from qforge.evaluate.sides import read
from qforge.files import sha256_tree
from qforge.machine_limits import default_threads, usable_cores
from qforge.models.model import open_model
from qforge.report.facts import gather
from qforge.report.junit import junit
from qforge.stages.pieces import BlockPieces
from qforge.text import windows
from qforge.types import Results

ROOT = Path(__file__).resolve().parents[2]


def test_every_stage_leaves_what_it_should(tmp_path: Path) -> None:
    tiny.make(tmp_path / "model")
    gates = {"perplexity_ratio": "<= 100", "size_ratio": {"limit": "<= 0.001", "on": "warn"}}
    results = qforge.quantize(write_recipe(tmp_path, gates=gates), out=tmp_path / "out")
    assert isinstance(results, Results)
    assert results.passed
    assert [g.passed for g in results.gates] == [True, False]
    out = tmp_path / "out"
    for name in ("results.json", "report.md", "report.html", "junit.xml", "model/config.json", "model/model.safetensors", "model/qforge.json", "model/tokenizer.json"):
        assert (out / name).is_file(), name
    stored = json.loads((out / "results.json").read_text())
    assert stored == json.loads(results.to_json())
    jsonschema.validate(stored, json.loads((ROOT / "docs" / "results.schema.json").read_text()), cls=jsonschema.Draft202012Validator)
    assert stored["artifact"]["sha256"] == sha256_tree(out / "model")
    e = stored["evaluation"]
    assert e["engine"].startswith("qforge")
    assert e["tokens"] == sum(c["tokens"] for c in e["clusters"]) > 500
    assert 0 < e["kl_mean"] < 1
    assert len(stored["layers"]) == 3 * 7 + 1
    assert all(layer["relative_error"] < 0.2 for layer in stored["layers"] if layer["scheme"])
    gguf, gptq = stored["exports"]
    assert gguf["lossless"] is True
    assert gptq["lossless"] is True
    assert gguf["verified_by"][0]["weights_equal"] is True
    assert str(tmp_path) not in "".join(p.read_text(errors="ignore") for p in (out / "model").rglob("*.json"))


def test_figures_equal_transformers_on_the_same_artifact(tmp_path: Path) -> None:
    tiny.make(tmp_path / "model")
    results = qforge.quantize(write_recipe(tmp_path, export=[]), out=tmp_path / "out")
    assert results.evaluation is not None
    tokenizer = open_model(str(tmp_path / "model")).tokenizer()
    ids = tokenizer((tmp_path / "evaluation.txt").read_text(), add_special_tokens=False).input_ids
    windows = [ids[i : i + 64] for i in range(0, len(ids) - 63, 64)]
    targets = torch.tensor([t for w in windows for t in w[1:]])
    p, q = (torch.log_softmax(logits(folder, windows).double(), -1) for folder in (tmp_path / "model", tmp_path / "out" / "model"))
    assert results.evaluation.tokens == len(targets)
    assert results.evaluation.reference is not None
    for figures, mine in ((results.evaluation.reference, p), (results.evaluation.candidate, q)):
        assert figures["perplexity"] == pytest.approx(float((-mine.gather(1, targets[:, None]).mean()).exp()), rel=1e-4)
    assert results.evaluation.kl_mean == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=2e-3)
    assert results.evaluation.top1_agreement == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()), abs=2e-3)


@pytest.mark.parametrize("family", ["qwen2", "gemma3_text", "phi3", "stablelm"])
def test_another_family_goes_through_the_same_flow(tmp_path: Path, family: str) -> None:
    tiny.make(tmp_path / "model", family)
    evaluate = {"text": "evaluation.txt", "window": 64, "engine": "transformers" if family != "stablelm" else "auto"}
    results = qforge.quantize(write_recipe(tmp_path, export=[], evaluate=evaluate), out=tmp_path / "out")
    assert results.evaluation is not None
    assert results.evaluation.engine.startswith("transformers")
    assert "transformers" in (tmp_path / "out" / "report.md").read_text()
    assert 0 < (results.evaluation.kl_mean or 0) < 1
    windows = [list(range(3, 40))]
    ours = torch.cat(list(qforge_scorer(tmp_path / "out").score(windows)))
    torch.testing.assert_close(ours, logits(tmp_path / "out" / "model", windows), atol=2e-3, rtol=2e-3)


def test_windows_that_only_transformers_computes_are_refused_before_work_starts(tmp_path: Path) -> None:
    """LongRoPE's long factors, which the runtime has not."""
    settings = tiny.longrope() | {"original_max_position_embeddings": 48}
    tiny.make(tmp_path / "model", "phi3", **settings)  # type: ignore[arg-type]
    evaluate = {"text": "evaluation.txt", "window": 64}
    with pytest.raises(DataError, match=r"windows have 64 tokens, and the built-in runtime computes 48; for longer sequences .*\(longrope\).*use engine: transformers"):
        qforge.quantize(write_recipe(tmp_path, export=[], evaluate=evaluate), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    results = qforge.quantize(write_recipe(tmp_path, export=[], evaluate=evaluate | {"engine": "transformers"}), out=tmp_path / "out")
    assert results.evaluation is not None
    assert results.evaluation.engine.startswith("transformers")


def qforge_scorer(folder: Path) -> TransformersEngine:
    return TransformersEngine(open_model(str(folder)))


@pytest.mark.parametrize("scheme", ["int4-g32-asym", "int8-channel-sym", "int8-g64-sym", "int4-channel-sym", "int8-channel-asym"])
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_schemes_load_in_transformers_with_the_same_weights(tmp_path: Path, scheme: str, method: str) -> None:
    tiny.make(tmp_path / "model", tied=False)
    qforge.quantize(write_recipe(tmp_path, quantize={"method": method, "scheme": scheme}, export=[], evaluate=None), out=tmp_path / "out")
    windows = [list(range(3, 60)), list(range(100, 140))]
    ours = torch.cat(list(qforge_scorer(tmp_path / "out").score(windows)))
    assert len(ours) == sum(b - a for w in windows for a, b in chunks(len(w)))
    torch.testing.assert_close(ours, logits(tmp_path / "out" / "model", windows), atol=1e-3, rtol=1e-3)


def test_a_tied_head_can_be_quantized_and_layers_can_differ(tmp_path: Path) -> None:
    tiny.make(tmp_path / "model", tied=True)
    quantize = {
        "method": "gptq",
        "scheme": "int4-g32-sym",
        "ignore": ["*.layers.0.*"],
        "overrides": [{"match": "lm_head", "scheme": "int8-g64-sym"}, {"match": "model.layers.0.mlp.down_proj", "scheme": "int8-g32-sym"}],
    }
    results = qforge.quantize(write_recipe(tmp_path, quantize=quantize, export=[]), out=tmp_path / "out")
    schemes = {layer.name: layer.scheme for layer in results.layers}
    assert schemes["lm_head"] == "int8-g64-sym"
    assert schemes["model.layers.0.mlp.down_proj"] == "int8-g32-sym"  # a name in full wins over ignore
    assert schemes["model.layers.0.mlp.up_proj"] is None
    assert schemes["model.layers.1.mlp.up_proj"] == "int4-g32-sym"
    assert results.evaluation is not None
    assert (results.evaluation.kl_mean or 9) < 0.5
    assert logits(tmp_path / "out" / "model", [[1, 2, 3]]).isfinite().all()


def test_a_second_run_does_no_work_again_and_fresh_does(tmp_path: Path) -> None:
    tiny.make(tmp_path / "model")
    recipe, out = write_recipe(tmp_path), tmp_path / "out"
    first = qforge.quantize(recipe, out=out)
    times = {p: p.stat().st_mtime_ns for p in (out / "model").rglob("*")}
    second = qforge.quantize(recipe, out=out)
    assert second.work == {"computed": 0, "resumed": first.work["computed"]}
    assert second.artifact == first.artifact
    assert second.evaluation == first.evaluation
    assert second.exports == first.exports
    assert times == {p: p.stat().st_mtime_ns for p in (out / "model").rglob("*")}
    third = qforge.quantize(recipe, out=out, fresh=True)
    assert third.work == first.work
    assert third.artifact == first.artifact


def test_a_spoiled_artifact_or_export_is_made_again(tmp_path: Path) -> None:
    tiny.make(tmp_path / "model")
    recipe, out = write_recipe(tmp_path), tmp_path / "out"
    first = qforge.quantize(recipe, out=out)
    hashes = sha256_tree(out / "model"), sha256_tree(out / "exports")
    (out / "model" / "model.safetensors").write_bytes(b"spoiled")
    shutil.rmtree(out / "exports" / "gptq")
    second = qforge.quantize(recipe, out=out)
    assert (sha256_tree(out / "model"), sha256_tree(out / "exports")) == hashes
    assert second.artifact == first.artifact
    assert 0 < second.work["computed"] < first.work["computed"]


def test_a_changed_recipe_reuses_what_it_can(tmp_path: Path) -> None:
    tiny.make(tmp_path / "model")
    out = tmp_path / "out"
    first = qforge.quantize(write_recipe(tmp_path, export=[]), out=out)
    window = qforge.quantize(write_recipe(tmp_path, export=[], evaluate={"text": "evaluation.txt", "window": 32}), out=out)
    assert window.artifact == first.artifact
    assert window.work["computed"] == 1  # the evaluation
    assert window.evaluation != first.evaluation
    damping = qforge.quantize(write_recipe(tmp_path, export=[], quantize={"method": "gptq", "scheme": "int4-g32-sym", "options": {"damping": 0.05}}), out=out)
    assert damping.artifact["sha256"] != first.artifact["sha256"]
    assert damping.work["resumed"] == 0


@pytest.mark.parametrize("rounds", [pytest.param(2), pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_any_moment_and_resumed_gives_the_same_bytes(tmp_path: Path, rounds: int) -> None:
    tiny.make(tmp_path / "model", layers=6)
    recipe = write_recipe(tmp_path)
    context = multiprocessing.get_context("forkserver")  # imports once, so that it is the work that is killed, not the imports
    context.set_forkserver_preload(["qforge.pipeline", "transformers.modeling_utils"])

    def start(out: Path) -> multiprocessing.process.BaseProcess:
        process = context.Process(target=qforge.quantize, args=(recipe,), kwargs={"out": out})
        process.start()
        return process

    def ended_well(process: multiprocessing.process.BaseProcess) -> bool:
        process.join()
        return process.exitcode == 0

    assert ended_well(start(tmp_path / "imports"))  # the server is up
    begin = time.monotonic()
    assert ended_well(start(tmp_path / "whole"))
    whole = time.monotonic() - begin
    want = sha256_tree(tmp_path / "whole" / "model"), sha256_tree(tmp_path / "whole" / "exports")
    seed, resumed = random.SystemRandom().getrandbits(32), 0
    print(f"seed {seed}, a whole run {whole:.3f} s")  # shown where the test fails
    rng = random.Random(seed)
    for i in range(rounds):
        out = tmp_path / f"killed-{i}"
        process = start(out)
        moment = rng.uniform(0.1, 1.0) * whole
        print(f"round {i} killed after {moment:.3f} s")
        time.sleep(moment)
        process.kill()
        process.join()
        assert not (out / "results.json").exists() or json.loads((out / "results.json").read_text())
        assert ended_well(start(out))
        assert (sha256_tree(out / "model"), sha256_tree(out / "exports")) == want
        resumed += json.loads((out / "results.json").read_text())["work"]["resumed"] > 0
        assert not list(out.rglob("*.part"))
    assert rounds < 20 or resumed >= 5


def test_the_model_can_write_its_own_calibration_text(tmp_path: Path) -> None:
    tiny.make(tmp_path / "model")
    calibration = {"source": "generated", "samples": 6, "sequence_length": 48}
    recipe = write_recipe(tmp_path, export=[], calibration=calibration)
    first = qforge.quantize(recipe, out=tmp_path / "out")
    assert first.calibration is not None
    assert first.calibration["source"] == "generated"
    assert first.calibration["tokens"] > 100
    again = qforge.quantize(recipe, out=tmp_path / "again")
    assert again.calibration == first.calibration  # the same seed writes the same text
    assert again.artifact == first.artifact
    resumed = qforge.quantize(recipe, out=tmp_path / "out")
    assert resumed.work["computed"] == 0


def test_the_model_can_write_more_text_than_it_is_given(tmp_path: Path) -> None:
    tiny.make(tmp_path / "model")
    given = {"source": "calibration.txt", "samples": 4, "sequence_length": 48}
    found = {}
    for more in (0, 3):
        found[more] = qforge.quantize(write_recipe(tmp_path, export=[], calibration=given | {"generated": more}), out=tmp_path / f"out{more}")
    alone, longer = found[0].calibration, found[3].calibration
    assert alone is not None
    assert longer is not None
    assert (alone["sequences"], longer["sequences"], longer["tokens"]) == (4, 7, 7 * 48)
    assert alone["sha256"] == alone["sampled_sha256"] == longer["sampled_sha256"] != longer["sha256"]
    assert found[0].artifact != found[3].artifact  # it has an effect
    again = qforge.quantize(tmp_path / "recipe.yaml", out=tmp_path / "out3")
    assert again.work["computed"] == 0
    assert again.calibration == longer


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft 0.21 with transformers 5.23
def test_an_adapter_is_merged_and_reported(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    tiny.make(tmp_path / "model", dtype=torch.float32)
    torch.manual_seed(0)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32), LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "down_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    model.save_pretrained(tmp_path / "adapter")
    want = model.merge_and_unload().state_dict()
    results = qforge.quantize(write_recipe(tmp_path, adapters=[{"source": "adapter"}], quantize={"method": "none"}, export=[]), out=tmp_path / "out")
    got = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model", dtype=torch.float32).state_dict()
    assert all(torch.allclose(got[n], w, atol=1e-6) for n, w in want.items())
    assert results.adapters[0]["tensors"] == 6
    assert results.evaluation is not None
    assert results.evaluation.base is not None
    assert results.evaluation.reference is not None
    assert results.evaluation.base["perplexity"] != results.evaluation.reference["perplexity"]
    assert results.evaluation.perplexity_ratio == pytest.approx(1, abs=1e-4)


def test_files_that_are_not_ours_are_kept(tmp_path: Path) -> None:
    tiny.make(tmp_path / "model")
    recipe = write_recipe(tmp_path, export=[], evaluate=None, quantize={"method": "rtn", "scheme": "int4-g32-sym"})
    before = sha256_tree(tmp_path)
    with pytest.raises(OutputError, match="not an output folder of qforge"):
        qforge.quantize(recipe, out=tmp_path)  # OUT/model is the base model
    other = tiny.make(tmp_path / "other")
    before = sha256_tree(tmp_path)
    with pytest.raises(OutputError, match=r"other is a model's folder, and has a config\.json in it; choose another --out"):
        qforge.quantize(recipe, out=other)
    assert sha256_tree(tmp_path) == before
    qforge.quantize(recipe, out=tmp_path / "out")
    own = tmp_path / "second.yaml"
    own.write_text(recipe.read_text().replace('"source": "model"', '"source": "out/model"'))
    with pytest.raises(QforgeError):
        qforge.quantize(own, out=tmp_path / "out")
    keep = tmp_path / "keep"
    keep.mkdir()
    (keep / "thesis.tex").write_text("mine")
    artifact = sha256_tree(tmp_path / "out" / "model")
    for format_name in ("gguf", "gptq"):
        for folder in (keep, tmp_path / "out" / "model", tmp_path / "out"):
            with pytest.raises(OutputError):
                qforge.export(tmp_path / "out", format_name, out=folder)
    assert (keep / "thesis.tex").read_text() == "mine"
    assert sha256_tree(tmp_path / "out" / "model") == artifact
    assert qforge.export(tmp_path / "out", "gptq", out=tmp_path / "new").lossless is True
    assert qforge.export(tmp_path / "out", "gguf").path == str(tmp_path / "out" / "exports" / "gguf")


def test_a_run_inside_the_models_folder_resumes(tmp_path: Path) -> None:
    model = tiny.make(tmp_path / "model")
    quick = {"export": [], "evaluate": None, "quantize": {"method": "rtn", "scheme": "int4-g32-sym"}, "calibration": "default"}
    recipe = write_recipe(model, model={"source": "."}, **quick)
    first = qforge.quantize(recipe, out=model / "runs" / "recipe")
    second = qforge.quantize(recipe, out=model / "runs" / "recipe")
    assert second.work["computed"] == 0
    assert second.artifact["sha256"] == first.artifact["sha256"]
    before = sha256_tree(tmp_path)
    with pytest.raises(OutputError, match=r"model is the folder of '\.', which the run reads; choose another --out"):
        qforge.quantize(recipe, out=model)
    own = write_recipe(tmp_path, model={"source": "model/runs/recipe"}, **quick)  # a run's folder stands for its model
    with pytest.raises(OutputError, match=r"the run reads model/runs/recipe, which lies in .*, where it writes"):
        qforge.quantize(own, out=model / "runs" / "recipe")
    own.unlink()
    for name in ("calibration.txt", "evaluation.txt"):
        (tmp_path / name).unlink()
    assert sha256_tree(tmp_path) == before


def test_words_of_a_recipe_are_no_paths(tmp_path: Path) -> None:
    """`builtin` is qforge's text whatever folder has that name."""
    tiny.make(tmp_path / "model")
    recipe = write_recipe(tmp_path, export=[], evaluate={"text": "evaluation.txt", "window": 64}, calibration={"source": "builtin", "samples": 8, "sequence_length": 64})
    for _ in range(2):
        qforge.quantize(recipe, out=tmp_path / "builtin")


def test_an_export_is_named_after_its_model(tmp_path: Path) -> None:
    """A dot in a folder's name begins no ending."""
    model = tiny.make(tmp_path / "model")
    (tmp_path / "out").mkdir()
    quick = {"export": [], "evaluate": None, "quantize": {"method": "rtn", "scheme": "int4-g32-sym"}, "calibration": "default"}
    qforge.quantize(write_recipe(tmp_path, **quick), out=tmp_path / "out")
    named = shutil.copytree(tmp_path / "out" / "model", tmp_path / "elsewhere" / "Q-1.7B-Instruct")
    assert qforge.export(named, "gptq").path == str(named.parent / "Q-1.7B-Instruct-gptq")
    file = shutil.copy(Path(qforge.export(model, "gguf", type="f32").path) / "model-f32.gguf", tmp_path / "elsewhere" / "Q-1.7B.gguf")
    assert qforge.export(file, "gguf", type="f16").path == str(named.parent / "Q-1.7B-gguf")


def test_a_second_export_stands_beside_the_runs_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.make(tmp_path / "model")
    out = tmp_path / "out"
    qforge.quantize(write_recipe(tmp_path, evaluate=None, quantize={"method": "rtn", "scheme": "int4-g32-sym"}, export=[{"format": "gguf", "type": "q4_0"}]), out=out)
    own = sha256_tree(out / "exports" / "gguf")
    places = {kind: qforge.export(out, "gguf", type=kind).path for kind in (None, "f32", "q4_0")}
    assert places == {None: str(out / "exports" / "gguf-auto"), "f32": str(out / "exports" / "gguf-f32"), "q4_0": str(out / "exports" / "gguf")}
    assert sha256_tree(out / "exports" / "gguf") == own
    assert qforge.export(out, "gptq").path == str(out / "exports" / "gptq")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(importlib.import_module("qforge.export.gguf"), "_write_tensors", full)
    with pytest.raises(OutputError, match="disk is full"):
        qforge.export(out, "gguf", type="q4_0")
    assert sha256_tree(out / "exports" / "gguf") == own
    assert sorted(p.name for p in (out / "exports").iterdir()) == ["gguf", "gguf-auto", "gguf-f32", "gptq"]


def test_what_another_recipe_left_is_removed(tmp_path: Path) -> None:
    tiny.make(tmp_path / "model")
    out = tmp_path / "out"
    qforge.quantize(write_recipe(tmp_path, evaluate=None), out=out)
    qforge.quantize(write_recipe(tmp_path, evaluate=None, export=[{"format": "gptq"}]), out=out)
    assert [p.name for p in (out / "exports").iterdir()] == ["gptq"]
    qforge.quantize(write_recipe(tmp_path, evaluate=None, export=[], quantize={"method": "rtn", "scheme": "int8-g32-sym"}), out=out)
    assert not (out / "exports").exists() or not list((out / "exports").iterdir())


def test_what_is_evaluated_decides_no_byte_of_the_artifact(tmp_path: Path) -> None:
    """Nor where the texts lie."""
    found = []
    for name, words in (("a", 1500), ("elsewhere", 2000)):
        (tmp_path / name).mkdir()
        tiny.make(tmp_path / name / "model")
        text = str(tmp_path / name / "calibration.txt")
        recipe = write_recipe(tmp_path / name, export=[], calibration={"source": text, "samples": 40, "sequence_length": 64})
        (tmp_path / name / "evaluation.txt").write_text(prose(3, words).upper() if name == "a" else "wort " * words)
        found.append(qforge.quantize(recipe, out=tmp_path / name / "out"))
    likeness = [(r.calibration or {})["likeness"] for r in found]
    assert likeness[0] != likeness[1]
    assert "another language" in likeness[1]["warning"]
    assert found[0].artifact["sha256"] == found[1].artifact["sha256"]


def test_the_artifact_names_the_recipe_that_made_it(tmp_path: Path) -> None:
    """A recipe that gives the same integers may still be another one."""
    tiny.make(tmp_path / "model")
    for pattern in ("lm_head", "lm_*"):
        recipe = write_recipe(tmp_path, export=[], evaluate=None, quantize={"method": "rtn", "scheme": "int4-g32-sym", "ignore": [pattern]})
        results = qforge.quantize(recipe, out=tmp_path / "out")
        assert json.loads((tmp_path / "out" / "model" / "qforge.json").read_text())["quantize"] == results.recipe["quantize"]
        assert results.artifact["sha256"] == sha256_tree(tmp_path / "out" / "model")


def test_an_optional_export_does_not_take_a_required_one_with_it(tmp_path: Path) -> None:
    tiny.make(tmp_path / "model")
    exports = [{"format": "gguf", "type": "q4_0", "optional": True}, {"format": "gguf", "type": "f32"}]
    results = qforge.quantize(write_recipe(tmp_path, evaluate=None, quantize={"method": "rtn", "scheme": "int8-g32-sym"}, export=exports), out=tmp_path / "out")
    assert results.exports[0].path is None
    assert results.exports[1].lossless is True


def test_what_a_type_rounds_is_not_lossless_and_no_failure(tmp_path: Path) -> None:
    tiny.make(tmp_path / "model")
    results = qforge.quantize(write_recipe(tmp_path, evaluate=None, export=[{"format": "gguf", "type": "f16"}]), out=tmp_path / "out")
    assert results.passed
    assert results.exports[0].lossless is False
    told = gather(json.loads(results.to_json()))
    assert any("NOT lossless: rounded to 16 bits" in cell for table in told.tables for row in table.rows for cell in row)
    assert 'failures="0"' in junit(told)
    with pytest.raises(SystemExit) as ended:
        main(["export", str(tmp_path / "out"), "--format", "gguf", "--type", "bf16", "--out", str(tmp_path / "bf16")])
    assert not ended.value.code


def test_a_run_that_finds_all_work_done_states_what_the_work_took(tmp_path: Path) -> None:
    tiny.make(tmp_path / "model")
    recipe = write_recipe(tmp_path, export=[])
    first = qforge.quantize(recipe, out=tmp_path / "out")
    again = qforge.quantize(recipe, out=tmp_path / "out")
    assert again.timings["quantize"] == first.timings["quantize"]
    assert again.peak_rss_bytes >= max(v for k, v in first.memory.items() if k.startswith("peak"))


def test_a_model_that_brings_its_own_code_is_quantized_and_takes_it_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    tiny.make(tmp_path / "plain")
    source = tiny.make(tmp_path / "model")
    config = json.loads((source / "config.json").read_text())
    own = {"model_type": "tiny-own", "auto_map": {"AutoConfig": "own_config.OwnConfig", "AutoModelForCausalLM": "own_model.OwnForCausalLM"}, "architectures": ["OwnForCausalLM"]}
    (source / "config.json").write_text(json.dumps(config | own))
    (source / "own_config.py").write_text('from transformers import LlamaConfig\n\n\nclass OwnConfig(LlamaConfig):\n    model_type = "tiny-own"\n')
    code = "from transformers import LlamaForCausalLM\n\nfrom .own_config import OwnConfig\n\n\nclass OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    (source / "own_model.py").write_text(code)
    evaluate = {"text": "evaluation.txt", "window": 64, "engine": "transformers", "exports": True}
    results, plain = (
        qforge.quantize(write_recipe(tmp_path, model={"source": name, "trust_remote_code": True}, export=[{"format": "gptq"}], evaluate=evaluate), out=tmp_path / f"out-{name}")
        for name in ("model", "plain")
    )
    assert results.evaluation is not None
    assert plain.evaluation is not None
    assert results.evaluation.kl_mean == plain.evaluation.kl_mean
    assert results.exports[0].lossless
    assert results.exports[0].measured is not None
    for folder in (tmp_path / "out-model" / "model", tmp_path / "out-model" / "exports" / "gptq"):
        assert (folder / "own_model.py").read_text() == code
        assert type(open_model(str(folder), trust_remote_code=True).config).__name__ == "OwnConfig"
    (source / "own_model.py").write_text(code + "\n# another\n")
    assert open_model(str(source), trust_remote_code=True).fingerprint() != results.model["sha256"]
    with pytest.raises(ModelError, match="only where the recipe says trust_remote_code: true"):
        qforge.quantize(write_recipe(tmp_path, export=[]), out=tmp_path / "other")


def test_the_threads_of_a_recipe_are_those_of_all_that_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our runtime, which scores, and other engines take `default_threads`."""
    tiny.make(tmp_path / "model")
    measure, started = pipeline.evidence.measure_artifact, list[int]()

    def scored(*given: Any, **named: Any) -> Any:
        started.append(default_threads())
        return measure(*given, **named)

    monkeypatch.setattr(pipeline.evidence, "measure_artifact", scored)
    qforge.quantize(write_recipe(tmp_path, quantize={"method": "rtn", "scheme": "int4-g32-sym"}, export=[], run={"threads": 7}), out=tmp_path / "out")
    assert started == [7]
    assert default_threads() == usable_cores()


def test_a_gate_whose_figure_no_such_tokenizer_gives_is_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.make(tmp_path / "model")
    monkeypatch.setattr(windows, "_offsets", lambda *_: None)
    quantize = {"method": "rtn", "scheme": "int4-g32-sym"}
    with pytest.raises(DataError, match=r"gates.bits_per_byte: .*use perplexity"):
        qforge.quantize(write_recipe(tmp_path, quantize=quantize, export=[], gates={"bits_per_byte": "<= 9"}), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert qforge.quantize(write_recipe(tmp_path, quantize=quantize, export=[], gates={"bits_per_byte": {"limit": "<= 9", "on": "off"}}), out=tmp_path / "out").passed


def test_an_engine_whose_folder_has_no_text_of_its_own_asks_for_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").touch()
    with pytest.raises(UnsupportedError, match=r"onnxruntime needs a model to be compared with .--against."):
        qforge.evaluate(tmp_path, engine="onnxruntime")


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.norm.weight"])
def test_a_damaged_tensor_outside_the_linears_is_refused(tmp_path: Path, name: str) -> None:
    tiny.make(tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors[name].view(-1)[0] = float("nan")
    save_file(tensors, tmp_path / "model" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NumericalError, match="NaN"):
        qforge.quantize(write_recipe(tmp_path, evaluate=None, export=[], quantize={"method": "rtn", "scheme": "int4-g32-sym"}), out=tmp_path / "out")
    assert not (tmp_path / "out" / "model").exists()


@pytest.mark.parametrize("scheme", ["int4-g32-sym", "int4-g32-asym", "int8-g32-sym"])
def test_an_exported_file_measures_as_the_artifact_does(tmp_path: Path, scheme: str) -> None:
    tiny.make(tmp_path / "model")
    results = qforge.quantize(write_recipe(tmp_path, quantize={"method": "rtn", "scheme": scheme}), out=tmp_path / "out")
    assert results.evaluation is not None
    gguf = next((tmp_path / "out" / "exports" / "gguf").glob("*.gguf"))
    for model in (tmp_path / "out", tmp_path / "out" / "exports" / "gptq", gguf):
        again = qforge.evaluate(model, text=str(tmp_path / "evaluation.txt"), window=64)
        assert again.candidate["perplexity"] == pytest.approx(results.evaluation.candidate["perplexity"], rel=1e-6), model


@pytest.mark.parametrize("head", [{}, {"overrides": [{"match": "lm_head", "scheme": "int8-g32-sym"}]}], ids=["blocks", "blocks and head"])
def test_weighed_outputs_survive_a_kill_and_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: dict[str, Any]) -> None:
    tiny.make(tmp_path / "model")
    recipe = write_recipe(tmp_path, quantize={"method": "gptq", "scheme": "int4-g32-sym", "options": {"fisher": True}, **head}, evaluate=None)
    whole = qforge.quantize(recipe, out=tmp_path / "whole")
    assert not [p for p in (tmp_path / "whole" / "work").iterdir() if p.name.startswith("outputs-")]
    calls: list[int] = []
    saved = BlockPieces._save

    def dying(self: BlockPieces, index: int, piece: Piece) -> None:
        calls.append(index)
        if len(calls) == 2:
            raise KeyboardInterrupt
        saved(self, index, piece)

    with monkeypatch.context() as patch:
        patch.setattr(BlockPieces, "_save", dying)
        with pytest.raises(KeyboardInterrupt):
            qforge.quantize(recipe, out=tmp_path / "killed")
    assert [p for p in (tmp_path / "killed" / "work").iterdir() if p.name.startswith("outputs-")]
    with monkeypatch.context() as patch:
        patch.setattr("qforge.calibration.fisher.gather", None)  # not measured again
        assert qforge.quantize(recipe, out=tmp_path / "killed").artifact["sha256"] == whole.artifact["sha256"]
    plain = write_recipe(tmp_path, quantize={"method": "gptq", "scheme": "int4-g32-sym", **head}, evaluate=None)
    assert qforge.quantize(plain, out=tmp_path / "plain").artifact["sha256"] != whole.artifact["sha256"]


@pytest.mark.parametrize(("family", "settings", "layers"), [("falcon", {"new_decoder_architecture": True}, 8), ("gptj", {"rotary_dim": 8, "tied": False}, 12)])
def test_a_family_whose_blocks_give_tuples_goes_from_recipe_to_result(tmp_path: Path, family: str, settings: dict[str, Any], layers: int) -> None:
    tiny.make(tmp_path / "model", family, layers=2, **settings)
    results = qforge.quantize(write_recipe(tmp_path, export=[]), out=tmp_path / "out")
    assert results.evaluation is not None
    assert 0 < (results.evaluation.kl_mean or 0.0) < 1
    assert sum(layer.scheme is not None for layer in results.layers) == layers
    window = list(range(3, 60))
    ours = torch.cat(list(TransformersEngine(open_model(str(tmp_path / "out"))).score([window])))
    torch.testing.assert_close(ours, logits(tmp_path / "out" / "model", [window]), atol=2e-4, rtol=2e-4)


def test_a_badly_broken_model_is_a_failed_gate_and_a_report(tmp_path: Path) -> None:
    folder = tiny.make(tmp_path / "model", layers=2, tied=False)
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t * 300 if n == "lm_head.weight" else t for n, t in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    recipe = write_recipe(tmp_path, quantize={"method": "rtn", "scheme": "int2-channel-sym"}, export=[], gates={"perplexity_ratio": "<= 1.1"})
    results = qforge.quantize(recipe, out=tmp_path / "out")
    assert not results.passed
    stored = json.loads((tmp_path / "out" / "results.json").read_text(), parse_constant=pytest.fail)
    assert stored["evaluation"]["candidate"]["nll"] > 700
    assert stored["evaluation"]["perplexity_ratio"] > 1e6
    assert (tmp_path / "out" / "report.html").is_file()
    assert not compare(read(tmp_path / "out" / "results.json"), read(tmp_path / "out" / "results.json"), ["perplexity <= 10"]).passed
