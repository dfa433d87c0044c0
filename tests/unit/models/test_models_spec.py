"""ModelSpec: each family's facts, rotary forms old and new, and None for what a ModelSpec cannot say."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from qforge.errors import ModelError
from qforge.models.spec import model_spec
from qforge.runtime.decoder import supports
from qforge.runtime.rope import inverse_frequencies
from qforge.types import ExpertsSpec, RopeSpec

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}


def config(family: str, **options: Any) -> PretrainedConfig:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2}
    return type(AutoConfig.for_model(family)).from_dict({"model_type": family, "max_position_embeddings": 1024, **sizes, **copy.deepcopy(options)})


@pytest.mark.parametrize(
    "form",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_theta": 5e5, "rope_scaling": {**{k: v for k, v in LLAMA3.items() if k != "rope_type"}, "type": "llama3", "rope_type": "llama3"}},
        {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
    ],
)
def test_llama3_scaling_in_all_its_forms(form: dict[str, Any]) -> None:
    spec = model_spec(config("llama", **form))
    assert spec is not None
    rope = spec.layer_ropes[0]
    assert (rope.theta, rope.kind) == (5e5, "llama3")
    assert dict(rope.parameters) == {k: v for k, v in LLAMA3.items() if k != "rope_type"}
    assert len(set(spec.layer_ropes)) == 1
    assert len(spec.layer_ropes) == 6


def test_llama_head_width_biases_and_scale() -> None:
    spec = model_spec(config("llama", head_dim=16, attention_bias=True, mlp_bias=True, tie_word_embeddings=True))
    assert spec is not None
    assert (spec.head_dim, spec.attention_scale) == (16, 0.25)
    assert (spec.attention_bias, spec.output_bias, spec.mlp_bias, spec.tied_head) == (True, True, True, True)
    plain = model_spec(config("llama"))
    assert plain is not None
    assert (plain.head_dim, plain.attention_bias, plain.qk_norm, plain.post_norms, plain.layer_windows) == (8, False, False, False, (0,) * 6)


def test_qwen_and_mistral() -> None:
    qwen2, qwen3 = model_spec(config("qwen2")), model_spec(config("qwen3", head_dim=16))
    assert qwen2 is not None
    assert qwen3 is not None
    assert (qwen2.attention_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    assert (qwen3.attention_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 16)
    sliding = model_spec(config("qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=4))
    assert sliding is not None
    assert sliding.layer_windows == (0, 0, 0, 0, 64, 64)
    for window, want in ((32, 32), (None, 0)):
        mistral = model_spec(config("mistral", sliding_window=window))
        assert mistral is not None
        assert mistral.layer_windows == (want,) * 6


def test_windows_are_those_that_each_family_has() -> None:
    """transformers' Llama and Mistral ask neither for kinds of layers, and Llama not for a window."""
    kinds = ["sliding_attention", "full_attention"] * 3
    llama, mistral = model_spec(config("llama", sliding_window=8, layer_types=kinds)), model_spec(config("mistral", sliding_window=8, layer_types=kinds))
    assert llama is not None
    assert mistral is not None
    assert (llama.layer_windows, mistral.layer_windows) == ((0,) * 6, (8,) * 6)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3_text"])
def test_a_window_without_a_width_is_refused(family: str) -> None:
    made = config(family)
    made.layer_types, made.sliding_window = ["sliding_attention"] * 6, None
    with pytest.raises(ModelError, match="sliding_window is None"):
        model_spec(made)


def test_gemma3_alternates_windows_and_ropes() -> None:
    spec = model_spec(config("gemma3_text", head_dim=8, sliding_window=16, query_pre_attn_scalar=64, rope_theta=1e6, rope_local_base_freq=1e4))
    assert spec is not None
    assert spec.layer_windows == (16, 16, 16, 16, 16, 0)
    assert [r.theta for r in spec.layer_ropes] == [1e4] * 5 + [1e6]
    assert (spec.attention_scale, spec.norm_offset, spec.embedding_scale) == (0.125, 1.0, 32**0.5)
    assert (spec.qk_norm, spec.post_norms, spec.hidden_act) == (True, True, "gelu_pytorch_tanh")


def test_gemma_is_gemma3_without_its_norms_between() -> None:
    spec = model_spec(config("gemma", head_dim=16, hidden_act="gelu", hidden_activation="silu", sliding_window=8))
    assert spec is not None
    assert (spec.hidden_act, spec.head_dim, spec.attention_scale, spec.norm_offset, spec.embedding_scale) == ("gelu_pytorch_tanh", 16, 0.25, 1.0, 32**0.5)
    assert (spec.qk_norm, spec.post_norms, spec.layer_windows) == (False, False, (0,) * 6)


def test_smollm3_rotates_where_it_says_so() -> None:
    plain, windows = model_spec(config("smollm3")), model_spec(config("smollm3", no_rope_layer_interval=3, use_sliding_window=True, sliding_window=16))
    assert plain is not None
    assert windows is not None
    assert [r.kind for r in plain.layer_ropes] == ["default"] * 3 + ["none"] + ["default"] * 2
    assert [r.kind for r in windows.layer_ropes] == ["default", "default", "none"] * 2
    assert (plain.layer_windows, windows.layer_windows) == ((0,) * 6, (0, 0, 16) * 2)
    with pytest.raises(ModelError, match="no_rope_layers tells of 2 layers, and the model has 6"):
        model_spec(config("smollm3", no_rope_layers=[1, 0], layer_types=["full_attention"] * 6))


def test_granites_multipliers_are_nobody_elses() -> None:
    scales = {"embedding_multiplier": 12, "attention_multiplier": 0.015625, "residual_multiplier": 0.22, "logits_scaling": 16}
    spec, llama = model_spec(config("granite", **scales)), model_spec(config("llama", **scales))
    assert spec is not None
    assert llama is not None
    assert (spec.embedding_scale, spec.attention_scale, spec.residual_scale, spec.logits_scale) == (12.0, 0.015625, 0.22, 0.0625)
    assert (llama.embedding_scale, llama.attention_scale, llama.residual_scale, llama.logits_scale) == (1.0, 8**-0.5, 1.0, 1.0)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("gpt_neox", {}),
        ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.4}}),  # 3 dimensions
        ("phi3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.0}}),
        ("phi3", {"hidden_act": "relu"}),
        ("llama", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 2.0}}),
        ("llama", {"hidden_act": "relu"}),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
        ("gemma3_text", {"final_logit_softcapping": 30.0}),
        ("gemma3_text", {"use_bidirectional_attention": True}),
        ("gemma", {"use_bidirectional_attention": True}),
        ("granite", {"residual_multiplier": 0.0}),
        ("granite", {"attention_multiplier": 0.0}),
        ("granite", {"logits_scaling": float("inf")}),
    ],
)
def test_what_a_spec_cannot_say_is_none(family: str, options: dict[str, Any]) -> None:
    assert model_spec(config(family, **options)) is None


def test_experts() -> None:
    mixtral = model_spec(config("mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=64))
    assert mixtral is not None
    assert mixtral.experts == ExpertsSpec(4, 48, 2, True, (True,) * 6)
    assert mixtral.layer_windows == (64,) * 6
    qwen = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
    some = model_spec(config("qwen3_moe", **qwen, decoder_sparse_step=2, mlp_only_layers=[3], norm_topk_prob=False))
    assert some is not None
    assert some.qk_norm
    assert some.experts == ExpertsSpec(8, 16, 3, False, (False, True, False, False, False, True))
    for settings in ({"mlp_only_layers": list(range(6))}, {"num_experts": 0}):
        none = model_spec(config("qwen3_moe", **{**qwen, **settings}))
        assert none is not None
        assert none.experts is None
    for active in (0, 9):
        with pytest.raises(ModelError, match=f"num_experts_per_tok is {active}, and a layer has 8 experts"):
            model_spec(config("qwen3_moe", **{**qwen, "num_experts_per_tok": active}))
    with pytest.raises(ModelError, match="num_experts_per_tok is 5, and a layer has 4 experts"):
        model_spec(config("mixtral", num_local_experts=4, num_experts_per_tok=5))


YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 256}


@pytest.mark.parametrize(("truncate", "whole"), [({}, True), ({"truncate": True}, True), ({"truncate": False}, False), ({"truncate": None}, False)])
def test_yarns_ramp_is_cut_to_whole_dimensions_as_transformers_cuts_it(truncate: dict[str, Any], whole: bool) -> None:
    given = config("llama", rope_parameters={**YARN, **truncate})
    spec = model_spec(given)
    assert spec is not None
    assert dict(spec.layer_ropes[0].parameters).get("truncate", 1.0) == whole
    theirs, amplitude = ROPE_INIT_FUNCTIONS["yarn"](given, "cpu")
    torch.testing.assert_close(inverse_frequencies(spec.layer_ropes[0], 8), theirs)
    assert spec.layer_ropes[0].amplitude == pytest.approx(amplitude)


@pytest.mark.parametrize(("name", "value"), [("attention_factor", "abc"), ("mscale", [1.0]), ("factor", {}), ("rope_theta", "x")])
def test_rotary_parameters_that_are_no_numbers_are_one_message(name: str, value: Any) -> None:
    with pytest.raises(ModelError, match=f"for {name}, where a number is needed"):
        model_spec(config("llama", rope_parameters={**YARN, name: value}))


def test_what_leaves_the_range_of_fp32_is_no_model_of_the_runtime() -> None:
    for factor in (1e200, 0.0, float("nan")):
        assert "multiplies queries and keys by" in str(supports(model_spec(config("llama", rope_parameters={**YARN, "attention_factor": factor}))))
    assert "lacks factor" in str(supports(replace(model_spec(config("llama")), layer_ropes=(RopeSpec(1e4, "yarn", (("original_max_position_embeddings", 8.0),)),) * 6)))
    for scale in (1e-200, 1e-20, 1e24):
        assert "residual multiplier" in str(supports(model_spec(config("granite", residual_multiplier=scale))))
    assert supports(model_spec(config("granite", residual_multiplier=0.22))) is None


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.5, 2.5], "long_factor": [2.0, 3.0, 5.0], "partial_rotary_factor": 0.75}


def phi3(rope: dict[str, Any], original: int = 128, **options: Any) -> PretrainedConfig:
    return config("phi3", original_max_position_embeddings=original, rope_parameters=rope, **options)


@pytest.mark.parametrize(
    "given", [{}, {"attention_factor": 1.3}, {"factor": 4.0}, {"factor": 1.0}, {"partial_rotary_factor": 1.0, "short_factor": [1.0, 2, 3, 4], "long_factor": [1] * 4}]
)
def test_longrope_is_that_of_transformers_with_short_factors(given: dict[str, Any]) -> None:
    made = phi3({**LONG, **given}, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    spec = model_spec(made)
    assert spec is not None
    rope = spec.layer_ropes[0]
    theirs, amplitude = ROPE_INIT_FUNCTIONS["longrope"](made, "cpu")
    found = inverse_frequencies(rope, 8)
    assert torch.equal(found[: len(theirs)], theirs)
    assert not found[len(theirs) :].any()
    assert len(found) == 4
    assert rope.amplitude == pytest.approx(amplitude)
    assert (spec.max_positions, spec.attention_bias, spec.layer_windows) == (128, False, (0,) * 6)


def test_older_names_of_longrope() -> None:
    for kind, more in (("su", {"original_max_position_embeddings": 128}), ("yarn", {})):
        spec = model_spec(phi3({**LONG, "rope_type": kind, **more}))
        assert spec == model_spec(phi3(LONG))
        assert spec is not None
        assert spec.layer_ropes[0].kind == "longrope"


def test_phi3_has_a_window_in_all_layers_or_none_and_no_biases() -> None:
    windows, plain = model_spec(config("phi3", sliding_window=2047, attention_bias=True)), model_spec(config("phi3", partial_rotary_factor=0.5))
    assert windows is not None
    assert plain is not None
    assert (windows.layer_windows, windows.attention_bias, windows.output_bias, windows.max_positions) == ((2047,) * 6, False, False, 1024)
    assert (plain.layer_windows, plain.layer_ropes[0].rotated, plain.layer_ropes[0].kind) == ((0,) * 6, 4, "default")
    with pytest.raises(ModelError, match="sliding_window is 0"):
        model_spec(config("phi3", sliding_window=0))


@pytest.mark.parametrize("name", ["short_factor", "long_factor"])
@pytest.mark.parametrize(
    "value", [None, 3, "abc", [1.0, 2.0], [1.0] * 4, [1.0, "x", 2.0], [1.0, float("nan"), 2.0], [1.0, float("inf"), 2.0], [1.0, 0.0, 2.0], [1, -1, 2]], ids=str
)
def test_factors_that_are_not_as_many_positive_numbers_are_one_message(name: str, value: Any) -> None:
    made = phi3(LONG)
    made.rope_parameters[name] = value
    with pytest.raises(ModelError, match=rf"for {name}, where a list of 3 positive numbers is needed"):
        model_spec(made)


@pytest.mark.parametrize(("name", "value"), [("attention_factor", "abc"), ("factor", {}), ("partial_rotary_factor", "x"), ("rope_theta", [])])
def test_longropes_parameters_that_are_no_numbers_are_one_message(name: str, value: Any) -> None:
    made = phi3(LONG)
    made.rope_parameters[name] = value
    with pytest.raises(ModelError, match=f"for {name}, where a number is needed"):
        model_spec(made)


@pytest.mark.parametrize("value", [1, 0, -5])
def test_an_original_context_without_a_logarithm_is_refused(value: int) -> None:
    made = phi3(LONG)
    made.original_max_position_embeddings = value
    with pytest.raises(ModelError, match="where a number of tokens is needed"):
        model_spec(made)


def test_an_odd_head_is_named() -> None:
    made = config("llama")
    made.head_dim = 7
    assert supports(model_spec(made)) == "its head size 7 is odd"
