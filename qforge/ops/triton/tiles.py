"""The shipped configurations: how a product is cut up, by class of device and number of rows.

A class is the smallest capability that its tiles are made for: 80 (and every later card with 99 KiB of shared memory a block: 86, 89, 120), 90, 100.
Each was compiled and held to the budget of benchmarks/results/triton-budget.md. Those of 90 for INT4, for INT8 with a scale a row, and for attention with heads of 128 were the
fastest of many on an H200 (docs/log.md). The others have not been timed: choose by time with `qforge bench MODEL --tune` where such a GPU is at hand.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Tile:
    """`m` rows x `n` outputs a block of threads, `k` inputs a step, `warps` of threads, `stages` of loads in flight; K in at most `parts`."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    parts: int = 1


Table = tuple[tuple[int, Tile], ...]  # up to so many rows: this tile; the last one for all others
CLASSES = (80, 90, 100)

W4_GEMM: dict[int, Table] = {  # steps of 128 inputs, as weights are packed
    80: ((16, Tile(16, 64, 128, 4, 4, 8)), (32, Tile(32, 64, 128, 4, 3, 8)), (64, Tile(64, 64, 128, 4, 3, 4)), (256, Tile(64, 128, 128, 8, 3, 2))),
    90: ((16, Tile(16, 128, 128, 4, 3, 8)), (256, Tile(32, 128, 128, 4, 3, 4))),
    100: ((16, Tile(16, 128, 128, 4, 3, 8)), (64, Tile(32, 128, 128, 4, 3, 4)), (256, Tile(64, 128, 128, 4, 3, 4))),
}
W8_GEMM: dict[int, Table] = {
    80: (
        (16, Tile(16, 64, 128, 4, 4, 4)),
        (64, Tile(64, 64, 128, 4, 3, 2)),
        (256, Tile(128, 128, 128, 8, 3)),
    ),
    90: (
        (16, Tile(16, 64, 256, 4, 4, 4)),
        (32, Tile(32, 64, 256, 4, 4, 2)),
        (64, Tile(64, 64, 128, 4, 4, 2)),
        (256, Tile(128, 128, 128, 8, 3)),
    ),
    100: (
        (16, Tile(16, 64, 128, 4, 4, 4)),
        (64, Tile(64, 128, 128, 4, 4, 2)),
        (256, Tile(128, 128, 128, 8, 4)),
    ),
}
# Scales within K: sums of a step are kept beside the total, so tiles are smaller.
W8_GROUPED: dict[int, Table] = {
    80: ((16, Tile(16, 64, 128, 4, 4, 4)), (64, Tile(64, 64, 128, 4, 3, 2)), (256, Tile(128, 64, 128, 8, 3))),
    90: ((16, Tile(16, 64, 128, 4, 4, 4)), (64, Tile(64, 64, 128, 4, 4, 2)), (256, Tile(128, 64, 128, 8, 3))),
    100: ((16, Tile(16, 64, 128, 4, 4, 4)), (64, Tile(64, 64, 128, 4, 3, 2)), (256, Tile(64, 128, 128, 8, 3))),
}
ATTENTION_DECODE = Tile(16, 128, 0, 4, 2)  # m: queries times the heads that share a cache head; n: tokens of the context a step
ATTENTION_DECODE_8BIT = Tile(16, 128, 0, 8, 2)
ATTENTION_PROMPT: dict[int, Tile] = {80: Tile(64, 64, 0, 8, 2), 90: Tile(64, 64, 0, 4, 2), 100: Tile(128, 64, 0, 8, 2)}
# Heads above 128, Gemma's 256: the tiles above would need more shared memory than a block has, and with 8 bits 32 tokens a step spill registers on capability 90.
WIDE_DECODE, WIDE_PROMPT = Tile(16, 32, 0, 4, 2), Tile(64, 32, 0, 8, 1)
WIDE_DECODE_8BIT, WIDE_PROMPT_8BIT = Tile(16, 16, 0, 4, 2), Tile(64, 16, 0, 8, 1)
_WIDE = 128
_FEW_ROWS, _LONG = 32, 2048  # rows of a tile, inputs of a part
_TURNS = 1024  # tiles of a product that is cut into parts
LARGE_SHARED = (90, 100, 103)  # capabilities with 227 KiB of shared memory a block


def device_class(capability: int) -> int:
    """The class whose tiles a device of this compute capability runs."""
    return 100 if capability == 103 else capability if capability in LARGE_SHARED else 80


def tile_for(table: Table, rows: int) -> Tile:
    """The tile for so many rows of activations."""
    return next((tile for most, tile in table if rows <= most), table[-1][1])


def attention_tile(of: int, size: int, queries: int, eight_bits: bool) -> Tile:
    """The tile for heads of this size, of which so many queries share a cache head in one sequence, on a class of devices."""
    if size > _WIDE:
        decode, prompt = (WIDE_DECODE_8BIT, WIDE_PROMPT_8BIT) if eight_bits else (WIDE_DECODE, WIDE_PROMPT)
    else:
        decode, prompt = ATTENTION_DECODE_8BIT if eight_bits else ATTENTION_DECODE, ATTENTION_PROMPT[of]
    return decode if queries <= decode.m else prompt


def parts_of(tile: Tile, rows: int, outputs: int, inputs: int, processors: int) -> int:
    """In how many parts K is cut: a power of two, doubled while parts have two steps on average and there is too little for all processors to do.

    That is fewer than two blocks for each, or four where parts are long; one where a block has so many rows that its products, not its loads, take the time.
    """
    blocks, parts = -(-rows // tile.m) * -(-outputs // tile.n), 1
    while parts < tile.parts and inputs >= 4 * parts * tile.k and blocks <= _TURNS:
        each = 1 if tile.m > _FEW_ROWS else 4 if inputs >= 2 * parts * _LONG else 2
        if blocks * parts >= each * processors:
            break
        parts *= 2
    return parts


def new_turns(device: torch.device | str) -> torch.Tensor:
    """Counters of a weight's tiles, int32, all 0 (`device.parts.finish`). They are the weight's own: one product with it runs at a time."""
    return torch.zeros(_TURNS, dtype=torch.int32, device=device)
