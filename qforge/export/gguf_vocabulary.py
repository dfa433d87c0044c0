"""A Hugging Face tokenizer as GGUF metadata: tokens, types, scores, merges, special tokens, chat template, and which of llama.cpp's pre-tokenizers splits text as it does.

Two kinds exist here: byte-level BPE (`gpt2`) and SentencePiece-like BPE with byte fallback (`llama`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import ascii_letters, digits
from typing import Any

from gguf import GGUFWriter, Keys, TokenType
from tokenizers import Regex
from tokenizers import pre_tokenizers as pre
from transformers import PreTrainedTokenizerBase

from qforge.errors import UnsupportedError
from qforge.models.gguf_pre_tokenizers import PRE_TOKENIZERS

_PRE_TOKENIZERS = {name: PRE_TOKENIZERS[name].splits for name in ("gpt-2", "smollm", "llama-bpe", "qwen2", "gpt-4o", "tekken")}
_PROBES = (
    "Hello, world! It's 3 o'clock; we'LL pay $1234.50 (or 99%).",
    "  two  spaces\n\n\nand lines\r\n\r\n  \t tabs\t\tx ",
    "def f(x):\n    return x**2 != 10_000 // 7\n",
    "naïve Café ÉCOLE ŒUVRE ß ﬁ ǅ Ελληνικά и русский текст 2024",
    "中文字符 測試123テスト한국어 العربية हिन्दी ไทย १२३ ٤٥٦",
    "😀\U0001f469\u200d\U0001f467 emoji🎉🎉 ½ ² Ⅷ CamelCaseHTTPServer x1y22z333 4444 55555",
    "a/b\\c /usr/bin //// --flag=1 #tag @you e\u0301 n\u0303 zero\u200bwidth nbsp\u00a0x",
    "'s 'T 're 'VE ''m 'll'd I'M YOU'RE we've",
    " leading",
    "trailing \n",
    "\n \n  x ...!!!???",
)
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


@dataclass(frozen=True, slots=True)
class _Raw:
    """A fast tokenizer and its JSON form."""

    tokenizer: PreTrainedTokenizerBase
    content: dict[str, Any]

    @property
    def model(self) -> dict[str, Any]:
        """The BPE part."""
        found: dict[str, Any] = self.content["model"]
        return found


def vocabulary_problem(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> str | None:
    """Why GGUF (as llama.cpp reads it) cannot hold this tokenizer; None if it can."""
    try:
        raw = _raw(tokenizer)
        if _kind(raw) == "gpt2":
            _pre_type(raw)
    except UnsupportedError as e:
        return str(e)
    largest = max(tokenizer.get_vocab().values(), default=-1)
    return f"the tokenizer has a token {largest}, but the model embeds only {vocab_size}" if largest >= vocab_size else None


def add_vocabulary(writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase, vocab_size: int, ends: Sequence[int]) -> None:
    """Write the tokenizer's metadata.

    Args:
        ends: tokens at which generation stops; GGUF can name one beside the tokenizer's own end (the first of them where it has none), as the end of a turn.

    Raises:
        UnsupportedError: llama.cpp has no such tokenizer (see `vocabulary_problem`), or its chat template is no text.
    """
    raw = _raw(tokenizer)
    kind = _kind(raw)
    tokens, types = _tokens(raw, vocab_size)
    writer.add_tokenizer_model(kind)
    writer.add_tokenizer_pre(_pre_type(raw) if kind == "gpt2" else "default")
    writer.add_token_list(tokens)
    if kind == "llama":
        writer.add_token_scores(_scores(raw, tokens))
    writer.add_token_types(types)
    if kind == "gpt2":
        writer.add_token_merges([" ".join(part.replace(" ", "Ġ") for part in pair) for pair in _merges(raw)])
    _add_special(writer, tokenizer, ends)
    if kind == "llama":
        writer.add_add_space_prefix(_encoded(raw, "a").startswith("▁"))
    if tokenizer.chat_template:
        template = tokenizer.chat_template
        if not all(isinstance(t, str) for t in (template.values() if isinstance(template, dict) else [template])):
            raise UnsupportedError("the tokenizer's chat template is no text")
        _add_templates(writer, template if isinstance(template, dict) else {"default": template})


def template_name(name: str) -> str:
    """A chat template's name as GGUF has it, in letters and digits of ASCII."""
    return "".join(c if c in ascii_letters + digits else "_" for c in name)


def _add_templates(writer: GGUFWriter, templates: Mapping[str, str]) -> None:
    """As `GGUFWriter.add_chat_template`, whose list of names is in another order each time."""
    named = {template_name(name): text for name, text in sorted(templates.items()) if name != "default"}
    for name, text in named.items():
        writer.add_string(Keys.Tokenizer.CHAT_TEMPLATE_N.format(name=name), text)
    if named:
        writer.add_array(Keys.Tokenizer.CHAT_TEMPLATES, list(named))
    if "default" in templates:
        writer.add_chat_template(templates["default"])


def _raw(tokenizer: PreTrainedTokenizerBase) -> _Raw:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UnsupportedError("this tokenizer has no fast form (tokenizer.json), from which GGUF's vocabulary is made")
    return _Raw(tokenizer, json.loads(backend.to_str()))


def _kind(raw: _Raw) -> str:
    if raw.model.get("type") != "BPE":
        raise UnsupportedError(f"GGUF vocabularies are made from BPE tokenizers here, and this one is {raw.model.get('type')}")
    if raw.model.get("byte_fallback"):
        return "llama"
    if "ByteLevel" in json.dumps([raw.content.get("pre_tokenizer"), raw.content.get("decoder")]):
        return "gpt2"
    raise UnsupportedError("this BPE tokenizer neither works on bytes nor falls back to them; llama.cpp has no such kind")


def _pre_type(raw: _Raw) -> str:
    """The pre-tokenizer of llama.cpp that splits probes of all scripts as this tokenizer does."""
    given = raw.tokenizer.backend_tokenizer.pre_tokenizer
    if given is not None:
        expected = [_pieces(given, p) for p in _PROBES]
        for name, splits in _PRE_TOKENIZERS.items():
            reference = pre.Sequence([*(pre.Split(Regex(s), "isolated") for s in splits), pre.ByteLevel(add_prefix_space=False, use_regex=False)])
            if [_pieces(reference, p) for p in _PROBES] == expected:
                return name
    raise UnsupportedError(f"llama.cpp has no pre-tokenizer known here that splits text as this model's tokenizer does; known are {', '.join(_PRE_TOKENIZERS)}")


def _pieces(pre_tokenizer: Any, text: str) -> list[str]:
    return [piece for piece, _ in pre_tokenizer.pre_tokenize_str(text)]


def _encoded(raw: _Raw, text: str) -> str:
    """The first token's text of plain text without special tokens."""
    tokens = raw.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).tokens
    return str(tokens[0]) if tokens else ""


def _tokens(raw: _Raw, vocab_size: int) -> tuple[list[str], list[int]]:
    """Texts and types of all ids; ids that the model embeds and the tokenizer lacks become unused padding."""
    by_id = {i: t for t, i in raw.tokenizer.get_vocab().items()}
    added = {t["id"]: t for t in raw.content["added_tokens"]}
    unknown = raw.model.get("unk_token")
    llama = _kind(raw) == "llama"
    tokens, types = [], []
    for i in range(vocab_size):
        text, kind = by_id.get(i, f"[PAD{i}]"), TokenType.NORMAL
        if i not in by_id:
            kind = TokenType.UNUSED
        elif llama and text == unknown:
            kind = TokenType.UNKNOWN
        elif i in added:
            kind = TokenType.CONTROL if added[i]["special"] else TokenType.USER_DEFINED
            text = text.replace("▁", " ") if llama and kind is TokenType.USER_DEFINED else text
        elif llama and _BYTE_TOKEN.fullmatch(text):
            kind = TokenType.BYTE
        tokens.append(text)
        types.append(int(kind))
    return tokens, types


def _merges(raw: _Raw) -> list[tuple[str, str]]:
    pairs = (m.split(" ", 1) if isinstance(m, str) else m for m in raw.model.get("merges", []))
    return [(left, right) for left, right in pairs]


def _scores(raw: _Raw, tokens: list[str]) -> list[float]:
    """SentencePiece's BPE scores: what is merged first scores highest. The rank of the first merge that makes a token, negated."""
    ranks: dict[str, int] = {}
    merges = _merges(raw)
    for left, right in merges:
        ranks.setdefault(left + right, len(ranks))
    return [-float(ranks.get(t, 0 if len(t) == 1 or _BYTE_TOKEN.fullmatch(t) else len(ranks))) for t in tokens]


def _add_special(writer: GGUFWriter, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> None:
    end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else next(iter(ends), None)  # where a file names none, llama.cpp takes token 11
    named = {kind: getattr(tokenizer, f"{kind}_token_id", None) for kind in ("bos", "unk", "pad")} | {"eos": end}
    for kind, add in (("bos", writer.add_bos_token_id), ("eos", writer.add_eos_token_id), ("unk", writer.add_unk_token_id), ("pad", writer.add_pad_token_id)):
        token = named[kind]
        if token is not None:
            add(int(token))
    turn = next((e for e in ends if e != end), None)
    if turn is not None:
        writer.add_eot_token_id(turn)
    with_special, bare = tokenizer("a").input_ids, tokenizer("a", add_special_tokens=False).input_ids
    writer.add_add_bos_token(with_special[: len(with_special) - len(bare)][:1] == [tokenizer.bos_token_id] and tokenizer.bos_token_id is not None)
    writer.add_add_eos_token(len(with_special) > len(bare) and with_special[-1] == tokenizer.eos_token_id)
