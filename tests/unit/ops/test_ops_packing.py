"""The tile layout of the native kernels, byte by byte."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from qforge import numerics
from qforge.ops.packing import block_length, embed, for_rounded, pack_dense, pack_quantized
from qforge.qlinear import QuantizedLinear
from qforge.scheme import parse


def _quantized(text: str, out_features: int, in_features: int, seed: int = 0) -> QuantizedLinear:
    scheme = parse(text)
    weight = torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(seed))
    scales, zeros = numerics.minmax_parameters(weight, scheme)
    return numerics.quantize(weight, scheme, scales, zeros)


def test_int4_bytes_are_in_w4n16_order() -> None:
    q = _quantized("int4-g16-asym", 20, 32)
    tiles = pack_quantized(q)
    assert tiles.codes.shape == (2, 4, 64)
    for tile, chunk, column, byte in ((0, 0, 0, 0), (0, 3, 7, 2), (1, 1, 3, 1), (0, 2, 15, 3)):
        got = int(tiles.codes[tile, chunk, column * 4 + byte])
        row = q.codes[tile * 16 + column]
        assert got == int(row[chunk * 8 + byte]) | int(row[chunk * 8 + byte + 4]) << 4


def test_int8_symmetric_codes_are_stored_with_a_zero_point_of_128() -> None:
    q = _quantized("int8-channel-sym", 16, 24)
    tiles = pack_quantized(q)
    assert tiles.codes.shape == (1, 3, 128)
    assert tiles.zeros is not None
    assert tiles.zeros.unique().tolist() == [128]
    assert int(tiles.codes[0, 2, 64 + 5 * 4 + 1]) == int(q.codes[5, 2 * 8 + 4 + 1]) + 128


@pytest.mark.parametrize(("text", "inputs", "ends"), [("int4-g64-asym", 192, [64, 128, 192]), ("int4-g96-sym", 192, [64, 96, 160, 192]), ("int4-g16-sym", 32, [16, 32])])
def test_sums_of_a_tile_s_codes_are_those_of_segments(text: str, inputs: int, ends: list[int]) -> None:
    q = _quantized(text, 20, inputs)
    tiles = for_rounded(pack_quantized(q), 8)
    assert tiles.code_sums is not None
    assert tiles.code_sums.shape == (2, len(ends), 16)
    assert for_rounded(pack_quantized(q), 16).code_sums is None
    codes = torch.nn.functional.pad(q.codes.int() + (0 if q.zeros is not None else 8), (0, 0, 0, 12)).view(2, 16, inputs)
    for i, (first, end) in enumerate(zip([0, *ends], ends, strict=False)):
        got, wanted = tiles.code_sums[:, i].int(), codes[:, :, first:end].sum(-1, dtype=torch.int32)
        assert torch.equal(got[0], wanted[0])
        assert torch.equal(got[1, :4], wanted[1, :4])
    tokens = torch.tensor([0, 19, 3, 16])
    assert torch.equal(embed(tiles, tokens), numerics.dequantize(q)[tokens])


@pytest.mark.parametrize("text", ["int4-g64-asym", "int4-g128-sym"])
def test_sums_of_pairs_are_what_such_products_have_too_much(text: str) -> None:
    """Any activations' codes: with what is kept of them, products by pairs less what depends on the row alone and on the column alone are the plain ones."""
    q = _quantized(text, 40, 256)
    tiles = for_rounded(pack_quantized(q), 8, by_pairs=True)
    assert tiles.pair_sums is not None
    assert tiles.code_sums is not None
    assert torch.equal((tiles.pair_sums << 16) >> 16, tiles.code_sums.int())
    column = 28140 - (tiles.pair_sums >> 16)  # the column's correction term
    w = tiles.codes.view(3, 4, 8, 16, 4).long()
    x = torch.randint(-120, 121, (4, 8, 2, 4), generator=torch.Generator().manual_seed(0))  # segments, chunks, halves
    x1, x2 = x[:, :, :1] + 120, x[:, :, 1:] - 8
    w1, w2 = w & 15, w >> 4
    for tile, plain in enumerate([(1, 6), (3, 5), (1, 6)]):
        paired = torch.tensor([i not in plain for i in range(8)]).view(1, 8, 1, 1)
        kept = torch.where(paired, (x1 + w2[tile]) * (x2 + w1[tile]) - x1 * x2, x1 * w1[tile] + x2 * w2[tile]).sum((1, 3))
        assert torch.equal(kept - column[tile], (x[:, :, :1] * w1[tile] + x[:, :, 1:] * w2[tile]).sum((1, 3)))
    for first, second, plain_first in ((0, 15, 0), (15, 15, 15), (15, 0, 15)):  # the least and the most
        codes = torch.tensor([first] * 4 + [second] * 4, dtype=torch.uint8).repeat(16, 8)
        codes[:, 8:16], codes[:, 48:56] = (torch.tensor([plain_first] * 4 + [0 if first else 15] * 4, dtype=torch.uint8) for _ in range(2))
        outermost = for_rounded(pack_quantized(QuantizedLinear(parse("int4-g64-asym"), codes, torch.ones(16, 1), torch.zeros(16, 1, dtype=torch.uint8))), 8, by_pairs=True)
        assert outermost.pair_sums is not None
        assert torch.equal((outermost.pair_sums << 16) >> 16, outermost.code_sums.int())
        w1, w2 = outermost.codes.view(1, 1, 8, 16, 4).long() & 15, outermost.codes.view(1, 1, 8, 16, 4).long() >> 4
        too_much = 120 * w1 - 8 * w2 + w1 * w2 * torch.tensor([i not in (1, 6) for i in range(8)]).view(8, 1, 1)
        assert torch.equal((28140 - (outermost.pair_sums >> 16)).long(), too_much.sum((2, 4)))
    assert for_rounded(pack_quantized(q), 8).pair_sums is None
    assert for_rounded(pack_quantized(_quantized("int4-g96-sym", 16, 192)), 8, by_pairs=True).pair_sums is None  # not of whole segments
    assert for_rounded(pack_quantized(q), 16, by_pairs=True).pair_sums is None


@pytest.mark.parametrize("text", ["int4-g64-sym", "int8-g32-asym"])
def test_scales_are_halves_where_all_are_exact_in_fp16(text: str) -> None:
    q = _quantized(text, 20, 128)
    exact = replace(q, scales=q.scales.half().float())
    tiles, tokens = for_rounded(pack_quantized(exact), 8), torch.tensor([0, 19])
    assert tiles.scales is not None
    assert tiles.scales.dtype == torch.float16
    assert torch.equal(embed(tiles, tokens), numerics.dequantize(exact)[tokens])
    for other in (1e-9, 70000.0, 0.1):  # too small, too large, with more digits
        scales = exact.scales.clone()
        scales[7, 1] = other
        plain = for_rounded(pack_quantized(replace(exact, scales=scales)), 8).scales
        assert plain is not None
        assert plain.dtype == torch.float32


@pytest.mark.parametrize(("group", "block"), [(8, 8), (12, 16), (64, 64), (128, 128), (576, 96), (2048, 128), (1536, 128), (130, 72), (1, 8), (288, 96)])
def test_blocks_have_least_padding(group: int, block: int) -> None:
    assert block_length(group) == block


def test_inputs_are_taken_as_they_are_when_groups_fill_blocks() -> None:
    assert pack_quantized(_quantized("int4-g64-sym", 16, 192)).gather is None
    assert pack_quantized(_quantized("int4-channel-sym", 16, 20)).gather is not None


def test_group_index_sorts_inputs_by_group() -> None:
    q = _quantized("int4-g8-sym", 16, 24)
    index = torch.tensor([2, 0, 1] * 8, dtype=torch.int32)
    tiles = pack_quantized(QuantizedLinear(q.scheme, q.codes, q.scales, None, index))
    assert tiles.gather is not None
    assert tiles.gather.tolist() == [*range(1, 24, 3), *range(2, 24, 3), *range(0, 24, 3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_embedding_rows_come_back_from_a_packed_head(dtype: torch.dtype) -> None:
    weight = torch.randn(37, 20, generator=torch.Generator().manual_seed(0)).to(dtype)
    tokens = torch.tensor([0, 36, 15, 16, 36])
    assert torch.equal(embed(pack_dense(weight), tokens), weight[tokens].float())


@pytest.mark.parametrize(("text", "columns"), [("int8-g32-sym", 96), ("int8-channel-sym", 576), ("int8-channel-asym", 130), ("int4-g12-asym", 48), ("int4-g64-sym", 64)])
def test_rows_of_packed_integers_are_those_of_the_dequantized_weight(text: str, columns: int) -> None:
    q = _quantized(text, 37, columns)
    tokens = torch.tensor([0, 36, 15, 16, 16, 31])
    assert torch.equal(embed(pack_quantized(q), tokens), numerics.dequantize(q)[tokens])


def test_a_group_longer_than_any_row_is_the_row() -> None:
    q = _quantized("int4-g32-asym", 16, 32)
    assert torch.equal(pack_quantized(replace(q, scheme=parse(f"int4-g{2**64}-asym"))).codes, pack_quantized(q).codes)
