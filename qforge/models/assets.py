"""The files beside the weights (tokenizer, chat template, generation config): which they are, and the tokenizer that they make."""

from __future__ import annotations

import contextlib
import json
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PretrainedConfig, PreTrainedTokenizerBase

from qforge.errors import ModelError, first_line
from qforge.files import check_regular
from qforge.models.config import read_json
from qforge.models.trial import try_template, try_tokenizer

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "tekken.json")
TOKENIZER_FILES = (*VOCABULARIES, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt", "chat_template.jinja", "chat_template.json")
TEMPLATE_FOLDER = "additional_chat_templates"  # transformers' name
_PROBE = "The 2 mills, and a river."
_MOST_BYTES = 256 << 20  # of a tokenizer's file
_LARGEST_ID = (1 << 24) - 1  # sixty times the largest vocabulary in use
ASSET_FILES = (*TOKENIZER_FILES, "generation_config.json", "config.json")


def check_tokenizer(folder: Path) -> None:
    """Refuse a model directory without a tokenizer.

    Raises:
        ModelError: none of the files that a tokenizer can be made from is there.
    """
    if not any((folder / name).exists() for name in VOCABULARIES) and not any(folder.glob("*.tiktoken")):
        raise ModelError(f"{folder} has no tokenizer (none of {', '.join(VOCABULARIES)}); copy the tokenizer's files of the model there")


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder.

    Raises:
        ModelError: its files are damaged, or need something that is not there.
    """
    for name in TOKENIZER_FILES:
        with reading_tokenizer(f"the tokenizer in {folder} cannot be loaded"):
            check_regular(folder / name, most_bytes=_MOST_BYTES)
    _check_ids(folder)
    if (folder / "tokenizer.json").exists():
        try_tokenizer(folder / "tokenizer.json")
    with reading_tokenizer(f"the tokenizer in {folder} cannot be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    if not isinstance(tokenizer.model_max_length, (int, float)):
        raise ModelError(f"the tokenizer in {folder} cannot be used: model_max_length in tokenizer_config.json is {tokenizer.model_max_length!r}, where a number is needed")
    with reading_tokenizer(f"the tokenizer in {folder} cannot be used"):
        tokenizer.decode(tokenizer.encode(_PROBE))  # what is wrong with its parts shows when they run
    _try_templates(tokenizer, folder)
    return tokenizer


def _try_templates(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    found = tokenizer.chat_template
    for name, template in found.items() if isinstance(found, dict) else [("default", found)]:
        if isinstance(template, str):
            own = folder / ("chat_template.jinja" if name == "default" else f"{TEMPLATE_FOLDER}/{name}.jinja")
            special_tokens = {kind: str(value) for kind, value in tokenizer.special_tokens_map.items()}
            try_template(template, special_tokens, str(own if own.is_file() else folder / "tokenizer_config.json"))


def try_template_files(folder: Path) -> None:
    """Try the chat templates that are files of a folder.

    Raises:
        ModelError: see `try_template`.
    """
    for path in (folder / "chat_template.jinja", *named_templates(folder)):
        if path.is_file():
            with reading_tokenizer(f"{path} cannot be read"):
                check_regular(path, most_bytes=_MOST_BYTES)
                text = path.read_text("utf-8")
            try_template(text, {}, str(path))


@contextlib.contextmanager
def reading_tokenizer(failed: str) -> Iterator[None]:
    """What transformers and tokenizers raise here, a bare Exception and panics of Rust code among it, as a ModelError that begins with `failed`."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, ModelError):
        raise
    except BaseException as e:
        raise ModelError(f"{failed}: {first_line(e)}") from e


def _check_ids(folder: Path) -> None:
    """Refuse ids of tokens that no model embeds: `tokenizers` walks all up to the largest, and ends the process where memory for them ends."""
    for name in ("tokenizer.json", "vocab.json", "added_tokens.json", "tokenizer_config.json"):
        try:
            words = json.loads((folder / name).read_bytes())
            most = max((i for i in _ids(name, words) if isinstance(i, int)), default=0)
        except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
            continue  # there is none, or what is wrong with it is told by who loads it
        if most > _LARGEST_ID:
            raise ModelError(f"{folder / name} gives a token the id {most}; ids go up to {_LARGEST_ID}")


def _ids(name: str, words: Any) -> list[Any]:
    """Ids that a tokenizer's file gives."""
    if name == "tokenizer_config.json":
        return [int(i) for i in words.get("added_tokens_decoder") or ()]
    if name != "tokenizer.json":
        return list(words.values())
    vocabulary = words["model"]["vocab"]
    return [*(vocabulary.values() if isinstance(vocabulary, dict) else ()), *(token["id"] for token in words.get("added_tokens") or ())]


def end_ids(folder: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase | None = None) -> list[int]:
    """Tokens that end a text: of generation_config.json, else of the config (a number or a list), and the tokenizer's own, as vLLM and llama.cpp take it.

    Raises:
        ModelError: they write something else.
    """
    told = generation_config(folder).get("eos_token_id")
    found = told if told is not None else getattr(config, "eos_token_id", None)
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ModelError(f"{folder}: eos_token_id is {reprlib.repr(found)}, where a token's id or a list of them is needed (generation_config.json, config.json)")
    own = None if tokenizer is None else tokenizer.eos_token_id
    return list(dict.fromkeys([*ids, *([] if own is None else [int(own)])]))


def generation_config(folder: Path) -> dict[str, Any]:
    """What generation_config.json says; empty where there is none.

    Raises:
        ModelError: it is no JSON object.
    """
    path = folder / "generation_config.json"
    return read_json(path) if path.exists() else {}


def files_in(folder: Path) -> list[Path]:
    """The asset files that a folder has, `*.tiktoken`, named chat templates (in `TEMPLATE_FOLDER`) and, where the config names code of the model's own, Python files included."""
    named = [folder / name for name in ASSET_FILES if (folder / name).is_file()]
    code = sorted(folder.glob("*.py")) if (folder / "config.json").is_file() and read_json(folder / "config.json").get("auto_map") else []
    return [*named, *sorted(folder.glob("*.tiktoken")), *named_templates(folder), *code]


def named_templates(folder: Path) -> list[Path]:
    """The files of a folder's chat templates that have names of their own (`tool_use`, ...)."""
    return sorted(p for p in (folder / TEMPLATE_FOLDER).glob("*.jinja") if p.is_file())
