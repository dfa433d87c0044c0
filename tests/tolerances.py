"""How far a kernel may be from the reference, in one table. Relative: |y - r| / |r| over the whole output (Frobenius norms), r computed in fp64 from the same codes."""

from __future__ import annotations

# kernel -> relative error, of the activations that it multiplies (native-a8, -a16 and -bf16 round by themselves: of those before). All but one of the others sum
# in fp32; for 16 to 4096 inputs, blocked sums stay within a few units of 2**-24.
KERNELS = {
    "native": 5e-7,
    "native-int8": 5e-7,
    "native-a16": 1e-4,
    "native-a8": 2.5e-2,
    "native-bf16": 5e-3,
    "native-dense": 5e-7,
    "reference": 1e-6,
}
# (operation) -> largest relative error of a native layer operation against fp64
LAYERS = {"norm": 3e-7, "gate": 6e-7, "attention": 2e-6, "attention fp16": 2e-3, "attention bf16": 2e-2, "attention int8": 4e-2, "attention fp8": 8e-2}
# How far the perplexity of a model may lie from that of the fp32 product over the same integers, relative, by --activations
PERPLEXITY = {"fp": 2e-5, "int16": 5e-4, "int8": 5e-3, "bf16": 1e-3}
PERPLEXITY_8_BITS = PERPLEXITY | {"int8": 1e-2}  # weights of 8 bits: .0054 was measured
# The same with 16-bit activations and caches on a GPU, relative (Frobenius norms) to the reference decoder in fp32: by the type of keys and values
GPU_LOGITS = {"fp16": 4e-3, "int8": 2e-2, "rounded activations": 4e-2}  # the last: fp16 before int8 moves them by .029 on a processor; an H200 was .031 off
# Logits of tiny seeded models (standard deviation about 2) against transformers in fp32, largest absolute difference
LOGITS = 1e-4
