"""Launch the GPU's matrix products: choose a tile, cut K, add the parts.

Letters: M rows, N outputs, K inputs, S parts of K.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from qforge.ops.cuda import w4 as cuda
from qforge.ops.triton import tiles, tuned
from qforge.ops.triton.present import capability, processors
from qforge.ops.triton.tiles import Tile
from qforge.ops.triton.tuned import Product
from qforge.ops.triton.w4_pack import STEP, W4, longest_step
from qforge.ops.triton.w8_pack import W8

DENSE_ROWS = 193  # from here on cuBLAS over weights in 16 bits is faster than Triton's kernel, the time to unpack them included (on an H200)
_DENSE_BYTES = 128 << 20  # of weights in 16 bits at a time
DENSE_TILE = 64  # outputs of a block of threads


def w4_linear(x: torch.Tensor, w: W4, tile: Tile | None = None) -> torch.Tensor:
    """`x [M, K]` fp16 or bf16 -> `[M, N]`, its dtype; with this tile of Triton's kernel, or with what is fastest."""
    x = (x if w.order is None else x[:, w.order]).contiguous()
    if tile is not None:
        return _w4_tiles(x, w, tile)
    y = cuda.w4_product(x, w, _w4_by_triton)
    return _w4_by_triton(x, w) if y is None else y


def _w4_by_triton(x: torch.Tensor, w: W4) -> torch.Tensor:
    if len(x) >= DENSE_ROWS:
        return w4_multiplied_dense(x, w)
    return _w4_tiles(x, w, tuned.find(x.device, _product_w4(w), len(x)) or tiles.tile_for(tiles.W4_GEMM[tiles.device_class(capability(x.device))], len(x)))


def _w4_tiles(x: torch.Tensor, w: W4, tile: Tile) -> torch.Tensor:
    from qforge.ops.triton.device.w4 import w4_gemm

    def product(y: torch.Tensor, sums: torch.Tensor | None, parts: int) -> None:
        w4_gemm[_grid(tile, len(x), w.out_features, parts)](
            x, w.words, w.scales, w.zeros, w.bias, y, sums, w.turns, len(x), w.out_features, w.in_features, w.steps, -(-w.steps // parts),
            **constants_w4(_group(w), w.zeros is not None), HAS_BIAS=w.bias is not None, SPLIT=parts > 1, EVEN_K=w.in_features == w.steps * STEP,
            BM=tile.m, BN=tile.n, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    return _in_parts(product, x, tile, w.out_features, w.steps * STEP, x.dtype)


def w4_multiplied_dense(x: torch.Tensor, w: W4, most_bytes: int = _DENSE_BYTES) -> torch.Tensor:
    """As `w4_linear`, by cuBLAS over weights in x's type, some outputs after the others: what so many rows cost is the product, and little of it to unpack before.

    x is in the weight's order. Weights, and the bias, are rounded to x's type.
    """
    from qforge.ops.triton.device.w4 import w4_dense

    y = x.new_empty((len(x), w.out_features))
    outputs = min(w.out_features, max(DENSE_TILE, most_bytes // (2 * w.in_features) // DENSE_TILE * DENSE_TILE))
    weight = x.new_empty((outputs, w.in_features))
    for first in range(0, w.out_features, outputs):
        count = min(outputs, w.out_features - first)
        w4_dense[(w.steps, -(-count // DENSE_TILE))](
            w.words, w.scales, w.zeros, weight, first, w.out_features, w.in_features, count,
            **constants_w4(_group(w), w.zeros is not None), EVEN_K=w.in_features == w.steps * STEP, BN=DENSE_TILE, num_warps=4,
        )  # fmt: skip
        torch.matmul(x, weight[:count].T, out=y[:, first : first + count])
    return y if w.bias is None else y + w.bias.to(y.dtype)


def _product_w4(w: W4) -> Product:
    return Product("w4", w.out_features, w.in_features, _group(w), zeros=w.zeros is not None)


def _group(w: W4 | W8) -> int:
    """Inputs that share a scale of the weight; 0: all of a row."""
    return 0 if len(w.scales) == 1 else w.group


def constants_w4(group: int, zeros: bool) -> dict[str, Any]:
    """What the W4 kernel is compiled for, as far as the weight's scheme decides; `group` 0: one scale a row."""
    return {"GROUP": group, "RUN": min(STEP, longest_step(group)) if group else STEP, "HAS_ZEROS": zeros}


@dataclass(frozen=True, slots=True, eq=False)
class RoundedRows:
    """Activations in 8 bits: codes `[M, K]` and scales `[M, G]` fp32."""

    codes: torch.Tensor
    scales: torch.Tensor


def round_activations(x: torch.Tensor, w: W8) -> RoundedRows:
    """Round `x [M, K]` as the weight's scheme says."""
    from qforge.ops.triton.device.w8 import round_rows

    span = w.input_group or w.in_features
    groups = -(-w.in_features // span)
    rounded = RoundedRows(torch.empty(x.shape, dtype=w.codes.dtype, device=x.device), torch.empty((len(x), groups), device=x.device))
    block = min(4096, 1 << (span - 1).bit_length())
    round_rows[(len(x), groups)](x, rounded.codes, rounded.scales, w.in_features, span, LIMIT=w.limit, INT=w.is_int, BLOCK=block, num_warps=4 if block > 512 else 1)
    return rounded


def w8_linear(x: torch.Tensor | RoundedRows, w: W8, dtype: torch.dtype | None = None, tile: Tile | None = None) -> torch.Tensor:
    """`x [M, K]` fp16 or bf16, or already rounded, -> `[M, N]` in `dtype` (x's own if it has one)."""
    from qforge.ops.triton.device.w8 import w8_gemm

    if isinstance(x, torch.Tensor):
        dtype, x = dtype or x.dtype, round_activations(x.contiguous(), w)
    assert dtype is not None, "rounded activations do not say which type the product should have"
    source, input_scales = x.codes, x.scales
    tile = tile or _w8_tile(source, w)
    step = _step(tile, w)
    tile = replace(tile, k=step)

    def product(y: torch.Tensor, sums: torch.Tensor | None, parts: int) -> None:
        w8_gemm[_grid(tile, len(source), w.out_features, parts)](
            source, input_scales, w.codes, w.scales, w.bias, y, sums, w.turns, len(source), w.out_features, w.in_features, _steps(w.in_features, step, parts) * step,
            GROUP=_group(w), INPUT_GROUP=w.input_group, INT=w.is_int, HAS_BIAS=w.bias is not None,
            SPLIT=parts > 1, EVEN_K=w.in_features % step == 0, BM=tile.m, BN=tile.n, BK=step, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    return _in_parts(product, source, tile, w.out_features, w.in_features, dtype)


def _w8_tile(x: torch.Tensor, w: W8) -> Tile:
    product = Product("w8-int8" if w.is_int else "w8-fp8", w.out_features, w.in_features, _group(w), w.input_group)
    found = tuned.find(x.device, product, len(x))
    if found is not None:
        return found
    tables = tiles.W8_GROUPED if w.input_group or _group(w) else tiles.W8_GEMM
    return tiles.tile_for(tables[tiles.device_class(capability(x.device))], len(x))


def _step(tile: Tile, w: W8) -> int:
    """Inputs of a step: as the tile has it, but within one scale of the weight and of the activations."""
    return min([tile.k, *(longest_step(g) for g in (_group(w), w.input_group) if g)])


def _grid(tile: Tile, rows: int, outputs: int, parts: int) -> tuple[int, int, int]:
    return -(-outputs // tile.n), -(-rows // tile.m), parts


def _steps(inputs: int, step: int, parts: int) -> int:
    """Steps of one part."""
    return -(-inputs // (step * parts))


def _in_parts(product: Callable[[torch.Tensor, torch.Tensor | None, int], None], x: torch.Tensor, tile: Tile, outputs: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """`[M, N]` from `product(y, sums, parts)`; sums `[S, M, N]` fp32, None for one part."""
    parts = tiles.parts_of(tile, len(x), outputs, inputs, processors(x.device))
    y = torch.empty((len(x), outputs), dtype=dtype, device=x.device)
    product(y, torch.empty((parts, len(x), outputs), device=x.device) if parts > 1 else None, parts)
    return y
