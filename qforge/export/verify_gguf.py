"""GGUF files read back with readers that are not ours: equal weights bit for bit, and llama.cpp's distributions beside those of our runtime."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import torch

from qforge import numerics
from qforge.engines import llama_cpp
from qforge.engines.base import Scorer
from qforge.engines.runtime_engine import RuntimeEngine
from qforge.errors import MissingCapabilityError
from qforge.export.agreement import EXACT_KL, agreement, next_token_logprobs
from qforge.export.gguf_types import MIXES
from qforge.models.model import Model, open_model
from qforge.models.names import HEAD, gguf_names, gguf_norm_offset, gguf_permutes, is_rotary, one_of, permuted_heads, unpermute_rows
from qforge.models.tying import shared_table
from qforge.types import Verification

_ROUNDED = {"F16": torch.float16, "BF16": torch.bfloat16}


def verify_gguf(path: Path, model: Model, scorer: Scorer, prompts: Sequence[Sequence[int]]) -> tuple[list[Verification], list[str]]:
    """Read a file back; arguments and answer as `verify.verify`."""
    if path.stem.removeprefix("model-") in MIXES:
        held = open_model(str(path), dtype="float32")
        engine = RuntimeEngine(held)
        done = [requantized_weights(path, model, scorer, engine, prompts)]
        model, scorer = held, engine  # llama.cpp is to compute what the file holds
    else:
        done = [verify_gguf_weights(path, model)]
    try:
        ran = verify_in_llama_cpp(path, model, scorer, prompts)
        done.append(replace(ran, weights_equal=ran.weights_equal and done[0].weights_equal))
    except MissingCapabilityError as e:
        return done, [f"llama.cpp: {e}"]
    return done, []


def verify_gguf_weights(path: Path, model: Model) -> Verification:
    """Every tensor of the file, dequantized by the gguf package, against the model's, rounded once where the file's type is of 16 bits: equal bit for bit?"""
    held = gguf.GGUFReader(path).tensors
    tensors, names, types = _matrices(held), gguf_names(model.config), _types(held)
    unequal, rounded = [], False
    of_file = path.stem.removeprefix("model-").upper()
    for name, expected in _expected(model):
        found = tensors.pop(names[name], None)
        expected = expected + gguf_norm_offset(model.config.model_type, name)
        stored = expected
        if found is not None and found.type.name == of_file and of_file in _ROUNDED:
            stored = expected.to(_ROUNDED[of_file]).float()
        if found is None or not torch.equal(_dequantized(found, name, model), stored) or (torch.isfinite(expected) & ~torch.isfinite(stored)).any():
            unequal.append(name)
        rounded |= not torch.equal(stored, expected)
    extra = sorted(name for name in tensors if not is_rotary(model.config.model_type, name))
    problem = f"unequal: {', '.join(unequal[:3])} and {max(0, len(unequal) - 3)} more; " if unequal else f"not in the model: {', '.join(extra)}; " if extra else ""
    return Verification("gguf package", version("gguf"), weights_equal=not unequal and not extra, note=problem + types, rounded="rounded to 16 bits" if rounded else None)


def requantized_weights(path: Path, model: Model, scorer: Scorer, engine: Scorer, prompts: Sequence[Sequence[int]]) -> Verification:
    """What quantizing anew did: the matrices of the file as the gguf package dequantizes them against the model's, and our runtime over the file (`engine`) against the scorer."""
    stored = gguf.GGUFReader(path).tensors
    tensors, names = _matrices(stored), gguf_names(model.config)
    wrong = right = 0.0
    for name, expected in _expected(model):
        if expected.dim() == 2:
            wrong += float((_dequantized(tensors[names[name]], name, model) - expected).square().sum())
            right += float(expected.square().sum())
    kl, same_first, _ = agreement(next_token_logprobs(scorer, prompts), next_token_logprobs(engine, prompts))
    moved = f"a KL divergence of {kl:.3g} in our runtime, the same first token at {same_first:.1%} of {len(prompts)} positions"
    mix, off = path.stem.removeprefix("model-"), (wrong / max(right, 1e-30)) ** 0.5
    note = f"requantized to {mix}, not the model's own integers: weights off by {off:.2%}, {moved}; {_types(stored)}"
    return Verification("gguf package", version("gguf"), note=note)


def _types(tensors: Iterable[gguf.ReaderTensor]) -> str:
    """How many tensors of each type: `13 F32, 42 Q4_0`."""
    return ", ".join(f"{count} {kind}" for kind, count in sorted(Counter(t.tensor_type.name for t in tensors).items()))


def _expected(model: Model) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and fp32 values of every tensor that an export of the model holds."""
    stored = model.weights.names()
    for name in [*stored, *(f"{n}.weight" for n in model.schemes if f"{n}.weight" not in stored)]:
        module = name.removesuffix(".weight")
        if name.startswith(f"{HEAD}.") and model.config.tie_word_embeddings and (HEAD not in model.schemes or shared_table(model, model.schemes) is not None):
            continue
        quantized = name.endswith(".weight") and module in model.schemes
        yield name, numerics.dequantize(model.linear(module)) if quantized else model.weights.read(name).float()


class _Matrix(NamedTuple):
    """A tensor, or one of those that it is a stack of."""

    data: np.ndarray
    type: gguf.GGMLQuantizationType


def _matrices(tensors: Iterable[gguf.ReaderTensor]) -> dict[str, _Matrix]:
    found: dict[str, _Matrix] = {}
    for t in tensors:
        if len(t.shape) == 3:
            found |= {one_of(t.name, i): _Matrix(part, t.tensor_type) for i, part in enumerate(t.data)}
        else:
            found[t.name] = _Matrix(t.data, t.tensor_type)
    return found


def _dequantized(matrix: _Matrix, name: str, model: Model) -> torch.Tensor:
    values = torch.from_numpy(gguf.quants.dequantize(matrix.data, matrix.type).astype(np.float32))
    heads = permuted_heads(name, model.config.num_attention_heads, model.config.num_key_value_heads)
    return unpermute_rows(values, heads) if heads is not None and gguf_permutes(model.config.model_type) else values


def verify_in_llama_cpp(path: Path, model: Model, scorer: Scorer, prompts: Sequence[Sequence[int]]) -> Verification:
    """Mean KL divergence of llama.cpp's next-token distributions from the scorer's, the share of the same first tokens, and whether it dequantizes blocks as the gguf package does.

    Raises:
        MissingCapabilityError: llama.cpp is not installed.
        ModelError: llama.cpp cannot run the file.
    """
    engine = llama_cpp.LlamaCppEngine(path)
    kl, same_first, largest = agreement(next_token_logprobs(scorer, prompts), next_token_logprobs(engine, prompts))
    note = f"against {scorer.name}; fp32 cache, no flash attention; largest difference of a log-probability {largest:.2g}"
    only_floats = {t.tensor_type.name for t in gguf.GGUFReader(path).tensors} == {"F32"}
    bound = EXACT_KL if only_floats and all(s.activations is None for s in model.schemes.values()) else None
    if model.schemes and "f32" not in path.stem:
        note += "; llama.cpp's quantized kernels round activations to 8 bits"
    unequal = _unequal_in_c(path)
    if unequal:
        note = f"blocks dequantized otherwise than by the gguf package: {', '.join(unequal[:3])}; " + note
    same = not unequal
    return Verification(llama_cpp.NAME, engine.version, kl_mean=kl, top1_agreement=same_first, positions=len(prompts), weights_equal=same, note=note, executed=True, kl_bound=bound)


def _unequal_in_c(path: Path) -> list[str]:
    """Names of quantized tensors that llama.cpp's C code and the gguf package dequantize to different fp32 values."""
    tensors = [t for t in gguf.GGUFReader(path).tensors if t.tensor_type.name not in ("F32", "F16", "BF16")]
    blocks = [{"type": t.tensor_type.name, "offset": int(t.data_offset), "nbytes": int(t.n_bytes), "count": int(t.n_elements)} for t in tensors]
    hashes, _ = llama_cpp.dequantized(path, blocks) if blocks else ([], "")
    return [t.name for t, found in zip(tensors, hashes, strict=True) if found != _sha256(gguf.quants.dequantize(t.data, t.tensor_type))]


def _sha256(values: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(values, dtype=np.float32).tobytes()).hexdigest()
