"""The files beside the weights (tokenizer, chat template, generation config): which they are, and the tokenizer that they make."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from qforge.errors import ModelError

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "tekken.json")
TOKENIZER_FILES = (*VOCABULARIES, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt", "chat_template.jinja", "chat_template.json")
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
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as e:  # transformers and tokenizers raise many kinds, a bare Exception among them
        raise ModelError(f"the tokenizer in {folder} cannot be loaded: {str(e).strip().splitlines()[0]}") from e
    if not isinstance(tokenizer.model_max_length, (int, float)):
        raise ModelError(f"the tokenizer in {folder} cannot be used: model_max_length in tokenizer_config.json is {tokenizer.model_max_length!r}, where a number is needed")
    return tokenizer


def files_in(folder: Path) -> list[Path]:
    """The asset files that a folder has, `*.tiktoken` and chat template folders' files included."""
    named = [folder / name for name in ASSET_FILES if (folder / name).is_file()]
    return named + sorted(folder.glob("*.tiktoken"))
