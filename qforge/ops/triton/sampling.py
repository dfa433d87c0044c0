"""Launch the choice of tokens.

Letters: S rows of logits, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

CHUNK = 2048  # tokens that are sorted together
FEWEST = 64  # chunks that the choice is compiled for: with 16 or 32, Triton 3.9 spills registers on one capability or another
CHOICE_WARPS = 16  # with 8, registers are spilled on capability 80
BLOCK = 4096  # of the search for the largest logit


@dataclass(frozen=True, slots=True, eq=False)
class SamplingRows:
    """How each row's token is chosen (as `SamplingParams` of the runtime says), all `[S]`.

    Attributes:
        temperatures, top_ps, min_ps: fp64; a temperature of 0 is greedy.
        top_ks: int64; 0 is all.
        seeds, positions: int64 with the bits of uint64; they decide the random number.
    """

    temperatures: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def of(cls, rows: Iterable[tuple[float, int, float, float, int, int]], device: str | torch.device) -> SamplingRows:
        """From (temperature, top_k, top_p, min_p, seed, position) of each row."""
        temperatures, top_ks, top_ps, min_ps, seeds, positions = zip(*rows, strict=True)
        signed = [[n - (1 << 64) if n >> 63 else n for n in v] for v in (seeds, positions)]
        temperature, top_p, min_p = torch.tensor((temperatures, top_ps, min_ps), dtype=torch.float64).to(device)  # one transfer for the floats, one for the integers
        top_k, seed, position = torch.tensor((top_ks, *signed)).to(device)
        return cls(temperature, top_k, top_p, min_p, seed, position)


def sample(logits: torch.Tensor, rows: SamplingRows, chunk: int = CHUNK) -> torch.Tensor:
    """The chosen tokens `[S]` int64 of logits `[S, V]` fp32, -1 where the largest is not finite. Nothing waits for the GPU, so that it can be captured in a graph.

    Equal to qforge/runtime/sampler.py's choice: fp64 weights, the same random numbers, equal logits in the vocabulary's order. (Sums are rounded in another order: a draw within
    about 1e-15 of a token's edge may fall on its neighbour.)
    """
    from qforge.ops.triton.device import sampling

    assert logits.dtype == torch.float32, logits.dtype
    logits = logits.contiguous()
    count, vocabulary = logits.shape
    chunks = -(-vocabulary // chunk)
    power = max(FEWEST, 1 << (chunks - 1).bit_length())
    keys = torch.empty((count, chunks, chunk), dtype=torch.int32, device=logits.device)
    sums = torch.empty((count, chunks, chunk), dtype=torch.float64, device=logits.device)
    tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
    warps = max(1, min(8, chunk // 256))
    sampling.sort_chunks[(chunks, count)](logits, keys, vocabulary, CHUNK=chunk, num_warps=warps)
    sampling.sum_chunks[(chunks, count)](keys, rows.temperatures, sums, vocabulary, CHUNK=chunk, NP=power, num_warps=warps)
    sampling.choose[(count,)](
        logits, keys, sums, rows.temperatures, rows.top_ks, rows.top_ps, rows.min_ps, rows.seeds, rows.positions, tokens, vocabulary, chunks,
        CHUNK=chunk, NP=power, num_warps=CHOICE_WARPS,
    )  # fmt: skip
    return tokens


def most_likely(logits: torch.Tensor) -> torch.Tensor:
    """The largest logit's place in each row of `[S, V]` fp32, the first of equal ones, -1 where it is not finite: `[S]` int64. For batches that are greedy altogether."""
    from qforge.ops.triton.device import sampling

    logits = logits.contiguous()
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    sampling.most_likely[(len(logits),)](logits, tokens, logits.shape[1], BLOCK=BLOCK, num_warps=8)
    return tokens
