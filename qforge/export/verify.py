"""What was written, read back with readers that are not ours: equal weights bit for bit, and llama.cpp's distributions beside those of our runtime."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors import safe_open

from qforge import numerics
from qforge.engines import llama_cpp
from qforge.engines.base import Scorer
from qforge.errors import MissingCapabilityError
from qforge.export.gptq import read_settings
from qforge.export.hf import HEAD
from qforge.models.model import Model
from qforge.models.names import gguf_names, gguf_norm_offset, gguf_permutes, permuted_heads, unpermute_rows
from qforge.types import Verification

SHORTEST, LONGEST = 16, 128


def seeded_prompts(windows: Sequence[Sequence[int]], count: int = 64, seed: int = 0) -> list[list[int]]:
    """Prefixes of evaluation windows, 16 to 128 tokens long where the windows are, no two alike: positions at which engines are compared."""
    choices = [(i, n) for i, w in enumerate(windows) for n in range(min(SHORTEST, len(w)), min(LONGEST, len(w)) + 1)]
    chosen = random.Random(seed).sample(choices, min(count, len(choices)))
    return [list(windows[i][:n]) for i, n in sorted(chosen)]


def verify(format_name: str, paths: Sequence[Path], model: Model, scorer: Scorer, prompts: Sequence[Sequence[int]]) -> tuple[list[Verification], list[str]]:
    """Read an export back.

    Args:
        format_name: `gguf`, `gptq`, `onnx` or `tensorrt`.
        paths: the files that the exporter wrote.
        model: what was exported, opened from disk.
        scorer: our runtime (or transformers) over the same model.
        prompts: token ids; the engines are compared at the token after each (`seeded_prompts`).

    Returns:
        What was verified, and which verifiers were left out, with the reason.
    Raises:
        ModelError: a foreign reader cannot read the file.
    """
    if format_name == "gptq":
        return [verify_gptq(paths[0].parent, model)], ["not executed: no engine for GPTQ checkpoints is at hand; its integers were compared"]
    if format_name in ("onnx", "tensorrt"):
        from qforge.export.verify_onnx import verify_onnx

        done, left_out = verify_onnx(next(p for p in paths if p.suffix == ".onnx").parent, model, scorer, prompts)
        return done, [*left_out, *(["TensorRT built the engine from this ONNX file; the engine itself was not executed"] if format_name == "tensorrt" else [])]
    path = next(p for p in paths if p.suffix == ".gguf")
    done = [verify_gguf_weights(path, model)]
    try:
        done.append(verify_in_llama_cpp(path, model, scorer, prompts))
    except MissingCapabilityError as e:
        return done, [f"llama.cpp: {e}"]
    return done, []


def verify_gguf_weights(path: Path, model: Model) -> Verification:
    """Every tensor of the file, dequantized by the gguf package, against the model's: equal bit for bit?"""
    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
    names = gguf_names(model.config.model_type, model.config.num_hidden_layers)
    unequal = []
    for name, expected in _expected(model):
        found = tensors.pop(names[name], None)
        if found is None or not torch.equal(_dequantized(found, name, model), expected + gguf_norm_offset(model.config.model_type, name)):
            unequal.append(name)
    extra = sorted(set(tensors) - {"rope_freqs.weight"})
    note = f"unequal: {', '.join(unequal[:3])} and {max(0, len(unequal) - 3)} more" if unequal else f"not in the model: {', '.join(extra)}" if extra else None
    return Verification("gguf package", version("gguf"), weights_equal=not unequal and not extra, note=note)


def _expected(model: Model) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and fp32 values of every tensor that an export of the model holds."""
    stored = model.weights.names()
    for name in [*stored, *(f"{n}.weight" for n in model.schemes if f"{n}.weight" not in stored)]:
        module = name.removesuffix(".weight")
        if name.startswith(f"{HEAD}.") and model.config.tie_word_embeddings and HEAD not in model.schemes:
            continue
        quantized = name.endswith(".weight") and module in model.schemes
        yield name, numerics.dequantize(model.linear(module)) if quantized else model.weights.read(name).float()


def _dequantized(tensor: gguf.ReaderTensor, name: str, model: Model) -> torch.Tensor:
    values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    heads = permuted_heads(name, model.config.num_attention_heads, model.config.num_key_value_heads)
    return unpermute_rows(values, heads) if heads is not None and gguf_permutes(model.config.model_type) else values


def verify_in_llama_cpp(path: Path, model: Model, scorer: Scorer, prompts: Sequence[Sequence[int]]) -> Verification:
    """Mean KL divergence of llama.cpp's next-token distributions from the scorer's, and how often both rank the same token first.

    Raises:
        MissingCapabilityError: llama.cpp is not installed.
        ModelError: llama.cpp cannot run the file.
    """
    theirs, engine_version = llama_cpp.next_token_logprobs(path, prompts, model.config.vocab_size)
    note = f"against {scorer.name}; fp32 cache, no flash attention"
    if model.schemes and "f32" not in path.stem:
        note += "; llama.cpp's quantized kernels round activations to 8 bits"
    return compare(next_token_logprobs(scorer, prompts), theirs).verification(llama_cpp.NAME, engine_version, note)


@dataclass(frozen=True, slots=True)
class Divergence:
    """How far log-probabilities of another engine are from ours."""

    kl_mean: float
    top1_agreement: float
    positions: int
    largest: float

    def verification(self, engine: str, engine_version: str, note: str) -> Verification:
        """The same as a row of the report."""
        note = f"{note}; largest difference of a log-probability {self.largest:.2g}"
        return Verification(engine, engine_version, kl_mean=self.kl_mean, top1_agreement=self.top1_agreement, positions=self.positions, note=note, executed=True)


def compare(ours: torch.Tensor, theirs: torch.Tensor) -> Divergence:
    """Log-probabilities `[positions, V]` of two engines: mean KL divergence of theirs from ours, and how often both rank the same token first."""
    p, q = torch.log_softmax(ours.double(), -1), torch.log_softmax(theirs.double(), -1)  # fp32 sums over a vocabulary are off by 1e-6
    kl = (p.exp() * (p - q)).sum(-1).mean().item()
    agreement = (ours.argmax(-1) == theirs.argmax(-1)).double().mean().item()
    return Divergence(max(kl, 0.0), agreement, len(ours), (ours - theirs).abs().amax().item())


def next_token_logprobs(scorer: Scorer, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    """fp32 log-probabilities `[len(prompts), V]` of the token after each prompt."""
    windows = [[*p, 0] for p in prompts]  # scorers leave out a window's last position
    pieces = iter(scorer.score(windows))
    rows = []
    for window in windows:
        left = len(window) - 1
        while left > 0:
            piece = next(pieces)
            left -= len(piece)
        rows.append(torch.log_softmax(piece[-1].float(), -1))
    return torch.stack(rows)


def verify_gptq(folder: Path, model: Model) -> Verification:
    """Every quantized linear's integers, unpacked word by word from what the safetensors package reads, against the artifact's; and all other tensors."""
    settings = read_settings(folder)
    unequal, seen = [], set()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as f:
            for name in f.keys():  # noqa: SIM118  (a safetensors handle, not a dictionary)
                module, _, part = name.rpartition(".")
                seen.add(module if part == "qweight" else name)
                if part == "qweight":
                    tensors = {n: f.get_tensor(f"{module}.{n}").numpy() for n in ("qweight", "qzeros", "scales", "g_idx")}
                    equal = _gptq_equal(tensors, model, module, v2=settings["checkpoint_format"] == "gptq_v2")
                else:
                    equal = part in ("qzeros", "scales", "g_idx") or torch.equal(f.get_tensor(name), model.weights.read(name))
                if not equal:
                    unequal.append(name)
    missing = sorted(set(model.schemes) - seen)
    note = f"unequal or missing: {', '.join([*unequal, *missing][:3])}" if unequal or missing else None
    return Verification("qforge's second unpacking of what safetensors reads", version("safetensors"), weights_equal=not unequal and not missing, note=note)


def _gptq_equal(tensors: dict[str, np.ndarray], model: Model, module: str, *, v2: bool) -> bool:
    """Unpack by shifts of whole words, as the format's description has it, and compare codes, zero points and the dequantized product."""
    q = model.linear(module)
    codes = _unpacked(tensors["qweight"].T, q.scheme.bits)[:, : q.in_features]
    zeros = _unpacked(tensors["qzeros"], q.scheme.bits).T + (0 if v2 else 1)
    index = tensors["g_idx"]
    middle = 2 ** (q.scheme.bits - 1) if q.scheme.symmetric else 0
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
