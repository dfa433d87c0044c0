"""Tokenizer and chat template of a merged model: those of the adapter's folder where it has them, the base's elsewhere, in one folder of the cache."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from qforge.errors import ModelError
from qforge.files import sha256_file
from qforge.models.assets import TEMPLATE_FOLDER, TOKENIZER_FILES, VOCABULARIES, end_ids, files_in, generation_config, load_tokenizer, named_templates, try_template_files
from qforge.models.cache import cached_folder
from qforge.models.model import Model
from qforge.models.weights import digest

_TEMPLATES = ("chat_template.jinja", "chat_template.json")


def merged_assets(model: Model, adapters: Sequence[Path], vocab_size: int) -> Path:
    """The assets folder of a model with adapters merged in.

    Raises:
        ModelError: a tokenizer brought by an adapter has more tokens than the merged model has embeddings, or a chat template cannot be used.
    """
    files = {p.relative_to(model.assets).as_posix(): p for p in files_in(model.assets)}
    before = dict(files)
    for folder in adapters:
        try_template_files(folder)
        own = {name: folder / name for name in TOKENIZER_FILES if (folder / name).is_file()}
        own |= {p.relative_to(folder).as_posix(): p for p in named_templates(folder)}
        if any(name in own for name in VOCABULARIES):
            files = {name: path for name, path in files.items() if name not in TOKENIZER_FILES or _is_template(name)}
        if _brings_template(own):
            files = {name: path for name, path in files.items() if not _is_template(name)}
        files |= own
    if files == before:
        return model.assets
    named = digest("ends", *(f"{n}:{sha256_file(p)}" for n, p in sorted(files.items())))[:32]
    assets = cached_folder("adapter-assets", named, lambda folder: _make(files, folder, model))
    tokens = len(load_tokenizer(assets, trust_remote_code=model.trust_remote_code))
    if tokens > vocab_size:
        raise ModelError(
            f"the tokenizer in the adapter's folder has {tokens} tokens, but the merged model has embeddings for {vocab_size}; "
            "save the resized embeddings with the adapter (peft: save_embedding_layers=True)"
        )
    return assets


def _is_template(name: str) -> bool:
    return name in _TEMPLATES or name.startswith(f"{TEMPLATE_FOLDER}/")


def _brings_template(own: dict[str, Path]) -> bool:
    if any(_is_template(name) for name in own):
        return True
    path = own.get("tokenizer_config.json")
    try:
        return path is not None and "chat_template" in json.loads(path.read_bytes())
    except ValueError as e:
        raise ModelError(f"{path} is not JSON: {e}") from e


def _make(files: dict[str, Path], folder: Path, model: Model) -> None:
    """Copies, and a generation_config.json that ends texts where the tokenizer does, too: an adapter that was trained to end them with a token of its own says so nowhere else."""
    for name, path in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, folder / name)
    own = load_tokenizer(folder, trust_remote_code=model.trust_remote_code).eos_token_id
    told = generation_config(folder)
    ends = end_ids(folder, model.config)
    if own is not None and own not in ends:
        special = {f"{kind}_token_id": getattr(model.config, f"{kind}_token_id", None) for kind in ("bos", "pad")}
        new = {name: value for name, value in special.items() if value is not None} | told | {"eos_token_id": [*ends, int(own)]}
        (folder / "generation_config.json").write_text(json.dumps(new, indent=1) + "\n")
