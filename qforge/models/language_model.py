"""The language model of a multimodal checkpoint, by itself: what computes texts in it. Its config, and its tensors under the names that it has alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from qforge.errors import ModelError
from qforge.models.weights import Renamed, WeightSource

# Families that compute texts as their language model alone does, positions and masks too (tests hold both against each other); most others were not tried.
MULTIMODAL = ("gemma3", "mistral3")
_OUTER = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")  # said of the whole, where it is said
_NAMES = (("language_model.model.", "model."), ("language_model.lm_head.", "lm_head."), ("model.language_model.", "model."), ("lm_head.", "lm_head."))  # older files', newer ones'


def config_of(whole: PretrainedConfig, raw: Mapping[str, Any], origin: str) -> PretrainedConfig:
    """The language model's config.

    Args:
        raw: config.json as it is.

    Raises:
        ModelError: transformers has no causal language model of its family.
    """
    config = copy.deepcopy(whole.get_text_config())
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if architecture is None:
        raise ModelError(f"{origin}: the language model of this '{whole.model_type}' is of the family '{config.model_type}', which transformers has no causal language model of")
    config.architectures = [architecture]
    if config.dtype is None:
        config.dtype = whole.dtype
    for name in _OUTER:
        if name in raw:
            setattr(config, name, raw[name])
    return config


def alone(name: str) -> str:
    """What a tensor of the whole is called in its language model; any other name as it is."""
    return next((to + name.removeprefix(prefix) for prefix, to in _NAMES if name.startswith(prefix)), name)


def tensors_of(weights: WeightSource, origin: str) -> Renamed:
    """The language model's tensors.

    Raises:
        ModelError: there are none, or two under one name.
    """
    found: dict[str, str] = {}
    for stored in weights.names():
        if stored.startswith(tuple(prefix for prefix, _ in _NAMES)):
            name = alone(stored)
            if name in found:
                raise ModelError(f"{origin}: the weights hold '{found[name]}' and '{stored}', which are one tensor of the language model")
            found[name] = stored
    if not found:
        raise ModelError(f"{origin}: the weights hold nothing of a language model, which config.json tells of")
    return Renamed(weights, found)
