"""What the peers' shared runner lacks: other widths than 4 bits, and NF4 on machines with AVX-512. Runs under the peer's own interpreter; writes what that runner writes.

adapter.py TOOL METHOD --tools DIR --model DIR --calibration ids.json --group N --bits B --out DIR
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

NF4_BLOCK = 64
Found = tuple[dict[str, torch.Tensor], dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", choices=["gptqmodel", "autoround", "simple"])
    parser.add_argument("method")
    for flag in ("--tools", "--model", "--calibration", "--out"):
        parser.add_argument(flag, required=True)
    for flag in ("--group", "--bits"):
        parser.add_argument(flag, type=int, required=True)
    args = parser.parse_args()
    sys.path.insert(0, args.tools)
    shared = importlib.import_module("run_peer")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    weights, cost = {"gptqmodel": gptqmodel, "autoround": autoround, "simple": simple}[args.tool](shared, args)
    from safetensors.torch import save_file

    save_file(weights, f"{args.out}/weights.safetensors")
    name = f"{args.tool} {args.method} {args.bits} bits g{args.group}"
    (Path(args.out) / "meter.json").write_text(json.dumps({"name": name, **cost}))


def gptqmodel(shared: ModuleType, args: argparse.Namespace) -> Found:
    """GPTQModel's GPTQ: plain, act-order, or group-aware (GAR)."""
    from gptqmodel import GPTQModel, QuantizeConfig

    act_order, group_aware = {"gptq": (False, False), "gptq_gar": (False, True), "gptq_act": (True, False)}[args.method]
    config = QuantizeConfig(bits=args.bits, group_size=args.group, sym=True, device="cpu", offload_to_disk=False, desc_act=act_order, act_group_aware=group_aware)
    model = GPTQModel.load(args.model, config, dtype=torch.float32)
    rows = json.loads(Path(args.calibration).read_text())
    with shared.Meter() as meter:
        model.quantize([{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows], batch_size=1)
    packed = Path(args.out) / "packed"
    model.save(str(packed))
    return unpacked(packed, args.bits), meter.cost


def unpacked(folder: Path, bits: int) -> dict[str, torch.Tensor]:
    """The fp32 weights of a GPTQ checkpoint: qweight is a little-endian bit stream along the inputs, qzeros one along the outputs."""
    from safetensors.torch import load_file

    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    offset = 0 if config.get("checkpoint_format", "gptq") == "gptq_v2" else 1
    found = {name: tensor.float() for name, tensor in tensors.items() if "norm" in name}
    for name in [n for n in tensors if n.endswith(".qweight")]:
        base = name.removesuffix(".qweight")
        group, scales = tensors[f"{base}.g_idx"].long(), tensors[f"{base}.scales"].float()
        codes = stream(tensors[name].T, bits)[:, : len(group)]
        zeros = stream(tensors[f"{base}.qzeros"], bits)[:, : scales.shape[1]] + offset
        found[f"{base}.weight"] = ((codes - zeros.T[:, group]) * scales.T[:, group]).contiguous()
    return found


def stream(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Values of `bits` bits in the rows of int32 `words` `[R, W]` -> int32 `[R, 32 W / bits]`."""
    ones = (words[:, :, None] >> torch.arange(32, dtype=torch.int32)) & 1
    return (ones.reshape(words.shape[0], -1, bits) << torch.arange(bits, dtype=torch.int32)).sum(-1, dtype=torch.int32)


def autoround(shared: ModuleType, args: argparse.Namespace) -> Found:
    """AutoRound; the method is its number of iterations."""
    from auto_round import AutoRound

    model, tokenizer = shared.load(args.model)
    rows = torch.tensor(json.loads(Path(args.calibration).read_text()))
    data = [{"input_ids": row[None], "attention_mask": torch.ones_like(row[None])} for row in rows]
    settings = {"bits": args.bits, "group_size": args.group, "sym": True, "iters": int(args.method), "nsamples": len(rows), "seqlen": rows.shape[1], "batch_size": 4}
    tool = AutoRound(model, tokenizer, dataset=data, device_map="cpu", amp=False, enable_torch_compile=False, **settings)
    with shared.Meter() as meter:
        done = tool.quantize()
    return shared.floats(done[0] if isinstance(done, tuple) else done), meter.cost


def simple(shared: ModuleType, args: argparse.Namespace) -> Found:
    """Calibration-free methods, layer by layer."""
    model, _ = shared.load(args.model)
    rounded = {"rtn": rtn, "hqq": hqq, "nf4": nf4}[args.method]
    with shared.Meter() as meter, torch.no_grad():
        for name, module in model.named_modules():
            if name.endswith(shared.LINEARS):
                module.weight.data = rounded(module.weight.data, args)
    return shared.floats(model), meter.cost


def rtn(weight: torch.Tensor, args: argparse.Namespace) -> torch.Tensor:
    """Symmetric rounding to nearest; the largest weight of a group lies half a step beyond the last positive code."""
    middle = 2 ** (args.bits - 1)
    groups = weight.view(weight.shape[0], -1, args.group)
    scale = groups.abs().amax(-1, keepdim=True) / (middle - 0.5)
    return ((groups / scale).round().clamp(-middle, middle - 1) * scale).view_as(weight)


def hqq(weight: torch.Tensor, args: argparse.Namespace) -> torch.Tensor:
    """HQQ, asymmetric, its defaults."""
    from hqq.core.quantize import Quantizer

    codes, meta = Quantizer.quantize(weight.clone(), nbits=args.bits, group_size=args.group, axis=1, device="cpu", compute_dtype=torch.float32)
    return Quantizer.dequantize(codes, meta).view_as(weight).float()


def nf4(weight: torch.Tensor, args: argparse.Namespace) -> torch.Tensor:
    """bitsandbytes' NF4 on rows of one block: with AVX-512, 0.50.2 dequantizes wrongly where a row is not whole blocks (288 columns: relative error .47, not .092)."""
    import bitsandbytes.functional as functional

    codes, state = functional.quantize_4bit(weight.reshape(-1, NF4_BLOCK).contiguous(), blocksize=NF4_BLOCK, quant_type="nf4")
    return functional.dequantize_4bit(codes, state).view_as(weight).float()


if __name__ == "__main__":
    main()
