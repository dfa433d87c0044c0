"""Makes other_packing.safetensors: the same integers as the packing code of Model Optimizer (which TensorRT-LLM reads), msmodelslim (Ascend) and MLX writes them.

    python make_other_packing.py MODELOPT MSMODELSLIM

in an environment with mlx 0.32.4, on the folders of unpacked nvidia-modelopt 0.47.0 and msmodelslim 26.1.0; only the packing functions are
taken out of their sources, whose imports need NVIDIA's and Huawei's libraries.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import torch
from safetensors.torch import save_file

GOLDEN = Path(__file__).with_name("other_packing.safetensors")
OUT, IN, GROUP = 32, 128, 64


def functions(source: Path, *names: str) -> list[Callable[..., Any]]:
    """Functions of a module, without the module."""
    tree = ast.parse(source.read_text())
    chosen: list[ast.stmt] = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in names]
    scope: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module(chosen, []), str(source), "exec"), scope)
    return [scope[n] for n in names]


def main() -> None:
    modelopt, msmodelslim = map(Path, sys.argv[1:3])
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-8, 8, (OUT, IN), generator=generator).to(torch.int8)
    scales = 2.0 ** -torch.randint(4, 9, (OUT, IN // GROUP), generator=generator).float()
    _, theirs = functions(modelopt / "modelopt/torch/export/quant_utils.py", "_validate_int4_block_size", "pack_int4_in_uint8")
    _, ascend = functions(msmodelslim / "msmodelslim/pytorch/llm_ptq/llm_ptq_tools/save/complex_quantifier.py", "_pack_int4", "_w4a16_pack_int4")
    tensors = {"codes": codes, "scales": scales, "modelopt": theirs(codes * scales.repeat_interleave(GROUP, 1), scales, GROUP)}
    tensors |= {"msmodelslim.group": ascend(codes, False), "msmodelslim.channel": ascend(codes, True)}
    for bits in (2, 3, 4, 5, 6, 8):
        weight = torch.randn(OUT, IN, generator=generator)
        packed, *both = mx.quantize(mx.array(weight.numpy()), group_size=GROUP, bits=bits)
        back = mx.dequantize(packed, *both, group_size=GROUP, bits=bits)
        found = {"weight": np.array(packed).view(np.int32), "scales": np.array(both[0]), "biases": np.array(both[1]), "values": np.array(back)}
        tensors |= {f"mlx.{bits}.{name}": torch.from_numpy(value.copy()) for name, value in found.items()}
    save_file({n: t.contiguous() for n, t in tensors.items()}, GOLDEN)


if __name__ == "__main__":
    main()
