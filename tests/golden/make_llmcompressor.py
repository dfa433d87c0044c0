"""Makes llmcompressor_gptq.safetensors: what llm-compressor 0.14's own GPTQ makes of seeded weights, Hessians and scales, in both orders, as dequantized weights.

python make_llmcompressor.py      (in an environment with llm-compressor)
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

CASES = {"int4-g32-sym": (4, 32, True), "int3-g32-asym": (3, 32, False), "int8-channel-sym": (8, None, True)}
ROWS, WIDTH, TOKENS, DAMPING = 32, 96, 2000, 0.01


def main() -> None:
    from compressed_tensors.quantization import QuantizationArgs
    from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight

    found = {}
    for case, (bits, group, symmetric) in CASES.items():
        g = torch.Generator().manual_seed(bits)
        x = torch.randn(TOKENS, WIDTH, generator=g) @ (torch.randn(WIDTH, WIDTH, generator=g) / WIDTH**0.5 + torch.eye(WIDTH)) * (torch.rand(WIDTH, generator=g) * 3 + 0.1)
        weight, hessian = torch.randn(ROWS, WIDTH, generator=g), x.T @ x
        groups = weight.view(ROWS, -1, group or WIDTH)
        if symmetric:
            scale, zero = groups.abs().amax(-1) / (2 ** (bits - 1) - 0.5), torch.zeros(ROWS, groups.shape[1])
        else:
            low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
            scale = (high - low) / (2**bits - 1)
            zero = (-low / scale).round()
        scale, zero = scale.bfloat16().float(), zero - (0 if symmetric else 2 ** (bits - 1))  # theirs counts from the lowest signed code
        found |= {f"{case}.weight": weight, f"{case}.hessian": hessian, f"{case}.scale": scale, f"{case}.zero": zero}
        for order in (None, "static"):
            shape = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
            settings = QuantizationArgs(num_bits=bits, symmetric=symmetric, actorder=order, **shape)
            made = quantize_weight(weight[None].clone(), hessian[None].clone(), scale[None], zero[None], None, settings, percdamp=DAMPING)
            assert not made[2].any()
            found[f"{case}.{order or 'plain'}"] = made[0][0].contiguous()
    save_file(found, Path(__file__).with_name("llmcompressor_gptq.safetensors"))


if __name__ == "__main__":
    main()
