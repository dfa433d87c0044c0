"""Tokens to text, piece by piece."""

from __future__ import annotations

import pytest
import tiny

from qforge.runtime.detokenize import Detokenizer

TOKENIZER = tiny.tokenizer()


@pytest.mark.parametrize("text", ["The small mill", "żółw 🐢 naïve 漢字", " leading and trailing ", "line\n\n  two"])
def test_text_comes_out_whole_and_never_with_half_characters(text: str) -> None:
    ids = TOKENIZER(text, add_special_tokens=False).input_ids
    d = Detokenizer(TOKENIZER, [3, 4, 5])
    for i in ids:
        d.add(i)
        assert "\ufffd" not in d.text
        assert text.startswith(d.text)
    d.finish()
    assert d.text == text


@pytest.mark.parametrize("every", [2, 3, 100])
def test_text_that_is_asked_for_seldom_is_the_same(every: int) -> None:
    text = "The żółw 🐢 stands by the naïve 漢字 mill\n\n  two"
    d = Detokenizer(TOKENIZER, [3, 4, 5])
    for n, i in enumerate(TOKENIZER(text, add_special_tokens=False).input_ids):
        d.add(i)
        if n % every == 0:
            assert text.startswith(d.text)
    d.finish()
    assert d.text == text


def test_bytes_that_never_become_a_character_come_out_at_the_end() -> None:
    ids = TOKENIZER("🐢", add_special_tokens=False).input_ids[:-1]
    d = Detokenizer(TOKENIZER, [])
    for i in ids:
        d.add(i)
    assert d.text == ""
    d.finish()
    assert d.text == "\ufffd"


def test_a_stop_string_over_several_tokens_is_found() -> None:
    ids = TOKENIZER("mill stands by the river", add_special_tokens=False).input_ids
    d = Detokenizer(TOKENIZER, [], ("ds by t",))
    assert any(d.add(i) for i in ids)
    assert d.text == "mill stan"


def test_special_tokens_give_no_text() -> None:
    d = Detokenizer(TOKENIZER, [])
    d.add(1)
    d.add(TOKENIZER("mill", add_special_tokens=False).input_ids[0])
    assert not d.text.startswith("<")
