"""The public face of the runtime: prompts, endings, texts, refusals."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from runtime_models import folder, greedy, model, prompts, quantized, transformers_model
from safetensors.torch import load_file, save_file

from qforge.errors import DataError, ModelError, UnsupportedError
from qforge.runtime import LLM, SamplingParams, running
from qforge.runtime.detokenize import Detokenizer


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(model("llama"), num_blocks=20)


def test_importing_the_runtime_imports_no_torch() -> None:
    code = "import qforge.runtime, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_texts_token_ids_and_messages_are_all_prompts(llm: LLM) -> None:
    messages = [{"role": "user", "content": "add two numbers"}]
    text = "<|im_start|>user\nadd two numbers<|im_end|>\n<|im_start|>assistant\n"
    a, b, c = llm.generate(["The small mill", llm.tokenizer("The small mill").input_ids, messages], SamplingParams(max_tokens=5))
    assert a.token_ids == b.token_ids
    assert (a.prompt, b.prompt, c.prompt) == ("The small mill", None, text)
    assert c.prompt_token_ids == llm.tokenizer(text, add_special_tokens=False).input_ids


def test_a_bos_is_added_to_text_and_not_doubled_in_chat(tmp_path: Path) -> None:
    target = tmp_path / "bos"
    shutil.copytree(folder("llama"), target)
    file = target / "tokenizer.json"
    raw = json.loads(file.read_text())
    special = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}
    single = [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    raw["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}], "special_tokens": special}
    file.write_text(json.dumps(raw))
    config = json.loads((target / "tokenizer_config.json").read_text())
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    (target / "chat_template.jinja").write_text(template)
    config.pop("chat_template", None)
    (target / "tokenizer_config.json").write_text(json.dumps(config))
    llm = LLM(str(target))
    assert llm.tokenize("mill")[1][0] == 0
    assert llm.tokenize([{"role": "user", "content": "mill"}])[1] == llm.tokenize("mill")[1]


def test_a_continuation_ends_at_the_end_token_or_goes_on_if_asked(llm: LLM) -> None:
    prompt = prompts(1, 30, seed=8)[0]
    free = llm.generate([prompt], SamplingParams(max_tokens=12, ignore_eos=True))[0]
    stop = free.token_ids[4]
    first = free.token_ids.index(stop)
    ended = llm.generate([prompt], SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=(stop,)))[0]
    assert (ended.token_ids, ended.finish_reason) == (free.token_ids[: first + 1], "stop")
    assert free.finish_reason == "length"


@pytest.mark.parametrize(("written", "where"), [(7, "generation_config.json"), ([5, 7], "generation_config.json"), ([5, 7], "config.json")])
def test_end_tokens_come_from_the_generation_config_or_the_config(tmp_path: Path, written: object, where: str) -> None:
    target = tmp_path / "m"
    shutil.copytree(folder("llama"), target)
    if where == "config.json":
        (target / "generation_config.json").unlink(missing_ok=True)
    file = target / where
    value = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(value | {"eos_token_id": written}))
    own = tiny.tokenizer().eos_token_id
    assert LLM(str(target)).engine()._end_ids == frozenset([own, *(written if isinstance(written, list) else [written])])


def test_a_stop_string_cuts_the_text(llm: LLM) -> None:
    prompt = "The small mill stands"
    free = llm.generate([prompt], SamplingParams(max_tokens=30, ignore_eos=True))[0]
    stop = free.text[7:10]
    cut = llm.generate([prompt], SamplingParams(max_tokens=30, ignore_eos=True, stop=(stop, "never there")))[0]
    assert cut.text == free.text[: free.text.index(stop)]
    assert cut.finish_reason == "stop"
    assert cut.token_ids == free.token_ids[: len(cut.token_ids)]


def test_sampled_tokens_depend_on_the_seed_alone(llm: LLM) -> None:
    given = prompts(12, 30, seed=9)
    params = [SamplingParams(max_tokens=10, temperature=1.0, top_k=50, top_p=0.9, seed=i) for i in range(12)]
    batch = [o.token_ids for o in llm.generate(given, params)]
    assert [llm.generate([p], s)[0].token_ids for p, s in zip(given, params, strict=True)] == batch
    assert batch != [o.token_ids for o in llm.generate(given, [SamplingParams(max_tokens=10, temperature=1.0, top_k=50, top_p=0.9, seed=i + 99) for i in range(12)])]


def test_a_pool_that_runs_out_changes_no_token() -> None:
    given = prompts(10, 60, seed=10)
    tight = LLM(model("llama"), num_blocks=6, max_step_tokens=40)
    engine = tight.engine()
    requests = [engine.add(p, SamplingParams(max_tokens=30, ignore_eos=True)) for p in given]
    while engine.busy():
        engine.step()
    assert sum(r.preemptions for r in requests) > 0
    roomy = LLM(model("llama")).generate(given, SamplingParams(max_tokens=30, ignore_eos=True))
    assert [r.generated for r in requests] == [o.token_ids for o in roomy]


def test_cancelling_one_request_touches_no_other(llm: LLM) -> None:
    given = prompts(4, 30, seed=11)
    wanted = [o.token_ids for o in llm.generate(given, SamplingParams(max_tokens=12, ignore_eos=True))]
    engine = llm.engine()
    requests = [engine.add(p, SamplingParams(max_tokens=12, ignore_eos=True)) for p in given]
    for turn in range(200):
        if turn == 3:
            engine.cancel(requests[1])
        if not engine.step() and not engine.busy():
            break
    assert [r.generated for i, r in enumerate(requests) if i != 1] == [w for i, w in enumerate(wanted) if i != 1]
    assert str(requests[1].finish_reason) == "cancelled"


@pytest.mark.parametrize("from_another_thread", [True, False])
def test_cancelling_while_a_step_is_computed_touches_no_other(llm: LLM, monkeypatch: pytest.MonkeyPatch, from_another_thread: bool) -> None:
    given, params = prompts(3, 30, seed=11), SamplingParams(max_tokens=6, ignore_eos=True)
    wanted = [o.token_ids for o in llm.generate(given, params)]
    engine, choose, threads = llm.engine(), llm.runner.choose, []
    requests = [engine.add(p, params) for p in given]

    def interrupted(*args: object) -> list[int]:
        if from_another_thread:
            threads.append(threading.Thread(target=engine.cancel, args=(requests[1],)))
            threads[-1].start()
            threads[-1].join(0.05)
        elif len(requests[1].generated) == 5:  # it is to end in this step
            engine.cancel(requests[1])
        return choose(*args)

    monkeypatch.setattr(llm.runner, "choose", interrupted)
    while engine.busy():
        engine.step()
    for thread in threads:
        thread.join(10)
    assert requests[1].finish_reason == "cancelled"
    assert [requests[0].generated, requests[2].generated] == [wanted[0], wanted[2]]
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.total


def test_a_request_whose_text_cannot_be_made_ends_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    given = prompts(3, 30, seed=11)
    wanted = [o.token_ids for o in llm.generate(given, SamplingParams(max_tokens=6, ignore_eos=True))]
    engine = llm.engine()
    requests = [engine.add(p, SamplingParams(max_tokens=6, ignore_eos=True, stop=("zzz",) if i == 1 else ())) for i, p in enumerate(given)]
    monkeypatch.setattr(engine._texts[requests[1].id], "add", lambda token: [].index(token))
    with pytest.raises(ValueError, match="not in list"):
        engine.step()
    while engine.busy():
        engine.step()
    assert requests[1].finish_reason == "cancelled"
    assert [requests[0].generated, requests[2].generated] == [wanted[0], wanted[2]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_whose_logits_are_not_finite_ends_with_a_message(tmp_path: Path, temperature: float) -> None:
    """One token's embedding is not a number: who has it in the prompt ends, others go on."""
    broken = shutil.copytree(folder("mistral"), tmp_path / "m")
    state = load_file(broken / "model.safetensors")
    state["model.embed_tokens.weight"][7] = float("nan")
    save_file(state, broken / "model.safetensors", metadata={"format": "pt"})
    llm, params = LLM(str(broken)), SamplingParams(max_tokens=6, ignore_eos=True, temperature=temperature, seed=1)
    wanted = llm.generate([[3, 4, 5]], params)[0].token_ids
    with pytest.raises(ModelError, match="not finite"):
        llm.generate([[3, 4, 5], [3, 7, 5]], params)
    engine = llm.engine()
    good, bad = engine.add([3, 4, 5], params), engine.add([3, 7, 5], params)
    with pytest.raises(ModelError, match="not finite"):
        engine.step()
    while engine.busy():
        engine.step()
    assert (good.generated, str(bad.finish_reason)) == (wanted, "cancelled")


def test_a_request_is_cancelled_also_where_its_text_cannot_be_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Detokenizer) -> bool:
        raise ValueError("no text")

    engine = LLM(str(folder("mistral"))).engine()
    request = engine.add([3, 4, 5], SamplingParams(max_tokens=6))
    engine.step()
    monkeypatch.setattr(Detokenizer, "finish", fails)
    with pytest.raises(ValueError, match="no text"):
        engine.cancel(request)
    assert (str(request.finish_reason), engine.busy()) == ("cancelled", False)


@pytest.mark.parametrize("token", [-1, 384, 2_000_000_000, -200_000_000])
def test_an_engine_refuses_tokens_that_the_model_does_not_know(llm: LLM, token: int) -> None:
    assert llm.runner.spec.vocab_size <= 384
    with pytest.raises(DataError, match=f"token {token} is not in the model's vocabulary"):
        llm.engine().add([3, token], SamplingParams(max_tokens=1))


def test_a_cancelled_request_has_the_text_that_it_got(llm: LLM) -> None:
    free = llm.generate(["The small mill stands"], SamplingParams(max_tokens=8, ignore_eos=True))[0]
    engine = llm.engine()
    request = engine.add(free.prompt_token_ids, SamplingParams(max_tokens=30, ignore_eos=True, stop=(free.text + "and nothing else",)))
    while len(request.generated) < 8:
        engine.step()
    assert engine.text(request) == ""  # all of it may be the stop string's beginning
    engine.cancel(request)
    assert engine.text(request).startswith(free.text)


def test_without_a_limit_a_continuation_ends_where_the_context_or_the_cache_does(llm: LLM) -> None:
    for blocks, total in ((None, 256), (4, 64)):
        output = LLM(model("llama"), num_blocks=blocks).generate([[3, 4, 5]], SamplingParams(max_tokens=None, ignore_eos=True))[0]
        assert (3 + len(output.token_ids), output.finish_reason) == (total, "length")
    with pytest.raises(DataError, match="the pool has 4"):
        LLM(model("llama"), num_blocks=4).generate([[3] * 64], SamplingParams(max_tokens=None))


def test_a_continuation_ends_where_the_context_ends(llm: LLM) -> None:
    prompt = prompts(1, 2, seed=1)[0] * 250
    output = llm.generate([prompt], SamplingParams(max_tokens=100, ignore_eos=True))[0]
    assert len(prompt) + len(output.token_ids) == 256
    assert output.finish_reason == "length"
    assert output.token_ids == greedy(transformers_model("llama"), prompt, 6)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "empty"),
        ([], "empty"),
        (5, "neither"),
        (None, "neither"),
        (b"ab", "neither"),
        ([3] * 256, "256 tokens leaves no room in the model's context of 256"),
        ([384000], "384000 is not in the model's vocabulary"),
        ([{"role": "user"}], "neither"),
        ("a\ud800b", "half a character"),
        ([{"role": "user", "content": "\udfff"}], "half a character"),
    ],
)
def test_bad_prompts_are_refused_with_their_number(llm: LLM, prompt: object, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        llm.generate(["fine", prompt])  # type: ignore[list-item]
    assert "prompt 2 of 2" in str(caught.value)


def test_a_request_that_never_fits_is_refused_at_once(llm: LLM) -> None:
    small = LLM(model("llama"), num_blocks=3)
    with pytest.raises(DataError, match=r"needs 4 cache blocks of 16 tokens, and the pool has 3"):
        small.generate([[3] * 30], SamplingParams(max_tokens=20))
    assert len(small.generate([[3] * 30], SamplingParams(max_tokens=18, ignore_eos=True))[0].token_ids) == 18


@pytest.mark.parametrize("activations", ["int16", "bf16", "int8"])
def test_what_only_native_kernels_round_is_refused_without_them(monkeypatch: pytest.MonkeyPatch, activations: str) -> None:
    """The reference computes in fp32 whatever it is asked for: its figures would pass for those of rounded activations."""
    monkeypatch.setattr(running, "missing", lambda: "the native module was not built")
    with pytest.raises(UnsupportedError, match=f"activations '{activations}' are rounded by the native kernels, and the native module was not built; use fp"):
        LLM(model("llama"), activations=activations)


def test_unknown_activations_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="activations 'int4' are not known; use one of fp, int16, bf16, int8"):
        LLM(model("llama"), activations="int4")


def test_a_family_that_is_not_listed_is_refused_with_the_list(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"lists llama, mistral, qwen2, qwen3, gemma3_text.*transformers"):
        LLM(str(tiny.make(tmp_path / "m", "stablelm")))


def test_windows_longer_than_the_context_are_refused(llm: LLM) -> None:
    with pytest.raises(DataError, match="257 tokens is longer"):
        next(llm.score([[3] * 257]))
    assert [len(p) for p in llm.score([[3, 4], [5]])] == [1]


def test_scoring_gives_fp32(llm: LLM) -> None:
    assert next(llm.score([[3, 4, 5]])).dtype == torch.float32


def test_what_a_template_refuses_in_two_lines_is_said_in_one(tmp_path: Path) -> None:
    folder = tiny.make(tmp_path / "m", layers=1)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('not\n  so') }}")
    with pytest.raises(DataError, match="refuses these messages: not so"):
        LLM(str(folder)).generate([[{"role": "user", "content": "hi"}]])


@pytest.mark.parametrize("rope", [{"rope_theta": 0.0}, {"rope_theta": -2.0}, {"rope_type": "linear", "rope_theta": 1e4, "factor": 0.0}])
def test_rotary_parameters_that_give_no_frequencies(tmp_path: Path, rope: dict[str, object]) -> None:
    folder = tiny.make(tmp_path / "m", layers=1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_parameters": {"rope_type": "default", **rope}}))
    with pytest.raises(ModelError, match=r"rotary|rope|factor"):
        LLM(str(folder))


def test_calls_of_several_threads_give_what_each_gives_alone(llm: LLM) -> None:
    each, params = prompts(6, 40, seed=3), SamplingParams(max_tokens=24, ignore_eos=True)
    alone = [llm.generate([p], params)[0].token_ids for p in each]
    with ThreadPoolExecutor(6) as threads:
        together = list(threads.map(lambda p: llm.generate([p], params)[0].token_ids, each))
    assert together == alone


def test_a_second_engine_waits_for_no_one_and_is_refused(llm: LLM) -> None:
    prompt, params = prompts(1, 20, seed=4)[0], SamplingParams(max_tokens=4, ignore_eos=True)
    first, second = llm.engine(), llm.engine()
    running = first.add(prompt, params)
    first.step()
    for other in (lambda: second.add(prompt, params), lambda: llm.generate([prompt], params), lambda: next(llm.score([prompt]))):
        with pytest.raises(UnsupportedError, match="another engine of this LLM"):
            other()
    while first.busy():
        first.step()
    assert llm.generate([prompt], params)[0].token_ids == running.generated
    left = second.add(prompt, params)
    with pytest.raises(UnsupportedError, match="another engine"):
        first.add(prompt, params)
    second.cancel(left)
    first.cancel(first.add(prompt, params))
    windows = llm.score([prompt])
    next(windows)
    with pytest.raises(UnsupportedError, match="score"):
        llm.generate([prompt], params)
    windows.close()
    assert llm.generate([prompt], params)[0].token_ids == running.generated


def _tokens(count: int) -> list[int]:
    return random.Random(count).choices(range(300), k=count)


def test_a_prompt_that_was_seen_before_is_not_computed_again_and_no_token_changes() -> None:
    llm, plain = LLM(model("llama"), num_blocks=8), LLM(model("llama"), num_blocks=8, prefix_cache=False)
    start, params = _tokens(70), SamplingParams(max_tokens=10, ignore_eos=True)
    given = [[*start, 5], [*start, 6, 7], [*start[:40], 9, 9]]
    wanted = [plain.generate([p], params)[0] for p in given]
    found = [llm.generate([p], params)[0] for p in given]
    assert found == wanted
    assert [o.cached_tokens for o in found] == [0, 64, 32]
    assert [o.cached_tokens for o in wanted] == [0, 0, 0]
    assert llm.generate(given, params) == wanted
    window = _tokens(128)
    scored = [t.clone() for t in llm.score([window])]
    assert all(torch.equal(a, b) for a, b in zip(scored, plain.score([window]), strict=True))
    after = llm.generate(given[:1], params)[0]
    assert (after, after.cached_tokens) == (wanted[0], 0), "the window took all blocks"
    answer = llm.generate([[*given[0], *after.token_ids, 3]], params)[0]
    assert answer == plain.generate([[*given[0], *after.token_ids, 3]], params)[0]
    assert answer.cached_tokens == 80


def test_a_request_that_was_given_up_leaves_nothing_behind() -> None:
    llm, plain = LLM(model("llama"), num_blocks=8), LLM(model("llama"), num_blocks=8, prefix_cache=False)
    prompt, params = _tokens(70), SamplingParams(max_tokens=10, ignore_eos=True)
    engine = llm.engine()
    engine.add(prompt, params)
    engine.scheduler._max_step_tokens = 40
    engine.step()
    del engine
    found = llm.generate([prompt], params)[0]
    assert (found, found.cached_tokens) == (plain.generate([prompt], params)[0], 32)
    assert llm.engine().scheduler.pool.num_used == 0


def test_prompts_are_looked_up_where_that_changes_nothing() -> None:
    by_batch = quantized("llama", lambda _: "int8-channel-sym+int8-tensor")[0]  # rounds activations by all rows of a step
    for given, wanted in ((None, 0), (True, 64)):
        llm = LLM(by_batch, prefix_cache=given)
        assert [llm.generate([[7] * 70], SamplingParams(max_tokens=1))[0].cached_tokens for _ in range(2)] == [0, wanted]


def test_an_engine_that_is_gone_has_no_turn(llm: LLM) -> None:
    engine = llm.engine()
    engine.add(prompts(1, 20, seed=4)[0], SamplingParams(max_tokens=4))
    del engine
    assert llm.generate([prompts(1, 20, seed=4)[0]], SamplingParams(max_tokens=1))


def test_a_request_that_was_refused_keeps_no_turn() -> None:
    small, prompt = LLM(model("llama"), num_blocks=3), prompts(1, 20, seed=4)[0]
    engine = small.engine()
    with pytest.raises(DataError, match="the pool has 3"):
        engine.add(prompt, SamplingParams(max_tokens=100))
    with pytest.raises(DataError, match="prompt 2 of 2") as kept:  # with its engine
        small.generate([prompt, []], SamplingParams(max_tokens=4))
    assert small.generate([prompt], SamplingParams(max_tokens=4))
    assert kept


def test_cancelling_a_finished_request_leaves_its_ending(llm: LLM) -> None:
    engine = llm.engine()
    request = engine.add(prompts(1, 20, seed=4)[0], SamplingParams(max_tokens=2, ignore_eos=True))
    while engine.busy():
        engine.step()
    engine.cancel(request)
    assert request.finish_reason == "length"


@pytest.mark.parametrize(
    "given",
    [
        {"max_tokens": 1.5}, {"max_tokens": "x"}, {"max_tokens": True}, {"top_k": 1.5}, {"seed": 1.5}, {"stop_token_ids": ("x",)}, {"temperature": "hot"}, {"top_k": True},
        {"stop": (5,)}, {"stop": 5}, {"stop": b"x"}, {"stop": (b"x",)}, {"stop": ("",)}, {"stop_token_ids": "12"}, {"stop_token_ids": True}, {"top_k": 1 << 70}, {"top_p": True},
    ],
)  # fmt: skip
def test_parameters_of_another_type_are_refused_by_name(given: dict[str, object]) -> None:
    with pytest.raises(DataError, match=next(iter(given))):
        SamplingParams(**given)


def test_ends_are_taken_in_every_usual_form() -> None:
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams(stop=[], stop_token_ids=[]) == SamplingParams()  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"], stop_token_ids=7) == SamplingParams(stop=("a", "b"), stop_token_ids=(7,))  # type: ignore[arg-type]
    assert SamplingParams(temperature=5e-309).temperature == 0


def test_sampling_parameters_of_another_kind_are_refused(llm: LLM) -> None:
    for given in ({"max_tokens": 3}, 3, [SamplingParams(), None]):
        with pytest.raises(DataError, match="SamplingParams"):
            llm.generate(["a", "b"], given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given", [{"num_speculative_tokens": "8"}, {"threads": 1.5}, {"threads": 100_000}, {"threads": 0}, {"block_size": "16"}, {"num_blocks": "9"}, {"max_num_seqs": 2.0}]
)
def test_sizes_of_another_kind_are_refused_by_name(given: dict[str, object]) -> None:
    with pytest.raises(UnsupportedError, match=next(iter(given))):
        LLM(model("llama"), **given)


def test_token_ids_may_be_an_array(llm: LLM) -> None:
    prompt, params = prompts(1, 20, seed=4)[0], SamplingParams(max_tokens=2)
    assert llm.generate([np.array(prompt)], params)[0].token_ids == llm.generate([prompt], params)[0].token_ids
    assert llm.generate([torch.tensor(prompt).tolist()], params)
