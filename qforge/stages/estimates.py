"""How much memory and time a run will take, before it starts: from shapes, token counts and this machine's measured matrix-product rate."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from qforge.calibration import endtoend, fisher
from qforge.calibration.gradients import CHUNK as GRADIENT_CHUNK
from qforge.calibration.room import BUDGET
from qforge.calibration.streams import BATCH_TOKENS
from qforge.calibration.tuning import STEP_TOKENS
from qforge.engines.base import CHUNK
from qforge.errors import RecipeError
from qforge.methods import native
from qforge.methods.gptq import GPTQ
from qforge.models.blocks import BlockModel
from qforge.plan import Plan

PROCESS = 400 << 20  # Python, torch, transformers, tokenizer and headers, buffers of the matrix products: what is resident beside tensors while blocks are quantized
RAY = 600 << 20  # its own processes
RAY_S = 12.0  # seconds until it and the workers are ready
RUNTIME = 70 << 20  # what evaluating adds to that
ACTIVATIONS = "activations of the calibration text, up to their budget"
FACTOR_BYTES = 8  # of an element of the factor while it is made: in fp32, and turned
SOLVING_BYTES = 16  # of an element of a weight while it is solved or judged: its target and three arrays on the way
# What a block takes beside its products at full speed in fp32, measured on TinyLlama's shape (`benchmarks/scale.py --layers 3 --samples 64`): norms, attention and activations, and
# conversions, by whether products are in bf16; and in products of [O, I] and [I, I], what solving and judging a linear, correcting and refining it take.
FORWARD, STATISTICS = {True: 0.8, False: 1.25}, {True: 0.7, False: 1.15}
GRADIENTS = 1.25  # the same forward, of products whose gradients are taken
SOLVE, CORRECT, REFINE, SWEEP = 4.4, 2.0, 1.1, 5.1
TUNED_BYTES = 28  # of a weight while its block is tuned: target, position, what is tried, gradient and what they are made with
TUNE = 2.5  # the same in tuning, forward and back, in half precision
SPILL_RATE = 2e9  # bytes a second to and from the page cache
SCORING_COPIES = 8  # fp32 arrays [CHUNK, vocabulary] that comparing two models holds


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a run is expected to take.

    Attributes:
        peak_bytes: resident memory at the peak, by what it is made of; the sum is the peak.
        peak_stage: in which stage that is.
        seconds: wall time by stage.
    """

    peak_bytes: dict[str, int]
    peak_stage: str
    seconds: dict[str, float]


def estimate(plan: Plan, blocks: BlockModel, calibration_tokens: int, evaluation_tokens: int, *, adapters: bool, candidates: int = 0) -> Estimate:
    """Estimate a run.

    Args:
        plan: what will be done.
        blocks: the merged model.
        calibration_tokens: of all sequences; 0 for a method that needs none.
        evaluation_tokens: scored positions; 0 where evaluation is skipped.
        adapters: whether the base's own perplexity is measured, too.
        candidates: schemes that are tried on each linear before one is chosen; 0 where there is no choice.
    """
    stages = {
        "choose": _choose_memory(plan, blocks, calibration_tokens) if candidates else {},
        "quantize": _most(_quantize_stages(plan, blocks, calibration_tokens)),
        "evaluate": _evaluate_memory(plan, blocks, evaluation_tokens) if evaluation_tokens else {},
    }
    peak = max(stages, key=lambda name: sum(stages[name].values()))
    choose = {"choose": _choose_seconds(plan, blocks, calibration_tokens, candidates)} if candidates else {}
    return Estimate(stages[peak], peak, choose | _seconds(plan, blocks, calibration_tokens, evaluation_tokens, 3 if adapters else 2))


def activation_budget(plan: Plan, blocks: BlockModel, calibration_tokens: int, evaluation_tokens: int, limit: int | None, *, candidates: int = 0) -> int:
    """Bytes of calibration activations that may lie in memory at once; the rest goes to disk.

    Raises:
        RecipeError: what cannot go to disk is estimated to exceed the limit already.
    """
    if limit is None:
        return BUDGET
    stages = [*_quantize_stages(plan, blocks, calibration_tokens), *([_choose_memory(plan, blocks, calibration_tokens)] if candidates else [])]
    fixed = max(sum(size for name, size in stage.items() if name != ACTIVATIONS) for stage in stages)
    evaluate = sum(_evaluate_memory(plan, blocks, evaluation_tokens).values()) if evaluation_tokens else 0
    for needed, stage, way_out in ((fixed, "quantizing", "fewer calibration tokens"), (evaluate, "evaluating", "a shorter evaluation text, or evaluate: null")):
        if needed > limit:
            raise RecipeError(f"run.memory_limit: {limit / 2**20:,.0f} MiB, but {stage} takes about {needed / 2**20:,.0f} MiB; raise the limit, or try {way_out}")
    return limit - fixed


@dataclass(frozen=True, slots=True)
class _Block:
    """One decoder block's linears, in order, and what its statistics are taken of.

    Attributes:
        shapes: `(out, in)`, and the share of the tokens that a linear is given.
        inputs: widths of distinct inputs, and that share.
        streams: 2 where the unquantized model runs beside the quantized one.
        solves: whether a factor is made of the statistics.
        steps: of tuning the block as a whole.
    """

    shapes: list[tuple[int, int, float]]
    inputs: list[tuple[int, float]]
    streams: int
    solves: bool
    steps: int

    @property
    def weights(self) -> int:
        """Weights of all the block's linears together."""
        return sum(o * i for o, i, _ in self.shapes)

    @property
    def work(self) -> float:
        """Multiply-adds of one token."""
        return sum(o * i * share for o, i, share in self.shapes)

    @property
    def squares(self) -> float:
        """Multiply-adds of one token in all Hessians, whole."""
        return sum(i * i * share for i, share in self.inputs)


def _block(plan: Plan, blocks: BlockModel) -> _Block:
    """The largest block's. Linears of one module share an input, but for the last of several, which takes what the module has made of the others."""
    by_block = [[p for p in plan.layers if p.name.startswith(f"{name}.") and p.name not in blocks.routers] for name in blocks.block_names]
    layers = max(by_block, key=lambda layers: sum(p.out_features * p.in_features for p in layers))
    by_module: dict[str, list[tuple[int, float]]] = {}
    for p in layers:
        by_module.setdefault(p.name.rpartition(".")[0], []).append((p.in_features, blocks.experts.get(p.name, 1.0)))
    inputs = [given for all_given in by_module.values() for given in ([*dict.fromkeys(all_given[:-1]), all_given[-1]])]
    streams = 1 if plan.needs.isdisjoint({"cross", "targets"}) else 2
    shapes = [(p.out_features, p.in_features, blocks.experts.get(p.name, 1.0)) for p in layers]
    return _Block(shapes, inputs, streams, isinstance(plan.quantizer, GPTQ), plan.options.steps if "targets" in plan.needs else 0)


def _kept_bytes(block: _Block, hidden: int) -> int:
    """Of one token: both streams before a block (a tuned one's input twice), what the unquantized block feeds its linears and has in the residual stream (halves), what waits at
    the widest linear."""
    return (
        4 * (block.streams + bool(block.steps)) * hidden
        + (int(2 * sum(i * share for i, share in block.inputs)) + 2 * 2 * hidden if block.streams == 2 else 0)
        + 4 * (2 * hidden + max(i for _, i, _ in block.shapes))
    )


def _quantize_memory(plan: Plan, blocks: BlockModel, tokens: int) -> dict[str, int]:
    block, hidden = _block(plan, blocks), blocks.hidden_size
    fixed = {"Python, torch, transformers, tokenizer": PROCESS}
    if not tokens:
        return fixed | {"one decoder block in fp32, read and quantized": 4 * block.weights + block.weights}
    fixed[ACTIVATIONS] = min(tokens * _kept_bytes(block, hidden), BUDGET)
    moments = [{"the embedding, as stored": blocks.vocab_size * hidden * blocks.stored_dtype(blocks.embedding_name).itemsize}]
    widest = max(i for _, i, _ in block.shapes)
    batch = {"what the block's code holds for one batch": min(tokens, BATCH_TOKENS) * (3 * 4 * (hidden + widest) + 6 * widest)}
    moments.append({"one decoder block in fp32": 4 * block.weights} | batch)
    if plan.workers > 1:
        held = 4 * block.weights + sum(batch.values()) + 2 * widest**2 * 4 * block.streams
        fixed |= {"Ray": RAY, f"{plan.workers} workers: Python, torch, transformers": plan.workers * PROCESS}
        fixed[f"{plan.workers} workers: one decoder block in fp32, one batch, one linear's statistics, twice on their way"] = plan.workers * held
    finished = 0
    for out, width, _ in block.shapes:
        rest = {"weights of the block that are still wanted, and codes": 4 * (block.weights - finished) + finished}
        residual = out * width * 4 if block.streams == 2 and out == hidden else 0
        statistics = {"one linear's statistics": width**2 * 4 * block.streams + residual}
        factor = width**2 * FACTOR_BYTES if block.solves else 0
        moments.append(rest | statistics | {"one linear's factor": factor})
        moments.append(rest | statistics | {"one linear's factor": factor // 2, "one linear on its way": SOLVING_BYTES * out * width})
        finished += out * width
    if block.steps:
        kept = int(min(tokens, STEP_TOKENS) * sum((o + i) * share for o, i, share in block.shapes)) * 2
        moments.append({"one decoder block while it is tuned": TUNED_BYTES * block.weights, "what a block keeps of one step for its gradients": kept} | batch)
    return fixed | max(moments, key=lambda parts: sum(parts.values()))


def _quantize_stages(plan: Plan, blocks: BlockModel, tokens: int) -> list[dict[str, int]]:
    stages = [_quantize_memory(plan, blocks, tokens)]
    if tokens and "outputs" in plan.needs:
        stages.append(_fisher_memory(plan, blocks, tokens))
    if tokens and plan.options.tune:
        stages.append(_tune_memory(plan, blocks, tokens))
    return stages


def _most(stages: Sequence[dict[str, int]]) -> dict[str, int]:
    return max(stages, key=lambda parts: sum(parts.values()))


def _fisher_memory(plan: Plan, blocks: BlockModel, tokens: int) -> dict[str, int]:
    block, gradients, head = _block(plan, blocks), *_gradient_memory(plan, blocks, min(tokens, fisher.BATCH_TOKENS))
    sums = {"how a block's outputs weigh against each other": sum(o * o for o, _, _ in block.shapes) * 6}
    kept = min(tokens, fisher.TOKENS) * blocks.hidden_size * 2 * blocks.num_blocks
    return {"Python, torch, transformers, tokenizer": PROCESS, ACTIVATIONS: min(kept, BUDGET), **_most((gradients | sums, head))}


def _tune_memory(plan: Plan, blocks: BlockModel, tokens: int) -> dict[str, int]:
    block, (_, head) = _block(plan, blocks), _gradient_memory(plan, blocks, 0)
    step = min(tokens, endtoend.STEP_TOKENS)
    whole = {
        "all decoder blocks in fp32, with gradients and codes": 9 * block.weights * blocks.num_blocks,
        "what all blocks keep of one step for its gradients": int(step * sum((o + i) * share for o, i, share in block.shapes)) * 4 * blocks.num_blocks,
    }
    return {"Python, torch, transformers, tokenizer": PROCESS, ACTIVATIONS: min(tokens * blocks.hidden_size * 8, BUDGET), **whole, **head}


def _gradient_memory(plan: Plan, blocks: BlockModel, batch: int) -> tuple[dict[str, int], dict[str, int]]:
    """Of going back through one block with a batch of so many tokens, and through the head."""
    block = _block(plan, blocks)
    gradients = {
        "one decoder block in fp32, read": 2 * block.weights * 4,
        "what a block keeps of one batch for its gradients": int(batch * sum((o + i) * share for o, i, share in block.shapes)) * 4,
    }
    head = {
        "the output head, as stored and in fp32": blocks.vocab_size * blocks.hidden_size * 8,
        f"logits of {GRADIENT_CHUNK} positions and their gradients": GRADIENT_CHUNK * blocks.vocab_size * 4 * SCORING_COPIES,
    }
    return gradients, head


def _choose_memory(plan: Plan, blocks: BlockModel, tokens: int) -> dict[str, int]:
    errors = {name: size for name, size in _quantize_memory(plan, blocks, tokens).items() if name not in ("Python, torch, transformers, tokenizer", ACTIVATIONS)}
    return {
        "Python, torch, transformers, tokenizer": PROCESS,
        ACTIVATIONS: min(tokens * blocks.hidden_size * 4, BUDGET),
        **_most((*_gradient_memory(plan, blocks, min(tokens, BATCH_TOKENS)), errors)),
    }


def _evaluate_memory(plan: Plan, blocks: BlockModel, tokens: int) -> dict[str, int]:
    return {
        "Python, torch, transformers, tokenizer": PROCESS + RUNTIME,
        "the quantized model, packed in the runtime": plan.size_bytes,
        "the original's head in fp32": blocks.vocab_size * blocks.hidden_size * 4,
        "hidden states of the evaluation text": tokens * blocks.hidden_size * 4,
        f"logits of {CHUNK} positions of both models": CHUNK * blocks.vocab_size * 4 * SCORING_COPIES,
    }


def _seconds(plan: Plan, blocks: BlockModel, calibration: int, evaluation: int, passes: int) -> dict[str, float]:
    rate, block, fast = gemm_rate(), _block(plan, blocks), native.has_bf16_products()
    head = blocks.vocab_size * blocks.hidden_size
    seconds = block.weights * 2e-8
    if calibration:
        passes_over = block.streams + bool(plan.transforms)  # transforms see every block once more
        products = FORWARD[fast] * passes_over * block.work + STATISTICS[fast] * (block.streams - 0.5) * block.squares  # half of the Hessian is computed
        seconds += calibration * products / gemm_rate(plan.workers) + 2 * calibration * _kept_bytes(block, blocks.hidden_size) / SPILL_RATE
    if calibration and block.solves:
        units = SOLVE + CORRECT * (block.streams - 1) + (REFINE + SWEEP * plan.options.refine if plan.options.refine else 0)
        seconds += (units * sum(o * i * i for o, i, _ in block.shapes) + sum(i**3 for i, _ in block.inputs)) / rate
    seconds += block.steps * min(calibration, STEP_TOKENS) * TUNE * block.work / rate
    seconds = seconds * blocks.num_blocks + (RAY_S if plan.workers > 1 else 0)
    if calibration and "outputs" in plan.needs:
        sums = sum(o * o * share for o, _, share in block.shapes)
        coupled = plan.options.refine * sum(3 * o * o * i + 2 * o * i * i for o, i, _ in block.shapes)
        seconds += (min(calibration, fisher.TOKENS) * (blocks.num_blocks * (3 * GRADIENTS * block.work + sums) + 2 * head) + coupled * blocks.num_blocks) / rate
    if calibration and plan.options.tune:
        steps = plan.options.tune * min(calibration, endtoend.STEP_TOKENS)
        seconds += (3 * steps * GRADIENTS * block.work * blocks.num_blocks + min(steps, calibration) * head + calibration * FORWARD[fast] * block.work * blocks.num_blocks) / rate
    return {"quantize": seconds, "evaluate": evaluation * passes * (block.work * blocks.num_blocks + head) / rate}


def _choose_seconds(plan: Plan, blocks: BlockModel, tokens: int, candidates: int) -> float:
    """One pass forward with statistics, every candidate rounded to, and one batch forward and back."""
    block, head, fast = _block(plan, blocks), blocks.vocab_size * blocks.hidden_size, native.has_bf16_products()
    forward = tokens * (FORWARD[fast] * block.work + STATISTICS[fast] * 0.5 * block.squares)
    tries = candidates * (SOLVE * sum(o * i * i for o, i, _ in block.shapes)) + sum(i**3 for i, _ in block.inputs)
    gradients = min(tokens, BATCH_TOKENS) * 2 * block.work
    return (blocks.num_blocks * (forward + tries + gradients) + min(tokens, BATCH_TOKENS) * 2 * head) / gemm_rate()


def gemm_rate(workers: int = 1) -> float:
    """Multiply-adds a second of this machine's fp32 matrix product at sizes like a model's, in so many processes that share its threads.

    Best of three; measured once a process for each number of threads. Machines of a cluster add what they have.
    """
    return workers * _gemm_rate(max(1, torch.get_num_threads() // workers))


@functools.cache
def _gemm_rate(threads: int) -> float:
    a, b = torch.ones(1024, 1024), torch.ones(1024, 1024)
    best, before = float("inf"), torch.get_num_threads()
    torch.set_num_threads(threads)
    for _ in range(3):
        start = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - start)
    torch.set_num_threads(before)
    return a.shape[0] * b.numel() / best
