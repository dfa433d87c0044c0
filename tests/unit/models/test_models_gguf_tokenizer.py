"""Tokenizers of GGUF files: ids are llama.cpp's (the golden ones it gave, and the slow ring asks it again), and what is not known is refused by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import pre_tokenizers

from qforge.engines import llama_cpp
from qforge.errors import ModelError
from qforge.models.gguf_pre_tokenizers import PRE_TOKENIZERS
from qforge.models.model import open_model

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["1 2", "12 3", "4 5", "123 45", "( a", "Ġ (", "Ġ( a", "Ġ x", "Ċ Ċ", "ĊĊ Ċ", "a )", "! !", "!! Ċ", "Ġ 1", "x '", "' S", "! x", ") Ġ", "Ġ Ġ", '" x', "Ã ©", "x Ã©"]
MADE = [m.replace(" ", "") for m in MERGES]
MARKED = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<think>", "    "]
TEXT = "(a) 12345 (a) x'S\n\n\n!!!\n !x  \"x xé\n"
# what llama.cpp makes of TEXT: tokens by pre-tokenizer
WORDS, DIGITS = "(a ) Ġ 123 45 Ġ( a ) Ġx 'S ĊĊĊ !! ! Ċ Ġ ! x Ġ Ġ \" x Ġx Ã© Ċ", "(a ) Ġ 1 2 3 4 5 Ġ( a ) Ġx 'S ĊĊĊ !! ! Ċ Ġ ! x Ġ Ġ \" x Ġx Ã© Ċ"
MARKS = "( a ) Ġ 123 45 Ġ ( a ) Ġx ' S ĊĊĊ !! ! Ċ Ġ ! x ĠĠ \" x Ġx Ã© Ċ"
SPLITS = {
    "gpt-2": "( a ) Ġ 12345 Ġ( a ) Ġx ' S ĊĊ Ċ !! ! Ċ Ġ ! x Ġ Ġ \" x Ġx Ã© Ċ",
    "smollm": "( a ) Ġ 1 2 3 4 5 Ġ( a ) Ġx ' S ĊĊ Ċ !! ! Ċ Ġ ! x Ġ Ġ \" x Ġx Ã© Ċ",
    "llama-bpe": WORDS,
    "smaug-bpe": WORDS,
    "glm4": WORDS,
    "deepseek-v3": WORDS,
    "qwen2": DIGITS,
    "hunyuan": DIGITS,
    "tekken": DIGITS,
    "deepseek-coder": "( a ) Ġ 1 2 3 4 5 Ġ( a ) Ġx ' S Ċ Ċ Ċ !! ! Ċ Ġ ! x Ġ Ġ \" x Ġx Ã© Ċ",
    "deepseek-llm": "( a ) Ġ 12345 Ġ( a ) Ġx ' S Ċ Ċ Ċ !! ! Ċ Ġ ! x Ġ Ġ \" x Ġx Ã© Ċ",
    "falcon": MARKS,
    "default": MARKS,
    "viking": "( a ) Ġ 1 2 3 4 5 Ġ( a ) Ġx 'S ĊĊĊ !! ! Ċ Ġ ! x Ġ Ġ \"x Ġx Ã© Ċ",
    "poro-chat": "( a ) Ġ 12345 Ġ( a ) Ġx 'S ĊĊĊ !! ! Ċ Ġ ! x Ġ Ġ \"x Ġx Ã© Ċ",
}
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "l", "e", "a", "d", "o", "le", "ad", "▁le", "lead", "▁lead", "▁▁", "\t\t", "do", "aa", "▁a", "<x>"]
SCORES = [0.0] * 259 + [-9.0] * 6 + [-2.0, -1.0, -3.0, -5.0, -4.0, -6.0, -7.0, -8.0, -8.5, -8.25, 0.0]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QFORGE_CACHE", str(tmp_path / "cache"))


def file(path: Path, tokens: list[str], *, rows: int | None = None, **said: Any) -> Path:
    """A model of 32 inputs and zeros, with a vocabulary; `said` are keys of `tokenizer.ggml`."""
    w = gguf.GGUFWriter(path, "llama")
    w.add_context_length(64)
    w.add_embedding_length(32)
    w.add_block_count(1)
    w.add_feed_forward_length(32)
    w.add_head_count(1)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_token_list(tokens)
    for key, value in said.items():
        add = {bool: w.add_bool, int: w.add_uint32, str: w.add_string, list: w.add_array}[type(value)]
        add(f"tokenizer.ggml.{key}", value)
    shapes = {"token_embd": (rows or len(tokens), 32), "output_norm": (32,), **{f"blk.0.{n}_norm": (32,) for n in ("attn", "ffn")}}
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        shapes[f"blk.0.{name}"] = (32, 32)
    for name, shape in shapes.items():
        w.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def byte_level(path: Path, extra: dict[str, int] | None = None, **said: Any) -> Path:
    """A file of bytes and `MERGES`; `extra` are tokens behind them and their types."""
    tokens, more = [*ALPHABET, *MADE], extra or {}
    types = [NORMAL] * len(tokens) + list(more.values())
    return file(path, [*tokens, *more], **{"model": "gpt2", "pre": "gpt-2", "merges": MERGES, "token_type": types, "add_bos_token": False, **said})


def pieces(path: Path, **said: Any) -> Path:
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(PIECES) - 260) + [USER]
    return file(path, PIECES, **{"model": "llama", "scores": SCORES, "token_type": types, "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0, **said})


def ids(path: Path, *texts: str) -> list[list[int]]:
    tokenizer = open_model(str(path)).tokenizer()
    return [tokenizer(text).input_ids for text in texts]


@pytest.mark.parametrize("name", SPLITS)
def test_text_is_split_as_the_named_pre_tokenizer_does(tmp_path: Path, name: str) -> None:
    tokens = [*ALPHABET, *MADE]
    (found,) = ids(byte_level(tmp_path / "m.gguf", pre=name), TEXT)
    assert [tokens[i] for i in found] == SPLITS[name].split()
    assert open_model(str(tmp_path / "m.gguf")).tokenizer().decode(found) == TEXT


def test_a_file_that_names_no_pre_tokenizer_has_llama_cpps_own(tmp_path: Path) -> None:
    assert ids(byte_level(tmp_path / "m.gguf", pre=""), TEXT) == ids(byte_level(tmp_path / "n.gguf", pre="default"), TEXT)


@pytest.mark.parametrize(("name", "whole"), [("llama-bpe", True), ("tekken", True), ("qwen2", False)])
def test_a_piece_that_is_a_token_needs_no_merges_where_the_pre_tokenizer_says_so(tmp_path: Path, name: str, whole: bool) -> None:
    path = byte_level(tmp_path / "m.gguf", {"Ġzyz": NORMAL, "<|eot_id|>": NORMAL}, pre=name)
    assert ids(path, "a zyz<|eot_id|>") == [[64, 278, 279] if whole else [64, 220, 89, 88, 89, 279]]


def test_special_tokens_of_any_characters_have_the_files_ids(tmp_path: Path) -> None:
    extra = dict(zip(MARKED, (CONTROL, CONTROL, USER, USER, USER), strict=True))
    path = byte_level(tmp_path / "m.gguf", extra, pre="deepseek-v3", bos_token_id=278, eos_token_id=279, add_bos_token=True)
    found = ids(path, "<｜User｜>x<think>\n a", "a<｜end▁of▁sentence｜> x", "a      x", "     ")
    assert found == [[278, 280, 87, 281, 198, 220, 64], [278, 64, 279, 263], [278, 64, 282, 220, 263], [278, 282, 220]]
    tokenizer = open_model(str(path)).tokenizer()
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (278, 279, 283)
    assert tokenizer.decode(found[0], skip_special_tokens=True) == "<｜User｜>x<think>\n a"
    assert tokenizer.decode(found[1]) == "<｜begin▁of▁sentence｜>a<｜end▁of▁sentence｜> x"


def test_rows_without_a_token_have_none(tmp_path: Path) -> None:
    path = byte_level(tmp_path / "m.gguf", {"[PAD278]": UNUSED, "[PAD279]": UNUSED})
    assert max(open_model(str(path)).tokenizer().get_vocab().values()) == 277


LEADING = (" lead  two", "lead", "</s> a", "a<x>do  a", "é\t\t\t<0x0A>", "", "▁lead <s>")
PREFIXED = [[259, 269, 270, 119, 122, 264], [269], [2, 270, 262], [274, 275, 259, 272, 270, 262], [259, 198, 172, 271, 12, 63, 51, 123, 51, 68, 65], [], [259, 269, 259, 1]]
BARE = [[269, 270, 119, 122, 264], [268], [2, 274], [262, 275, 272, 270, 262], [198, 172, 271, 12, 63, 51, 123, 51, 68, 65], [], [269, 259, 1]]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, [[1, *i] for i in PREFIXED]),
        ({"add_space_prefix": False}, [[1, *i] for i in BARE]),
        ({"add_bos_token": False, "add_eos_token": True}, [[*i, 2] for i in PREFIXED]),
    ],
    ids=["as missing", "no prefix", "an end"],
)
def test_sentence_pieces_have_the_spaces_and_ends_that_the_file_says(tmp_path: Path, said: dict[str, Any], expected: list[list[int]]) -> None:
    path = pieces(tmp_path / "m.gguf", **said)
    assert ids(path, *LEADING) == expected
    tokenizer = open_model(str(path)).tokenizer()
    assert [tokenizer.decode(i, skip_special_tokens=True) for i in expected[:2]] == [" lead  two", "lead"]


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"pre": "kimi-k2"}, "tokenizer.ggml.pre is 'kimi-k2', which qforge does not know .* it knows gpt-2, .*llama-bpe"),
        ({"model": "t5"}, "tokenizer.ggml.model is 't5'; gpt2 and llama are read"),
        ({"merges": ["1 2", "1 3"]}, "its tokenizer cannot be read: .*13"),
        ({"token_type": [1]}, "token_type has 1 entries for 278 tokens"),
        ({"add_bos_token": True}, "tokenizer.ggml.bos_token_id names none"),
        ({"add_eos_token": True}, "tokenizer.ggml.eos_token_id names none"),
    ],
)
def test_byte_level_vocabularies_that_are_not_known_are_refused(tmp_path: Path, said: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        open_model(str(byte_level(tmp_path / "m.gguf", **said)))


@pytest.mark.parametrize(
    ("tokens", "said", "message"),
    [
        (["<unk>", "a", "a"], {"scores": [0.0] * 3}, "tokenizer.ggml.tokens has 'a' twice, as 1 and as 2"),
        (["<unk>", "a", "b"], {}, "tokenizer.ggml.scores has no finite number for each of 3 tokens"),
        (["<unk>", "a", "b"], {"scores": [0.0, math.nan, 0.0]}, "tokenizer.ggml.scores has no finite number for each of 3 tokens"),
        (["<unk>", "a" * 40_000], {"scores": [0.0] * 2}, "are too long"),
        (["<unk>", "a", "b"], {"scores": [0.0] * 3, "rows": 2}, "there are 3 tokens .* and the model embeds 2"),
    ],
)
def test_sentence_pieces_that_are_damaged_are_refused(tmp_path: Path, tokens: list[str], said: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        open_model(str(file(tmp_path / "m.gguf", tokens, model="llama", add_bos_token=False, **said)))


@pytest.mark.slow
@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_llama_cpp_splits_the_same(tmp_path: Path, name: str) -> None:
    path = byte_level(tmp_path / "m.gguf", {"Ġzyz": NORMAL}, pre=name)
    texts = [TEXT, "a zyz 1234 56x78!\r\n\t'LL it's,(b)\n \n x", "x中文12字，テスト。한국어!? é ñ Ünï ½ 😀\n\n\n"]
    assert ids(path, *texts) == llama_cpp.tokenized(path, texts)[0]


@pytest.mark.slow
@pytest.mark.parametrize("said", [{}, {"add_space_prefix": False}, {"add_bos_token": False, "add_eos_token": True}], ids=["as missing", "no prefix", "an end"])
def test_llama_cpp_makes_the_same_sentence_pieces(tmp_path: Path, said: dict[str, Any]) -> None:
    path = pieces(tmp_path / "m.gguf", **said)
    assert ids(path, *LEADING) == llama_cpp.tokenized(path, LEADING)[0]
