"""Tokens to text, piece by piece."""

from __future__ import annotations

import pytest
import tiny
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from qforge.runtime.detokenize import Detokenizer

TOKENIZER = tiny.tokenizer()


def _with_byte_fallback() -> PreTrainedTokenizerFast:
    """As Llama 2's: a character that is no token is the tokens of its bytes (ids 1 to 256), and words begin with U+2581."""
    words = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "\u2581the", "\u2581mill", "s", "\u2581"]
    made = Tokenizer(models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


FALLBACK = _with_byte_fallback()
THE, MILL = 257, 258


def _bytes(text: str) -> list[int]:
    return [b + 1 for b in text.encode()]


@pytest.mark.parametrize("stop", [(), ("zzz",)])
@pytest.mark.parametrize("before", range(13))
def test_characters_of_bytes_are_whole_wherever_the_prompt_is_cut(before: int, stop: tuple[str, ...]) -> None:
    d = Detokenizer(FALLBACK, [THE, *_bytes("\u6771" * before)], stop)
    came = ""
    for token in [*_bytes("\u6771" * 12), MILL, *_bytes("\u017b\u00f3\U0001f422"), THE, MILL]:
        d.add(token)
        assert d.text.startswith(came)
        came = d.text
    d.finish()
    assert d.text == "\u6771" * 12 + " mill\u017b\u00f3\U0001f422 the mill"


@pytest.mark.parametrize("polled", [True, False])
def test_a_byte_that_is_no_character_leaves_those_before_it(polled: bool) -> None:
    d = Detokenizer(FALLBACK, [THE])
    for token in [*_bytes("\u6771\u6771"), 0xE6 + 1, MILL]:
        d.add(token)
        if polled:
            assert "\ufffd\ufffd" not in d.text
    d.finish()
    assert d.text.endswith("\ufffd mill")
    assert d.text.startswith("\u6771\u6771") == polled  # all at once they are one run of bytes, which the tokenizer's own decoder gives up whole


@pytest.mark.parametrize("stop", [("ds by t",), ("by the", "river!"), ("xyz", "the river is")])
def test_text_that_came_out_is_never_taken_back(stop: tuple[str, ...]) -> None:
    d = Detokenizer(TOKENIZER, [3, 4, 5], stop)
    came, whole = "", "mill stands by the river"
    for token in TOKENIZER(whole, add_special_tokens=False).input_ids:
        found = d.add(token)
        assert d.text.startswith(came)
        came = d.text
        if found:
            break
    d.finish()
    assert d.text.startswith(came)
    cut = [at for at in (whole.find(s) for s in stop) if at >= 0]
    assert d.text == whole[: min(cut, default=len(whole))]


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
