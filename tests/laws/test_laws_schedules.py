"""Law 11, for logits: a sequence's logits are equal bit for bit whatever else is in the batch, for any thread count, cut of the prompt, block size, and place of blocks,
and wherever it begins, behind what others left of it in the cache."""

from __future__ import annotations

import random
import sys
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "runtime"))
from runtime_models import model, prompts, quantized

from qforge.models.model import Model
from qforge.runtime import LLM, native_decoder
from qforge.runtime import sequence as seq
from qforge.runtime.blocks import BlockPool
from qforge.runtime.scheduler import Guess, Scheduler
from qforge.runtime.sequence import FinishReason, SamplingParams
from qforge.runtime.step import build_step

MODELS = ["llama", "llama-odd-widths", "llama-wide-heads", "gemma3", "mistral", "qwen2", "qwen3", "gemma", "smollm3-windows", "granite", "olmo3", "exaone4", "phi3-long", "glm4"]
MODELS += [
    "int4-g32-asym",
    "int8-channel-sym+int8-token",
    "shared table",
    "qwen3-moe-many",
    "experts as int8",
    "int4-g32-asym as int8",
    "shared table as bf16",
]  # as: with such activations
GIVEN, NEW = prompts(9, 110, seed=5), 6  # past 64 positions, which int8 rounds together; 8 sequences or more are stored by tasks
BLOCKS = 60


@cache
def opened(name: str) -> Model:
    if name == "shared table":
        return quantized("llama", lambda n: "int4-g32-sym", head="int8-g32-sym")[0]
    if name == "experts":
        return quantized("qwen3-moe-many", lambda n: "int8-g16-sym" if ".2.mlp" in n else "int4-g32-sym")[0]
    return quantized("llama", lambda n: name)[0] if name.startswith("int") else model(name)


@cache
def runtime(name: str, threads: int, block_size: int, kv_cache: str, far_ns: float = native_decoder.FAR_NS) -> LLM:
    model_name, _, activations = name.partition(" as ")
    with mock.patch.object(native_decoder, "FAR_NS", far_ns):
        return LLM(opened(model_name), activations=activations or "fp", threads=threads, block_size=block_size, num_blocks=BLOCKS, kv_cache=kv_cache)


def logits_of(llm: LLM, block_size: int, who: list[int], rng: random.Random | None, guess: Guess | None = None) -> tuple[list[torch.Tensor], int]:
    """Logits at every position that a sequence is asked for, for each of `who`, and how many tokens were in the cache when they began. `rng` draws step budgets, places of blocks,
    arrivals, and who gives way."""
    draw = rng or random.Random(0)
    scheduler = Scheduler(BlockPool(BLOCKS), block_size, 9, 512, prefix_cache=rng is not None)
    if rng is not None:
        scheduler.pool._empty.sort(key=lambda _: rng.random())  # hands out blocks in any order: a heap's order is not needed to be a pool
    arriving = [seq.Sequence(n, list(GIVEN[i]), len(GIVEN[i]), SamplingParams(), 0, len(GIVEN[i]) + NEW, frozenset()) for n, i in enumerate(who)]
    all_of_them, rows = list(arriving), dict[int, list[torch.Tensor]]({n: [] for n in range(len(who))})
    while arriving or scheduler.waiting or scheduler.running:
        for _ in range(draw.randint(1, 3) if rng else len(arriving)):
            if arriving:
                scheduler.add(arriving.pop(0))
        scheduler._max_step_tokens = draw.choice([1, 3, 7, 20, 64, 512]) if rng else 512
        pieces = scheduler.schedule(guess)
        ready = [p for p in pieces if p.wants_logits]
        logits = llm.runner.step(build_step(pieces, block_size)).split([1 + len(p.draft) for p in ready])
        scheduler.advance(pieces)
        for found, piece in zip(logits, ready, strict=True):
            sequence, chosen = piece.sequence, found.argmax(-1).tolist()
            right = next((i for i, t in enumerate(piece.draft) if t != chosen[i]), len(piece.draft))
            sequence.tokens += chosen[: right + 1]
            scheduler.keep(piece, right)
            rows[sequence.id] += found[: right + 1]
            if len(sequence.tokens) >= sequence.limit:
                scheduler.finish(sequence, FinishReason.LENGTH)
        if rng and scheduler.running and draw.random() < 0.05:
            scheduler._preempt(scheduler.running[-1])
    return [torch.stack(r) for r in rows.values()], sum(s.cached for s in all_of_them)


@cache
def alone(name: str, kv_cache: str, i: int) -> torch.Tensor:
    return logits_of(runtime(name, 1, 16, kv_cache), 16, [i], None)[0][0]


def check(name: str, number: int) -> int:
    """Compare a schedule's logits with those of each sequence alone; how many tokens were in the cache when they began."""
    rng = random.Random(number)
    threads, block_size, kv_cache = rng.choice([1, 2, 3]), rng.choice([16, 32]), rng.choice(["fp32", "fp16", "bf16", "int8", "fp8"])
    far_ns = rng.choice([-1.0, native_decoder.FAR_NS])  # -1: threads compute sequences of their own wherever there are enough
    who = rng.sample(range(len(GIVEN)), rng.randint(1, len(GIVEN)))
    who += rng.choices(who, k=rng.randint(0, 3))  # these may begin behind what the first of their kind left
    comes = {i: alone(name, kv_cache, i).argmax(-1).tolist() for i in who}

    def guess(sequence: seq.Sequence, most: int, _: int) -> list[int]:
        """Up to three tokens of what comes; one in four is wrong."""
        next_ones = comes[who[sequence.id]][len(sequence.tokens) - sequence.num_prompt :]
        return [t if rng.random() < 0.75 else t - 1 if t else 1 for t in next_ones[: min(most, rng.randint(0, 3))]]

    found, cached = logits_of(runtime(name, threads, block_size, kv_cache, far_ns), block_size, who, rng, guess)
    for i, rows in zip(who, found, strict=True):
        assert torch.equal(rows, alone(name, kv_cache, i)), f"sequence {i} of schedule {number}"
    return cached


@pytest.mark.parametrize("name", MODELS)
def test_logits_have_the_same_bits_in_any_schedule(name: str) -> None:
    assert sum(check(name, number) for number in range(6)) > 0, "no schedule began behind what others had left"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_a_thousand_schedules(part: int) -> None:
    for number in range(100 * part, 100 * part + 100):
        check(MODELS[number % len(MODELS)], 1000 + number)
