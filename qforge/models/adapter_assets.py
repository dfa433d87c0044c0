"""Tokenizer and chat template of a merged model: those of the adapter's folder where it has them, the base's elsewhere, in one folder of the cache."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from qforge.errors import ModelError
from qforge.files import sha256_file
from qforge.models.assets import TOKENIZER_FILES, VOCABULARIES, files_in, load_tokenizer
from qforge.models.cache import cached_folder
from qforge.models.model import Model
from qforge.models.weights import digest

_TEMPLATES = ("chat_template.jinja", "chat_template.json")


def merged_assets(model: Model, adapters: Sequence[Path], vocab_size: int) -> Path:
    """The assets folder of a model with adapters merged in.

    Raises:
        ModelError: a tokenizer brought by an adapter has more tokens than the merged model has embeddings.
    """
    files = {p.name: p for p in files_in(model.assets)}
    before = dict(files)
    for folder in adapters:
        own = {name: folder / name for name in TOKENIZER_FILES if (folder / name).is_file()}
        if any(name in own for name in VOCABULARIES):
            files = {name: path for name, path in files.items() if name not in TOKENIZER_FILES or name in _TEMPLATES}
        if _brings_template(own):
            files = {name: path for name, path in files.items() if name not in _TEMPLATES}
        files |= own
    if files == before:
        return model.assets
    assets = cached_folder("adapter-assets", digest(*(f"{n}:{sha256_file(p)}" for n, p in sorted(files.items())))[:32], lambda folder: _copy(files, folder))
    tokens = len(load_tokenizer(assets, trust_remote_code=model.trust_remote_code))
    if tokens > vocab_size:
        raise ModelError(
            f"the tokenizer in the adapter's folder has {tokens} tokens, but the merged model has embeddings for {vocab_size}; "
            "save the resized embeddings with the adapter (peft: save_embedding_layers=True)"
        )
    return assets


def _brings_template(own: dict[str, Path]) -> bool:
    if any(name in own for name in _TEMPLATES):
        return True
    path = own.get("tokenizer_config.json")
    try:
        return path is not None and "chat_template" in json.loads(path.read_bytes())
    except ValueError as e:
        raise ModelError(f"{path} is not JSON: {e}") from e


def _copy(files: dict[str, Path], folder: Path) -> None:
    for name, path in files.items():
        shutil.copyfile(path, folder / name)
