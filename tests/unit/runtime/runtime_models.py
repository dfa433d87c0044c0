"""Tiny models for runtime tests, transformers' view of them, and one quantized in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import tiny
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from qforge import numerics
from qforge.models.model import Model, open_model
from qforge.qlinear import QuantizedLinear
from qforge.scheme import parse

FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "llama-untied-rope3": (
        "llama",
        {
            "tied": False,
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
            },
        },
    ),
    "llama-linear-rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
    "llama-yarn": ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}}),
    "qwen3-yarn-whole": (  # with a ramp between dimensions that are no whole numbers, and an amplitude of its own
        "qwen3",
        {
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 500.0, "factor": 3.0, "original_max_position_embeddings": 40, "attention_factor": 1.4, "beta_fast": 8, "truncate": False,
            },
        },
    ),
    "gemma3-yarn": (
        "gemma3_text",
        {
            "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {
                    "rope_type": "yarn", "rope_theta": 1000.0, "factor": 2.0, "original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 2.0,
                },
            },
        },
    ),
    "llama-wide-heads": ("llama", {"hidden": 192, "heads": 3, "kv_heads": 1}),  # 64 dimensions, which tiles of AMX take
    "llama-odd-widths": ("llama", {"hidden": 60, "intermediate": 100, "heads": 3, "kv_heads": 1}),  # not whole eights, so inputs are gathered before a product
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": 20}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3_text", {"sliding_window": 20}),
    "gemma": ("gemma", {"head_dim": 32, "attention_bias": True}),
    "smollm3": ("smollm3", {"layers": 4}),
    "smollm3-windows": ("smollm3", {"no_rope_layers": [0, 1, 0], "use_sliding_window": True, "sliding_window": 20, "attention_bias": True, "mlp_bias": True}),
    "granite": ("granite", tiny.GRANITE | {"attention_bias": True, "mlp_bias": True}),
    "olmo2": ("olmo2", {"attention_bias": True}),
    "olmo3": (
        "olmo3",
        {
            "layers": 4, "sliding_window": 20,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 40, "attention_factor": 1.2},
            },
        },
    ),
    "exaone4": ("exaone4", {"layers": 4, "sliding_window": 20, "sliding_window_pattern": 2}),
    "exaone4-no-window": ("exaone4", {"layers": 2, "sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "seed-oss": ("seed_oss", {"attention_out_bias": True, "mlp_bias": True}),
    "glm4": ("glm4", {}),
    "glm4-whole": ("glm4", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 40, "partial_rotary_factor": 1.0}}),
    "ernie4.5": ("ernie4_5", {"use_bias": True}),
    "phi3": ("phi3", {"tied": False}),
    "phi3-part": ("phi3", {"kv_heads": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5}}),
    "phi3-long": ("phi3", tiny.longrope()),  # of a part, and with an amplitude
    "phi3-long-whole": ("phi3", tiny.longrope(16)),
    "phi3-windows": ("phi3", {"sliding_window": 20}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 20, "seed": 1}),  # with seed 0 a token's second and third expert are 2e-7 apart
    "qwen3-moe": ("qwen3_moe", {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen3-moe-many": (  # so many that each is computed by one thread
        "qwen3_moe", {"num_experts": 16, "num_experts_per_tok": 6, "moe_intermediate_size": 32, "norm_topk_prob": True, "seed": 1},
    ),
    "qwen3-moe-shares": ("qwen3_moe", {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": False, "decoder_sparse_step": 2}),
}  # fmt: skip


@cache
def folder(name: str) -> Path:
    """A tiny model of one of FAMILIES, made once a test session."""
    family, settings = FAMILIES[name]
    return tiny.make(Path(mkdtemp()) / name, family, **{"norms": True, **settings})  # type: ignore[arg-type]


@cache
def model(name: str) -> Model:
    """The same, opened."""
    return open_model(str(folder(name)))


@cache
def transformers_model(name: str) -> PreTrainedModel:
    """The same, in transformers."""
    return AutoModelForCausalLM.from_pretrained(folder(name), dtype=torch.float32).eval()


class Quantized(Model):
    """A model whose linears are rounded when they are asked for."""

    def linear(self, name: str) -> QuantizedLinear:
        """The rounded linear."""
        names = self.weights.names()
        weight, scheme = self.weights.read(f"{name}.weight" if f"{name}.weight" in names else "model.embed_tokens.weight"), self.schemes[name]
        scales, zeros = numerics.minmax_parameters(weight, scheme)
        return numerics.quantize(weight, scheme, scales, zeros, bias=self.weights.read(f"{name}.bias") if f"{name}.bias" in names else None)


def quantized(name: str, scheme: Callable[[str], str | None], head: str | None = None) -> tuple[Quantized, PreTrainedModel]:
    """A tiny model with linears rounded by `scheme(module name)`, its tied head and embedding by `head`, and transformers' model with the same dequantized weights."""
    plain = model(name)
    linears = [n.removesuffix(".weight") for n in plain.weights.names() if n.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight"))]
    schemes = {n: parse(text) for n in linears if (text := scheme(n)) is not None}
    assert plain.spec is not None
    assert plain.spec.experts is None or any(".experts." in n for n in schemes)
    if head is not None:
        schemes["lm_head"] = parse(head)
    ours = Quantized(**{f: getattr(plain, f) for f in plain.__dataclass_fields__})
    ours = replace(ours, schemes=schemes)
    theirs = AutoModelForCausalLM.from_pretrained(folder(name), dtype=torch.float32).eval()
    modules = dict(theirs.named_modules())
    with torch.no_grad():
        for n in schemes:
            _matrix(modules, n).copy_(numerics.dequantize(ours.linear(n)))
    return ours, theirs


def _matrix(modules: dict[str, torch.nn.Module], linear: str) -> torch.Tensor:
    """A linear's weight, which is a part of a stack where it is an expert's."""
    if linear in modules:
        return modules[linear].get_parameter("weight")
    block, expert, part = linear.replace("block_sparse_moe", "mlp").rsplit(".", 2)
    if part in ("down_proj", "w2"):
        return modules[block].get_parameter("down_proj")[int(expert)]
    return modules[block].get_parameter("gate_up_proj")[int(expert)].chunk(2)[part in ("up_proj", "w3")]


def prompts(count: int, longest: int, seed: int = 0, vocabulary: int = 380) -> list[list[int]]:
    """Seeded random prompts of mixed lengths."""
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocabulary, (int(n),), generator=g).tolist() for n in torch.randint(1, longest, (count,), generator=g)]


@torch.no_grad()
def greedy(theirs: PreTrainedModel, prompt: list[int], tokens: int) -> list[int]:
    """transformers' greedy continuation."""
    ids = torch.tensor([prompt])
    out: list[int] = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)[0, len(prompt) :].tolist()
    return out
