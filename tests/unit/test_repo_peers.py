"""benchmarks/vs_quantizers.py: what it is asked to run, the ids that all tools see, the judge beside plain transformers, the ratios."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))
from peers import adapter, floor, ours, table, texts
from peers.judge import Judge
from peers.kept import begin, finish, finished, key
from peers.others import Tools
from peers.runs import parse
from transformers import AutoModelForCausalLM

from qforge.errors import DataError
from qforge.layouts.bits import pack_words
from qforge.models.model import Model, open_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("peers") / "model")


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return open_model(str(folder))


@pytest.fixture(scope="module")
def tokens(model: Model, tmp_path_factory: pytest.TempPathFactory) -> texts.Tokens:
    out = tmp_path_factory.mktemp("out")
    text = out / "text.txt"
    text.write_text("\n".join(f"The miller of village {i} grinds {i * i} sacks of wheat, and sells {i + 3} of them on day {i % 7}." for i in range(120)))
    return texts.gather(model, out, text, 8, 48, text, 32, 5)


def test_a_run_names_tool_method_scheme_and_options() -> None:
    run = parse("ours:awq+gptq@int3-g64-asym/damping=0.02/act_order=false", 4, 32)
    assert (run.tool, run.method, run.scheme, dict(run.options)) == ("ours", "awq+gptq", "int3-g64-asym", {"damping": 0.02, "act_order": False})
    assert parse("ours:gptq", 3, 64).scheme == "int3-g64-sym"
    assert parse("ours:auto/budget=4.5", 4, 32).scheme == "by layer"
    assert parse("simple:hqq", 4, 32).stored_bits == 5.0
    assert parse("llmcompressor:gptq_static", 4, 32).stored_bits == 4.5
    assert parse("simple:nf4", 4, 32).stored_bits == 4.5


@pytest.mark.parametrize("text", ["gptq", "theirs:gptq", "ours:", "simple:rtn@int4-g32-sym"])
def test_a_run_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=text):
        parse(text, 4, 32)


def test_one_text_is_split_and_its_ids_are_written(tokens: texts.Tokens) -> None:
    out = tokens.ids_file.parent
    halves = [(out / name).read_text() for name in ("calibration.txt", "evaluation.txt")]
    assert "".join(halves) == (out / "text.txt").read_text()
    assert len(halves[0].splitlines()) == 96
    assert json.loads(tokens.ids_file.read_text()) == tokens.calibration.ids.tolist()
    assert json.loads((out / "windows.json").read_text()) == tokens.windows.ids
    assert (len(tokens.windows.ids), tokens.windows.tokens) == (5, 5 * 31)


def test_overlapping_texts_and_short_ones_are_refused(model: Model, tokens: texts.Tokens, tmp_path: Path) -> None:
    copy = tmp_path / "copy.txt"
    copy.write_text(tokens.calibration_file.read_text())
    with pytest.raises(DataError, match="same text"):
        texts.gather(model, tmp_path, tokens.calibration_file, 8, 48, copy, 32, None)
    with pytest.raises(DataError, match="9999 x 48 tokens asked for"):
        texts.gather(model, tmp_path, tokens.calibration_file, 9999, 48, tokens.ids_file.parent / "evaluation.txt", 32, None)


def test_ours_calibrates_on_the_ids_that_the_peers_see(folder: Path, model: Model, tokens: texts.Tokens, tmp_path: Path) -> None:
    ours.run(parse("ours:gptq/damping=0.02", 4, 32), folder, tokens, tmp_path)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    meter = json.loads((tmp_path / "meter.json").read_text())
    assert results["calibration"]["sha256"] == tokens.calibration.sha256
    assert results["recipe"]["quantize"]["options"]["damping"] == 0.02
    assert meter["wall_s"] < meter["process_s"]
    assert meter["rss_before_mb"] < meter["rss_peak_mb"] <= meter["rss_peak_process_mb"]
    ours.dequantize(tmp_path, folder)
    left = load_file(tmp_path / "weights.safetensors")
    assert set(left) == {f"{layer['name']}.weight" for layer in results["layers"] if layer["scheme"] is not None}


def test_a_budget_is_asked_for_in_the_place_of_a_scheme(folder: Path, tokens: texts.Tokens) -> None:
    for asked, listed in (("", []), ("/candidates=int4-g32-sym+int4-g32-asym", ["int4-g32-sym", "int4-g32-asym"])):
        quantize = ours.recipe(parse(f"ours:auto/budget=4.5{asked}/damping=0.02", 4, 32), folder, tokens)["quantize"]
        assert quantize == {"method": "auto", "budget": "4.5 bits", "candidates": listed, "options": {"damping": 0.02}}


def test_the_judge_agrees_with_plain_transformers(folder: Path, model: Model, tokens: texts.Tokens, tmp_path: Path) -> None:
    reference, candidate = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval() for _ in range(2))
    noise = torch.Generator().manual_seed(1)
    changed = {n: (p + 0.1 * p.std() * torch.randn(p.shape, generator=noise)).float() for n, p in candidate.named_parameters() if "proj" in n}
    candidate.load_state_dict(changed, strict=False)
    save_file({n: t.contiguous() for n, t in changed.items()}, tmp_path / "weights.safetensors")
    kl, nll, agree = 0.0, 0.0, 0
    with torch.no_grad():
        for window in torch.tensor(tokens.windows.ids):
            p, q = (m(input_ids=window[None]).logits[0, :-1].log_softmax(-1) for m in (reference, candidate))
            kl += float((p.exp() * (p - q)).sum())
            nll -= float(q.gather(1, window[1:, None]).sum())
            agree += int((p.argmax(-1) == q.argmax(-1)).sum())
    judge = Judge(model, tokens.windows)
    found, n = judge.figures(tmp_path), tokens.windows.tokens
    assert kl / n > 1e-3
    assert found["kl_mean"] == pytest.approx(kl / n, rel=1e-3)
    assert found["candidate"]["perplexity"] == pytest.approx(math.exp(nll / n), rel=1e-4)
    assert found["top1_agreement"] == pytest.approx(agree / n, abs=1.5 / n)
    assert judge.figures(tmp_path) == json.loads((tmp_path / "judged.json").read_text())["evaluation"]


def test_weights_of_another_model_are_not_judged(model: Model, tokens: texts.Tokens, tmp_path: Path) -> None:
    save_file({"model.layers.0.self_attn.q_proj.weight": torch.zeros(3, 3)}, tmp_path / "weights.safetensors")
    with pytest.raises(ValueError, match=r"no such tensors: model\.layers\.0\.self_attn\.q_proj\.weight"):
        Judge(model, tokens.windows).figures(tmp_path)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_checkpoints_of_any_width_are_unpacked(bits: int) -> None:
    values = torch.randint(0, 2**bits, (5, 96), generator=torch.Generator().manual_seed(bits), dtype=torch.uint8)
    assert torch.equal(adapter.stream(pack_words(values, bits), bits), values.int())


def test_a_result_is_found_only_for_the_same_inputs(tmp_path: Path) -> None:
    job = parse("ours:gptq/damping=0.02", 4, 32)
    wanted = key(job, "model", "ids")
    (tmp_path / "weights.safetensors").touch()
    assert not finished(tmp_path, wanted)
    finish(tmp_path, wanted)
    assert finished(tmp_path, wanted)
    others = [key(job, "another", "ids"), key(job, "model", "others"), key(parse("ours:gptq", 4, 32), "model", "ids"), key(parse("ours:gptq", 3, 32), "model", "ids")]
    assert not any(finished(tmp_path, other) for other in others)
    begin(tmp_path)
    assert not finished(tmp_path, wanted)


def test_a_peer_that_is_not_there_is_named_with_the_cure(tmp_path: Path) -> None:
    assert "has no run_peer.py" in str(Tools(tmp_path, tmp_path).lacks("simple"))
    (tmp_path / "run_peer.py").touch()
    assert "make it with" in str(Tools(tmp_path, tmp_path).lacks("simple"))


def test_ours_is_measured_against_the_best_of_its_kind() -> None:
    def row(name: str, kl: float, perplexity: float, seconds: float, peak: int) -> dict:
        tool, method = name.split(":")
        figures = {"kl": kl, "kl_ci95": None, "kl_p99": 1.0, "perplexity": perplexity, "original": 4.0, "top1": 0.9, "bits": 4.5}
        memory = {"mb_libraries": 100, "mb_before": 110, "mb_peak": peak}
        return {"tool": tool, "method": method, "name": name, "scheme": "s", "seconds": seconds, "process_seconds": 9.0, **memory, **figures}

    peers = [row("llmcompressor:gptq", 0.10, 4.8, 10.0, 300), row("gptqmodel:gptq_act", 0.08, 4.4, 20.0, 200), row("simple:rtn", 0.01, 4.0, 0.1, 101)]
    rows = [row("ours:gptq", 0.05, 4.2, 5.0, 150), *peers]
    assert table.ratio_table(rows).splitlines()[2] == (
        "| ours:gptq s | gptq | 0.62 x gptqmodel:gptq_act | 0.50 x gptqmodel:gptq_act | 0.50 x llmcompressor:gptq | 0.50 x gptqmodel:gptq_act |"
    )
    assert [line.split(" |")[0] for line in table.main_table(rows).splitlines()[2:]] == ["| simple:rtn", "| ours:gptq", "| gptqmodel:gptq_act", "| llmcompressor:gptq"]
    assert table.ratio_table(peers) == ""


def test_the_floor_counts_each_linear_and_each_input_once(model: Model) -> None:
    width, inner, kv = 64, 128, 32
    linears = width * (2 * width + 2 * kv) + 3 * width * inner
    squares = 3 * width**2 + inner**2  # q, k and v take one input; so do gate and up
    assert floor.multiplications(model, 10) == 10 * 3 * (linears + squares)


def test_the_floor_stands_beside_runs_that_read_no_other_text() -> None:
    row = {"method": "gptq", "scheme": "s", "multiplications_per_s": 2e9, "forward_seconds": 1.2, "seconds": 3.0}
    rows = [row | {"name": "plain"}, row | {"name": "generated=4"}, row | {"name": "other", "method": "rtn"}, row | {"name": "older", "forward_seconds": None}]
    assert table.floor_table(rows, 4e9).splitlines()[2:] == ["| plain | s | 2 | 3.0 | 2.0 | 1.50 | 1.2 | 2.50 |", "| older | s | 2 | 3.0 | 2.0 | 1.50 | - | - |"]
    assert table.floor_table([row | {"name": "oldest", "multiplications_per_s": None}], 4e9) == ""


def test_a_forward_pass_is_told_from_the_first_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that each sequence moves on by a second, the first of all (which is not counted) by nine."""
    now, seen = [0.0], []

    class Slow:
        def eval(self) -> Slow:
            return self

        def __call__(self, input_ids: torch.Tensor, use_cache: bool) -> None:
            now[0] += 9.0 if not seen else 1.0
            seen.append(input_ids)

    monkeypatch.setattr(floor.AutoModel, "from_pretrained", lambda folder, dtype: Slow())
    monkeypatch.setattr(floor.time, "perf_counter", lambda: now[0])
    ids = torch.arange(20 * 6).reshape(20, 6)
    assert floor.forward_seconds(Path("model"), ids) == 20.0
    assert torch.equal(torch.cat(seen[1:]), ids[:8])


def test_a_forward_pass_of_a_real_model_takes_time(folder: Path) -> None:
    assert floor.forward_seconds(folder, torch.full((3, 16), 5)) > 0
