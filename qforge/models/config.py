"""config.json -> transformers' config, and the refusal of everything that is not a decoder-only text model."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers import __version__ as transformers_version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from qforge.errors import ModelError, last_line
from qforge.files import check_regular
from qforge.layouts import ascend, trtllm
from qforge.models import language_model

_MOST_BYTES = 256 << 20  # of a JSON file
_ONLY = "qforge takes decoder-only text models"


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ModelError: it is missing, not JSON, or no object.
    """
    try:
        check_regular(path, most_bytes=_MOST_BYTES)
        raw = path.read_bytes()
        content = json.loads(raw)
        if rb"\ud" in raw.lower():
            json.dumps(content, ensure_ascii=False).encode()
    except OSError as e:
        raise ModelError(f"cannot read {path}: {e.strerror}") from e
    except UnicodeEncodeError as e:
        raise ModelError(f"{path} holds half of a pair of surrogates ({reprlib.repr(e.object[e.start])}), which is no text") from e
    except (ValueError, RecursionError) as e:
        raise ModelError(f"{path} is not JSON: {e}") from e
    if not isinstance(content, dict):
        raise ModelError(f"{path} should hold a JSON object, and holds a {type(content).__name__}")
    return content


def read_config(folder: Path, *, trust_remote_code: bool = False) -> tuple[PretrainedConfig, dict[str, Any] | None, str | None]:
    """The config of a Hugging Face directory (without its `quantization_config`), that `quantization_config`, or what other programs' files say in its place, and the family
    whose language model the config is of, where the directory holds more than that.

    Raises:
        ModelError: no config.json, a malformed one, a family that the installed transformers does not know, no decoder-only text model, or a quantized multimodal one.
    """
    path = folder / "config.json"
    if not path.exists():
        raise ModelError(f"{folder} has no config.json, so it is no Hugging Face model directory{_hint(folder)}")
    raw = read_json(path)
    quantization = quantization_of(folder, raw)
    for key in ("quantization_config", "quantization"):
        raw.pop(key, None)
    remote = bool(raw.get("auto_map"))
    _check_known(path, raw, remote and trust_remote_code)
    try:
        if remote and trust_remote_code and raw.get("model_type") not in CONFIG_MAPPING:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=True, local_files_only=True)
        else:
            config = CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
        whole = config.model_type if config.model_type in language_model.MULTIMODAL else None
        if whole is not None:
            config = language_model.config_of(config, raw, str(path), quantized=quantization is not None)
    except ModelError:
        raise
    except Exception as e:  # transformers and its validators raise many kinds
        raise ModelError(f"{path} is not a valid config of the family '{raw.get('model_type')}': {last_line(e)}") from e
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    eps = getattr(config, "rms_norm_eps", None)
    if isinstance(eps, (int, float)) and not 0 <= eps < math.inf:
        raise ModelError(f"{path}: rms_norm_eps is {eps}, where a positive number is needed")
    check_text_decoder(config, str(path), remote=remote and trust_remote_code)
    return config, quantization, whole


def quantization_of(folder: Path, raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """`quantization_config` of a config.json; where it has none, what MLX's `quantization`, TensorRT-LLM's or Ascend's file say, under a `quant_method` of ours; None if plain.

    Raises:
        ModelError: one of them is malformed.
    """
    found, method = raw.get("quantization_config"), None
    if raw.get("quantization") is not None and (found is None or (isinstance(found, dict) and "quant_method" not in found)):
        found, method = raw["quantization"], "mlx"
    elif found is None and (folder / trtllm.FILE).exists():
        found, method = read_json(folder / trtllm.FILE).get("quantization"), "trtllm"
    elif found is None and (folder / ascend.FILE).exists():
        found, method = read_json(folder / ascend.FILE), "ascend"
    if found is None and method is None:
        return None
    if not isinstance(found, dict):
        raise ModelError(
            f"{folder / 'config.json'}: quantization_config should be an object" if method is None else f"{folder}: what tells of the quantization ({method}) is no object"
        )
    return dict(found) if method is None else {**found, "quant_method": method}


def _hint(folder: Path) -> str:
    if (folder / "adapter_config.json").exists():
        return "; it is an adapter: name it under `adapters:` of a recipe, and its base under `model:`"
    ggufs = sorted(p.name for p in folder.glob("*.gguf"))
    if ggufs:
        return f"; to read a GGUF file name the file itself, for example {folder / ggufs[0]}"
    return ""


def _check_known(path: Path, raw: dict[str, Any], remote: bool) -> None:
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise ModelError(f"{path} has no model_type, so the family of the model is unknown; is the file complete?")
    if model_type not in CONFIG_MAPPING and not remote:
        code = " (the model brings its own code, which runs only where the recipe says trust_remote_code: true)" if raw.get("auto_map") else ""
        raise ModelError(f"{path}: transformers {transformers_version} does not know the family '{model_type}'{code}; a newer transformers may: pip install -U transformers")


def check_text_decoder(config: PretrainedConfig, origin: str, *, remote: bool = False) -> None:
    """Refuse configs of models that are not decoder-only text models.

    Raises:
        ModelError: encoder-decoder, multimodal, encoder-only or classification models; the message says which.
    """
    family = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{origin}: '{family}' is an encoder-decoder model; {_ONLY}")
    if config.sub_configs:
        parts = sorted(name.removesuffix("_config") for name in config.sub_configs)
        taken = " and ".join(language_model.MULTIMODAL)
        raise ModelError(
            f"{origin}: '{family}' is a multimodal model (its parts: {', '.join(parts)}); {_ONLY}, and the language model of {taken}: save that of this one by itself and name it"
        )
    if remote:
        return
    causal = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(family)
    encoder = family in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False)
    if causal is None or encoder:
        raise ModelError(f"{origin}: '{family}' is not a causal language model; {_ONLY}")
    named = getattr(config, "architectures", None) or []
    if not isinstance(named, (list, tuple)):
        raise ModelError(f"{origin}: its architectures should be a list of names, and are {str(named)[:80]!r}")
    if named and causal not in named:
        raise ModelError(f"{origin}: the architecture is {', '.join(map(str, named))}, not {causal}: not a causal language model; {_ONLY}")
