"""Transcribe weights into the tile layout of the native CPU kernels (kernels/include/qforge/linear.h).

Letters: O outputs, I inputs, N tiles of 16 outputs, B blocks of K inputs (one scale each), C chunks of 8 inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from qforge.numerics import code_book
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Per

TILE = 16
CHUNK = 8
SEGMENT = 64  # inputs, kCentered of blockwise.h
_FIRST_MORE, _SECOND_LESS, _PAIRS_MIDDLE, _PLAIN_CHUNKS = 120, 8, 28140, ((1, 6), (3, 5))  # of products by pairs (blockwise.h)
_LONGEST_BLOCK = 128  # inputs: partial sums of more than this lose accuracy and do not fit the first-level cache when unpacked


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """A packed weight.

    Attributes:
        format: `INT4`, `INT8`, `BOOK4`, `E4M3`, `F32`, `F16` or `BF16`.
        codes: uint8 (or the float dtype), contiguous; shape for codes `[N, C, bytes]`, for dense weights `[N, padded I, 16]`.
        scales: `[N, B, 16]` fp32, or fp16 (`for_rounded`); None for dense weights.
        zeros: `[N, B, 16]` uint8 for integers, else None.
        code_sums: `[N, segments, 16]` int16, what each segment's codes add up to (`for_rounded`), else None.
        pair_sums: `[N, segments, 16]` int32, `code_sums` with the column's correction term of the paired product (`for_rounded`), else None.
        book: `[16]` fp32, what the codes of BOOK4 stand for, else None.
        blocks, block_k: B and K; the kernel's input has B x K columns.
        run: so many blocks one after the other have the same scales and zeros.
        gather: `[B x K]` int64, where each packed input comes from in `x` with one zero column appended; None if `x` is taken as it is.
    """

    format: str
    out_features: int
    in_features: int
    blocks: int
    block_k: int
    codes: torch.Tensor
    scales: torch.Tensor | None
    zeros: torch.Tensor | None
    gather: torch.Tensor | None
    run: int = 1
    book: torch.Tensor | None = None
    code_sums: torch.Tensor | None = None
    pair_sums: torch.Tensor | None = None


def block_length(group: int) -> int:
    """Inputs of one block for groups of `group` inputs: a multiple of 8, at most 128, chosen for the least padding and then for length."""
    if group <= _LONGEST_BLOCK:
        return -(-group // CHUNK) * CHUNK
    return min(range(_LONGEST_BLOCK, _LONGEST_BLOCK // 2 - 1, -CHUNK), key=lambda k: (-(-group // k) * k, -k))


def pack_quantized(q: QuantizedLinear) -> Tiles:
    """Pack codes `[O, I]`: integers up to 8 bits, symmetric or with zero points; e4m3 floats; indices into a book of 16. Per tensor, channel, group or block; any group index."""
    in_features, number = q.in_features, q.scheme.number
    order, scale_of_block, block_k = _blocks(q)
    rows = _rows_of_scales(q)
    scales = q.scales[rows][:, scale_of_block]
    codes, zeros = _codes_of_integers(q, order, rows, scale_of_block, block_k) if number.is_int else (torch.nn.functional.pad(q.codes, (0, 1))[:, order], None)
    wide = q.scheme.bits > 4
    return Tiles(
        "INT8" if number.is_int and wide else "INT4" if number.is_int else "E4M3" if wide else "BOOK4", q.out_features, in_features, len(scale_of_block), block_k,
        _interleave(_by_tile(codes), wide), _by_tile(scales).transpose(1, 2).contiguous(), None if zeros is None else _by_tile(zeros).transpose(1, 2).contiguous(),
        None if _is_identity(order, in_features) else order, _run(scale_of_block), None if number.is_int or wide else code_book(number),
    )  # fmt: skip


def for_rounded(tiles: Tiles, bits: int, *, by_pairs: bool = False) -> Tiles:
    """Integers for activations that are rounded to so many bits (blockwise.h): scales in fp16 where none changes by it; beside INT4 and 8 bits the sums of codes.

    by_pairs: with those of pairs, where blocks are whole segments.
    """
    assert tiles.scales is not None
    half = tiles.scales.half()
    tiles = replace(tiles, scales=half if torch.equal(half.float(), tiles.scales) else tiles.scales)
    if tiles.format != "INT4" or bits != 8:
        return tiles
    sums = _code_sums(tiles)
    return replace(tiles, code_sums=sums, pair_sums=_pair_sums(tiles, sums) if by_pairs and tiles.block_k % SEGMENT == 0 else None)


def _code_sums(tiles: Tiles) -> torch.Tensor:
    """Of each segment of 64 inputs, or what is left of a block."""
    count = tiles.codes.shape[0]
    chunks = (_sums_of_two(tiles.codes & 15) + _sums_of_two(tiles.codes >> 4)).view(count, tiles.blocks, -1, TILE)  # [N, B, chunks of a block, 16]
    whole = torch.nn.functional.pad(chunks, (0, 0, 0, -chunks.shape[2] % (SEGMENT // CHUNK)))
    return _of_segments(whole.view(count, -1, SEGMENT // CHUNK, TILE)).to(torch.int16)


def _pair_sums(tiles: Tiles, code_sums: torch.Tensor) -> torch.Tensor:
    """See `Weight::pair_sums` of linear.h."""
    first, second = tiles.codes & 15, tiles.codes >> 4
    shape = (tiles.codes.shape[0], -1, SEGMENT // CHUNK, TILE)  # [N, segments, chunks, 16]
    too_much = _FIRST_MORE * _of_segments(_sums_of_two(first).view(shape)) - _SECOND_LESS * _of_segments(_sums_of_two(second).view(shape))
    products = _sums_of_two(first * second).view(shape)  # at most 15 x 15, which a byte holds
    for odd, plain in enumerate(_PLAIN_CHUNKS):  # in even and in odd tiles
        for i in plain:
            products[odd::2, :, i] = 0
    return (_PAIRS_MIDDLE - too_much - _of_segments(products)) * 65536 + code_sums


def _sums_of_two(codes: torch.Tensor) -> torch.Tensor:
    """`[..., 4 X]` uint8 -> `[X]` int32, each with two sums of two codes, of 16 bits."""
    words = codes.view(torch.int32)
    return (words & 0x00FF00FF) + ((words >> 8) & 0x00FF00FF)


def _of_segments(chunks: torch.Tensor) -> torch.Tensor:
    """`_sums_of_two` `[N, segments, chunks, 16]`, added up: `[N, segments, 16]` int32."""
    sums = chunks.sum(2, dtype=torch.int32)
    return (sums & 0xFFFF) + (sums >> 16)


def _codes_of_integers(q: QuantizedLinear, order: torch.Tensor, rows: torch.Tensor, scale_of_block: torch.Tensor, block_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Unsigned codes `[O, B x K]`, padding equal to the zero point, and zero points `[O, B]`."""
    bias = 0 if q.zeros is not None else 1 << (7 if q.scheme.bits > 4 else 3)
    codes = q.codes.view(torch.uint8) + bias  # modulo 256, as it should be
    zeros = torch.full((q.out_features, len(scale_of_block)), bias, dtype=torch.uint8) if q.zeros is None else q.zeros[rows][:, scale_of_block]
    if _is_identity(order, q.in_features):
        return codes, zeros
    codes = torch.nn.functional.pad(codes, (0, 1))[:, order]
    padding = (order == q.in_features).view(1, -1, block_k)
    return torch.where(padding, zeros.unsqueeze(-1), codes.view(q.out_features, -1, block_k)).view(q.out_features, -1), zeros


def _is_identity(order: torch.Tensor, in_features: int) -> bool:
    return len(order) == in_features and torch.equal(order, torch.arange(in_features))


def _run(scale_of_block: torch.Tensor) -> int:
    """How many neighbouring blocks share a scale, where that is the same number all along; else 1."""
    counts = torch.bincount(scale_of_block)
    return int(counts[0]) if bool((counts == counts[0]).all()) else 1


def pack_dense(weight: torch.Tensor) -> Tiles:
    """Pack a floating point weight `[O, I]` in its own dtype (fp32, fp16 or bf16)."""
    out_features, in_features = weight.shape
    block_k = block_length(in_features)
    blocks = -(-in_features // block_k)
    padded = torch.nn.functional.pad(weight, (0, blocks * block_k - in_features))
    order = torch.arange(blocks * block_k).clamp(max=in_features)
    name = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[weight.dtype]
    gather = None if blocks * block_k == in_features else order
    return Tiles(name, out_features, in_features, blocks, block_k, _by_tile(padded).transpose(1, 2).contiguous(), None, None, gather)


def embed(tiles: Tiles, tokens: torch.Tensor) -> torch.Tensor:
    """Rows `tokens [T]` of a packed weight (dense, or of integers), `[T, I]` fp32: an embedding table that shares its memory with the output head."""
    tile, column = tokens // TILE, tokens % TILE
    if tiles.scales is None or tiles.zeros is None:
        return tiles.codes[tile, :, column][:, : tiles.in_features].float()
    columns = tiles.codes.view(*tiles.codes.shape[:2], -1, TILE, CHUNK // 2)[tile, :, :, column]  # [T, C, 2, 4], or [T, C, 1, 4] of two codes a byte
    codes = columns if tiles.format == "INT8" else torch.cat([columns & 15, columns >> 4], 2)
    values = (codes.reshape(len(tokens), tiles.blocks, -1).float() - tiles.zeros[tile, :, column].unsqueeze(-1)) * tiles.scales[tile, :, column].float().unsqueeze(-1)
    packed = values.view(len(tokens), -1)
    if tiles.gather is None:
        return packed
    return packed.new_zeros(len(tokens), tiles.in_features + 1).index_copy_(1, tiles.gather, packed)[:, :-1]


def _blocks(q: QuantizedLinear) -> tuple[torch.Tensor, torch.Tensor, int]:
    """(order `[B x K]`: the input at each packed place or I for padding; `[B]`: scale column of each block; K)."""
    in_features, columns = q.in_features, q.scales.shape[1]
    length = in_features if q.scheme.granularity.per in (Per.TENSOR, Per.CHANNEL) else min(q.scheme.granularity.columns, in_features)
    index = q.group_index.long() if q.group_index is not None else torch.arange(in_features) // length
    counts = torch.bincount(index, minlength=columns)
    block_k = block_length(int(counts.max()))
    per_group = (counts + block_k - 1) // block_k
    first_place = torch.cumsum(per_group, 0) - per_group
    by_group = torch.argsort(index, stable=True)
    within = torch.arange(in_features) - (torch.cumsum(counts, 0) - counts)[index[by_group]]
    order = torch.full((int(per_group.sum()) * block_k,), in_features)
    order[first_place[index[by_group]] * block_k + within] = by_group
    return order, torch.repeat_interleave(torch.arange(columns), per_group), block_k


def _rows_of_scales(q: QuantizedLinear) -> torch.Tensor:
    """`[O]`: the row of the scale tensor that each output uses."""
    outputs = torch.arange(q.out_features)
    per = q.scheme.granularity.per
    return torch.zeros_like(outputs) if per is Per.TENSOR else outputs // q.scheme.granularity.rows if per is Per.BLOCK else outputs


def _by_tile(values: torch.Tensor) -> torch.Tensor:
    """`[O, X] -> [N, 16, X]`, the last tile filled up with zeros."""
    out_features = values.shape[0]
    tiles = -(-out_features // TILE)
    return torch.nn.functional.pad(values, (0, 0, 0, tiles * TILE - out_features)).view(tiles, TILE, -1)


def _interleave(codes: torch.Tensor, wide: bool) -> torch.Tensor:
    """`[N, 16, I]` uint8 -> `[N, C, 128]` (one byte a code) or `[N, C, 64]` (two codes a byte, inputs j and j + 4 of a chunk)."""
    halves = codes.view(torch.int32).view(codes.shape[0], TILE, -1, 2)  # [N, 16, C, half], four codes each
    if not wide:
        halves = halves[..., :1] | (halves[..., 1:] << 4)
    return halves.permute(0, 2, 3, 1).contiguous().view(torch.uint8).view(codes.shape[0], halves.shape[2], -1)
