"""The products as they are compiled for one tile: what the budget and the tuner compile where no weight and no GPU is at hand."""

from __future__ import annotations

from typing import Any

from qforge.ops.triton.offline import Variant
from qforge.ops.triton.products import constants_w4
from qforge.ops.triton.tiles import Tile

TYPES = {"fp16": "*fp16", "bf16": "*bf16", "int8": "*i8", "fp8": "*fp8e4nv"}  # in Triton's notation
LIMIT = {"int8": 127.5, "fp8": 448.0}
_INTEGERS = (
    "m_rows", "n_rows", "k_columns", "k_steps", "first", "y_rows", "k_part", "steps", "span", "columns", "queries", "table_stride", "window", "rows", "vocabulary", "chunks",
)  # fmt: skip
_POINTERS = {
    "words": "*i32", "zeros": "*u8", "bias": "*fp32", "input_scales": "*fp32", "parts": "*fp32", "turns": "*i32", "key_scales": "*fp32", "value_scales": "*fp32", "tables": "*i32",
    "starts": "*i32", "lengths": "*i32", "most_out": "*fp32", "sum_out": "*fp32", "most_in": "*fp32", "sum_in": "*fp32", "cosines": "*fp32", "sines": "*fp32",
    "positions": "*i32", "slots": "*i64", "scale": "fp32", "epsilon": "fp32", "q_norm": "*bf16", "k_norm": "*bf16", "logits": "*fp32", "sorted_keys": "*i32",
    "temperatures": "*fp64", "sums": "*fp64", "top_ks": "*i64", "top_ps": "*fp64", "min_ps": "*fp64", "seeds": "*i64", "tokens": "*i64",
}  # fmt: skip


def variant(name: str, kernel: Any, tile: Tile, constants: dict[str, Any], *, matrix: bool = False, **types: str) -> Variant:
    """A variant whose arguments have their usual types but for `types`."""
    return Variant(name, kernel, {**_POINTERS, **dict.fromkeys(_INTEGERS, "i32"), **types}, constants, tile.warps, tile.stages, matrix)


def w4_variant(name: str, tile: Tile, kind: str, group: int, zeros: bool, split: bool, bias: bool = False) -> Variant:
    """A product of 4-bit weights with scales in fp16. `kind`: of activations; `group` 0: one scale a row; `split`: into parts of K."""
    from qforge.ops.triton.device import w4

    x = TYPES[kind]
    constants = {**constants_w4(group, zeros), "HAS_BIAS": bias, "EVEN_K": True, "SPLIT": split, "BM": tile.m, "BN": tile.n}
    return variant(name, w4.w4_gemm, tile, constants, matrix=True, x=x, y=x, scales="*fp16")


def w8_variant(name: str, tile: Tile, number: str, group: int, input_group: int) -> Variant:
    """A product of 8-bit weights with rounded activations. Groups of 0: one scale a row."""
    from qforge.ops.triton.device import w8

    codes, split = TYPES[number], tile.parts > 1
    constants = {
        "GROUP": group, "INPUT_GROUP": input_group, "INT": number == "int8", "HAS_BIAS": False, "EVEN_K": True, "SPLIT": split, "BM": tile.m, "BN": tile.n, "BK": tile.k,
    }  # fmt: skip
    return variant(name, w8.w8_gemm, tile, constants, matrix=True, x=codes, codes=codes, scales="*fp32", y="*bf16")
