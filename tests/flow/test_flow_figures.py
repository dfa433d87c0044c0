"""Figures against computations that are not ours: transformers' own loss, llama.cpp over the same file, a plain fp64 sum over stored logits; each export in its own engine."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from flows import prose, write_recipe
from real_models import STORIES, needs_stories
from transformers import AutoModelForCausalLM

import qforge
from qforge import pipeline
from qforge.engines import llama_cpp, onnx_runtime
from qforge.engines.runtime_engine import RuntimeEngine
from qforge.engines.transformers_engine import TransformersEngine
from qforge.evaluate.compare import compare
from qforge.evaluate.divergence import evaluate
from qforge.evaluate.sides import parse
from qforge.export.gguf import GgufExporter
from qforge.models.model import open_model
from qforge.report.comparison import headline
from qforge.text.documents import documents
from qforge.text.windows import EvaluationWindows, evaluation_windows

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")]
MODELS = ["tiny", pytest.param("stories15M", marks=needs_stories)]


@pytest.fixture(scope="module", params=MODELS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Any]:
    """A folder with a run (int4, GGUF and ONNX), the original, and the run's results; exports are measured."""
    folder = tmp_path_factory.mktemp(request.param)
    source = tiny.make(folder / "model", layers=2) if request.param == "tiny" else STORIES.resolve()
    engines = [{"format": "gguf"}, {"format": "gptq"}, *([] if onnx_runtime.missing() else [{"format": "onnx"}])]
    recipe = write_recipe(
        folder,
        model={"source": str(source)},
        quantize={"method": "rtn", "scheme": "int4-g32-sym"},
        export=engines,
        evaluate={"text": "evaluation.txt", "window": 128, "exports": True},
    )
    (folder / "evaluation.txt").write_text(prose(2, 1600))
    return folder, source, qforge.quantize(recipe, out=folder / "out")


def windows(folder: Path) -> EvaluationWindows:
    tokenizer = open_model(str(folder / "out" / "model")).tokenizer()
    return evaluation_windows(documents("evaluation.txt", role="evaluation", folder=folder, tokenizer=tokenizer), tokenizer, 128)


@torch.no_grad()
def plain_perplexity(model: Any, ids: list[list[int]]) -> float:
    """With transformers' own loss, whole windows at once, fp32."""
    sums = [float(model(input_ids=torch.tensor([w]), labels=torch.tensor([w])).loss.double()) * (len(w) - 1) for w in ids]
    return math.exp(math.fsum(sums) / sum(len(w) - 1 for w in ids))


def test_perplexity_is_transformers_own(made: tuple[Path, Path, Any]) -> None:
    """Within 0.01 %: the original by transformers' code and by our runtime, against AutoModelForCausalLM and its loss."""
    folder, source, results = made
    text = windows(folder)
    expected = plain_perplexity(AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval(), text.ids)
    assert results.evaluation.reference["perplexity"] == pytest.approx(expected, rel=1e-4)
    assert evaluate(RuntimeEngine(open_model(str(source))), None, text).candidate["perplexity"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.skipif(llama_cpp.missing() is not None, reason="llama.cpp is not installed")
def test_perplexity_is_llama_cpps(made: tuple[Path, Path, Any], tmp_path: Path) -> None:
    """On the same GGUF, the same token ids and windows: within 0.5 % on Q4_0, whose kernels in llama.cpp round activations to 8 bits, and within 0.01 % on fp32."""
    folder, _, results = made
    file = next((folder / "out" / "exports" / "gguf").glob("*.gguf"))
    text = windows(folder)
    ours = evaluate(RuntimeEngine(open_model(str(file), dtype="float32")), None, text).candidate["perplexity"]
    theirs = pipeline.evaluate(file, against=folder / "out" / "model", text=str(folder / "evaluation.txt"), window=128, engine="llama.cpp")
    assert theirs.engine.startswith("llama.cpp xllamacpp")
    assert theirs.candidate["perplexity"] == pytest.approx(ours, rel=5e-3)
    assert theirs.candidate["perplexity"] != pytest.approx(ours, rel=1e-6)  # it is another program
    (twin,) = GgufExporter("f32").write(open_model(str(folder / "out" / "model")), tmp_path / "f32")
    exact = pipeline.evaluate(twin, text=str(folder / "evaluation.txt"), window=128, engine="llama.cpp").candidate["perplexity"]
    assert exact == pytest.approx(results.evaluation.candidate["perplexity"], rel=1e-4)


def test_divergence_is_a_plain_fp64_sum_over_stored_logits(made: tuple[Path, Path, Any]) -> None:
    """Mean and percentiles within 1e-6 nats, top-1 exactly, from both models' logits kept whole."""
    folder, source, results = made
    text = windows(folder)
    a, b = (torch.cat(list(engine.score(text.ids))).double() for engine in (RuntimeEngine(open_model(str(folder / "out" / "model"))), TransformersEngine(open_model(str(source)))))
    x, y = a.log_softmax(-1), b.log_softmax(-1)
    kl = (y.exp() * (y - x)).sum(-1).numpy()
    e = results.evaluation
    assert e.tokens == len(kl)
    assert e.kl_mean == pytest.approx(float(kl.mean()), abs=1e-6)
    for name, share in (("kl_median", 0.5), ("kl_p90", 0.9), ("kl_p99", 0.99), ("kl_p999", 0.999)):
        assert getattr(e, name) == pytest.approx(float(np.quantile(kl, share)), abs=1e-6), name
    assert e.kl_max == pytest.approx(float(kl.max()), abs=1e-6)
    assert e.top1_agreement == pytest.approx(float((a.argmax(-1) == b.argmax(-1)).double().mean()), abs=1e-12)


def test_every_export_has_a_row_of_its_own_engine(made: tuple[Path, Path, Any]) -> None:
    folder, _, results = made
    rows = {e.format: e.measured for e in results.exports}
    wanted = {"gptq": "transformers", **({} if llama_cpp.missing() else {"gguf": "llama.cpp"}), **({} if onnx_runtime.missing() else {"onnx": "onnxruntime"})}
    for name, engine in wanted.items():
        found = rows[name]
        assert found.engine.startswith(engine)
        assert found.tokens == results.evaluation.tokens
        assert found.perplexity == pytest.approx(results.evaluation.candidate["perplexity"], rel=5e-3)
        assert found.kl_mean_ci95[0] < results.evaluation.kl_mean < found.kl_mean_ci95[1]
    report = (folder / "out" / "report.md").read_text()
    assert "Exports in their own engines" in report
    assert all(rows[name].engine.split()[0] in report for name in wanted)
    again = qforge.quantize(folder / "recipe.yaml", out=folder / "out")
    assert again.work["computed"] == 0
    assert again.exports == results.exports


def test_a_damaged_export_shows_in_its_own_row(made: tuple[Path, Path, Any]) -> None:
    """The same command on the file itself: significantly worse than the artifact."""
    folder, source, results = made
    if llama_cpp.missing():
        pytest.skip("llama.cpp is not installed")
    file = next((folder / "out" / "exports" / "gguf").glob("*.gguf"))
    broken = folder / "broken.gguf"
    data = bytearray(file.read_bytes())
    data[-20000:-10000] = bytes(b ^ 0x11 if i % 18 > 1 else b for i, b in enumerate(data[-20000:-10000]))
    broken.write_bytes(data)
    found = pipeline.evaluate(broken, against=source, text=str(folder / "evaluation.txt"), window=128, engine="llama.cpp")
    verdict = compare(parse(json.dumps(asdict(results.evaluation)), "artifact"), parse(json.dumps(asdict(found)), "file"))
    assert not verdict.passed
    assert verdict.changed["engines"]


def test_two_hundred_tokens_are_not_enough(made: tuple[Path, Path, Any], tmp_path: Path) -> None:
    """A worse candidate on a text of about 200 tokens: neither better, nor worse, nor the same, and how much text would tell; on the whole text it is worse."""
    folder, source, _ = made
    words = (folder / "evaluation.txt").read_text().split()
    tokenizer = open_model(str(source)).tokenizer()
    count = next(n for n in range(20, len(words)) if len(tokenizer(" ".join(words[:n])).input_ids) >= 200)
    (tmp_path / "short.txt").write_text(" ".join(words[:count]))
    worse = qforge.quantize(
        write_recipe(tmp_path, model={"source": str(source)}, quantize={"method": "rtn", "scheme": "int3-g32-sym"}, export=[], evaluate=None), out=tmp_path / "worse"
    )
    assert worse.passed
    sides = {}
    for text in (tmp_path / "short.txt", folder / "evaluation.txt"):
        for name, model in (("int4", folder / "out" / "model"), ("int3", tmp_path / "worse" / "model")):
            found = pipeline.evaluate(model, against=source, text=str(text), window=50)
            sides[text.stem, name] = parse(json.dumps(asdict(found)), name)
    short = compare(sides["short", "int4"], sides["short", "int3"])
    assert 190 <= short.tokens <= 210
    assert {r.verdict.word for r in short.rows} == {"not enough data"}
    assert all((r.verdict.needs_tokens or 0) > 2 * short.tokens for r in short.rows)
    assert short.passed
    assert "too short to tell" in headline(asdict(short))
    whole = compare(sides["evaluation", "int4"], sides["evaluation", "int3"])
    assert not whole.passed
    assert "worse" in {r.verdict.word for r in whole.rows}


MEMORY = """
import resource, sys
import torch
from qforge.engines.runtime_engine import RuntimeEngine
from qforge.engines.transformers_engine import TransformersEngine
from qforge.evaluate.divergence import evaluate
from qforge.models.model import open_model
from qforge.text.windows import EvaluationWindows
folder, length = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
model = open_model(folder)
text = EvaluationWindows([[i % 384 for i in range(length)]], [0], length - 1, "x", {}, None)
evaluate(RuntimeEngine(model, threads=1), TransformersEngine(model), text)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_memory_does_not_grow_with_the_context_times_the_vocabulary(tmp_path: Path) -> None:
    """Of a window of 2,048 tokens one model's logits are 512 MiB; the peak of both engines together is that of an eighth of it, but for attention's square (16 MiB a matrix)."""
    folder = tiny.make(tmp_path / "model", layers=1, hidden=32, intermediate=32, heads=1, kv_heads=1)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(65536, mean_resizing=False)
    model.config.max_position_embeddings = 2049
    model.save_pretrained(folder)
    peaks = [int(subprocess.run([sys.executable, "-c", MEMORY, str(folder), str(n)], check=True, capture_output=True, text=True).stdout) for n in (257, 2049)]
    assert peaks[1] - peaks[0] < 256 * 1024, peaks  # KiB
