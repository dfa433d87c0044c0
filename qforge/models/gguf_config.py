"""GGUF metadata -> transformers' config. Everything that llama.cpp reads from the file is taken from it, rotary scaling included; what it does not say is refused."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from qforge.errors import ModelError, last_line
from qforge.models.experts import MOST_EXPERTS
from qforge.models.gguf_header import GgufHeader
from qforge.models.names import ROPE_FACTORS
from qforge.models.spec import PARTIAL

FAMILIES = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "gemma": "gemma", "gemma3": "gemma3_text", "smollm3": "smollm3", "granite": "granite",
    "olmo2": "olmo2", "exaone4": "exaone4", "seed_oss": "seed_oss", "phi3": "phi3", "glm4": "glm4", "ernie4_5": "ernie4_5",
}  # fmt: skip
_MIXTURES = {"llama": "mixtral", "qwen3moe": "qwen3_moe"}  # the families of architectures that may have experts
_ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "mixtral": "MixtralForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma": "GemmaForCausalLM", "gemma3_text": "Gemma3ForCausalLM", "smollm3": "SmolLM3ForCausalLM", "granite": "GraniteForCausalLM", "phi3": "Phi3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM", "olmo3": "Olmo3ForCausalLM", "exaone4": "Exaone4ForCausalLM", "seed_oss": "SeedOssForCausalLM",
    "glm4": "Glm4ForCausalLM", "ernie4_5": "Ernie4_5ForCausalLM",
}  # fmt: skip
_MLP_BIAS = ("llama", "granite")
_FIXED_BIAS = ("qwen2", "phi3")  # q, k and v of the one always have a bias, the other's never
GEMMA3_PERIOD = 6  # every sixth layer attends to everything (Gemma 3 report, section 2)
PERIOD = 4  # of OLMo 3 and EXAONE 4
EXAONE4_LAYERS = 64  # of the one size that has windows, as llama.cpp tells it
GEMMA3_27B_LAYERS = 62  # the one size that scales queries by hidden / heads instead of the head's width


def gguf_config(header: GgufHeader) -> PretrainedConfig:
    """The config of the model in a GGUF file.

    Raises:
        ModelError: an architecture that qforge does not read (the message lists those it does), or metadata that are missing or unusual.
    """
    architecture = header.architecture
    if architecture not in FAMILIES:
        raise ModelError(f"{header.path} holds a model of the architecture '{architecture}'; qforge reads {', '.join(FAMILIES)} from GGUF (a Hugging Face directory may do)")
    if (parts := header.metadata.get("split.count", 1)) not in (0, 1):
        raise ModelError(f"{header.path} is one of {parts} parts; join them first: llama-gguf-split --merge")
    get = _Keys(header)
    experts = get.number("expert_count", None, int) if get.optional("expert_count", 0) else 0
    if experts and (architecture not in _MIXTURES or experts > MOST_EXPERTS):
        raise ModelError(f"{header.path} has {experts} experts in a layer; qforge reads up to {MOST_EXPERTS} of {' and '.join(_MIXTURES)} models")
    family = _MIXTURES[architecture] if experts else FAMILIES[architecture]
    family = "olmo3" if family == "olmo2" and get.optional("attention.sliding_window", 0) else family
    values = _sizes(header, get, family) | (_experts(header, get, family, experts) if experts else {})
    if family == "gemma3_text":
        values |= _gemma3(header, get, values)
    elif family == "phi3":
        values |= _phi3(header, get, values)
    else:
        values["rope_parameters"] = _rope(header, get, values["head_dim"])
    if family == "glm4":
        values["rope_parameters"]["partial_rotary_factor"] = _rotated_share(get, values["head_dim"])
    if family == "ernie4_5":
        values["use_bias"] = "blk.0.ffn_up.bias" in header.tensors
    if family in ("olmo3", "exaone4"):
        values |= _periodic(get, family, values)
    values |= _granite(header.path, get, values["head_dim"]) if family == "granite" else {}
    try:
        return CONFIG_MAPPING[family].from_dict({"model_type": family, "architectures": [_ARCHITECTURES[family]], **values, **_tokens(header, values["vocab_size"])})
    except Exception as e:  # transformers' validators raise many kinds
        raise ModelError(f"{header.path}: its metadata make no valid '{family}' config: {last_line(e)}") from e


class _Keys:
    """Metadata of the file's architecture, by their short names."""

    def __init__(self, header: GgufHeader) -> None:
        self._header = header

    def required(self, key: str, kind: type) -> Any:
        return self.number(key, None, kind)

    def number(self, key: str, default: Any, kind: type) -> Any:
        """A positive number where the file has the key or there is no default."""
        value = self.optional(key, default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]  # one value a layer, all the same
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value) or value <= 0 or kind(value) != value:
            needed = "whole number" if kind is int else "number"
            raise ModelError(f"{self._header.path}: its metadata say {reprlib.repr(value)} for {self._header.architecture}.{key}, where one positive {needed} is needed")
        return kind(value)

    def optional(self, key: str, default: Any) -> Any:
        return self._header.metadata.get(f"{self._header.architecture}.{key}", default)


def _sizes(header: GgufHeader, get: _Keys, family: str) -> dict[str, Any]:
    hidden, heads = get.required("embedding_length", int), get.required("attention.head_count", int)
    partial = family in PARTIAL  # so that their heads may be wider than what is rotated of them
    head_dim = get.number("attention.key_length", hidden // heads if partial else get.optional("rope.dimension_count", hidden // heads), int)
    if (not partial and get.number("rope.dimension_count", head_dim, int) != head_dim) or get.number("attention.value_length", head_dim, int) != head_dim:
        raise ModelError(f"{header.path}: its heads have parts of different widths (rotary, key, value); these are not available")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{header.path} has no token_embd.weight, so it is no complete language model")
    layers, held = get.required("block_count", int), 1 + max((int(m[1]) for n in header.tensors if (m := re.match(r"blk\.(\d+)\.", n))), default=-1)
    if layers != held:
        raise ModelError(f"{header.path}: its metadata say {layers} blocks, and it holds tensors of {held}")
    values = {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": get.required("attention.head_count_kv", int) if get.optional("attention.head_count_kv", None) is not None else heads,
        "head_dim": head_dim,
        "num_hidden_layers": layers,
        "intermediate_size": get.required("feed_forward_length", int),
        "max_position_embeddings": get.required("context_length", int),
        "rms_norm_eps": get.required("attention.layer_norm_rms_epsilon", float),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    if family not in _FIXED_BIAS:
        values["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    if family in _MLP_BIAS:
        values["mlp_bias"] = "blk.0.ffn_up.bias" in header.tensors
    return values


def _experts(header: GgufHeader, get: _Keys, family: str, count: int) -> dict[str, Any]:
    """llama.cpp makes the weights of a token's experts sum to 1, whatever a file says."""
    found = {"num_experts_per_tok": get.required("expert_used_count", int)}
    if found["num_experts_per_tok"] > count:
        raise ModelError(f"{header.path}: its metadata say that a token has {found['num_experts_per_tok']} of {count} experts")
    if family == "mixtral":
        return {**found, "num_local_experts": count}
    return {**found, "num_experts": count, "norm_topk_prob": True, "moe_intermediate_size": get.required("expert_feed_forward_length", int)}


def _tokens(header: GgufHeader, vocab_size: int) -> dict[str, Any]:
    ids = {kind: token_id(header, theirs, vocab_size) for kind, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))}
    return {f"{kind}_token_id": found for kind, found in ids.items()}


def token_id(header: GgufHeader, kind: str, vocab_size: int) -> int | None:
    """The special token of a kind; None if the file names none, or one outside its vocabulary (-1 is written for none), as llama.cpp has it.

    Raises:
        ModelError: it is no whole number.
    """
    found = header.metadata.get(f"tokenizer.ggml.{kind}_token_id")
    if found is not None and (not isinstance(found, int) or isinstance(found, bool)):
        raise ModelError(f"{header.path}: its metadata say {reprlib.repr(found)} for tokenizer.ggml.{kind}_token_id, where a token's id is needed")
    return found if found is not None and 0 <= found < vocab_size else None


def _scaling(header: GgufHeader, get: _Keys) -> dict[str, Any]:
    """Rotary scaling: linear where the file gives a factor and no type, and none with a factor of 1 or 0, as llama.cpp has it."""
    kind = get.optional("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise ModelError(f"{header.path}: rotary scaling of the kind {reprlib.repr(kind)} is not available; none, linear and yarn are")
    key = next((key for key in ("rope.scaling.factor", "rope.scale_linear") if get.optional(key, None) is not None), None)  # the second is its old name
    factor = 1.0 if key is None or get.optional(key, 0.0) == 0 else get.required(key, float)
    attention = get.number("rope.scaling.attn_factor", 1.0, float)
    if attention != 1.0 and (kind != "yarn" or header.architecture == "gemma3"):
        raise ModelError(
            f"{header.path}: its metadata say {attention} for {header.architecture}.rope.scaling.attn_factor, which is available with yarn scaling, and not for gemma3"
        )
    if kind == "yarn":
        found = {"rope_type": "yarn", "factor": get.required("rope.scaling.factor", float) if key is None else factor}
        if attention != 1.0:
            found["attention_factor"] = attention * (1 + 0.1 * math.log(max(factor, 1.0)))
        original = "rope.scaling.original_context_length"
        return found if get.optional(original, None) is None else found | {"original_max_position_embeddings": get.required(original, int)}
    return {"rope_type": "default"} if kind == "none" or factor == 1.0 else {"rope_type": "linear", "factor": factor}


def _rope(header: GgufHeader, get: _Keys, head_dim: int) -> dict[str, Any]:
    theta = get.number("rope.freq_base", 10000.0, float)
    found = {"rope_theta": theta, **_scaling(header, get)}
    if "rope_freqs.weight" not in header.tensors:
        return found
    if found["rope_type"] != "default":
        raise ModelError(f"{header.path}: its rotary frequencies are scaled twice, by rope_freqs.weight and as {found['rope_type']}; this is not available")
    return found | _llama3_scaling(header, theta, head_dim)


def _llama3_scaling(header: GgufHeader, theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3.1's rotary scaling, which GGUF holds as divisors of the frequencies: the published constants if they give just these divisors.

    Raises:
        ModelError: the divisors are others.
    """
    stored = _stored(header, "rope_freqs.weight")
    factor = float(stored.max(initial=1.0))
    parameters = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    expected = [_divisor(theta ** (-2 * i / head_dim), parameters) for i in range(head_dim // 2)]
    if stored.shape != (head_dim // 2,) or not np.allclose(stored, expected, rtol=1e-3):
        raise ModelError(f"{header.path}: its rotary frequencies (rope_freqs.weight) are scaled in a way that qforge cannot tell; start from the Hugging Face model")
    return parameters


def _stored(header: GgufHeader, name: str) -> np.ndarray:
    """Rotary factors in fp32.

    Raises:
        ModelError: they are of another type.
    """
    tensor = header.tensors[name]
    if tensor.type.name != "F32":
        raise ModelError(f"{header.path}: {name} is of type {tensor.type.name}, where F32 is needed")
    return np.fromfile(header.path, dtype=np.float32, count=tensor.nbytes // 4, offset=tensor.start)


def _divisor(frequency: float, p: Mapping[str, Any]) -> float:
    """What Llama 3.1 divides a rotary frequency by (its reference code's apply_scaling)."""
    wavelength = 2 * math.pi / frequency
    original, low, high, factor = p["original_max_position_embeddings"], p["low_freq_factor"], p["high_freq_factor"], p["factor"]
    if wavelength < original / high:
        return 1.0
    if wavelength > original / low:
        return float(factor)
    smooth = (original / wavelength - low) / (high - low)
    return float(1.0 / ((1 - smooth) / factor + smooth))


def _granite(path: Path, get: _Keys, head_dim: int) -> dict[str, Any]:
    """Granite's multipliers; where one is missing or 0, llama.cpp multiplies by nothing, and scores by what is usual."""

    def scale(key: str, default: float) -> float:
        return float(get.number(key, default, float)) if get.optional(key, 0) else default

    if get.optional("rope.scaling.finetuned", True) is False:
        raise ModelError(f"{path}: its metadata say that it has no rotary embedding (granite.rope.scaling.finetuned); this is not available")
    return {
        "attention_multiplier": scale("attention.scale", head_dim**-0.5), "embedding_multiplier": scale("embedding_scale", 1.0),
        "residual_multiplier": scale("residual_scale", 1.0), "logits_scaling": get.required("logit_scale", float),
    }  # fmt: skip


def _periodic(get: _Keys, family: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Layers with windows, all but every fourth, unless the file has a pattern; OLMo 3 has no rotary scaling in these."""
    layers = values["num_hidden_layers"]
    if family == "exaone4" and layers != EXAONE4_LAYERS:
        return {"sliding_window": None, "layer_types": ["full_attention"] * layers}
    found = {"sliding_window": get.number("attention.sliding_window", 4096, int), "layer_types": _layer_types(get, layers, PERIOD)}
    if family == "exaone4":
        return found
    full = values["rope_parameters"]
    local = get.number("rope.freq_base_swa", full["rope_theta"], float)
    return found | {"rope_parameters": {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": local}}}


def _layer_types(get: _Keys, layers: int, period: int) -> list[str]:
    """Every so many layers attend to everything, or those that the file names."""
    key = "attention.sliding_window_pattern"
    pattern = get.optional(key, period)
    sliding = pattern if isinstance(pattern, list) else [(i + 1) % get.number(key, period, int) != 0 for i in range(layers)]
    return ["sliding_attention" if s else "full_attention" for s in sliding]


def _rotated_share(get: _Keys, head_dim: int) -> float:
    """`partial_rotary_factor`, of which transformers makes the whole number again."""
    rotated = get.number("rope.dimension_count", head_dim, int)
    return next((s for s in (rotated / head_dim, (rotated + 0.5) / head_dim) if int(head_dim * s) == rotated), 0.0)


def _phi3(header: GgufHeader, get: _Keys, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Its window, which llama.cpp passes over, and its rotary embedding: of a part of each head, and LongRoPE where the file holds factors."""
    rope: dict[str, Any] = {"rope_theta": get.number("rope.freq_base", 10000.0, float), "partial_rotary_factor": _rotated_share(get, sizes["head_dim"])}
    values = {"sliding_window": get.required("attention.sliding_window", int) if get.optional("attention.sliding_window", 0) else None, "rope_parameters": rope}
    held = [name for name in ROPE_FACTORS if name in header.tensors]
    if not held:
        rope |= _scaling(header, get)
        return values
    if len(held) < len(ROPE_FACTORS) or get.number("rope.scaling.factor", 1.0, float) != 1.0:
        raise ModelError(f"{header.path}: its rotary frequencies are divided by {held[0]} and something else than {' and '.join(ROPE_FACTORS)}; this is not available")
    long, short = (_stored(header, name).tolist() for name in held)
    rope |= {"rope_type": "longrope", "long_factor": long, "short_factor": short, "attention_factor": get.number("rope.scaling.attn_factor", 1.0, float)}
    return values | {"original_max_position_embeddings": get.number("rope.scaling.original_context_length", sizes["max_position_embeddings"], int)}


def _gemma3(header: GgufHeader, get: _Keys, sizes: Mapping[str, Any]) -> dict[str, Any]:
    layers, head_dim = sizes["num_hidden_layers"], sizes["head_dim"]
    full = {"rope_theta": get.number("rope.freq_base", 1_000_000.0, float), **_scaling(header, get)}
    return {
        "query_pre_attn_scalar": sizes["hidden_size"] // sizes["num_attention_heads"] if layers == GEMMA3_27B_LAYERS else head_dim,
        "sliding_window": get.required("attention.sliding_window", int),
        "layer_types": _layer_types(get, layers, GEMMA3_PERIOD),
        "rope_parameters": {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": get.number("rope.freq_base_swa", 10_000.0, float)}},
        "final_logit_softcapping": get.optional("final_logit_softcapping", None),
    }
