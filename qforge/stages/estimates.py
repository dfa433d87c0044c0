"""How much memory and time a run will take, before it starts: from shapes, token counts and this machine's measured matrix-product rate."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from qforge.calibration.room import BUDGET
from qforge.errors import RecipeError
from qforge.models.blocks import BlockModel
from qforge.plan import Plan

PROCESS = 470 << 20  # Python, torch, transformers, tokenizer and headers: measured before the first block is read
BATCH_TOKENS = 2048  # of calibration.sequential
CHUNK = 128  # positions whose logits exist at once
HELD = 4  # arrays of the hidden width that a decoder block keeps of every token while it waits at a linear: residual, normed input, query, key and value
ACTIVATIONS = "activations of the calibration text, up to their budget"
FACTOR_BYTES = 28  # of one square matrix element while its factor is made: Hessian fp32, damped and factors fp64
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
        "quantize": _quantize_memory(plan, blocks, calibration_tokens),
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
    stages = [_quantize_memory(plan, blocks, calibration_tokens), *([_choose_memory(plan, blocks, calibration_tokens)] if candidates else [])]
    fixed = max(sum(size for name, size in stage.items() if name != ACTIVATIONS) for stage in stages)
    evaluate = sum(_evaluate_memory(plan, blocks, evaluation_tokens).values()) if evaluation_tokens else 0
    for needed, stage, way_out in ((fixed, "quantizing", "fewer calibration tokens"), (evaluate, "evaluating", "a shorter evaluation text, or evaluate: null")):
        if needed > limit:
            raise RecipeError(f"run.memory_limit: {limit / 2**20:,.0f} MiB, but {stage} takes about {needed / 2**20:,.0f} MiB; raise the limit, or try {way_out}")
    return limit - fixed


def _block_shapes(plan: Plan, blocks: BlockModel) -> list[tuple[int, int, float]]:
    """`(out, in)` of the linears of the largest block, and the share of tokens that each is given."""
    by_block = [[(p.out_features, p.in_features, blocks.experts.get(p.name, 1.0)) for p in plan.layers if p.name.startswith(f"{name}.")] for name in blocks.block_names]
    return max(by_block, key=lambda shapes: sum(o * i for o, i, _ in shapes))


def _quantize_memory(plan: Plan, blocks: BlockModel, tokens: int) -> dict[str, int]:
    shapes = _block_shapes(plan, blocks)
    widths = {i for _, i, _ in shapes}
    streams = 2 if "cross" in plan.needs else 1
    embedding = {"the embedding, as stored and in fp32": blocks.vocab_size * blocks.hidden_size * 8}
    block = {"one decoder block in fp32, read and quantized": 3 * sum(o * i for o, i, _ in shapes) * 4}
    if tokens:
        block |= {
            "outputs of its linears for one batch": int(min(tokens, BATCH_TOKENS) * sum(o * share for o, _, share in shapes)) * 4,
            "one linear's statistics and their factor": max(widths) ** 2 * (FACTOR_BYTES + (4 if "cross" in plan.needs else 0)),
            "what waiting batches hold": tokens * HELD * blocks.hidden_size * 4,
        }
    larger = max((embedding, block), key=lambda part: sum(part.values())) if tokens else block
    return {
        "Python, torch, transformers, tokenizer": PROCESS,
        ACTIVATIONS: min(tokens * streams * blocks.hidden_size * 4, BUDGET),
        **larger,
    }


def _choose_memory(plan: Plan, blocks: BlockModel, tokens: int) -> dict[str, int]:
    shapes = _block_shapes(plan, blocks)
    gradients = {
        "one decoder block in fp32, read": 2 * sum(o * i for o, i, _ in shapes) * 4,
        "what a block keeps of one batch for its gradients": int(min(tokens, BATCH_TOKENS) * sum((o + i) * share for o, i, share in shapes)) * 4,
    }
    head = {
        "the output head, as stored and in fp32": blocks.vocab_size * blocks.hidden_size * 8,
        f"logits of {CHUNK} positions and their gradients": CHUNK * blocks.vocab_size * 4 * SCORING_COPIES,
    }
    errors = {name: size for name, size in _quantize_memory(plan, blocks, tokens).items() if name not in ("Python, torch, transformers, tokenizer", ACTIVATIONS)}
    return {
        "Python, torch, transformers, tokenizer": PROCESS,
        ACTIVATIONS: min(tokens * blocks.hidden_size * 4, BUDGET),
        **max((gradients, head, errors), key=lambda part: sum(part.values())),
    }


def _evaluate_memory(plan: Plan, blocks: BlockModel, tokens: int) -> dict[str, int]:
    return {
        "Python, torch, transformers, tokenizer": PROCESS,
        "the quantized model, packed in the runtime": plan.size_bytes,
        "the original's head in fp32": blocks.vocab_size * blocks.hidden_size * 4,
        "hidden states of the evaluation text": tokens * blocks.hidden_size * 4,
        f"logits of {CHUNK} positions of both models": CHUNK * blocks.vocab_size * 4 * SCORING_COPIES,
    }


def _seconds(plan: Plan, blocks: BlockModel, calibration: int, evaluation: int, passes: int) -> dict[str, float]:
    shapes = _block_shapes(plan, blocks)
    rate = gemm_rate()
    weights = sum(o * i * share for o, i, share in shapes) * blocks.num_blocks
    head = blocks.vocab_size * blocks.hidden_size
    inputs = sum(i * i * share for _, i, share in shapes) * 4 / 7 * blocks.num_blocks  # linears that share an input share its statistics: 4 inputs for 7 linears
    corrected = "cross" in plan.needs
    per_token = (1 + corrected + bool(plan.transforms)) * (weights + inputs)  # transforms see every block once more
    per_linear = sum(o * i * i for o, i, _ in shapes) * blocks.num_blocks * (3 * plan.options.refine + 2 * corrected)
    quantize = (calibration * per_token + per_linear) / rate if calibration else 0.0
    return {"quantize": quantize + (0.5 if calibration else 0.05) * blocks.num_blocks, "evaluate": evaluation * passes * (weights + head) / rate}


def _choose_seconds(plan: Plan, blocks: BlockModel, tokens: int, candidates: int) -> float:
    """One pass forward with statistics, every candidate rounded to, and one batch forward and back."""
    shapes = _block_shapes(plan, blocks)
    weights = sum(o * i * share for o, i, share in shapes) * blocks.num_blocks
    inputs = sum(i * i * share for _, i, share in shapes) * 4 / 7 * blocks.num_blocks
    tries = candidates * sum(o * i * i for o, i, _ in shapes) * blocks.num_blocks * 3
    gradients = min(tokens, BATCH_TOKENS) * (2 * weights + 2 * blocks.vocab_size * blocks.hidden_size)
    return (tokens * (weights + inputs) + tries + gradients) / gemm_rate() + 0.5 * blocks.num_blocks


def gemm_rate() -> float:
    """Multiply-adds a second of this machine's fp32 matrix product at sizes like a model's, best of three."""
    a, b = torch.ones(1024, 1024), torch.ones(1024, 1024)
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - start)
    return a.shape[0] * b.numel() / best
