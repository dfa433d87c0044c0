"""Damage on purpose: what notices it, and what is blamed; and honest runs that raise no alarm."""

from __future__ import annotations

import html
import itertools
import json
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from flows import prose, write_recipe
from gguf import GGUFWriter
from peft import LoraConfig, get_peft_model
from real_models import STORIES, needs_stories
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import qforge
from qforge import pipeline
from qforge.cli.main import main
from qforge.engines import llama_cpp
from qforge.engines.base import chunks
from qforge.engines.runtime_engine import RuntimeEngine
from qforge.engines.transformers_engine import TransformersEngine
from qforge.errors import DataError
from qforge.evaluate.compare import Comparison, compare
from qforge.evaluate.divergence import evaluate
from qforge.evaluate.sides import parse
from qforge.export.agreement import EXACT_KL
from qforge.export.gptq import GptqExporter
from qforge.export.verify_checkpoint import verify_words
from qforge.models.lora import with_adapters
from qforge.models.model import open_model
from qforge.report import markdown
from qforge.report.facts import gather
from qforge.report.junit import junit
from qforge.search.blame import blame
from qforge.text.documents import documents, from_texts
from qforge.text.windows import EvaluationWindows, evaluation_windows
from qforge.types import Evaluation, Results

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")]
Tensors = dict[str, torch.Tensor]
TARGET = "model.layers.1.mlp.up_proj"


def quantized(folder: Path, scheme: str = "int8-g32-sym", export: list[dict[str, str]] | None = None, **changes: object) -> Results:
    tiny.make(folder / "model")
    recipe = write_recipe(folder, quantize={"method": "rtn", "scheme": scheme}, export=export or [], **changes)
    (folder / "evaluation.txt").write_text(prose(2, 6000))
    return qforge.quantize(recipe, out=folder / "out")


def measured(folder: Path) -> Evaluation:
    return pipeline.evaluate(folder / "out" / "model", against=folder / "model", text=str(folder / "evaluation.txt"), window=64, engine="transformers")


def held(before: Evaluation, after: Evaluation) -> Comparison:
    return compare(parse(json.dumps(asdict(before)), "before"), parse(json.dumps(asdict(after)), "after"))


def honest_gates(kl_mean: float | None) -> list[str]:
    """What honest runs with another calibration keep, and no sabotage does: one percent of the perplexity, a tenth of the divergence, two percent of the agreement."""
    assert kl_mean is not None
    return ["perplexity_ratio <= 1.01", f"kl_mean_change <= {0.1 * kl_mean}", "top1_agreement_change >= -0.02"]


def caught(before: Evaluation, after: Evaluation) -> bool:
    """By a comparison without gates, and by the gates that no honest run fails."""
    sides = (parse(json.dumps(asdict(side)), name) for side, name in ((before, "before"), (after, "after")))
    return not held(before, after).passed and not compare(*sides, honest_gates(before.kl_mean)).passed


def verdicts(found: Comparison) -> dict[str, str]:
    return {r.name: r.verdict.word for r in found.rows}


def tamper(folder: Path, change: Callable[[Tensors], None]) -> None:
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    change(tensors)
    save_file({n: t.contiguous() for n, t in tensors.items()}, file, metadata={"format": "pt"})


def ids(folder: Path) -> list[list[int]]:
    return windows(folder).ids


def windows(folder: Path) -> EvaluationWindows:
    return evaluation_windows(from_texts("t", [(folder / "evaluation.txt").read_text()]), tiny.tokenizer(), 64)


def test_scales_of_one_layer_two_percent_off(tmp_path: Path) -> None:
    quantized(tmp_path)
    before = measured(tmp_path)
    shutil.copytree(tmp_path / "out" / "model", tmp_path / "baseline")
    tamper(tmp_path / "out" / "model", lambda t: t[f"{TARGET}.weight_scale"].mul_(1.02))
    after = measured(tmp_path)
    assert verdicts(held(before, after))["kl_mean"] == "worse"
    assert caught(before, after)
    guilty = blame(open_model(str(tmp_path / "baseline")), open_model(str(tmp_path / "out" / "model")), ids(tmp_path))
    assert [p.name for p in guilty.parts] == ["model.layers.1", TARGET]
    assert all(p.returned == pytest.approx(1.0) for p in guilty.parts)


def test_a_wrong_rope_base(tmp_path: Path) -> None:
    quantized(tmp_path)
    before = measured(tmp_path)
    file = tmp_path / "out" / "model" / "config.json"
    config = json.loads(file.read_text())
    config["rope_parameters"]["rope_theta"] *= 50
    file.write_text(json.dumps(config))
    assert caught(before, measured(tmp_path))
    guilty = blame(open_model(str(tmp_path / "model")), open_model(str(tmp_path / "out" / "model")), ids(tmp_path))
    assert "rope_parameters" in guilty.words
    assert "no part's weights explain it" in guilty.words


@pytest.mark.parametrize("sabotage", ["zero point of one group", "two heads swapped"])
def test_an_export_that_holds_other_weights_fails_the_run(tmp_path: Path, sabotage: str) -> None:
    results = quantized(tmp_path, "int4-g32-asym", [{"format": "gptq"}])
    assert results.passed
    folder = tmp_path / "out" / "exports" / "gptq"
    artifact = open_model(str(tmp_path / "out" / "model"))
    assert verify_words(folder, artifact).weights_equal
    name = TARGET if sabotage.startswith("zero") else "model.layers.1.self_attn.q_proj"

    def change(t: Tensors) -> None:
        if sabotage.startswith("zero"):
            t[f"{name}.qzeros"][1, 2] ^= 1 << 8  # the third of eight packed zero points
        else:
            heads = t[f"{name}.qweight"].reshape(t[f"{name}.qweight"].shape[0], 4, -1)
            t[f"{name}.qweight"] = heads[:, [1, 0, 2, 3]].reshape(t[f"{name}.qweight"].shape)

    tamper(folder, change)
    check = verify_words(folder, artifact)
    assert check.weights_equal is False
    assert check.note is not None
    assert name in check.note
    failed = replace(results, exports=[replace(results.exports[0], verified_by=[check])])
    assert not failed.passed
    assert gather(json.loads(failed.to_json())).verdict == "FAILED: export gptq"


class _WithBos:
    """A scorer whose engine puts `count` tokens too many (or too few) before every window."""

    name, version = "sabotaged", "1"

    def __init__(self, engine: TransformersEngine, count: int) -> None:
        self._engine, self._count = engine, count

    def score(self, windows: list[list[int]]) -> Iterator[torch.Tensor]:
        shifted = [[0] * self._count + w for w in windows] if self._count > 0 else [[5, *w[1:]] for w in windows]
        pieces = self._engine.score(shifted)
        for window, fed in zip(windows, shifted, strict=True):
            rows = torch.cat([next(pieces) for _ in chunks(len(fed))])[max(0, self._count) :]
            for start, stop in chunks(len(window)):
                yield rows[start:stop]


@pytest.mark.parametrize("count", [1, -1], ids=["doubled", "dropped"])
def test_a_bos_doubled_or_dropped_by_an_engine(tmp_path: Path, count: int) -> None:
    quantized(tmp_path)
    plain = windows(tmp_path)
    text = replace(plain, ids=[[0, *w] for w in plain.ids])
    model, artifact = open_model(str(tmp_path / "model")), open_model(str(tmp_path / "out" / "model"))
    before = evaluate(TransformersEngine(artifact), TransformersEngine(model), text)
    after = evaluate(_WithBos(TransformersEngine(artifact), count), TransformersEngine(model), text)
    assert caught(before, after)
    assert held(before, after).changed == {"engines": [f"engine: {before.engine} -> sabotaged 1"]}
    first, last = after.kl_by_position[0], after.kl_by_position[-1]
    if count > 0:  # two equal first tokens attend as one does; what follows sees all others one position further
        assert first.kl_mean == pytest.approx(before.kl_by_position[0].kl_mean, rel=1e-3)
        assert all(p.kl_mean > 30 * was.kl_mean for p, was in list(zip(after.kl_by_position, before.kl_by_position, strict=True))[1:])
    else:  # hurts most where the window begins
        assert first.kl_mean > 3 * last.kl_mean
    assert all(p.returned <= 0 for p in blame(model, artifact, text.ids, tokens=10**6).parts if p.kl_mean > before.kl_mean)  # type: ignore[operator]


@pytest.mark.parametrize("sabotage", ["a BOS too many", "no first token"])
def test_an_engine_that_feeds_other_tokens_fails_the_gate_and_is_blamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sabotage: str) -> None:
    """The whole command: the gate fails, and what is blamed is neither a layer nor a setting, but the engine; without the sabotage the engine is not named."""
    gates = {"kl_mean": "<= 0.0001"}
    tiny.make(tmp_path / "model")
    recipe = str(write_recipe(tmp_path, quantize={"method": "rtn", "scheme": "int8-g32-sym"}, export=[], gates=gates))

    def blamed(out: str) -> Any:
        with pytest.raises(SystemExit) as left:
            main(["quantize", "--recipe", recipe, "--out", str(tmp_path / out)])
        assert left.value.code == 1
        return json.loads((tmp_path / out / "results.json").read_text())

    honest = blamed("honest")
    assert honest["blame"]["parts"][0]["name"].startswith("model.layers.")
    score = RuntimeEngine.score

    def sabotaged(self: RuntimeEngine, windows: list[list[int]]) -> Iterator[torch.Tensor]:
        fed = [[0, *w] for w in windows] if "BOS" in sabotage else [[5, *w[1:]] for w in windows]
        pieces = score(self, fed)
        for window, other in zip(windows, fed, strict=True):
            rows = torch.cat([next(pieces) for _ in chunks(len(other))])[len(other) - len(window) :]
            yield from (rows[start:stop] for start, stop in chunks(len(window)))

    monkeypatch.setattr(RuntimeEngine, "score", sabotaged)
    results = blamed("sabotaged")
    assert results["artifact"]["sha256"] == honest["artifact"]["sha256"]
    first = results["blame"]["parts"][0]
    assert first["name"].startswith("the engine (qforge ")
    assert first["returned"] > 0.9
    assert first["kl_mean"] == pytest.approx(honest["blame"]["kl_mean"])
    told, pages = results["blame"]["words"], {name: (tmp_path / "sabotaged" / name).read_text() for name in ("report.html", "report.md")}
    assert told.startswith(first["name"])
    assert told in html.unescape(pages["report.html"])
    assert markdown.words(told) in pages["report.md"]


def german(seed: int, words: int) -> str:
    """Another language, of our own making."""
    rng = random.Random(seed)
    frequent, rare = (
        ["der", "die", "das", "und", "ist", "nicht", "ein", "eine", "mit", "auf", "von", "zu", "sie", "er", "es", "wenn", "dann", "aber"],
        ["Mühle", "Fluss", "Weizen", "Dorf", "Sturm", "Fenster", "Lampe", "Geschichte", "Morgen", "Woche", "mahlt"],
    )
    return " ".join(rng.choice(frequent) if rng.random() < 0.6 else rng.choice(rare) for _ in range(words))


@pytest.mark.parametrize("kind", ["tiny", pytest.param("stories15M", marks=needs_stories)])
def test_a_calibration_text_in_another_language(tmp_path: Path, kind: str) -> None:
    """The divergence is worse than with honest text; the comparison says that the text changed and what is wrong with it; the run warns, and its report gives that as a reason."""
    if kind == "tiny":
        tiny.make(tmp_path / "model")
    source = "model" if kind == "tiny" else str(STORIES.resolve())
    found: dict[str, Results] = {}
    for name, text in (("honest", prose(5, 4000)), ("foreign", german(5, 4000))):
        calibration = {"source": f"{name}.txt", "samples": 36 if kind == "tiny" else 12, "sequence_length": 128}
        gates = {"kl_mean": {"limit": "<= 1e-6", "on": "warn"}}
        recipe = write_recipe(tmp_path, model={"source": source}, calibration=calibration, export=[], evaluate={"text": "evaluation.txt", "window": 128}, gates=gates)
        (tmp_path / f"{name}.txt").write_text(text)
        (tmp_path / "evaluation.txt").write_text(prose(2, 2500))
        found[name] = qforge.quantize(recipe, out=tmp_path / name)
    honest, foreign = (gather(json.loads(found[n].to_json())) for n in ("honest", "foreign"))
    told = [w for w in found["foreign"].warnings if "reads like another language" in w]
    assert len(told) == 1
    assert told[0].startswith("foreign.txt: ")
    assert f"calibration: {told[0]}" in foreign.reasons
    assert not [w for w in (*found["honest"].warnings, *honest.reasons) if "another language" in w]
    sides = [parse(found[n].to_json(), n) for n in ("honest", "foreign")]
    verdict = compare(*sides)
    assert verdicts(verdict)["kl_mean"] == "worse"
    assert not verdict.passed
    assert not compare(*sides, honest_gates(sides[0].evaluation["kl_mean"])).passed
    assert f"calibration of the candidate: {told[0]}" in verdict.notes
    assert any(line.startswith("calibration text:") for line in verdict.changed["data"])


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    quantized(tmp_path)
    before = measured(tmp_path)
    file = tmp_path / "out" / "model" / "tokenizer.json"
    raw = json.loads(file.read_text())
    raw["model"]["merges"] = raw["model"]["merges"][:5]
    file.write_text(json.dumps(raw))
    with pytest.raises(DataError, match="their tokenizers differ"):
        held(before, measured(tmp_path))


def test_a_missing_chat_template_is_named(tmp_path: Path) -> None:
    quantized(tmp_path)
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": prose(3, 40)}]}) + "\n")
    model = tmp_path / "out" / "model"
    assert documents("chat.jsonl", role="evaluation", folder=tmp_path, tokenizer=open_model(str(model)).tokenizer()).texts[0].startswith("<|im_start|>")
    for file in (model / "chat_template.jinja", model / "tokenizer_config.json"):
        if file.suffix == ".jinja":
            file.unlink(missing_ok=True)
        elif file.exists():
            file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "chat_template"}))
    with pytest.raises(DataError, match="chat template"):
        pipeline.evaluate(model, text=str(tmp_path / "chat.jsonl"))


def changed_asset(folder: Path, name: str, change: Callable[[dict[str, Any]], None]) -> None:
    raw = json.loads((folder / name).read_text())
    change(raw)
    (folder / name).write_text(json.dumps(raw))


def dropped_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    changed_asset(folder, "tokenizer_config.json", lambda raw: raw.pop("chat_template", None))


def other_merges(folder: Path) -> None:
    changed_asset(folder, "tokenizer.json", lambda raw: raw["model"].update(merges=raw["model"]["merges"][:5]))


def doubled_bos(folder: Path) -> None:
    """A tokenizer that puts a BOS before every text."""
    bos = {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
    template = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": bos["id"], "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]}
    template |= {"pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}], "special_tokens": {bos["id"]: bos}}
    changed_asset(folder, "tokenizer.json", lambda raw: raw.update(post_processor=template))


def other_end(folder: Path) -> None:
    changed_asset(folder, "tokenizer_config.json", lambda raw: raw.update(eos_token="<|im_end|>"))


TEXT_SABOTAGE = {
    dropped_template: "it has no chat template",
    other_merges: "texts as other tokens",
    doubled_bos: "as [0] instead of []",
    other_end: "its EOS token is 2 instead of 0",
}


@pytest.mark.parametrize("sabotage", TEXT_SABOTAGE)
def test_an_export_that_reads_text_otherwise_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sabotage: Callable[[Path], None]) -> None:
    """Its writer loses the template, another tokenizer's merges, a BOS too many, another end: the command fails and names the export, the other export passes."""
    write = GptqExporter.write

    def sabotaged(self: GptqExporter, model: Any, folder: Path) -> list[Path]:
        paths = write(self, model, folder)
        sabotage(folder)
        return paths

    monkeypatch.setattr(GptqExporter, "write", sabotaged)
    results = quantized(tmp_path, "int4-g32-sym", [{"format": "gptq"}, {"format": "awq"}])
    assert not results.passed
    found = {e.format: [v for v in e.verified_by if v.text_equal is not None] for e in results.exports}
    assert [v.text_equal for v in found["awq"]] == [True]
    assert [v.text_equal for v in found["gptq"]] == [False]
    told = gather(json.loads(results.to_json()))
    assert told.verdict == "FAILED: export gptq"
    assert told.reasons[0].startswith("export gptq does not read text as the artifact does: ")
    assert TEXT_SABOTAGE[sabotage] in told.reasons[0]


@pytest.mark.skipif(llama_cpp.missing() is not None, reason="llama.cpp is not installed")
@pytest.mark.parametrize("sabotage", ["chat template", "BOS", "merges"])
def test_a_gguf_file_that_reads_text_otherwise_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sabotage: str) -> None:
    if sabotage == "chat template":
        monkeypatch.setattr(GGUFWriter, "add_chat_template", lambda self, template: None)
    elif sabotage == "BOS":
        write = GGUFWriter.add_add_bos_token
        monkeypatch.setattr(GGUFWriter, "add_add_bos_token", lambda self, value: write(self, not value))
    else:
        merges = GGUFWriter.add_token_merges
        monkeypatch.setattr(GGUFWriter, "add_token_merges", lambda self, found: merges(self, found[:5]))
    results = quantized(tmp_path, "int4-g32-sym", [{"format": "gguf"}])
    assert not results.passed
    (check,) = (v for v in results.exports[0].verified_by if v.text_equal is not None)
    assert check.note is not None
    assert {"chat template": "it has no chat template", "BOS": "as [0] instead of []", "merges": "texts as other tokens"}[sabotage] in check.note
    monkeypatch.undo()
    assert qforge.quantize(tmp_path / "recipe.yaml", out=tmp_path / "honest").passed


@pytest.mark.skipif(llama_cpp.missing() is not None, reason="llama.cpp is not installed")
@pytest.mark.parametrize("kind", ["f32", "q4_0"])
def test_an_export_that_computes_otherwise_in_fp32_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Its weights are equal and its rotary base is another one; where llama.cpp rounds activations, no bound says so."""
    base = GGUFWriter.add_rope_freq_base
    monkeypatch.setattr(GGUFWriter, "add_rope_freq_base", lambda self, theta: base(self, theta / 100))
    results = quantized(tmp_path, "int4-g32-sym", [{"format": "gguf", "type": kind}])
    (ran,) = (v for v in results.exports[0].verified_by if v.executed)
    assert ran.kl_mean is not None
    assert ran.kl_mean > EXACT_KL
    assert ran.weights_equal
    assert ran.kl_bound == (EXACT_KL if kind == "f32" else None)
    assert results.passed == (kind != "f32")
    told = gather(json.loads(results.to_json()))
    if kind == "f32":
        assert told.verdict == "FAILED: export gguf"
        assert told.reasons[0].startswith("export gguf does not compute what our runtime does: a KL divergence of ")
        assert 'failures="1"' in junit(told)
    monkeypatch.undo()
    assert qforge.quantize(tmp_path / "recipe.yaml", out=tmp_path / "honest").passed


class _Peft:
    """The base with its adapter beside it, not merged: peft's own arithmetic."""

    name, version = "peft", "1"

    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.no_grad()
    def score(self, windows: list[list[int]]) -> Iterator[torch.Tensor]:
        for window in windows:
            rows = self._model(input_ids=torch.tensor([window])).logits[0]
            for start, stop in chunks(len(window)):
                yield rows[start:stop].float()


def test_an_adapter_merged_twice(tmp_path: Path) -> None:
    tiny.make(tmp_path / "model")
    torch.manual_seed(7)
    wrapped = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval(), LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"])
    )
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    wrapped.save_pretrained(tmp_path / "adapter")
    (tmp_path / "evaluation.txt").write_text(prose(2, 3000))
    text, base = windows(tmp_path), open_model(str(tmp_path / "model"))
    once, twice = (with_adapters(base, [("adapter", 1.0)] * n, folder=tmp_path) for n in (1, 2))
    truth = _Peft(wrapped.eval())
    before, after = (evaluate(TransformersEngine(m), truth, text) for m in (once, twice))
    assert before.kl_mean is not None
    assert before.kl_mean < 1e-8
    assert caught(before, after)
    guilty = [p.name for p in blame(once, twice, text.ids).parts if p.part_of and p.returned > 0.01]
    assert guilty
    assert all(n.endswith("q_proj") for n in guilty)


@pytest.mark.parametrize(("method", "count"), [("rtn", 4), ("gptq", 22)])
def test_honest_runs_raise_no_alarm(tmp_path: Path, method: str, count: int) -> None:
    """Other thread counts and calibration seeds, each run against each, on a text that shows small differences: nothing is worse by more than calibration does."""
    tiny.make(tmp_path / "model")
    runs = []
    for i in range(count):
        recipe = write_recipe(
            tmp_path, quantize={"method": method, "scheme": "int4-g32-sym"}, export=[], run={"threads": 1 + i % 2},
            calibration={"source": "calibration.txt", "samples": 16, "sequence_length": 64, "seed": i // 2},
        )  # fmt: skip
        (tmp_path / "evaluation.txt").write_text(prose(2, 6000))
        runs.append(qforge.quantize(recipe, out=tmp_path / f"out{i}"))
    sides = [parse(r.to_json(), str(i)) for i, r in enumerate(runs)]
    assert [(a.path, b.path) for a, b in itertools.permutations(sides, 2) if not compare(a, b).passed] == []
