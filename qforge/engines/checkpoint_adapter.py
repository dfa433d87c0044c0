"""Runs a Hugging Face checkpoint in transformers or GPTQModel, by itself: a request file in, log-probabilities and a JSON answer out. Imports nothing of ours.

usage: python checkpoint_adapter.py REQUEST.json
    request: {"model": path, "engine": "transformers" | "portable" | "gptqmodel", "prompts": [[token id]], "modules": [name], "threads": n, "output": path}
    output:  float32 [len(prompts), V], raw; on stdout, last line, {"version": ..., "weights": {module: [dtype, sha256]}, "linears": {class: count}} or {"error": ...}

`portable` is transformers on a CPU that has no AVX512-BF16, for all that bitsandbytes knows.
`weights` are those that the engine itself makes of the codes: `[O, I]`, contiguous, in its own dtype.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import sys
from importlib.metadata import version
from typing import Any

if __name__ == "__main__":
    os.environ.update({"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "GPTQMODEL_CPU_WORKERS": "2"})  # GPTQModel asks for two workers, and makes one on small machines

import torch


def in_transformers(path: str) -> tuple[Any, str]:
    """The model as transformers loads it, in fp32; GPTQ and AWQ with GPTQModel's plain torch kernels, through which transformers runs them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path)
    kernel = {"gptq": "gptq_torch", "awq": "torch_awq"}.get(config.quantization_config["quant_method"])
    if kernel is not None:
        config.quantization_config["backend"] = kernel
    return AutoModelForCausalLM.from_pretrained(path, config=config, dtype=torch.float32).eval(), version("transformers")


def in_portable(path: str) -> tuple[Any, str]:
    """As `in_transformers`, but bitsandbytes dequantizes and multiplies in fp32, as on every CPU without AVX512-BF16."""
    import bitsandbytes.nn.modules

    bitsandbytes.nn.modules.has_avx512bf16 = lambda: False
    return in_transformers(path)


def in_gptqmodel(path: str) -> tuple[Any, str]:
    """The model as GPTQModel loads it with its plain torch kernels; what is not quantized is computed in fp32, its kernels keep weights in fp16."""
    from gptqmodel import BACKEND, GPTQModel

    with open(f"{path}/config.json", encoding="utf-8") as f:
        awq = json.load(f)["quantization_config"]["quant_method"] == "awq"
    loaded = GPTQModel.load(path, device="cpu", backend=BACKEND.AWQ_TORCH if awq else BACKEND.GPTQ_TORCH, dtype=torch.float16)
    model = loaded.model.eval()
    for module in model.modules():
        if not hasattr(module, "qweight"):
            for tensor in (*module._parameters.values(), *module._buffers.values()):
                if tensor is not None and tensor.is_floating_point():
                    tensor.data = tensor.data.float()
    return model, version("gptqmodel")


def dequantized(module: Any) -> torch.Tensor:
    """`[O, I]` as the engine's own code gives it."""
    if hasattr(module._parameters.get("weight"), "quant_state"):
        from bitsandbytes.functional import dequantize_4bit

        state = copy.copy(module.weight.quant_state)
        state.dtype = torch.float32
        four: torch.Tensor = dequantize_4bit(module.weight.data, state)
        return four
    if not hasattr(module, "qweight"):
        plain: torch.Tensor = module.weight.detach()
        return plain
    module.scales = module.scales.float()  # exact; or the product would be rounded to fp16
    if hasattr(module, "dequantize_weight"):
        gptq: torch.Tensor = module.dequantize_weight()
        return gptq.T.contiguous()
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

    awq: torch.Tensor = dequantize_gemm(qweight=module.qweight, qzeros=module.qzeros, scales=module.scales, bits=module.bits, group_size=module.group_size)
    return awq.T.contiguous()


def hashed(weight: torch.Tensor) -> list[str]:
    """dtype and SHA-256 of a weight's bytes."""
    raw = weight.contiguous().view(torch.int16 if weight.element_size() == 2 else torch.int32).numpy()
    return [str(weight.dtype).removeprefix("torch."), hashlib.sha256(raw.tobytes()).hexdigest()]


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Run the request."""
    torch.set_num_threads(request["threads"])
    model, label = {"gptqmodel": in_gptqmodel, "portable": in_portable}.get(request["engine"], in_transformers)(request["model"])
    kinds: dict[str, int] = {}
    modules = {name: model.get_submodule(name) for name in request["modules"]}
    for module in modules.values():
        kinds[type(module).__name__] = kinds.get(type(module).__name__, 0) + 1
    with torch.inference_mode(), open(request["output"], "wb") as out:
        # bitsandbytes packs weights anew in its first run; compressed-tensors unpacks them in its own, and GPTQModel keeps what it was made to dequantize, here from fp32 scales
        weights = {n: hashed(dequantized(m)) for n, m in modules.items() if hasattr(m._parameters.get("weight"), "quant_state")}
        for prompt in request["prompts"]:
            logits = model(input_ids=torch.tensor([prompt])).logits[0, -1]
            torch.log_softmax(logits.double(), -1).float().numpy().tofile(out)
        weights |= {n: hashed(dequantized(m)) for n, m in modules.items() if n not in weights}
    return {"version": label, "weights": weights, "linears": kinds}


def main() -> None:
    """Answer one request."""
    with open(sys.argv[1], encoding="utf-8") as f:
        request = json.load(f)
    try:
        found = answer(request)
    except Exception as e:
        found = {"error": f"{type(e).__name__}: {e}"}
    print("\n" + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
