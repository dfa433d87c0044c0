"""Tensor names: what Hugging Face calls a tensor, what GGUF calls it, and which rows or values the two store differently.

The names themselves are the gguf package's (`TensorNameMap`, llama.cpp's converter); this file says which modules a family has, that some of
llama.cpp's architectures want the rows of q and k in interleaved rotary order, and that it stores Gemma's norms as 1 + weight.
GGUF stacks the matrices of a layer's experts in one tensor `[experts, O, I]`; here, each of them has a name of its own: `blk.0.ffn_up_exps.weight#3`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import PretrainedConfig

from qforge.errors import UnsupportedError
from qforge.models.spec import FAMILIES
from qforge.types import PRE_NORMS

if TYPE_CHECKING:
    from gguf import TensorNameMap

# Hugging Face model_type -> GGUF `general.architecture`
GGUF_ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "gemma": "gemma", "gemma3_text": "gemma3",
    "smollm3": "smollm3", "granite": "granite", "phi3": "phi3", "seed_oss": "seed_oss", "olmo2": "olmo2", "olmo3": "olmo2", "exaone4": "exaone4",
    "glm4": "glm4", "ernie4_5": "ernie4_5",
}  # fmt: skip

EMBEDDING, HEAD = "model.embed_tokens", "lm_head"
JOINT = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}  # linears that vLLM multiplies as one, and its name for that
_OUTER = (EMBEDDING, "model.norm", HEAD)
_ROTARY = ("rope_freqs.weight", "attn_rot_embd.weight")
ROPE_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")  # GGUF's, of Phi 3
_PERMUTED, _OFFSET = ("llama", "smollm3", "granite"), ("gemma", "gemma3")  # architectures
_FUSED = {"phi3": tuple(JOINT), "glm4": ("gate_up_proj",)}  # families whose checkpoints hold JOINT linears: the rows of their parts below each other
_MLP_PARTS = ("gate_proj", "up_proj", "down_proj")
_EXPERTS = {"qwen3_moe": ("mlp", _MLP_PARTS), "mixtral": ("block_sparse_moe", ("w1", "w3", "w2"))}  # the block beside whose router experts are, and an expert's gate, up and down
_QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")


def gguf_architecture(model_type: str) -> str:
    """GGUF's name of a Hugging Face family.

    Raises:
        UnsupportedError: a family that qforge has no GGUF names for; the message lists those it has.
    """
    if model_type not in GGUF_ARCHITECTURES:
        raise UnsupportedError(f"GGUF names of the family '{model_type}' are not known; known are {', '.join(GGUF_ARCHITECTURES)}")
    return GGUF_ARCHITECTURES[model_type]


def gguf_names(config: PretrainedConfig) -> dict[str, str]:
    """Hugging Face tensor name -> GGUF tensor name, for every weight and bias that a model of this family can have.

    Raises:
        UnsupportedError: as `gguf_architecture`.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    architecture = gguf_architecture(config.model_type)
    arch = next(a for a, name in MODEL_ARCH_NAMES.items() if name == architecture)
    lookup = get_tensor_name_map(arch, config.num_hidden_layers)
    names = {}
    for module in (*_OUTER, *(f"model.layers.{i}.{m}" for i in range(config.num_hidden_layers) for m in _block_modules(config.model_type))):
        found = lookup.get_name(module)
        if found is None and module == HEAD:
            continue  # an architecture whose head is always the embedding
        assert found is not None, module
        for suffix in (".weight", ".bias"):
            names[module + suffix] = found + suffix
    if config.model_type in _EXPERTS:
        for i in range(config.num_hidden_layers):
            names |= _expert_names(config.model_type, f"model.layers.{i}.", config.num_local_experts, lookup)
    return names


def _expert_names(model_type: str, layer: str, count: int, lookup: TensorNameMap) -> dict[str, str]:
    block, parts = _EXPERTS[model_type]
    stacks = [lookup.get_name(f"{layer}{block}.experts.{part}") for part in parts]
    experts = enumerate((*inputs, down) for inputs, down in mlps(model_type, count))
    return {f"{layer}{module}.weight": one_of(f"{stack}.weight", e) for e, modules in experts for module, stack in zip(modules, stacks, strict=True)}


def one_of(stack: str, index: int) -> str:
    """Our name of a matrix in a stack."""
    return f"{stack}#{index}"


def stack_of(name: str) -> str:
    """GGUF's name of the tensor that a matrix is in, its own where it is in no stack."""
    return name.partition("#")[0]


def _block_modules(model_type: str) -> tuple[str, ...]:
    family = FAMILIES[model_type]
    ((inputs, down),) = mlps(model_type, None)
    mlp = (router(model_type),) if model_type in _EXPERTS else (*inputs, down)
    norms = (norm for norm in family.get("norms", PRE_NORMS) if norm is not None)
    return (*attention_inputs(model_type), "self_attn.o_proj", *mlp, *norms, *(_QK_NORMS if family.get("qk_norm") else ()))


def router(model_type: str) -> str:
    """What decides over experts, below a layer."""
    return f"{_EXPERTS[model_type][0]}.gate"


def is_router(model_type: str, name: str) -> bool:
    """Whether a tensor decides over experts."""
    return model_type in _EXPERTS and name.endswith(f".{router(model_type)}.weight")


def attention_inputs(model_type: str) -> tuple[str, ...]:
    """Queries, keys and values below a layer: a linear of each, or one of all."""
    return tuple(f"self_attn.{part}" for part in _linears(model_type, "qkv_proj"))


def mlps(model_type: str, experts: int | None) -> list[tuple[tuple[str, ...], str]]:
    """Gate and up (or what holds both), and down below a layer: of its one MLP, or of each of so many experts."""
    if experts is None:
        return [(tuple(f"mlp.{part}" for part in _linears(model_type, "gate_up_proj")), "mlp.down_proj")]
    block, (gate, up, down) = _EXPERTS[model_type]
    return [((f"{block}.experts.{e}.{gate}", f"{block}.experts.{e}.{up}"), f"{block}.experts.{e}.{down}") for e in range(experts)]


def _linears(model_type: str, joint: str) -> tuple[str, ...]:
    return (joint,) if joint in _FUSED.get(model_type, ()) else JOINT[joint]


def is_rotary(model_type: str, name: str) -> bool:
    """Whether a GGUF tensor holds what rotary frequencies are or are divided by, which a config tells."""
    return name in ROPE_FACTORS if gguf_architecture(model_type) == "phi3" else name.endswith(_ROTARY)


def gguf_permutes(model_type: str) -> bool:
    """Whether GGUF stores the rows of q and k of this family in interleaved rotary order (`permute_rows`)."""
    return gguf_architecture(model_type) in _PERMUTED


def permuted_heads(name: str, num_heads: int, num_kv_heads: int) -> int | None:
    """Heads over which the rows of a Hugging Face tensor (weight or bias) are permuted in a family that `gguf_permutes`; None for all other tensors."""
    if ".self_attn.q_proj." in name:
        return num_heads
    return num_kv_heads if ".self_attn.k_proj." in name else None


def permute_rows(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Hugging Face row order `[heads, 2, d/2]` -> GGUF row order `[heads, d/2, 2]`; `[O]` or `[O, ...]` of any dtype, codes and scales alike."""
    return tensor.reshape(num_heads, 2, tensor.shape[0] // num_heads // 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def unpermute_rows(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The inverse of `permute_rows`."""
    return tensor.reshape(num_heads, tensor.shape[0] // num_heads // 2, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def gguf_norm_offset(model_type: str, name: str) -> float:
    """What GGUF adds to a Hugging Face tensor when it stores it: 1 for Gemma's norms (whose modules multiply by 1 + weight), else 0."""
    return 1.0 if gguf_architecture(model_type) in _OFFSET and name.endswith("norm.weight") else 0.0
