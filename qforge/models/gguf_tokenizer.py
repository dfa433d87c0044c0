"""A tokenizer from a GGUF file's metadata, as files of Hugging Face's: the inverse of `qforge.export.gguf_vocabulary`.

Token ids of texts are llama.cpp's. Two kinds of vocabularies are read: byte-level BPE (`gpt2`) and SentencePiece's BPE with byte fallback (`llama`); what is not known here is
refused, since another splitting gives other tokens without a word.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from gguf import TokenType
from tokenizers import Tokenizer

from qforge.errors import ModelError
from qforge.models.assets import TEMPLATE_FOLDER
from qforge.models.gguf_config import token_id
from qforge.models.gguf_header import GgufHeader, read_arrays
from qforge.models.gguf_pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from qforge.models.trial import try_template

_KEY = "tokenizer.ggml."
_ARRAYS = ("tokens", "token_type", "scores", "merges")
_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_TEMPLATE = re.compile(r"tokenizer\.chat_template(?:\.([A-Za-z0-9_-]+))?")
_TRIED_CUTS = 1 << 30  # characters looked at to find how tokens are merged; 262,144 tokens take a twentieth
# texts that llama.cpp takes for control tokens whatever their type says (llama-vocab.cpp), and those that it always takes for text to show
_CONTROL_TEXTS = """
    <|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> <EOT> _<EOT> [EOT] [EOS] <|end_of_text|>
    <end_of_utterance> <eos> <turn|> <|tool_response> <｜end▁of▁sentence｜> <|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|>
    <|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|> <|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID>
    <|code_middle|> <|middle|> <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>
"""
_CONTROL = frozenset(_CONTROL_TEXTS.split())
_SHOWN = frozenset(["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"])


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Tokens and their types by id, and the ids that have a part."""

    path: Path
    tokens: list[str]
    types: list[int]
    arrays: Mapping[str, list[Any]]
    named: Mapping[str, int]

    def special(self) -> dict[int, bool]:
        """Tokens that are found in a text before it is split: ids, and whether they are control tokens."""
        found = {}
        for i, (text, kind) in enumerate(zip(self.tokens, self.types, strict=True)):
            if text in _SHOWN or (kind == TokenType.USER_DEFINED and text not in _CONTROL):
                found[i] = False
            elif text in _CONTROL or kind in (TokenType.CONTROL, TokenType.UNKNOWN):
                found[i] = True
        return found


def write_tokenizer(header: GgufHeader, vocab_size: int, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and, where there are any, chat_template.jinja and the templates that have names.

    Args:
        vocab_size: tokens that the model embeds.

    Raises:
        ModelError: the file has no vocabulary, one that is damaged, or one of a kind, or with a pre-tokenizer, that is not known here; or a chat template cannot be used.
    """
    vocabulary = _vocabulary(header, vocab_size)
    kind = header.metadata.get(f"{_KEY}model")
    if kind == "gpt2":
        pre = _pre_tokenizer(header)
        content, add_bos = _byte_level(vocabulary, pre), pre.add_bos
    elif kind == "llama":
        content, add_bos = _sentence_pieces(vocabulary, _flag(header, "add_space_prefix", True)), True
    else:
        raise ModelError(f"{header.path}: tokenizer.ggml.model is {reprlib.repr(kind)}; gpt2 and llama are read here (a Hugging Face directory may do)")
    content["post_processor"] = _post_processor(vocabulary, bos=_flag(header, "add_bos_token", add_bos), eos=_flag(header, "add_eos_token", False))
    raw = Tokenizer.from_str(json.dumps(content))
    raw.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {f"{name}_token": vocabulary.tokens[i] for name, i in vocabulary.named.items()}
    config |= {"clean_up_tokenization_spaces": False, "tokenizer_class": "TokenizersBackend"}  # the class that takes tokenizer.json as it is
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    for key, template in header.metadata.items():
        named = _TEMPLATE.fullmatch(key)
        if named and isinstance(template, str):
            try_template(template, {}, f"{header.path} ({key})")
            path = folder / TEMPLATE_FOLDER / f"{named[1]}.jinja" if named[1] else folder / "chat_template.jinja"
            path.parent.mkdir(exist_ok=True)
            path.write_text(template)


def _vocabulary(header: GgufHeader, vocab_size: int) -> _Vocabulary:
    arrays = {key.removeprefix(_KEY): found for key, found in read_arrays(header.path, [_KEY + name for name in _ARRAYS]).items()}
    given = arrays.get("tokens", [])
    if not given or not _texts(given):
        raise ModelError(f"{header.path} has no tokens (tokenizer.ggml.tokens), so it is no complete language model")
    if len(given) > vocab_size:
        raise ModelError(f"{header.path}: there are {len(given)} tokens (tokenizer.ggml.tokens), and the model embeds {vocab_size}")
    types = arrays.get("token_type", [int(TokenType.NORMAL)] * len(given))
    if len(types) < len(given):
        raise ModelError(f"{header.path}: tokenizer.ggml.token_type has {len(types)} entries for {len(given)} tokens")
    tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(given)]
    first: dict[str, int] = {}
    for i, text in enumerate(tokens):
        if first.setdefault(text, i) != i:
            raise ModelError(f"{header.path}: tokenizer.ggml.tokens has {reprlib.repr(text)} twice, as {first[text]} and as {i}")
    while len(tokens) > 1 and types[len(tokens) - 1] == TokenType.UNUSED and tokens[-1] == f"[PAD{len(tokens) - 1}]":
        tokens.pop()  # rows of the embedding that the tokenizer has no token for
    ids = {name: token_id(header, theirs, vocab_size) for name, theirs in _NAMED.items()}
    return _Vocabulary(header.path, tokens, types[: len(tokens)], arrays, {name: i for name, i in ids.items() if i is not None and i < len(tokens)})


def _texts(found: Sequence[Any]) -> TypeGuard[Sequence[str]]:
    return all(isinstance(text, str) for text in found)


def _flag(header: GgufHeader, key: str, default: bool) -> bool:
    return bool(header.metadata.get(_KEY + key, default))


def _pre_tokenizer(header: GgufHeader) -> PreTokenizer:
    name = header.metadata.get(f"{_KEY}pre", "default") or "default"
    if isinstance(name, str) and name in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[name]
    known = ", ".join(PRE_TOKENIZERS)
    raise ModelError(f"{header.path}: tokenizer.ggml.pre is {reprlib.repr(name)}, which qforge does not know (a Hugging Face directory may do); it knows {known}")


def _byte_level(vocabulary: _Vocabulary, pre: PreTokenizer) -> dict[str, Any]:
    given = vocabulary.arrays.get("merges")
    if given is None or not _texts(given):
        raise ModelError(f"{vocabulary.path} has no merges (tokenizer.ggml.merges), which a byte-level vocabulary needs")
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    splits = [{"type": "Split", "pattern": {"Regex": s}, "behavior": "Isolated", "invert": False} for s in pre.splits]
    merges = [(m[:at], m[at + 1 :]) for m in dict.fromkeys(given) if (at := m.find(" ", 1)) >= 0]
    ids = {text: i for i, text in enumerate(vocabulary.tokens)}
    return _content(vocabulary) | {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, bytes_]},
        "decoder": bytes_,
        "model": {"type": "BPE", "ignore_merges": pre.ignore_merges, "vocab": ids, "merges": merges},
    }


def _sentence_pieces(vocabulary: _Vocabulary, prefix: bool) -> dict[str, Any]:
    special = vocabulary.special()
    ids = {text: i for i, text in enumerate(vocabulary.tokens)}
    ordinary = {text: i for text, i in ids.items() if i not in special}
    for char in sorted({c for text in ordinary if len(text) > 1 and not text.startswith("<0x") for c in text if c.isascii() and c not in ids}):
        byte = f"<0x{ord(char):02X}>"
        if byte in ordinary:  # it is merged with others, which `tokenizers` does with characters of the vocabulary alone
            ids[char] = ordinary[char] = ids.pop(byte)
            del ordinary[byte]
    unknown = vocabulary.named.get("unk", 0)
    before = [{"type": "Prepend", "prepend": "▁"}] if prefix else []
    after = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    return _content(vocabulary) | {
        "normalizer": {"type": "Sequence", "normalizers": [*before, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
        "decoder": {
            "type": "Sequence",
            "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}, *after],
        },
        "model": {"type": "BPE", "unk_token": vocabulary.tokens[unknown], "fuse_unk": True, "byte_fallback": True, "vocab": ids, "merges": _merges(vocabulary, ordinary)},
    }


def _merges(vocabulary: _Vocabulary, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """All ways to make a token of two, those of the highest scores first."""
    scores = vocabulary.arrays.get("scores", [])
    if len(scores) < len(vocabulary.tokens) or not all(isinstance(s, (int, float)) and math.isfinite(s) for s in scores):
        raise ModelError(f"{vocabulary.path}: tokenizer.ggml.scores has no finite number for each of {len(vocabulary.tokens)} tokens")
    if sum(len(text) ** 2 for text in ids) > _TRIED_CUTS:
        raise ModelError(f"{vocabulary.path}: its tokens (tokenizer.ggml.tokens) are too long")
    found = []
    for text, i in ids.items():
        cuts = ((text[:at], text[at:]) for at in range(1, len(text)))
        found += [(scores[i], i, ids[left], ids[right], left, right) for left, right in cuts if left in ids and right in ids]
    found.sort(key=lambda merge: (-merge[0], *merge[1:4]))
    return [(left, right) for *_, left, right in found]


def _content(vocabulary: _Vocabulary) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"version": "1.0", "added_tokens": [{"id": i, "content": vocabulary.tokens[i], **flags, "special": special} for i, special in vocabulary.special().items()]}


def _post_processor(vocabulary: _Vocabulary, *, bos: bool, eos: bool) -> dict[str, Any]:
    for kind, added in (("bos", bos), ("eos", eos)):
        if added and kind not in vocabulary.named:
            raise ModelError(
                f"{vocabulary.path}: texts get a token that is not there: tokenizer.ggml.add_{kind}_token is set, or its default, and tokenizer.ggml.{kind}_token_id names none"
            )
    used = {name: vocabulary.tokens[vocabulary.named[name]] for name, added in (("bos", bos), ("eos", eos)) if added}

    def one(sequence: str, type_id: int) -> list[dict[str, Any]]:
        around = {name: [{"SpecialToken": {"id": text, "type_id": type_id}}] for name, text in used.items()}
        return [*around.get("bos", []), {"Sequence": {"id": sequence, "type_id": type_id}}, *around.get("eos", [])]

    special = {text: {"id": text, "ids": [vocabulary.named[name]], "tokens": [text]} for name, text in used.items()}
    return {"type": "TemplateProcessing", "single": one("A", 0), "pair": [*one("A", 0), *one("B", 1)], "special_tokens": special}
