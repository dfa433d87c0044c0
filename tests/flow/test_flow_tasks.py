"""Tasks through lm-eval: our engines' figures are lm-eval's own on transformers, a run reports both models' answers, and what cannot be scored is refused by name."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from flows import write_recipe

import qforge
from qforge.engines import tasks
from qforge.engines.runtime_engine import RuntimeEngine
from qforge.engines.transformers_engine import TransformersEngine
from qforge.errors import DataError, MissingCapabilityError
from qforge.models.model import open_model

QUESTIONS = [{"context": c, "choices": [" mill by the river", " storm", " a", " windows, lit the lamp"], "answer": i % 4} for i, c in enumerate(tiny.TEXT * 2)]
slow = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"), pytest.mark.skipif(tasks.missing() is not None, reason="lm-eval is not installed: pip install 'qforge[eval]'")]


@pytest.fixture
def few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The built-in tasks, cut to a few questions."""
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(q) + "\n" for q in QUESTIONS))
    monkeypatch.setattr(tasks, "BUILTIN", {"qforge_few": "few.jsonl"})
    monkeypatch.setattr(tasks, "builtin_folder", lambda: tmp_path)


def test_without_lm_eval_tasks_are_refused_before_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # so that it cannot be found
    tiny.make(tmp_path / "model")
    with pytest.raises(MissingCapabilityError, match=r"lm-eval, which is not installed; pip install 'qforge\[eval\]'"):
        qforge.quantize(write_recipe(tmp_path, evaluate={"text": "evaluation.txt", "tasks": ["builtin"]}), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_builtin_stands_for_all_of_them() -> None:
    assert tasks.expanded(["arc_easy", "builtin", "qforge_sums"]) == ["arc_easy", *tasks.BUILTIN]


class TestWithLmEval:
    """What needs lm-eval."""

    pytestmark = slow

    @pytest.mark.parametrize("bos", [False, True])
    def test_our_engines_give_lm_evals_own_figures(self, tmp_path: Path, few: None, bos: bool) -> None:
        """Every answer's log-likelihood within 1e-4 nats of lm-eval's transformers model in fp32, and so every accuracy."""
        import lm_eval
        import torch
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = tiny.make(tmp_path / "model")
        if bos:
            tokenizer = tiny.tokenizer()
            from tokenizers.processors import TemplateProcessing

            tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
            tokenizer.save_pretrained(folder)
        model = open_model(str(folder))
        theirs = HFLM(pretrained=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tokenizer=AutoTokenizer.from_pretrained(folder), batch_size=1)
        expected = lm_eval.simple_evaluate(model=theirs, tasks=[tasks.task("qforge_few")], task_manager=TaskManager(include_defaults=False), bootstrap_iters=0, log_samples=True)
        for engine in (TransformersEngine(model), RuntimeEngine(model)):
            found = tasks.answer(["qforge_few"], engine, model.tokenizer(), 256)["qforge_few"]
            assert found.figures["acc"] == expected["results"]["qforge_few"]["acc,none"]
            assert found.figures["acc_norm"] == expected["results"]["qforge_few"]["acc_norm,none"]
            assert found.right["acc"] == [s["acc"] for s in sorted(expected["samples"]["qforge_few"], key=lambda s: s["doc_id"])]
            assert found.protocol["bos"] is bos
        from qforge.engines.lm_eval_model import TaskModel

        ours = TaskModel(TransformersEngine(model), model.tokenizer(), 256)
        pairs = [(q["context"], c) for q in QUESTIONS[:4] for c in q["choices"]] + [("", "a mill")]
        asked = [((c, a), *ours._encode_pair(c, a)) if c else ((c, a), [ours.prefix_token_id], ours.tok_encode(a, add_special_tokens=False)) for c, a in pairs]
        for (a, greedy), (b, theirs_greedy) in zip(ours._loglikelihood_tokens(asked), theirs._loglikelihood_tokens(asked), strict=True):
            assert a == pytest.approx(b, abs=1e-4)
            assert greedy == theirs_greedy

    def test_lm_eval_asks_our_server_and_finds_the_same(self, tmp_path: Path, few: None) -> None:
        """`lm_eval --model local-completions`, which has log-probabilities of echoed prompts told, beside the engine in this process."""
        import lm_eval
        from lm_eval.models.openai_completions import LocalCompletionsAPI
        from lm_eval.tasks import TaskManager

        from qforge.engines.lm_eval_model import TaskModel

        folder = tiny.make(tmp_path / "tiny")
        engine, tokenizer = RuntimeEngine(open_model(str(folder))), open_model(str(folder)).tokenizer()
        expected = tasks.answer(["qforge_few"], engine, tokenizer, 256)["qforge_few"]
        with subprocess.Popen([sys.executable, "-m", "qforge", "serve", str(folder), "--port", "0"], stderr=subprocess.PIPE, text=True) as server:
            try:
                assert server.stderr is not None
                url = server.stderr.readline().split()[-1]
                theirs = LocalCompletionsAPI(base_url=f"{url}/completions", model="tiny", tokenizer=str(folder), tokenizer_backend="huggingface", batch_size=4)
                found = lm_eval.simple_evaluate(model=theirs, tasks=[tasks.task("qforge_few")], task_manager=TaskManager(include_defaults=False), bootstrap_iters=0)
                assert found is not None
                assert {m: found["results"]["qforge_few"][f"{m},none"] for m in ("acc", "acc_norm")} == {m: expected.figures[m] for m in ("acc", "acc_norm")}
                ours = TaskModel(engine, tokenizer, 256)
                asked = [((q["context"], c), *ours._encode_pair(q["context"], c)) for q in QUESTIONS[:4] for c in q["choices"]]
                for (a, greedy), (b, theirs_greedy) in zip(ours._loglikelihood_tokens(asked), theirs._loglikelihood_tokens(asked), strict=True):
                    assert a == pytest.approx(b, abs=1e-6)
                    assert greedy == theirs_greedy
            finally:
                server.kill()

    def test_a_run_reports_both_models_answers(self, tmp_path: Path, few: None) -> None:
        tiny.make(tmp_path / "model")
        recipe = write_recipe(tmp_path, export=[], quantize={"method": "rtn", "scheme": "int2-g32-asym"}, evaluate={"text": "evaluation.txt", "window": 64, "tasks": ["builtin"]})
        results = qforge.quantize(recipe, out=tmp_path / "out")
        assert results.evaluation is not None
        task = results.evaluation.tasks["qforge_few"]
        assert task.questions == len(QUESTIONS)
        metric = task.metrics["acc"]
        assert metric.difference == pytest.approx(metric.candidate - metric.reference)
        assert (metric.gained - metric.lost) / task.questions == pytest.approx(metric.difference)
        report = (tmp_path / "out" / "report.md").read_text()
        assert "task qforge\\_few, acc: original / quantized" in report
        assert "chat template not applied, no BOS" in report
        again = qforge.quantize(recipe, out=tmp_path / "out")
        assert again.work["computed"] == 0
        assert again.evaluation == results.evaluation

    def test_what_cannot_be_scored_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="arc_eesy is no task of lm-eval's"):
            tasks.check(["arc_eesy"])
        tasks.check(["arc_easy", "builtin"])


def test_the_builtin_questions_are_made_from_the_text_beside_them() -> None:
    spec = importlib.util.spec_from_file_location("make_tasks", tasks.builtin_folder() / "tasks.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    texts = [json.loads(line)["text"] for line in (made.FOLDER / "evaluation.jsonl").read_text("utf-8").splitlines()]
    for file, records in (("task_continuation.jsonl", made.continuations(texts)), ("task_sums.jsonl", made.sums())):
        assert [json.loads(line) for line in (made.FOLDER / file).read_text("utf-8").splitlines()] == records


def test_the_builtin_questions_have_one_right_answer_each() -> None:
    for name, file in tasks.BUILTIN.items():
        records = [json.loads(line) for line in (tasks.builtin_folder() / file).read_text("utf-8").splitlines()]
        assert len(records) >= 100, name
        answers = [r["answer"] for r in records]
        assert all(len(set(r["choices"])) == 4 for r in records)
        assert all(15 < 100 * answers.count(i) / len(answers) < 35 for i in range(4)), "no place is right much more often than another"
    for r in records:
        a, b = r["context"].splitlines()[-1].removesuffix(" =").split(" + ")
        assert int(r["choices"][r["answer"]]) == int(a) + int(b)
