"""Config of a Hugging Face model -> ModelSpec, for the families that the runtime's one decoder can be told as data; None for all others."""

from __future__ import annotations

import math
import reprlib
import sys
from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig

from qforge.errors import ModelError
from qforge.types import NO_ROPE, ExpertsSpec, LayerNorms, ModelSpec, RopeSpec

_POST_NORMS: LayerNorms = (None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_ALL_NORMS: LayerNorms = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
_GLM4_NORMS: LayerNorms = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
# What each family is, whatever its config says. The tests hold greedy tokens and logits of all of them against transformers.
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {}, "mistral": {}, "qwen2": {}, "qwen3": {"qk_norm": True}, "gemma3_text": {"qk_norm": True, "norms": _ALL_NORMS, "norm_offset": 1.0},
    "qwen3_moe": {"qk_norm": True}, "mixtral": {}, "gemma": {"norm_offset": 1.0}, "smollm3": {}, "granite": {}, "phi3": {}, "seed_oss": {},
    "olmo2": {"qk_norm": True, "whole_qk_norm": True, "norms": _POST_NORMS}, "olmo3": {"qk_norm": True, "whole_qk_norm": True, "norms": _POST_NORMS},
    "exaone4": {"qk_norm": True, "norms": _POST_NORMS}, "glm4": {"norms": _GLM4_NORMS}, "ernie4_5": {},
}  # fmt: skip
_NO_WINDOW = ("llama", "gemma", "granite", "seed_oss", "olmo2", "glm4", "ernie4_5")  # whatever their config says
_ONE_WINDOW = ("mistral", "qwen3_moe", "mixtral", "phi3")  # in all layers, if any
PARTIAL = ("phi3", "glm4")  # may rotate a part of each head
_INTERLEAVED = ("glm4", "ernie4_5")  # rotate neighbours
_NO_OUTPUT_BIAS = ("qwen2", "glm4")
_NO_ATTENTION_BIAS, _NO_MLP_BIAS = ("phi3", "exaone4", "ernie4_5"), ("exaone4", "ernie4_5")  # whatever their config says under these names
_ROPES = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("original_max_position_embeddings", "attention_factor"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
}
_GRANITE_SCALES = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling")  # above 0
_ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


def model_spec(config: PretrainedConfig) -> ModelSpec | None:
    """The model as data, or None when its family, rotary scaling, activation or attention is none that a ModelSpec can say.

    Raises:
        ModelError: layers have a window, and the config does not say how wide it is; it does not say of all layers whether they rotate; rotary parameters are no numbers, or
            not as many as needed; or a token has no experts, or more than there are.
    """
    family = config.model_type
    if family not in FAMILIES or _has_unsayable_parts(config):
        return None
    kinds = _layer_kinds(config)
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    ropes = _ropes(config, kinds, head_dim)
    if any(r is None for r in ropes):
        return None
    everywhere = family == "ernie4_5" and bool(config.use_bias)
    bias = everywhere or (bool(getattr(config, "attention_bias", False)) and family not in _NO_ATTENTION_BIAS)
    return ModelSpec(
        family=family,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=config.num_key_value_heads or heads,
        head_dim=head_dim,
        max_positions=min(config.max_position_embeddings, *(_reach(r) for r in ropes if r is not None)),
        norm_eps=config.rms_norm_eps,
        hidden_act=_activation(config),
        tied_head=bool(config.tie_word_embeddings),
        layer_windows=tuple(_window(config, kind) for kind in kinds),
        layer_ropes=tuple(r for r in ropes if r is not None),
        attention_bias=True if family == "qwen2" else bias,
        output_bias=bool(config.attention_out_bias) if family == "seed_oss" else bias and family not in _NO_OUTPUT_BIAS,
        mlp_bias=everywhere or (bool(getattr(config, "mlp_bias", False)) and family not in _NO_MLP_BIAS),
        **FAMILIES[family],
        **_scales(config, head_dim),
        experts=_experts(config),
    )


def _scales(config: PretrainedConfig, head_dim: int) -> dict[str, Any]:
    """What a family multiplies scores, embeddings, branches and logits by."""
    if config.model_type == "granite":
        return {
            "attention_scale": float(config.attention_multiplier), "embedding_scale": float(config.embedding_multiplier),
            "residual_scale": float(config.residual_multiplier), "logits_scale": 1.0 / config.logits_scaling,
        }  # fmt: skip
    scales = {"attention_scale": float(config.query_pre_attn_scalar if config.model_type == "gemma3_text" else head_dim) ** -0.5}
    return scales | {"embedding_scale": float(config.hidden_size) ** 0.5} if config.model_type in ("gemma", "gemma3_text") else scales


def _experts(config: PretrainedConfig) -> ExpertsSpec | None:
    """As transformers' decoder layers read the config: Mixtral's all have experts, Qwen 3's every so many, less those that are named."""
    layers = range(config.num_hidden_layers)
    if config.model_type == "mixtral":
        width, normalized, mixed = config.intermediate_size, True, (True,) * len(layers)
    elif config.model_type == "qwen3_moe":
        width, normalized = config.moe_intermediate_size, bool(config.norm_topk_prob)
        mixed = tuple(config.num_local_experts > 0 and i not in config.mlp_only_layers and (i + 1) % config.decoder_sparse_step == 0 for i in layers)
    else:
        return None
    if not any(mixed):
        return None
    count, active = config.num_local_experts, config.num_experts_per_tok
    if not isinstance(active, int) or not 1 <= active <= count:
        raise ModelError(f"config.json: num_experts_per_tok is {active!r}, and a layer has {count} experts")
    return ExpertsSpec(count, width, active, normalized, mixed)


def _activation(config: PretrainedConfig) -> str:
    return str(config.hidden_activation if config.model_type == "gemma3_text" else config.hidden_act)


def _has_unsayable_parts(config: PretrainedConfig) -> bool:
    soft_capped = getattr(config, "final_logit_softcapping", None) or getattr(config, "attn_logit_softcapping", None)
    scaled = all(math.isfinite(s) and s > 0 for s in (getattr(config, name) for name in _GRANITE_SCALES)) if config.model_type == "granite" else True
    return bool(_activation(config) not in _ACTIVATIONS or soft_capped or not scaled or getattr(config, "use_bidirectional_attention", False))


def _layer_kinds(config: PretrainedConfig) -> list[str]:
    """As transformers' code of each family reads the config: a family has no window, or one in all layers, or kinds of layers."""
    if config.model_type not in _NO_WINDOW + _ONE_WINDOW:
        return list(config.layer_types)
    sliding = config.model_type in _ONE_WINDOW and getattr(config, "sliding_window", None) is not None
    return ["sliding_attention" if sliding else "full_attention"] * int(config.num_hidden_layers)


def _window(config: PretrainedConfig, kind: str) -> int:
    if kind != "sliding_attention":
        return 0
    width = config.sliding_window
    if not isinstance(width, int) or isinstance(width, bool) or width < 1:
        raise ModelError(f"config.json: a layer has a sliding window, and sliding_window is {width!r}, where a number of tokens is needed")
    return width


def _parameters(config: PretrainedConfig, kind: str) -> Mapping[str, Any]:
    """Rotary parameters of one kind of layer: transformers 5 keeps one dictionary, or one for each kind, and turns the older `rope_theta` and `rope_scaling` into it."""
    parameters: Mapping[str, Any] = config.rope_parameters
    nested = parameters.get(kind)
    return nested if isinstance(nested, Mapping) else parameters


def _ropes(config: PretrainedConfig, kinds: list[str], head_dim: int) -> list[RopeSpec | None]:
    """Per layer; SmolLM3 says for each whether it has one, and EXAONE 4 has none where it sees all, if it has windows."""
    rotated = [1] * len(kinds)
    if config.model_type == "smollm3":
        rotated = config.no_rope_layers
    elif config.model_type == "exaone4" and config.sliding_window is not None:
        rotated = [kind == "sliding_attention" for kind in kinds]
    if len(rotated) < len(kinds):
        raise ModelError(f"config.json: no_rope_layers tells of {len(rotated)} layers, and the model has {len(kinds)}")
    whole = "truncate" not in config.rope_parameters or bool(config.rope_parameters["truncate"])  # read there, also where each kind has parameters of its own
    found = {kind: _rope(config, _parameters(config, kind), head_dim, whole=whole) for kind in dict.fromkeys(kinds)}
    return [found[kind] if here else NO_ROPE for kind, here in zip(kinds, rotated, strict=False)]


def _rope(config: PretrainedConfig, parameters: Mapping[str, Any], head_dim: int, *, whole: bool) -> RopeSpec | None:
    """`whole`: whether YaRN's ramp begins and ends at whole dimensions (`truncate`)."""
    kind = str(parameters.get("rope_type", "default"))
    share = _number(parameters, "partial_rotary_factor") if parameters.get("partial_rotary_factor") is not None else 1.0
    partial = config.model_type in PARTIAL
    if kind not in _ROPES or parameters.get("rope_theta") is None or (share != 1.0 and not partial) or (kind == "longrope" and config.model_type != "phi3"):
        return None
    rotated = int(head_dim * share) if math.isfinite(share) else 0
    if not 0 < rotated <= head_dim or (rotated < head_dim and rotated % 2):
        return None
    if kind == "longrope":
        return _longrope(config, parameters, rotated, head_dim)
    values = [(name, _number(parameters, name)) for name in _ROPES[kind] if parameters.get(name) is not None]
    more = (("truncate", 0.0),) if kind == "yarn" and not whole else ()
    return RopeSpec(_number(parameters, "rope_theta"), kind, (*values, *more), rotated=rotated % head_dim, interleaved=config.model_type in _INTERLEAVED)


def _longrope(config: PretrainedConfig, parameters: Mapping[str, Any], rotated: int, head_dim: int) -> RopeSpec:
    """With its short factors. Phi 3's config says the original context beside its rotary parameters, as transformers' does."""
    values = {**parameters, "original_max_position_embeddings": config.original_max_position_embeddings}
    original = _number(values, "original_max_position_embeddings")
    if not 1 < original < math.inf:
        raise ModelError(f"config.json: original_max_position_embeddings is {original:g}, where a number of tokens is needed")
    factors, _ = (_factors(values, name, rotated // 2) for name in ("short_factor", "long_factor"))
    longer = _number(values, "factor") if values.get("factor") is not None else config.max_position_embeddings / original
    if values.get("attention_factor") is None:
        values["attention_factor"] = math.sqrt(1 + math.log(longer) / math.log(original)) if longer > 1 else 1.0
    kept = tuple((name, _number(values, name)) for name in _ROPES["longrope"])
    return RopeSpec(_number(values, "rope_theta"), "longrope", kept, factors, rotated % head_dim)


def _factors(parameters: Mapping[str, Any], name: str, count: int) -> tuple[float, ...]:
    found = parameters.get(name)
    if not isinstance(found, list) or len(found) != count or not all(isinstance(f, (int, float)) and 0 < f < math.inf for f in found):
        raise ModelError(f"config.json: rotary parameters have {reprlib.repr(found)} for {name}, where a list of {count} positive numbers is needed")
    return tuple(map(float, found))


def _number(parameters: Mapping[str, Any], name: str) -> float:
    try:
        return float(parameters[name])
    except (TypeError, ValueError, OverflowError) as e:
        raise ModelError(f"config.json: rotary parameters have {parameters[name]!r} for {name}, where a number is needed") from e


def _reach(rope: RopeSpec) -> int:
    """Positions up to which a rotary embedding is what its RopeSpec says."""
    return int(dict(rope.parameters)["original_max_position_embeddings"]) if rope.kind == "longrope" else sys.maxsize
