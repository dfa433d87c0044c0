"""The bytes of every block type of `qforge.superblocks`, as ggml lays them out.

    Q4_1   d, m, 16 bytes of nibbles                  Q5_1   d, m, 32 high bits, 16 bytes of nibbles
    Q2_K   16 bytes: scale low, minimum high; 64 bytes of 2 bits; d, dmin
    Q3_K   32 bytes of high bits; 64 bytes of 2 bits; 12 bytes of scales; d
    Q4_K   d, dmin; 12 bytes of scales and minima; 128 bytes of nibbles
    Q5_K   d, dmin; 12 bytes of scales and minima; 32 bytes of high bits; 128 bytes of nibbles
    Q6_K   128 bytes of low nibbles; 64 bytes of 2 high bits; 16 scales, int8; d
    (Q4_0, Q5_0, Q8_0: see gguf_blocks.py)

Inputs that lie 32 apart share a byte, so that a vector instruction unpacks 32 neighbours at once. Source: ggml's `ggml-common.h` and `ggml-quants.c`.

Letters: N blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from qforge.errors import ModelError
from qforge.layouts.bits import pack_halves, unpack_halves
from qforge.layouts.gguf_blocks import BITS, decode, encode, pack_fives, unpack_fives
from qforge.superblocks import TYPES, BlockType, Superblocks

_SIX_BITS = 12  # bytes of the scales of Q3_K, Q4_K and Q5_K


def pack(blocks: Superblocks) -> torch.Tensor:
    """uint8 `[N, type.nbytes]`."""
    pieces = _PACK.get(blocks.type.name, _pack_flat)(blocks)
    return torch.cat(pieces, -1)


def unpack(kind: str, data: torch.Tensor) -> Superblocks:
    """The inverse of `pack`.

    Args:
        kind: name of the type.
        data: uint8 `[N, type.nbytes]`.

    Raises:
        ModelError: the data are not whole blocks of the type.
    """
    t = TYPES[kind]
    if data.dim() != 2 or data.shape[1] != t.nbytes:
        raise ModelError(f"{kind} data of shape {list(data.shape)} are not blocks of {t.nbytes} bytes")
    return _UNPACK.get(kind, _unpack_flat)(t, data)


def _half(values: torch.Tensor) -> torch.Tensor:
    """fp16 `[N]` as bytes `[N, 2]`."""
    return values.clone(memory_format=torch.contiguous_format).view(torch.uint8).view(-1, 2)


def _halves(data: torch.Tensor, start: int) -> torch.Tensor:
    """The fp16 number `[N]` at byte `start` of each block."""
    return data[:, start : start + 2].contiguous().view(torch.float16).squeeze(-1)


def _dmin(blocks: Superblocks) -> torch.Tensor:
    assert blocks.dmin is not None
    return _half(blocks.dmin)


def _pack_flat(b: Superblocks) -> list[torch.Tensor]:
    codes = b.codes.flatten(1)
    if not b.type.minimum:
        return [_half(b.d), encode(b.type.name, codes)]
    unsigned = codes.to(torch.uint8)
    return [_half(b.d), _dmin(b), pack_halves(unsigned) if b.type.name == "Q4_1" else pack_fives(unsigned)]


def _unpack_flat(t: BlockType, data: torch.Tensor) -> Superblocks:
    if t.name in BITS:
        return Superblocks(t, decode(t.name, data[:, 2:].contiguous())[:, None], _halves(data, 0))
    codes = (unpack_halves if t.name == "Q4_1" else unpack_fives)(data[:, 4:])
    return Superblocks(t, codes.to(torch.int16)[:, None], _halves(data, 0), dmin=_halves(data, 2))


def _join(fields: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 `[N, A, K, 32]`, K values of `bits` bits that share a byte, the first lowest: `[N, A * 32]`."""
    shifts = torch.arange(0, fields.shape[2] * bits, bits, dtype=torch.uint8)[:, None]
    return (fields << shifts).sum(2, dtype=torch.uint8).flatten(1)


def _split(data: torch.Tensor, bits: int, parts: int) -> torch.Tensor:
    """The inverse of `_join`, for `parts` values a byte: uint8 `[N, A, parts, 32]`."""
    shifts = torch.arange(0, parts * bits, bits, dtype=torch.uint8)[:, None]
    return (data.reshape(len(data), -1, 1, 32) >> shifts) & ((1 << bits) - 1)


def _unsigned(b: Superblocks) -> torch.Tensor:
    """Codes from 0 on, uint8 `[N, 256]`."""
    return (b.codes - b.type.codes[0]).to(torch.uint8).flatten(1)


def _codes(t: BlockType, unsigned: torch.Tensor) -> torch.Tensor:
    """The inverse of `_unsigned`."""
    return unsigned.reshape(-1, t.groups, t.group).to(torch.int16) + t.codes[0]


def _sub(values: torch.Tensor | None, low: int = 0) -> torch.Tensor:
    assert values is not None
    return (values - low).to(torch.uint8)


def _pack_q2(b: Superblocks) -> list[torch.Tensor]:
    return [_sub(b.scales) | (_sub(b.minima) << 4), _join(_unsigned(b).view(-1, 2, 4, 32), 2), _half(b.d), _dmin(b)]


def _unpack_q2(t: BlockType, data: torch.Tensor) -> Superblocks:
    scales, minima = (data[:, :16] & 0xF).to(torch.int16), (data[:, :16] >> 4).to(torch.int16)
    return Superblocks(t, _codes(t, _split(data[:, 16:80], 2, 4)), _halves(data, 80), scales, _halves(data, 82), minima)


def _pack_q3(b: Superblocks) -> list[torch.Tensor]:
    codes, scales = _unsigned(b), _sub(b.scales, b.type.scales[0] if b.type.scales else 0)
    high = torch.stack([_pairs(scales[:, i::4] >> 4) for i in range(4)], -1)
    return [_join((codes >> 2).view(-1, 1, 8, 32), 1), _join((codes & 3).view(-1, 2, 4, 32), 2), pack_halves(scales & 0xF), high, _half(b.d)]


def _pairs(fields: torch.Tensor) -> torch.Tensor:
    """Four 2-bit values `[N, 4]` in one byte `[N]`, the first lowest."""
    return (fields << torch.arange(0, 8, 2, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def _unpack_q3(t: BlockType, data: torch.Tensor) -> Superblocks:
    assert t.scales is not None
    codes = _split(data[:, 32:96], 2, 4).flatten(1) | (_split(data[:, :32], 1, 8).flatten(1) << 2)
    high = (data[:, None, 104:108] >> torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]) & 3
    scales = unpack_halves(data[:, 96:104]) | (high.flatten(1) << 4)
    return Superblocks(t, _codes(t, codes), _halves(data, 108), scales.to(torch.int16) + t.scales[0])


def _pack_six_bits(b: Superblocks) -> torch.Tensor:
    """Eight scales and eight minima of 6 bits: the first four whole, with the high bits of the last four above them, then the last four's nibbles."""
    s, m = _sub(b.scales), _sub(b.minima)
    return torch.cat((s[:, :4] | (s[:, 4:] >> 4 << 6), m[:, :4] | (m[:, 4:] >> 4 << 6), (s[:, 4:] & 0xF) | ((m[:, 4:] & 0xF) << 4)), -1)


def _unpack_six_bits(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    s, m, both = data.split(4, -1)
    scales = torch.cat((s & 63, (both & 0xF) | (s >> 6 << 4)), -1)
    return scales.to(torch.int16), torch.cat((m & 63, (both >> 4) | (m >> 6 << 4)), -1).to(torch.int16)


def _pack_q4(b: Superblocks) -> list[torch.Tensor]:
    return [_half(b.d), _dmin(b), _pack_six_bits(b), _join(_unsigned(b).view(-1, 4, 2, 32), 4)]


def _unpack_q4(t: BlockType, data: torch.Tensor) -> Superblocks:
    scales, minima = _unpack_six_bits(data[:, 4 : 4 + _SIX_BITS])
    return Superblocks(t, _codes(t, _split(data[:, 16:], 4, 2)), _halves(data, 0), scales, _halves(data, 2), minima)


def _pack_q5(b: Superblocks) -> list[torch.Tensor]:
    codes = _unsigned(b)
    return [_half(b.d), _dmin(b), _pack_six_bits(b), _join((codes >> 4).view(-1, 1, 8, 32), 1), _join((codes & 0xF).view(-1, 4, 2, 32), 4)]


def _unpack_q5(t: BlockType, data: torch.Tensor) -> Superblocks:
    scales, minima = _unpack_six_bits(data[:, 4 : 4 + _SIX_BITS])
    codes = _split(data[:, 48:], 4, 2).flatten(1) | (_split(data[:, 16:48], 1, 8).flatten(1) << 4)
    return Superblocks(t, _codes(t, codes), _halves(data, 0), scales, _halves(data, 2), minima)


def _pack_q6(b: Superblocks) -> list[torch.Tensor]:
    assert b.scales is not None
    codes = _unsigned(b).view(-1, 2, 4, 32)
    low = pack_halves((codes & 0xF).flatten(2)).flatten(1)
    return [low, _join(codes >> 4, 2), b.scales.to(torch.int8).view(torch.uint8), _half(b.d)]


def _unpack_q6(t: BlockType, data: torch.Tensor) -> Superblocks:
    low = unpack_halves(data[:, :128].reshape(-1, 2, 64)).flatten(1)
    codes = low | (_split(data[:, 128:192], 2, 4).flatten(1) << 4)
    return Superblocks(t, _codes(t, codes), _halves(data, 208), data[:, 192:208].contiguous().view(torch.int8).to(torch.int16))


_PACK: dict[str, Callable[[Superblocks], list[torch.Tensor]]] = {"Q2_K": _pack_q2, "Q3_K": _pack_q3, "Q4_K": _pack_q4, "Q5_K": _pack_q5, "Q6_K": _pack_q6}
_UNPACK: dict[str, Callable[[BlockType, torch.Tensor], Superblocks]] = {"Q2_K": _unpack_q2, "Q3_K": _unpack_q3, "Q4_K": _unpack_q4, "Q5_K": _unpack_q5, "Q6_K": _unpack_q6}
