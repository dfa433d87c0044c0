"""Hugging Face exports read back: integers unpacked a second time from what the safetensors package reads, and the checkpoint executed by transformers or GPTQModel."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from qforge import numerics
from qforge.engines import checkpoints
from qforge.engines.base import Scorer
from qforge.errors import MissingCapabilityError
from qforge.export.agreement import agreement, next_token_logprobs
from qforge.export.verify_packed import others
from qforge.models.config import read_json
from qforge.models.model import Model
from qforge.types import Verification

FORMATS = ("gptq", "awq", "compressed-tensors", "bitsandbytes", "mlx")
_MLX_WEIGHTS = 1e11  # that its CPU build is to go through: two minutes (it multiplies quantized weights on one core; 7 tokens a second of 135M parameters)
_AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)  # where AutoAWQ's own reader finds output i of eight


def verify_checkpoint(format_name: str, folder: Path, model: Model, scorer: Scorer, prompts: Sequence[Sequence[int]]) -> tuple[list[Verification], list[str]]:
    """Read a checkpoint back and run it; see `verify.verify`."""
    done = [verify_words(folder, model)] if format_name in ("gptq", "awq") else []
    try:
        return [*done, verify_in_engine(format_name, folder, model, scorer, prompts)], []
    except MissingCapabilityError as e:
        return done, [f"not executed: {e}"]


def verify_in_engine(format_name: str, folder: Path, model: Model, scorer: Scorer, prompts: Sequence[Sequence[int]], *, engine: str | None = None) -> Verification:
    """The engine's own dequantized weights against ours, and its next-token distributions against the scorer's; `engine` as in `checkpoints.run`.

    Raises:
        MissingCapabilityError: the engine is not installed, or the model is too large to be run here.
        ModelError: it refuses the checkpoint.
    """
    parameters = sum(torch.Size(model.weights.info(n).shape).numel() for n in model.weights.names())
    if format_name == "mlx":
        prompts = prompts[:: math.ceil(parameters * sum(map(len, prompts)) / _MLX_WEIGHTS)]
    ran = checkpoints.run(format_name, folder, prompts, list(model.schemes), model.config.vocab_size, parameters, engine=engine)
    unequal = [name for name in ran.weights if not _same(ran.weights[name], numerics.dequantize(model.linear(name)))]
    kl, same_first, largest = agreement(next_token_logprobs(scorer, prompts), ran.logprobs)
    linears = ", ".join(f"{n} {kind}" for kind, n in ran.linears.items()) or "weights packed by the engine"
    note = f"against {scorer.name}; {linears}; largest difference of a log-probability {largest:.2g}"
    if unequal:
        note = f"weights unequal: {', '.join(unequal[:3])} and {max(0, len(unequal) - 3)} more; " + note
    if "Linear4bit" in ran.linears:
        note += "; bitsandbytes as on a CPU without AVX512-BF16" if engine == "portable" else "; bitsandbytes' kernel for CPUs with AVX512-BF16 multiplies in bf16"
    if any(dtype == "float16" for dtype, _ in ran.weights.values()):
        note += "; its kernels round weights to fp16"
    equal = not unequal if ran.weights else None
    return Verification(ran.engine, ran.version, kl_mean=kl, top1_agreement=same_first, positions=len(prompts), weights_equal=equal, note=note, executed=True)


def _same(theirs: tuple[str, str], ours: torch.Tensor) -> bool:
    """Whether the hash is that of our fp32 weight, or of it rounded once to the dtype that the engine has."""
    dtype = getattr(torch, theirs[0])
    data = ours.to(dtype).contiguous().view(torch.uint8).numpy()
    return hashlib.sha256(data.tobytes()).hexdigest() == theirs[1]


def verify_words(folder: Path, model: Model) -> Verification:
    """Every quantized linear's integers, unpacked word by word from what the safetensors package reads, against the artifact's; and all other tensors."""
    settings = read_json(folder / "config.json")["quantization_config"]
    parts = ("qweight", "qzeros", "scales", *(("g_idx",) if settings["quant_method"] == "gptq" else ()))
    unequal, seen = [], set()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as f:
            for name in f.keys():  # noqa: SIM118  (a safetensors handle, not a dictionary)
                module, _, part = name.rpartition(".")
                seen.add(module if part == "qweight" else name)
                if part == "qweight":
                    equal = _words_equal({n: f.get_tensor(f"{module}.{n}").numpy() for n in parts}, model, module, settings)
                else:
                    equal = part in parts or torch.equal(f.get_tensor(name), model.weights.read(name))
                if not equal:
                    unequal.append(name)
    missing = sorted({*model.schemes, *others(model)} - seen)
    note = f"unequal or missing: {', '.join([*unequal, *missing][:3])}" if unequal or missing else None
    return Verification("qforge's second unpacking of what safetensors reads", version("safetensors"), weights_equal=not unequal and not missing, note=note)


def _words_equal(tensors: dict[str, np.ndarray], model: Model, module: str, settings: dict[str, Any]) -> bool:
    """Unpack by shifts of whole words, as the formats' descriptions have it, and compare codes, zero points and the dequantized product."""
    q = model.linear(module)
    bits = q.scheme.bits
    if settings["quant_method"] == "awq":
        codes, zeros = (_unpacked(tensors[n], bits).reshape(tensors[n].shape[0], -1, 8)[..., _AWQ_NIBBLES].reshape(tensors[n].shape[0], -1).T for n in ("qweight", "qzeros"))
        index = np.arange(q.in_features) // q.scheme.granularity.group_size(q.in_features)
    else:
        codes = _unpacked(tensors["qweight"].T, bits)[:, : q.in_features]
        zeros = _unpacked(tensors["qzeros"], bits).T + (0 if settings["checkpoint_format"] == "gptq_v2" else 1)
        index = tensors["g_idx"]
        if not np.all((index >= 0) & (index < zeros.shape[1])):
            return False
    middle = 2 ** (bits - 1) if q.scheme.symmetric else 0
    if not np.array_equal(codes - middle, q.codes.numpy().astype(np.int16)):
        return False
    weight = (codes - zeros[:, index]).astype(np.float32) * tensors["scales"].T.astype(np.float32)[:, index]
    return np.array_equal(weight, numerics.dequantize(q).numpy())


def _unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """Values (int16) of int32 words `[rows, words]`, the first in the lowest bits."""
    words = np.ascontiguousarray(words).view(np.uint32)
    if 32 % bits == 0:
        parts = [((words >> np.uint32(shift)) & np.uint32(2**bits - 1)).astype(np.int16) for shift in range(0, 32, bits)]
        return np.stack(parts, -1).reshape(words.shape[0], -1)
    single = np.stack([((words >> np.uint32(i)) & np.uint32(1)).astype(np.int16) for i in range(32)], -1).reshape(words.shape[0], -1)
    whole = single[:, : single.shape[1] // bits * bits].reshape(words.shape[0], -1, bits)
    return np.asarray((whole << np.arange(bits, dtype=np.int16)).sum(-1, dtype=np.int16))
