"""GGUF's mixes of block types by name (`q4_k_m`, ...): which type each tensor gets, and what takes its place where 256 does not divide a row.

The choice is llama.cpp's (`src/llama-quant.cpp`), so that a file is as large as one that llama-quantize makes: more bits for the tensors that hurt most, `attn_v` and `ffn_down`
of the first and last eighth of the layers and of every third between them, and Q6_K for the output head; where there are 8 experts, Q8_0 for `attn_k` and `attn_v`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gguf import LlamaFileType

from qforge.superblocks import TYPES
from qforge.types import ModelSpec

_FALLBACK = {"Q2_K": "Q4_0", "Q3_K": "Q4_0", "Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
_LAYERS_OF_70B = 80
_EIGHT = 8  # experts, beside which attention is small
_RAISED_BESIDE_EIGHT = ("q2_k", "q3_k_s", "q3_k_m", "q4_k_s", "q4_k_m")
_GROUPED = 4  # queries to a key: from here on `attn_v` is so small that Q2_K's gets Q4_K


@dataclass(frozen=True, slots=True)
class Mix:
    """A mix: the type of most tensors, and llama.cpp's number for the file."""

    name: str
    base: str
    file_type: LlamaFileType


MIXES = {
    m.name: m
    for m in (
        Mix("q2_k", "Q2_K", LlamaFileType.MOSTLY_Q2_K),
        Mix("q3_k_s", "Q3_K", LlamaFileType.MOSTLY_Q3_K_S),
        Mix("q3_k_m", "Q3_K", LlamaFileType.MOSTLY_Q3_K_M),
        Mix("q3_k_l", "Q3_K", LlamaFileType.MOSTLY_Q3_K_L),
        Mix("q4_1", "Q4_1", LlamaFileType.MOSTLY_Q4_1),
        Mix("q4_k_s", "Q4_K", LlamaFileType.MOSTLY_Q4_K_S),
        Mix("q4_k_m", "Q4_K", LlamaFileType.MOSTLY_Q4_K_M),
        Mix("q5_1", "Q5_1", LlamaFileType.MOSTLY_Q5_1),
        Mix("q5_k_s", "Q5_K", LlamaFileType.MOSTLY_Q5_K_S),
        Mix("q5_k_m", "Q5_K", LlamaFileType.MOSTLY_Q5_K_M),
        Mix("q6_k", "Q6_K", LlamaFileType.MOSTLY_Q6_K),
    )
}


def tensor_type(mix: Mix, name: str, width: int, spec: ModelSpec, tied: bool) -> str:
    """The type of a matrix: a block type, or F16 where no block divides its rows.

    Args:
        mix: what was asked for.
        name: GGUF's.
        width: of a row.
        spec: of the model.
        tied: whether the embedding is the output head, too.
    """
    is_head = name == ("token_embd.weight" if tied else "output.weight")
    chosen = _by_part(mix, name, spec) if not is_head else "Q8_0" if width % TYPES[mix.base].block else "Q6_K"
    if width % TYPES[chosen].block:
        chosen = _FALLBACK.get(chosen, chosen)
    return chosen if width % TYPES[chosen].block == 0 else "F16"


def _by_part(mix: Mix, name: str, spec: ModelSpec) -> str:
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is None:
        return mix.base
    layer, part = int(match[1]), match[2].removesuffix("_exps")
    if spec.experts is not None and spec.experts.count == _EIGHT and part in ("attn_k", "attn_v"):
        return "Q8_0"
    if spec.experts is not None and spec.experts.count == _EIGHT and part == "attn_output":
        return "Q5_K" if mix.name in _RAISED_BESIDE_EIGHT else mix.base
    if part in ("attn_v", "attn_qkv"):
        return _values(mix, layer, spec)
    if part == "ffn_down":
        return _down(mix, layer, spec.num_layers)
    if part == "attn_output":
        return {"q2_k": "Q3_K", "q3_k_m": "Q4_K", "q3_k_l": "Q5_K"}.get(mix.name, mix.base)
    return mix.base


def _values(mix: Mix, layer: int, spec: ModelSpec) -> str:
    chosen = mix.base
    if mix.name == "q2_k":
        chosen = "Q4_K" if spec.num_heads // spec.num_kv_heads >= _GROUPED else "Q3_K"
    elif mix.name == "q3_k_m":
        chosen = "Q5_K" if layer < 2 else "Q4_K"
    elif mix.name == "q3_k_l" or (mix.name == "q4_k_s" and layer < 4):
        chosen = "Q5_K"
    elif mix.name in ("q4_k_m", "q5_k_m") and _matters(layer, spec.num_layers):
        chosen = "Q6_K"
    large = spec.num_layers == _LAYERS_OF_70B and spec.family in ("llama", "qwen2")
    return "Q5_K" if large and chosen in ("Q3_K", "Q4_K") else chosen


def _down(mix: Mix, layer: int, layers: int) -> str:
    if mix.name == "q2_k":
        return "Q3_K"
    if mix.name == "q3_k_m":
        return "Q5_K" if layer < layers // 16 else "Q4_K"
    if mix.name == "q3_k_l" or (mix.name == "q4_k_s" and layer < layers // 8):
        return "Q5_K"
    return "Q6_K" if mix.name in ("q4_k_m", "q5_k_m") and _matters(layer, layers) else mix.base


def _matters(layer: int, layers: int) -> bool:
    """Whether llama.cpp gives a layer more bits: the first eighth, the last, and every third between them."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
