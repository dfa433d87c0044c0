"""The language model of a multimodal checkpoint, by itself: what computes texts in it. Its config, and its tensors under the names that it has alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from qforge.errors import ModelError
from qforge.models.weights import Renamed, WeightSource

# Families that compute texts as their language model alone does, positions and masks too, and that model's family: tests hold both against each other. Others were not tried.
MULTIMODAL = {"gemma3": "gemma3_text", "mistral3": "mistral"}
_OUTER = ("bos_token_id", "eos_token_id", "pad_token_id")  # said of the whole, where they are said
_NAMES = (("language_model.model.", "model."), ("language_model.lm_head.", "lm_head."), ("model.language_model.", "model."), ("lm_head.", "lm_head."))  # older files', newer ones'
_OTHERS = ("vision_tower.", "multi_modal_projector.")  # parts of the whole, in newer files below `model.`


def config_of(whole: PretrainedConfig, raw: Mapping[str, Any], origin: str, *, quantized: bool) -> PretrainedConfig:
    """The language model's config.

    Args:
        raw: config.json.
        quantized: whether the whole says that it is.

    Raises:
        ModelError: the whole is no generative model, or its language model another than is taken, none, quantized, or badly described.
    """
    family = whole.model_type
    generative, named = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(family), raw.get("architectures")
    if named and (not isinstance(named, list) or generative not in named):
        raise ModelError(f"{origin}: the architecture is {named}, not {generative}: no generative model")
    text = raw.get("text_config")
    if not isinstance(text, Mapping) or not text:
        raise ModelError(f"{origin}: '{family}' is a multimodal model, and no text_config tells of its language model")
    if quantized or text.get("quantization_config") is not None:
        raise ModelError(f"{origin}: a quantized multimodal checkpoint ('{family}') is not readable; start from the unquantized one")
    config = copy.deepcopy(whole.text_config)
    if config.model_type != MULTIMODAL[family]:
        raise ModelError(
            f"{origin}: the language model of this '{family}' is a '{config.model_type}'; only '{MULTIMODAL[family]}' is taken out of it: save it by itself and name that"
        )
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.tie_word_embeddings = bool(whole.tie_word_embeddings)  # as transformers ties the whole, whatever the part says
    if config.dtype is None:
        config.dtype = whole.dtype
    for name in _OUTER:
        if raw.get(name) is not None:
            setattr(config, name, raw[name])
    return config


def is_other(name: str) -> bool:
    """Whether a tensor of the whole belongs to a part that texts do not go through."""
    return name.removeprefix("model.").startswith(_OTHERS)


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
