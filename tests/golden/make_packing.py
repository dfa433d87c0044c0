"""Makes packing.safetensors: the same integers as the packing code of GPTQModel, AutoGPTQ and AutoAWQ writes them.

    python make_packing.py AUTO_GPTQ AUTO_AWQ

in an environment with GPTQModel 7.6.0, on the folders of unpacked auto_gptq 0.7.1 and autoawq 0.2.9, whose own imports need transformers of their time.

Names are `<maker>.<case>.<tensor>`; `codes` and `zeros` are what went in.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path

import torch
from safetensors.torch import save_file

GOLDEN = Path(__file__).with_name("packing.safetensors")
OUT, IN, GROUP = 32, 64, 32
# case -> bits, symmetric, groups in activation order
GPTQ = {"2bit": (2, False, False), "3bit": (3, False, False), "4bit-sym": (4, True, False), "4bit": (4, False, False), "4bit-order": (4, False, True), "8bit": (8, False, False)}
AWQ = {"4bit-sym": (4, True, False), "4bit": (4, False, False)}


def inputs(bits: int, symmetric: bool, ordered: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes `[OUT, IN]`, zero points `[OUT, IN / GROUP]` (from 1: version 1 cannot hold 0), scales that are powers of two, and the group of each input."""
    generator = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 2**bits, (OUT, IN), generator=generator)
    zeros = torch.full((OUT, IN // GROUP), 2 ** (bits - 1)) if symmetric else torch.randint(1, 2**bits, (OUT, IN // GROUP), generator=generator)
    scales = 2.0 ** -torch.randint(4, 9, zeros.shape, generator=generator).float()
    index = torch.arange(IN) // GROUP
    return codes, zeros, scales, index[torch.randperm(IN, generator=generator)] if ordered else index


def linear(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, index: torch.Tensor) -> torch.nn.Linear:
    layer = torch.nn.Linear(IN, OUT, bias=False)
    layer.weight.data = (codes - zeros[:, index]) * scales[:, index]
    return layer


def without_init(name: str, folder: str) -> None:
    """A package whose `__init__` is not run: those of the two ended projects import what transformers no longer has."""
    package = types.ModuleType(name)
    package.__path__ = [folder]
    sys.modules[name] = package


def gptqmodel(case: tuple[int, bool, bool]) -> dict[str, torch.Tensor]:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear

    codes, zeros, scales, index = inputs(*case)
    packed = TorchLinear(bits=case[0], group_size=GROUP, sym=case[1], desc_act=case[2], in_features=IN, out_features=OUT, bias=False, pack_dtype=torch.int32, register_buffers=True)
    packed.pack_original(linear(codes, zeros, scales, index), scales.clone(), zeros.clone(), index.int())
    return {n: getattr(packed, n) for n in ("qweight", "qzeros", "scales", "g_idx")}


def auto_gptq(case: tuple[int, bool, bool]) -> dict[str, torch.Tensor]:
    quant_linear = importlib.import_module("auto_gptq.nn_modules.qlinear.qlinear_cuda").QuantLinear
    codes, zeros, scales, index = inputs(*case)
    packed = quant_linear(case[0], GROUP, IN, OUT, False)
    packed.pack(linear(codes, zeros, scales, index).half(), scales.clone(), zeros.float(), index.int())
    return {n: getattr(packed, n) for n in ("qweight", "qzeros", "scales", "g_idx")}


def auto_awq(case: tuple[int, bool, bool]) -> dict[str, torch.Tensor]:
    gemm = importlib.import_module("awq.modules.linear.gemm")
    gemm.get_best_device = lambda: "cpu"
    codes, zeros, scales, index = inputs(*case)
    packed = gemm.WQLinear_GEMM.from_linear(linear(codes, zeros, scales, index).half(), 4, GROUP, scales=scales.T.contiguous(), zeros=zeros.T.contiguous().float())
    return {n: getattr(packed, n) for n in ("qweight", "qzeros", "scales")}


def main() -> None:
    auto_gptq_folder, awq_folder = sys.argv[1:3]
    parts = {"auto_gptq": (auto_gptq_folder, "nn_modules", "nn_modules.qlinear"), "awq": (awq_folder, "modules", "modules.linear", "utils")}
    packages = [(name, folder, inner) for name, (folder, *inners) in parts.items() for inner in ("", *inners)]
    for name, folder, inner in packages:
        without_init(f"{name}.{inner}".rstrip("."), f"{folder}/{inner.replace('.', '/')}".rstrip("/"))
    tensors = {}
    for maker, cases in ((gptqmodel, GPTQ), (auto_gptq, GPTQ), (auto_awq, AWQ)):
        for name, case in cases.items():
            codes, zeros, _, _ = inputs(*case)
            found = maker(case) | {"codes": codes.to(torch.uint8), "zeros": zeros.to(torch.uint8)}
            tensors |= {f"{maker.__name__}.{name}.{n}": t.contiguous().cpu() for n, t in found.items()}
    save_file(tensors, GOLDEN)


if __name__ == "__main__":
    main()
