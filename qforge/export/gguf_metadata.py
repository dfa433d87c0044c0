"""A model's sizes, norms and rotary embedding as GGUF metadata, and the reasons why llama.cpp could not compute a model from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from gguf import GGUFWriter, RopeScalingType

from qforge.models.gguf_config import EXAONE4_LAYERS, GEMMA3_27B_LAYERS, GEMMA3_PERIOD, PERIOD
from qforge.models.names import ROPE_FACTORS
from qforge.types import NO_ROPE, ModelSpec, RopeSpec

_GEMMA3_LOCAL_THETA = 10_000.0
_SMOLLM3_INTERVAL = 4  # of layers without rotary embedding
_GELU = ("gemma", "gemma3_text")
_WITHOUT_BIAS = ("qwen3", "qwen3_moe", "gemma3_text", "gemma", "smollm3", "olmo2", "olmo3", "exaone4")
_LLAMA3_ROPE = ("llama", "mistral", "mixtral", "granite", "exaone4")  # the others have no tensor rope_freqs
_WINDOWS = ("gemma3_text", "olmo3", "exaone4")  # llama.cpp computes those of no other
_CONTEXTS = 256  # llama.cpp makes room for multiples of so many tokens
_YARN_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}


def metadata_problem(spec: ModelSpec) -> str | None:
    """What of a model llama.cpp cannot be told, or would refuse as it loads the file; None if it computes what the model means."""
    own = {
        "gemma3_text": _gemma3_problem, "smollm3": _smollm3_problem, "seed_oss": _seed_oss_problem, "olmo2": _olmo_problem, "olmo3": _olmo_problem, "exaone4": _exaone4_problem,
        "phi3": _phi3_problem, "glm4": _wide_heads_problem, "ernie4_5": _ernie_problem,
    }.get(spec.family)  # fmt: skip
    return _family_problem(spec) or _rope_problem(spec) or _experts_problem(spec) or (None if own is None else own(spec))


def _family_problem(spec: ModelSpec) -> str | None:
    activation = "gelu_pytorch_tanh" if spec.family in _GELU else "silu"
    if spec.hidden_act != activation:
        return f"llama.cpp's {spec.family} has the activation {activation}, and this model's hidden_act is {spec.hidden_act}"
    if spec.family in _WITHOUT_BIAS and (spec.attention_bias or spec.output_bias or spec.mlp_bias):
        return f"llama.cpp's {spec.family} has no biases, and this model has them (attention_bias or mlp_bias)"
    return None


def _rope_problem(spec: ModelSpec) -> str | None:
    rope = _global_rope(spec)
    values = dict(rope.parameters)
    if rope.kind == "llama3" and spec.family not in _LLAMA3_ROPE:
        return f"llama.cpp's {spec.family} has no rotary scaling of the kind llama3"
    if rope.kind != "yarn":
        return None
    if "mscale" in values or values.get("truncate") == 0.0 or values["factor"] < 1.0:
        return "its YaRN rotary scaling is a variant that GGUF does not hold"
    for name, default in _YARN_BETAS.items():
        if values.get(name, default) != default:
            return f"llama.cpp has {default:g} for {name} of YaRN rotary scaling, whatever a file says, and this model has {values[name]:g}"
    if spec.family == "gemma3_text" and not math.isclose(_attention_factor(values), 1.0, rel_tol=1e-6):
        return "its YaRN rotary scaling has an attention factor of its own, which llama.cpp would apply in sliding layers as well"
    return None


def _experts_problem(spec: ModelSpec) -> str | None:
    if spec.family == "qwen3_moe" and not (spec.experts and all(spec.experts.layers)):
        return "llama.cpp's Qwen 3 MoE has experts in every layer, and this model not"
    if spec.experts is not None and not spec.experts.normalized:
        return "llama.cpp makes the weights of a token's experts sum to 1, and this model's do not (norm_topk_prob)"
    return None


def _gemma3_problem(spec: ModelSpec) -> str | None:
    pattern = [(i + 1) % GEMMA3_PERIOD != 0 for i in range(spec.num_layers)]
    if [w > 0 for w in spec.layer_windows] != pattern:
        return f"llama.cpp's Gemma 3 attends to everything in every {GEMMA3_PERIOD}th layer, and this model in others"
    local = {r for r, sliding in zip(spec.layer_ropes, pattern, strict=True) if sliding}
    if local != {RopeSpec(_GEMMA3_LOCAL_THETA)}:
        return f"llama.cpp's Gemma 3 has a rotary base of {_GEMMA3_LOCAL_THETA:.0f} in its sliding layers, and this model another one"
    width = spec.hidden_size // spec.num_heads if spec.num_layers == GEMMA3_27B_LAYERS else spec.head_dim
    if not math.isclose(spec.attention_scale, width**-0.5, rel_tol=1e-6):
        return f"llama.cpp's Gemma 3 scales queries by {width} ** -0.5 in a model of {spec.num_layers} layers, and this model otherwise"
    return None


def _smollm3_problem(spec: ModelSpec) -> str | None:
    if [r.kind == "none" for r in spec.layer_ropes] != [(i + 1) % _SMOLLM3_INTERVAL == 0 for i in range(spec.num_layers)]:
        return f"llama.cpp's SmolLM3 has no rotary embedding in every {_SMOLLM3_INTERVAL}th layer, and this model in others"
    return None


def _seed_oss_problem(spec: ModelSpec) -> str | None:
    return "llama.cpp's Seed-OSS has biases of q, k and v only, and this model has others (attention_out_bias or mlp_bias)" if spec.output_bias or spec.mlp_bias else None


def _olmo_problem(spec: ModelSpec) -> str | None:
    if spec.tied_head:
        return "llama.cpp's OLMo has an output head of its own, and this model's is the embedding (tie_word_embeddings)"
    if wide := _wide_heads_problem(spec):
        return wide
    if spec.family == "olmo3" and not _every_fourth_sees_all(spec):
        return f"llama.cpp's OLMo 3 has windows of one width in all but every {PERIOD}th layer, and this model others"
    local = {r for r, window in zip(spec.layer_ropes, spec.layer_windows, strict=True) if window}
    if local - {RopeSpec(_global_rope(spec).theta)}:
        return "llama.cpp's OLMo 3 has one rotary base, unscaled in its sliding layers, and this model not"
    return None


def _exaone4_problem(spec: ModelSpec) -> str | None:
    if spec.num_layers == EXAONE4_LAYERS:
        if not _every_fourth_sees_all(spec):
            return f"llama.cpp's EXAONE 4 of {EXAONE4_LAYERS} layers has windows of one width in all but every {PERIOD}th, and this model others"
    elif any(spec.layer_windows):
        return f"llama.cpp's EXAONE 4 has windows if it has {EXAONE4_LAYERS} layers, and this model has {spec.num_layers}"
    elif NO_ROPE in spec.layer_ropes:
        return "llama.cpp's EXAONE 4 rotates in all layers where it has no windows, and this model, whose config names one (sliding_window), in none"
    return _wide_heads_problem(spec)


def _every_fourth_sees_all(spec: ModelSpec) -> bool:
    return len(set(spec.layer_windows)) <= 2 and [w == 0 for w in spec.layer_windows] == [(i + 1) % PERIOD == 0 for i in range(spec.num_layers)]


def _ernie_problem(spec: ModelSpec) -> str | None:
    return "llama.cpp's ERNIE 4.5 adds no bias behind attention or in its MLP, and this model does (use_bias)" if spec.mlp_bias else None


def _phi3_problem(spec: ModelSpec) -> str | None:
    original = dict(_global_rope(spec).parameters).get("original_max_position_embeddings") if _global_rope(spec).kind == "longrope" else None
    room = -(-_context(spec) // _CONTEXTS) * _CONTEXTS
    if original is not None and room > original:
        return f"llama.cpp makes room for {room} tokens where {_context(spec)} are asked for, and takes LongRoPE's long factors beyond {original:g}"
    return _wide_heads_problem(spec)


def _wide_heads_problem(spec: ModelSpec) -> str | None:
    if spec.num_heads * spec.head_dim != spec.hidden_size:
        return f"llama.cpp's {spec.family} has heads that are together as wide as the model, and this one's are {spec.num_heads} x {spec.head_dim} beside {spec.hidden_size}"
    return None


def add_metadata(writer: GGUFWriter, spec: ModelSpec) -> None:
    """Write sizes, norms, windows and rotary embedding of a model without `metadata_problem`."""
    writer.add_vocab_size(spec.vocab_size)
    writer.add_context_length(_context(spec))
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.num_layers)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_dimension_count(_global_rope(spec).turned(spec.head_dim))
    _add_rope(writer, _global_rope(spec))
    if spec.experts is not None:
        writer.add_expert_count(spec.experts.count)
        writer.add_expert_used_count(spec.experts.active)
        if spec.family == "qwen3_moe":
            writer.add_expert_feed_forward_length(spec.experts.intermediate_size)
    if spec.family == "phi3" or (spec.family in _WINDOWS and any(spec.layer_windows)):  # Phi 3's files always have the key, 0 for none
        writer.add_sliding_window(max(spec.layer_windows))
    if spec.family == "gemma3_text":
        writer.add_rope_freq_base_swa(_GEMMA3_LOCAL_THETA)
    if spec.family == "granite":
        writer.add_attention_scale(spec.attention_scale)
        writer.add_embedding_scale(spec.embedding_scale)
        writer.add_residual_scale(spec.residual_scale)
        writer.add_logit_scale(1.0 / spec.logits_scale)


def rope_factors(spec: ModelSpec, parameters: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """What each rotary frequency is divided by, by the name of the tensor that holds it, fp32 `[frequencies]`; nothing where it is by none, or by one number.

    Source: Llama 3.1's reference code, which transformers' `llama3` rope type follows.

    Args:
        spec: of the model.
        parameters: rotary ones of its config, which have the factors of longer sequences.
    """
    rope = _global_rope(spec)
    if rope.kind == "longrope":
        return {name: np.asarray(factors, dtype=np.float32) for name, factors in zip(ROPE_FACTORS, (parameters["long_factor"], rope.factors), strict=True)}
    if rope.kind != "llama3":
        return {}
    p = dict(rope.parameters)
    wavelengths = 2 * math.pi * rope.theta ** (np.arange(0, spec.head_dim, 2, dtype=np.float64) / spec.head_dim)
    ratio = p["original_max_position_embeddings"] / wavelengths
    smooth = np.clip((ratio - p["low_freq_factor"]) / (p["high_freq_factor"] - p["low_freq_factor"]), 0.0, 1.0)
    return {"rope_freqs.weight": np.asarray(1.0 / ((1 - smooth) / p["factor"] + smooth), dtype=np.float32)}


def _global_rope(spec: ModelSpec) -> RopeSpec:
    rotated = [(r, window) for r, window in zip(spec.layer_ropes, spec.layer_windows, strict=True) if r.kind != "none"]
    return next((r for r, window in rotated if window == 0), rotated[-1][0] if rotated else NO_ROPE)


def _context(spec: ModelSpec) -> int:
    """The context in which llama.cpp computes what the model means: where it has no sliding window, up to the model's; and in a context beyond LongRoPE's original one it takes
    the long factors, however short a sequence is."""
    windows = [w for w in spec.layer_windows if w > 0]
    return spec.max_positions if spec.family in _WINDOWS or not windows else min(spec.max_positions, *windows)


def _attention_factor(values: Mapping[str, float]) -> float:
    """`rope.scaling.attn_factor` of YaRN: by what the model's attention factor differs from 1 + 0.1 ln(factor), which llama.cpp multiplies it by."""
    common = 0.1 * math.log(values["factor"]) + 1.0
    return values.get("attention_factor", common if values["factor"] > 1 else 1.0) / common


def _add_rope(writer: GGUFWriter, rope: RopeSpec) -> None:
    writer.add_rope_freq_base(rope.theta)
    p = dict(rope.parameters)
    if rope.kind == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(p["factor"])
    elif rope.kind == "longrope":
        writer.add_rope_scaling_orig_ctx_len(int(p["original_max_position_embeddings"]))
        writer.add_rope_scaling_attn_factors(rope.amplitude)
    elif rope.kind == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(p["factor"])
        if "original_max_position_embeddings" in p:
            writer.add_rope_scaling_orig_ctx_len(int(p["original_max_position_embeddings"]))
        if not math.isclose(_attention_factor(p), 1.0, rel_tol=1e-6):
            writer.add_rope_scaling_attn_factors(_attention_factor(p))
