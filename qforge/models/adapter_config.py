"""adapter_config.json as peft 0.21 writes it: what of it changes the merged weights, and a refusal by name of what qforge does not merge."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qforge.errors import ModelError
from qforge.models.config import read_json
from qforge.patterns import matches

CONFIG_FILE = "adapter_config.json"
# Keys that do not change how stored tensors are merged: where the adapter came from, how it was trained, which modules it was put on (the tensors' names tell).
_HARMLESS = {
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "r", "target_modules", "exclude_modules",
    "lora_alpha", "lora_dropout", "fan_in_fan_out", "bias", "use_rslora", "modules_to_save", "init_lora_weights", "layers_to_transform", "layers_pattern",
    "rank_pattern", "alpha_pattern", "megatron_config", "megatron_core", "loftq_config", "eva_config", "use_dora", "lora_bias", "qalora_group_size",
    "ensure_weight_tying", "runtime_config",
}  # fmt: skip
# Ways to start training that leave the base as it is; the others (pissa, olora, corda, loftq, lora_ga) subtract something from it first.
_LARGEST_ALPHA = 1e30
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """What decides how an adapter is merged, and `base`, the model that it says it was made for (empty where it does not)."""

    path: Path
    rank: int
    alpha: float
    rslora: bool
    dora: bool
    tied: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    base: str = ""

    def rank_of(self, module: str) -> int:
        """The rank of a module's adapter."""
        return self.rank_pattern.get(self._pattern_for(self.rank_pattern, module), self.rank)

    def scaling_of(self, module: str) -> float:
        """What B A is multiplied by: alpha / r, or alpha / sqrt(r) for rank-stabilised LoRA (arXiv 2312.03732)."""
        alpha, rank = self.alpha_pattern.get(self._pattern_for(self.alpha_pattern, module), self.alpha), self.rank_of(module)
        return alpha / math.sqrt(rank) if self.rslora else alpha / rank

    @property
    def variant(self) -> str:
        """The method's name, for a report."""
        return "DoRA" + (" (rank-stabilised)" if self.rslora else "") if self.dora else "rsLoRA" if self.rslora else "LoRA"

    def _pattern_for(self, patterns: Mapping[str, Any], module: str) -> str:
        """peft's rule: the first pattern, as a regular expression, that matches the whole module name or a dotted end of it."""
        return next((p for p in patterns if matches(rf"(.*\.)?({p})$", module, str(self.path))), module)


def read_adapter_config(folder: Path) -> AdapterConfig:
    """The config of an adapter's folder.

    Raises:
        ModelError: it is missing, malformed, of another method than LoRA, or uses something that qforge does not merge (named).
    """
    path = folder / CONFIG_FILE
    if not path.exists():
        raise ModelError(f"{folder} has no {CONFIG_FILE}, so it is no adapter; give the folder that peft's save_pretrained wrote")
    raw = read_json(path)
    kind = str(raw.get("peft_type"))
    if kind.upper() != "LORA":
        raise ModelError(f"{path}: adapters of the type {kind} cannot be merged yet; LoRA, rsLoRA and DoRA can")
    unknown = sorted(key for key, value in raw.items() if key not in _HARMLESS and value)
    if unknown:
        raise ModelError(f"{path} uses {', '.join(unknown)}, which qforge does not merge yet; merge it with peft (merge_and_unload) and give the merged model")
    start = raw.get("init_lora_weights")
    if start not in _PLAIN_STARTS:
        raise ModelError(
            f"{path}: init_lora_weights '{start}' changed the base model before training, so this adapter does not fit the original one; "
            "convert it in peft (save_pretrained with path_initial_model_for_weight_conversion) first"
        )
    return AdapterConfig(
        path, _rank(path, raw.get("r")), _alpha(path, raw.get("lora_alpha")), bool(raw.get("use_rslora")), bool(raw.get("use_dora")), bool(raw.get("ensure_weight_tying")),
        {p: _rank(path, r) for p, r in _patterns(path, raw, "rank_pattern").items()}, {p: _alpha(path, a) for p, a in _patterns(path, raw, "alpha_pattern").items()},
        base.strip() if isinstance(base := raw.get("base_model_name_or_path"), str) else "",
    )  # fmt: skip


def _rank(path: Path, value: Any) -> int:
    if type(value) is not int or not 1 <= value < 1 << 31:
        raise ModelError(f"{path}: a rank of {reprlib.repr(value)}, where a positive whole number is needed")
    return value


def _alpha(path: Path, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < _LARGEST_ALPHA:
        raise ModelError(f"{path}: an alpha of {reprlib.repr(value)}, where a number is needed")
    return float(value)


def _patterns(path: Path, raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    patterns = raw.get(key) or {}
    if not isinstance(patterns, dict):
        raise ModelError(f"{path}: {key} should be an object of patterns and numbers")
    for pattern in patterns:
        matches(pattern, "", f"{path}: {key}")  # one that no module meets is told, too
    return patterns
