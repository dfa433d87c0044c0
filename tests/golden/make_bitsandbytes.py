"""Makes bitsandbytes_nf4.safetensors: what bitsandbytes' own quantizer makes of the weight below. Run by hand where bitsandbytes 0.50 is installed.

python tests/golden/make_bitsandbytes.py
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors.torch import save_file

GOLDEN = Path(__file__).parent / "bitsandbytes_nf4.safetensors"
SHAPE = (10, 1920)  # 300 blocks of 64: more than one second-level block


def weight() -> torch.Tensor:
    """A weight `[10, 1920]` fp32 that is the same everywhere: integers without a pattern, in rows of different size."""
    count = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.int64)
    noise = (count * 48271 % 2147483647 * 16807 % 2147483647 % 20011 - 10005).float().view(SHAPE)
    return noise * (1 + torch.arange(SHAPE[1]) % 7) * torch.arange(1, SHAPE[0] + 1).view(-1, 1) * 2.0**-20


def main() -> None:
    import bitsandbytes.functional as bnb

    packed, state = bnb.quantize_4bit(weight(), blocksize=64, compress_statistics=True, quant_type="nf4")
    tensors = {"weight": packed, **{f"weight.{name}": t for name, t in state.as_dict(packed=True).items()}}
    dequantized = bnb.dequantize_4bit(packed, state)
    save_file({n: t.contiguous() for n, t in tensors.items()}, GOLDEN, {"dequantized_sha256": hashlib.sha256(dequantized.numpy().tobytes()).hexdigest()})


if __name__ == "__main__":
    main()
