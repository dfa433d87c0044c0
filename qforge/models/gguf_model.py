"""Opening a `.gguf` file as a Model: its config, its weights dequantized on demand, and its tokenizer as a folder in the cache."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from gguf import GGMLQuantizationType
from transformers import PretrainedConfig
from transformers import __version__ as transformers_version

from qforge.errors import ModelError
from qforge.models import skeleton as skeletons
from qforge.models.assets import reading_tokenizer
from qforge.models.cache import cached_folder
from qforge.models.gguf_config import gguf_config, token_id
from qforge.models.gguf_header import GgufHeader, read_gguf_header
from qforge.models.gguf_source import GgufSource
from qforge.models.gguf_tokenizer import write_tokenizer
from qforge.models.model import DTYPES, Model
from qforge.models.spec import model_spec
from qforge.models.weights import Cast, digest


def open_gguf(source: str, path: Path, dtype: str) -> Model:
    """Open a GGUF file; only its header is read.

    Args:
        source: as the user wrote it.
        dtype: `auto`: float16 if the file is quantized (it keeps more of the dequantized values than bfloat16), else as the file is stored.

    Raises:
        ModelError: no sound GGUF file, or a model that qforge does not read from GGUF.
    """
    header = read_gguf_header(path)
    config = gguf_config(header)
    skeleton = skeletons.build(config)
    gguf = GgufSource(header, config, skeleton.linears)
    stored = skeletons.fitted(gguf, skeleton, config, str(path))
    chosen = _own_dtype(header) if dtype == "auto" else DTYPES[dtype]
    assets = _assets(header, config)
    config.dtype = chosen
    weights = Cast(stored, chosen, keep=[f"{name}.weight" for name in gguf.schemes])
    return Model(source, config, model_spec(config), weights, chosen, assets, gguf.schemes)


def _own_dtype(header: GgufHeader) -> torch.dtype:
    types = {t.type for t in header.tensors.values()}
    if types == {GGMLQuantizationType.F32}:
        return torch.float32
    return torch.bfloat16 if types <= {GGMLQuantizationType.F32, GGMLQuantizationType.BF16} else torch.float16


def _assets(header: GgufHeader, config: PretrainedConfig) -> Path:
    """The tokenizer as a folder: made once for each header."""

    def build(folder: Path) -> None:
        failed = f"{header.path}: its tokenizer cannot be read"
        if outside := _outside(header):
            raise ModelError(failed + outside)
        with reading_tokenizer(failed):
            write_tokenizer(header, config.vocab_size, folder)
        ends = sorted({end for kind in ("eos", "eot") if (end := token_id(header, kind, config.vocab_size)) is not None})
        generation = {"bos_token_id": config.bos_token_id, "eos_token_id": ends[0] if len(ends) == 1 else ends or None, "pad_token_id": config.pad_token_id}
        (folder / "generation_config.json").write_text(json.dumps({k: v for k, v in generation.items() if v is not None}, indent=1) + "\n")
        config.to_json_file(folder / "config.json")

    return cached_folder("gguf-assets", digest("5", header.sha256, transformers_version)[:32], build)


def _outside(header: GgufHeader) -> str:
    """Special tokens that there are not."""
    count = header.metadata.get("tokenizer.ggml.tokens")
    keys = (f"tokenizer.ggml.{kind}_token_id" for kind in ("bos", "eos", "unknown", "padding"))
    found = [f"{key} is {value}" for key in keys if isinstance(value := header.metadata.get(key), int) and isinstance(count, int) and value >= count]
    return f" ({', '.join(found)}, and there are {count} tokens)" if found else ""
