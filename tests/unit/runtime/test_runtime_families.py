"""Laws 10 and 11: per family, greedy tokens and logits equal transformers', alone and in batches with chunked prefill; bits do not depend on the batch."""

from __future__ import annotations

import pytest
import torch
from runtime_models import FAMILIES, greedy, model, prompts, quantized, short_of_greedy, transformers_model
from tolerances import LOGITS, TIES

from qforge.runtime import LLM, SamplingParams


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_equal_those_of_transformers(name: str) -> None:
    given, theirs = prompts(20, 60), transformers_model(name)
    wanted = [greedy(theirs, p, 24) for p in given]
    params = SamplingParams(max_tokens=24)
    batch = LLM(model(name), max_step_tokens=13, max_num_seqs=7, num_blocks=40).generate(given, params)
    assert [o.token_ids for o in batch] == wanted
    alone = LLM(model(name))
    assert [alone.generate([p], params)[0].token_ids for p in given[:4]] == wanted[:4]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_windows_equal_those_of_transformers(name: str) -> None:
    window = prompts(1, 2, seed=3)[0] * 100 + prompts(40, 12, seed=4)[0]
    window = (window + [i % 380 + 3 for i in range(200)])[:200]
    pieces = list(LLM(model(name)).score([window]))
    assert [len(p) for p in pieces] == [128, 71]
    with torch.no_grad():
        wanted = transformers_model(name)(torch.tensor([window])).logits[0, :-1]
    assert (torch.cat(pieces) - wanted).abs().max() < LOGITS


@pytest.mark.parametrize("scheme", ["int4-g32-sym", "int4-g16-asym", "int8-channel-sym", "nf4-g16"])
def test_a_quantized_model_equals_transformers_on_the_same_weights(scheme: str) -> None:
    ours, theirs = quantized("llama", lambda n: scheme)
    given = prompts(20, 40, seed=1)
    outputs = LLM(ours, max_step_tokens=24).generate(given, SamplingParams(max_tokens=16))
    assert max(short_of_greedy(theirs, p, o.token_ids) for p, o in zip(given, outputs, strict=True)) <= TIES


@pytest.mark.parametrize("scheme", ["int4-g32-sym", "int4-g16-asym", "int8-channel-sym"])
def test_activations_of_8_bits_stay_near_the_same_weights(scheme: str) -> None:
    ours, theirs = quantized("llama", lambda n: scheme)
    window = prompts(1, 60, seed=6)[0] * 3
    with torch.no_grad():
        wanted = theirs(torch.tensor([window])).logits[0, :-1].log_softmax(-1)
    divergence = {a: (wanted.exp() * (wanted - torch.cat(list(LLM(ours, activations=a).score([window]))).log_softmax(-1))).sum(-1).mean() for a in ("fp", "int8")}
    assert divergence["fp"] < 1e-6
    assert 1e-5 < divergence["int8"] < 3e-2


def test_linears_of_mixed_schemes_run_side_by_side() -> None:
    ours, theirs = quantized("qwen2", lambda n: None if "k_proj" in n else "int8-g32-sym" if "up_proj" in n else "int4-g32-sym")
    llm = LLM(ours)
    given = prompts(5, 40, seed=2)
    outputs = llm.generate(given, SamplingParams(max_tokens=16))
    assert max(short_of_greedy(theirs, p, o.token_ids) for p, o in zip(given, outputs, strict=True)) <= TIES
    assert llm.kernels() == {"native-a16; native-dense": 3, "native-a16": 9, "native-dense": 1}


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral"])
def test_logits_have_the_same_bits_however_steps_are_cut_and_whoever_is_in_the_batch(name: str) -> None:
    given = prompts(8, 70, seed=5)
    llms = [LLM(model(name), threads=t, max_step_tokens=n, block_size=b, num_blocks=40) for t, n, b in ((1, 512, 16), (2, 7, 32), (3, 33, 16))]
    runs = []
    for llm, order in zip(llms, ([0, 1, 2, 3, 4, 5, 6, 7], [7, 6, 5, 4, 3, 2, 1, 0], [3, 1, 4, 0, 5, 2, 6, 7]), strict=True):
        rows: dict[int, list[torch.Tensor]] = {i: [] for i in order}
        engine = llm.engine()
        who = {engine.add(given[i], SamplingParams(max_tokens=6, ignore_eos=True)).id: i for i in order}
        step = llm.runner.step
        recorded: list[torch.Tensor] = []
        object.__setattr__(llm.runner, "step", lambda s, step=step, recorded=recorded: recorded.append(step(s)) or recorded[-1])
        while engine.busy():
            before = len(recorded)
            chosen = engine.step()
            for row, (sequence, _) in zip(recorded[before] if len(recorded) > before else [], chosen, strict=True):
                rows[who[sequence.id]].append(row)
        runs.append(rows)
    for i in range(len(given)):
        whole = torch.stack(runs[0][i])
        assert len(whole) == 6
        assert all(torch.equal(whole, torch.stack(other[i])) for other in runs[1:])
