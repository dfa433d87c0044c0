"""What onnxruntime-genai must know of a decoder: genai_config.json."""

from __future__ import annotations

from typing import Any

from qforge.engines.onnx_runtime import EXACT, MODEL
from qforge.models.assets import end_ids, generation_config
from qforge.models.model import Model
from qforge.types import ModelSpec

_UNKNOWN = ("olmo2", "olmo3", "exaone4", "seed_oss", "glm4")  # to onnxruntime-genai, which takes any decoder by that name


def genai_config(model: Model, spec: ModelSpec, *, positions: bool) -> dict[str, Any]:
    """The file's content; search is greedy unless a caller asks otherwise.

    Args:
        model: whose special tokens are told.
        spec: of the model.
        positions: whether the graph has the input `position_ids`; such a graph gives caches of exactly the tokens so far, the other one may be given room for more.
    """
    stops, start, padding = _special(model)
    names = {"input_ids": "input_ids", "attention_mask": "attention_mask"} | ({"position_ids": "position_ids"} if positions else {})
    decoder = {
        "session_options": {"log_id": "onnxruntime-genai", "provider_options": []} | (EXACT if positions else {}),
        "filename": MODEL,
        "head_size": spec.head_dim,
        "hidden_size": spec.hidden_size,
        "inputs": {**names, "past_key_names": "past_key_values.%d.key", "past_value_names": "past_key_values.%d.value"},
        "outputs": {"logits": "logits", "present_key_names": "present.%d.key", "present_value_names": "present.%d.value"},
        "num_attention_heads": spec.num_heads,
        "num_hidden_layers": spec.num_layers,
        "num_key_value_heads": spec.num_kv_heads,
    }
    special = {"bos_token_id": start, "eos_token_id": stops[0] if len(stops) == 1 else stops, "pad_token_id": padding}
    about = {**special, "context_length": spec.max_positions, "decoder": decoder, "type": "decoder" if spec.family in _UNKNOWN else spec.family, "vocab_size": spec.vocab_size}
    search = {"do_sample": False, "max_length": spec.max_positions, "min_length": 0, "num_beams": 1, "num_return_sequences": 1, "past_present_share_buffer": not positions}
    return {"model": about, "search": search | {"repetition_penalty": 1.0, "temperature": 1.0, "top_k": 50, "top_p": 1.0}}


def _special(model: Model) -> tuple[list[int], int, int]:
    """Tokens that end a text (the generation config's, else the model's, else the tokenizer's), the one that begins it, the one that fills up; 0 where none is named, which
    onnxruntime-genai takes for the end of a file that names none."""
    told, stops = generation_config(model.assets), end_ids(model.assets, model.config)
    if not stops:
        end = model.tokenizer().eos_token_id
        stops = [0 if end is None else int(end)]
    start, padding = (told.get(f"{k}_token_id", getattr(model.config, f"{k}_token_id", None)) for k in ("bos", "pad"))
    return stops, start if start is not None else 0, padding if padding is not None else stops[0]
