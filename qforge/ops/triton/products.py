"""Launch the GPU's matrix products: choose a tile, cut K, add the parts.

Letters: M rows, N outputs, K inputs, S parts of K.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from qforge.ops.triton import tiles, tuned
from qforge.ops.triton.present import capability, processors
from qforge.ops.triton.tiles import Tile
from qforge.ops.triton.tuned import Product
from qforge.ops.triton.w4_pack import W4, longest_step
from qforge.ops.triton.w8_pack import W8

_FUSED_ROWS = 4  # up to so many, each block of threads rounds the activations again for itself
_REDUCE = 1024  # columns of one block of threads that adds parts


def w4_linear(x: torch.Tensor, w: W4, tile: Tile | None = None) -> torch.Tensor:
    """`x [M, K]` fp16 or bf16 -> `[M, N]`, its dtype; with this tile, or the shipped one (`tile.m` 1: the kernel for one row)."""
    x = (x if w.order is None else x[:, w.order]).contiguous()
    of = tiles.device_class(capability(x.device))
    tile = tile or tuned.find(x.device, _product_w4(w), len(x)) or (tiles.W4_GEMV[of] if len(x) == 1 else tiles.tile_for(tiles.W4_GEMM[of], len(x)))
    return _w4_row(x, w, tile) if tile.m == 1 else _w4_rows(x, w, tile)


def _product_w4(w: W4) -> Product:
    return Product("w4", w.out_features, w.in_features, 0 if len(w.scales) == 1 else w.group, zeros=w.zeros is not None)


def _w4_row(x: torch.Tensor, w: W4, tile: Tile) -> torch.Tensor:
    from qforge.ops.triton.device.w4 import w4_gemv

    assert len(x) == 1
    y = x.new_empty((1, w.out_features))
    words = w.words.shape[1]
    w4_gemv[(-(-w.out_features // tile.n),)](
        x, w.words, w.scales, w.zeros, w.bias, y, w.out_features, w.in_features, words,
        **constants_w4(w), EVEN_K=w.in_features == words * 8 and words % (tile.k // 8) == 0, BN=tile.n, BW=tile.k // 8, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


def _w4_rows(x: torch.Tensor, w: W4, tile: Tile) -> torch.Tensor:
    from qforge.ops.triton.device.w4 import w4_gemm

    words = w.words.shape[1]
    tile = tiles.with_step(tile, min(tile.k, longest_step(w.group)))

    def product(y: torch.Tensor, parts: int) -> None:
        w4_gemm[_grid(tile, len(x), w.out_features, parts)](
            x, w.words, w.scales, w.zeros, w.bias, y, len(x), w.out_features, w.in_features, words, _steps(words * 8, tile.k, parts),
            **constants_w4(w), SPLIT=parts > 1, EVEN_K=w.in_features == words * 8,
            BM=tile.m, BN=tile.n, BK=tile.k, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    return _in_parts(product, x, tile, w.out_features, words * 8, w.bias, x.dtype)


def constants_w4(w: W4) -> dict[str, Any]:
    """What the W4 kernels are compiled for, as far as the weight decides."""
    return {"HAS_ZEROS": w.zeros is not None, "HAS_BIAS": w.bias is not None, "GROUP": 0 if len(w.scales) == 1 else w.group}


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
    rows = len(x.codes if isinstance(x, RoundedRows) else x)
    if isinstance(x, torch.Tensor):
        dtype, x = dtype or x.dtype, x.contiguous()
        x = x if rows <= _FUSED_ROWS and w.input_group in (0, _step(tile or _w8_tile(x, rows, w), w)) else round_activations(x, w)
    source = x.codes if isinstance(x, RoundedRows) else x
    tile = tile or _w8_tile(source, rows, w)
    assert dtype is not None, "rounded activations do not say which type the product should have"
    return _w8_rows(source, x.scales if isinstance(x, RoundedRows) else None, w, dtype, tile)


def _w8_rows(source: torch.Tensor, input_scales: torch.Tensor | None, w: W8, dtype: torch.dtype, tile: Tile) -> torch.Tensor:
    from qforge.ops.triton.device.w8 import w8_gemm

    step = _step(tile, w)
    tile = replace(tile, k=step)

    def product(y: torch.Tensor, parts: int) -> None:
        w8_gemm[_grid(tile, len(source), w.out_features, parts)](
            source, input_scales, w.codes, w.scales, w.bias, y, len(source), w.out_features, w.in_features, _steps(w.in_features, step, parts) * step,
            FUSED=input_scales is None, GROUP=_weight_group(w), INPUT_GROUP=w.input_group, LIMIT=w.limit, INT=w.is_int, HAS_BIAS=w.bias is not None,
            SPLIT=parts > 1, EVEN_K=w.in_features % step == 0, BM=tile.m, BN=tile.n, BK=step, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip

    return _in_parts(product, source, tile, w.out_features, w.in_features, w.bias, dtype)


def _w8_tile(x: torch.Tensor, rows: int, w: W8) -> Tile:
    product = Product("w8-int8" if w.is_int else "w8-fp8", w.out_features, w.in_features, _weight_group(w), w.input_group)
    found = tuned.find(x.device, product, rows)
    if found is not None:
        return found
    tables = tiles.W8_GROUPED if w.input_group or _weight_group(w) else tiles.W8_GEMM
    return tiles.tile_for(tables[tiles.device_class(capability(x.device))], rows)


def _weight_group(w: W8) -> int:
    return 0 if len(w.scales) == 1 else w.group


def _step(tile: Tile, w: W8) -> int:
    """Inputs of a step: as the tile has it, but within one scale of the weight and of the activations."""
    return min([tile.k, *(longest_step(g) for g in (_weight_group(w), w.input_group) if g)])


def _grid(tile: Tile, rows: int, outputs: int, parts: int) -> tuple[int, int, int]:
    return -(-outputs // tile.n), -(-rows // tile.m), parts


def _steps(inputs: int, step: int, parts: int) -> int:
    """Steps of one part."""
    return -(-inputs // (step * parts))


def _in_parts(product: Any, x: torch.Tensor, tile: Tile, outputs: int, inputs: int, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """`[M, N]` from `product(y, parts)`, the parts added by a second kernel, so that sums have one order."""
    from qforge.ops.triton.device.w4 import add_parts

    rows = len(x)
    parts = tiles.parts_of(tile, rows, outputs, inputs, processors(x.device))
    y = torch.empty((rows, outputs), dtype=dtype, device=x.device)
    if parts == 1:
        product(y, 1)
        return y
    each = torch.empty((parts, rows, outputs), device=x.device)
    product(each, parts)
    add_parts[(-(-outputs // _REDUCE), rows)](each, bias, y, rows, outputs, S=parts, HAS_BIAS=bias is not None, BLOCK=_REDUCE, num_warps=4)
    return y
