"""Log-probabilities of prompts and of what is generated: those of the model's logits, however a step was cut, and no token is another for it."""

from __future__ import annotations

import random

import pytest
import torch
from runtime_models import model, quantized

from qforge.errors import DataError
from qforge.runtime import LLM, SamplingParams, logprobs
from qforge.runtime.logprobs import of
from qforge.runtime.sequence import Logprob, Output

GIVEN = [random.Random(n).choices(range(300), k=n) for n in (1, 17, 140, 40)]


def opened(name: str) -> LLM:
    return LLM(model(name), num_blocks=60, max_step_tokens=100)


def checked(llm: LLM, output: Output, most: int) -> None:
    """Compare with the logits that `score` gives over the whole sequence."""
    tokens = output.prompt_token_ids + output.token_ids
    rows = torch.log_softmax(torch.cat(list(llm.score([tokens]))).double(), -1)
    assert output.prompt_logprobs is not None
    assert output.logprobs is not None
    found = [*output.prompt_logprobs, *output.logprobs]
    assert len(found) == len(tokens)
    assert found[0] is None
    for place, told in enumerate(found[1:], 1):
        row = rows[place - 1]
        assert told is not None
        assert told.token == tokens[place]
        assert told.logprob == float(row[tokens[place]])
        want = row.sort(descending=True, stable=True)
        assert [i for i, _ in told.top] == want.indices[:most].tolist()
        assert [p for _, p in told.top] == want.values[:most].tolist()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_they_are_the_models_and_change_no_token(name: str, temperature: float) -> None:
    llm = opened(name)
    wanted = llm.generate(GIVEN, [SamplingParams(max_tokens=20, temperature=temperature, seed=i, ignore_eos=True) for i in range(4)])
    found = llm.generate(GIVEN, [SamplingParams(max_tokens=20, temperature=temperature, seed=i, ignore_eos=True, logprobs=3, prompt_logprobs=3) for i in range(4)])
    assert [o.token_ids for o in found] == [o.token_ids for o in wanted]
    assert [o.logprobs for o in wanted] == [o.prompt_logprobs for o in wanted] == [None] * 4
    for output in found:
        checked(llm, output, 3)


def test_they_are_there_where_a_product_runs_outside_the_native_step() -> None:
    llm = LLM(quantized("llama", lambda _: "int8-channel-sym+int8-tensor")[0])
    (wanted,) = llm.generate([GIVEN[3]], SamplingParams(max_tokens=20, ignore_eos=True))
    (found,) = llm.generate([GIVEN[3]], SamplingParams(max_tokens=20, ignore_eos=True, logprobs=1))
    assert found.token_ids == wanted.token_ids
    assert found.logprobs is not None
    assert [told.top for told in found.logprobs] == [((told.token, told.logprob),) for told in found.logprobs]


def test_a_pool_that_runs_out_notes_each_token_once() -> None:
    llm = LLM(model("llama"), num_blocks=16, max_step_tokens=30)
    params = SamplingParams(max_tokens=60, ignore_eos=True, logprobs=2, prompt_logprobs=2)
    engine = llm.engine()
    requests = [engine.add(p, params) for p in (GIVEN[2], GIVEN[3], GIVEN[1])]
    while engine.busy():
        engine.step()
    assert sum(r.preemptions for r in requests) > 0
    roomy = LLM(model("llama"))
    for r in requests:
        checked(roomy, Output(None, r.tokens[: r.num_prompt], r.generated, "", "", 0, r.logprobs, r.prompt_logprobs), 2)


def test_who_asks_for_none_gets_none_beside_who_does() -> None:
    llm = opened("llama")
    both = [SamplingParams(max_tokens=4), SamplingParams(max_tokens=4, logprobs=0)]
    first, second = llm.generate([GIVEN[3], GIVEN[3]], both)
    assert (first.logprobs, first.prompt_logprobs, second.prompt_logprobs) == (None, None, None)
    assert second.logprobs is not None
    assert [(told.token, told.top) for told in second.logprobs] == [(t, ()) for t in second.token_ids]


def test_equal_ones_come_by_their_ids() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0, 2.0])
    found = of(logits, 4, 4)
    norm = float(logits.double().logsumexp(0))
    assert found == Logprob(4, pytest.approx(2 - norm), ((1, pytest.approx(3 - norm)), (3, pytest.approx(3 - norm)), (2, pytest.approx(2 - norm)), (4, pytest.approx(2 - norm))))


@pytest.mark.parametrize("given", [{"logprobs": -1}, {"logprobs": 21}, {"prompt_logprobs": 21}, {"logprobs": True}, {"prompt_logprobs": "2"}])
def test_what_cannot_be_told_is_refused(given: dict[str, int]) -> None:
    with pytest.raises(DataError, match=next(iter(given))):
        SamplingParams(**given)


def test_who_wants_them_makes_nobody_wait_for_a_sorted_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are native kernels they choose, as in steps in which nobody wants any."""

    def sorts(*_: object) -> list[int]:
        raise AssertionError("the reference sorts")

    monkeypatch.setattr(logprobs, "sample", sorts)
    found = opened("llama").generate(GIVEN[:2], [SamplingParams(max_tokens=3, temperature=1.0, seed=1), SamplingParams(max_tokens=3, logprobs=1)])
    assert found[1].logprobs is not None
