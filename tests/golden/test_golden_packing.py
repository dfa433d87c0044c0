"""Bytes of integer checkpoints as their own makers pack them: compressed-tensors' packer, the gguf package's quantizer, and AutoGPTQ's published loop."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

from qforge import numerics
from qforge.layouts.autogptq import AutoGptq
from qforge.layouts.compressed_tensors import CompressedTensors
from qforge.layouts.gguf_blocks import GgufBlocks
from qforge.qlinear import QuantizedLinear
from qforge.scheme import parse


def linear(text, out_features=32, in_features=96, seed=0):
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(out_features, in_features, generator=g)
    scheme = parse(text)
    return numerics.quantize(weight, scheme, *numerics.minmax_parameters(weight, scheme))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
@pytest.mark.parametrize("symmetry", ["sym", "asym"])
def test_compressed_tensors_packs_the_same_words(bits, symmetry):
    q = linear(f"int{bits}-g32-{symmetry}", out_features=20, in_features=96)
    packed = CompressedTensors().pack(q)
    middle = 1 << (bits - 1)
    signed = q.codes if symmetry == "sym" else (q.codes.int() - middle).to(torch.int8)
    assert torch.equal(packed["weight_packed"], pack_to_int32(signed, bits))
    if symmetry == "asym":
        assert torch.equal(packed["weight_zero_point"], pack_to_int32((q.zeros.int() - middle).to(torch.int8), bits, packed_dim=0))


def loop_packed(values: np.ndarray, bits: int) -> np.ndarray:
    """AutoGPTQ's packing, word by word: values `[rows, columns]` uint32, packed along the rows."""
    words = np.zeros((values.shape[0] * bits // 32, values.shape[1]), dtype=np.uint32)
    if bits in (2, 4, 8):
        for row in range(words.shape[0]):
            for i in range(32 // bits):
                words[row] |= values[row * (32 // bits) + i] << (bits * i)
        return words.astype(np.int32)
    for block in range(values.shape[0] // 32):  # 3 bits: 32 values in three words, two of them across a border
        v, at = values[block * 32 : block * 32 + 32], block * 3
        for i in range(10):
            words[at] |= v[i] << (3 * i)
        words[at] |= v[10] << 30
        words[at + 1] |= (v[10] >> 2) & 1
        for i in range(10):
            words[at + 1] |= v[11 + i] << (3 * i + 1)
        words[at + 1] |= v[21] << 31
        words[at + 2] |= (v[21] >> 1) & 0x3
        for i in range(10):
            words[at + 2] |= v[22 + i] << (3 * i + 2)
    return words.astype(np.int32)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetry", ["sym", "asym"])
def test_gptq_words_are_those_of_the_published_loop(bits, symmetry, version):
    q = linear(f"int{bits}-g32-{symmetry}")
    if symmetry == "asym":
        q = QuantizedLinear(q.scheme, q.codes, q.scales, q.zeros.clamp(min=1))
    packed = AutoGptq(version).pack(q)
    middle = 1 << (bits - 1)
    codes = (q.codes.int() + (middle if symmetry == "sym" else 0)).numpy().astype(np.uint32)
    zeros = np.full(q.scales.shape, middle, np.uint32) if symmetry == "sym" else q.zeros.numpy().astype(np.uint32)
    np.testing.assert_array_equal(packed["qweight"].numpy(), loop_packed(codes.T.copy(), bits))
    np.testing.assert_array_equal(packed["qzeros"].numpy(), loop_packed((zeros - (2 - version)).copy(), bits).T)
    np.testing.assert_array_equal(packed["scales"].numpy(), q.scales.numpy().T.astype(np.float16))
    np.testing.assert_array_equal(packed["g_idx"].numpy(), np.arange(96) // 32)


@pytest.mark.parametrize(("kind", "text"), [("Q4_0", "int4-g32-sym@f16"), ("Q8_0", "int8-g32-sym@f16"), ("Q5_0", "int5-g32-sym@f16")])
def test_blocks_made_by_the_gguf_package_survive_unpack_and_pack(kind, text):
    weight = torch.randn(8, 96, generator=torch.Generator().manual_seed(1)).abs() * -1  # ggml's scale is positive when the largest value is negative
    theirs = torch.from_numpy(gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[kind]))
    layout = GgufBlocks(kind)
    q = layout.unpack({"weight": theirs}, parse(text))
    assert torch.equal(layout.pack(q)["weight"], theirs)
    assert torch.equal(numerics.dequantize(q), torch.from_numpy(gguf.quants.dequantize(theirs.numpy(), gguf.GGMLQuantizationType[kind])))


def test_one_block_by_hand():
    """q = -8..7 twice at scale 0.5: nibbles 0..15 in both halves, so every byte is 0x11 times its place."""
    codes = torch.arange(-8, 8, dtype=torch.int8).repeat(2)[None]
    q = QuantizedLinear(parse("int4-g32-sym"), codes, torch.tensor([[0.5]]))
    assert GgufBlocks("Q4_0").pack(q)["weight"].flatten().tolist() == [0x00, 0x38, *(0x11 * i for i in range(16))]
    assert CompressedTensors().pack(q)["weight_packed"].tolist() == [[0x76543210, -0x1234568, 0x76543210, -0x1234568]]
    assert AutoGptq(1).pack(QuantizedLinear(q.scheme, codes.repeat(8, 1), torch.full((8, 1), 0.5)))["qzeros"].tolist() == [[0x77777777]]
