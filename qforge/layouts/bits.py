"""Nibble order and word packing: n-bit values, little-endian and without gaps, in int32 words along a dimension. Written once, for all layouts.

Element i of a row occupies the bits [i * bits, (i + 1) * bits) of the row, bit 0 being the lowest bit of word 0. Where bits divides 32 this is what
AutoGPTQ calls "qweight", elsewhere what GPTQ's 3-bit kernels and compressed-tensors' dense packing use.
"""

from __future__ import annotations

import sys

import numpy as np
import torch

assert sys.byteorder == "little", "words are viewed as bytes"


def words_for(count: int, bits: int) -> int:
    """int32 words that hold `count` values of `bits` bits."""
    return -(-count * bits // 32)


def pack_words(values: torch.Tensor, bits: int, dim: int = -1) -> torch.Tensor:
    """Pack unsigned values (uint8, each below 2**bits) along `dim` into int32 words; the last word is padded with zero bits."""
    rows = values.transpose(dim, -1).clone(memory_format=torch.contiguous_format)  # `contiguous` would keep the odd strides of single rows
    count = rows.shape[-1]
    padding = words_for(count, bits) * 4 - -(-count * bits // 8)
    if bits == 8:
        data = rows
    elif bits == 4:
        data = pack_nibbles(torch.nn.functional.pad(rows, (0, count % 2)))
    else:
        single = np.unpackbits(rows.numpy()[..., None], axis=-1, count=bits, bitorder="little")
        data = torch.from_numpy(np.packbits(single.reshape(*rows.shape[:-1], -1), axis=-1, bitorder="little"))
    words = torch.nn.functional.pad(data, (0, padding)).clone(memory_format=torch.contiguous_format).view(torch.int32)
    return words.transpose(dim, -1).contiguous()


def unpack_words(words: torch.Tensor, bits: int, count: int, dim: int = -1) -> torch.Tensor:
    """The `count` values (uint8) that `pack_words` packed along `dim` into int32 words."""
    data = words.transpose(dim, -1).clone(memory_format=torch.contiguous_format).view(torch.uint8)
    if bits == 8:
        values = data
    elif bits == 4:
        values = unpack_nibbles(data)
    else:
        single = np.unpackbits(data.numpy(), axis=-1, count=count * bits, bitorder="little")
        values = torch.from_numpy(np.packbits(single.reshape(*data.shape[:-1], count, bits), axis=-1, bitorder="little")).squeeze(-1)
    return values[..., :count].transpose(dim, -1).contiguous()


def pack_nibbles(values: torch.Tensor) -> torch.Tensor:
    """Neighbours of the last dimension (uint8 below 16, an even number of them) in one byte, the first in the low half."""
    return values[..., 0::2] | (values[..., 1::2] << 4)


def unpack_nibbles(data: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_nibbles`."""
    return torch.stack((data & 0xF, data >> 4), -1).flatten(-2)


def pack_pairs_of_rows(values: torch.Tensor) -> torch.Tensor:
    """`[rows, n]` (uint8 below 16, an even number of rows) -> `[rows / 2, n]`: two neighbouring rows in one byte, the first in the low half."""
    return pack_nibbles(values.T).T.contiguous()


def unpack_pairs_of_rows(data: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_pairs_of_rows`."""
    return unpack_nibbles(data.T).T.contiguous()


def pack_halves(values: torch.Tensor) -> torch.Tensor:
    """GGUF's nibble order: the first half of the last dimension (uint8 below 16) in the low nibbles, the second half in the high ones."""
    low, high = values.chunk(2, -1)
    return low | (high << 4)


def unpack_halves(data: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_halves`."""
    return torch.cat((data & 0xF, data >> 4), -1)


def pack_flags(flags: torch.Tensor) -> torch.Tensor:
    """One bit per element of the last dimension (0 or 1, a multiple of 8 of them), the first in the lowest bit of the first byte."""
    return torch.from_numpy(np.packbits(flags.numpy(), axis=-1, bitorder="little"))


def unpack_flags(data: torch.Tensor) -> torch.Tensor:
    """The inverse of `pack_flags`, as uint8."""
    return torch.from_numpy(np.unpackbits(data.contiguous().numpy(), axis=-1, bitorder="little"))
