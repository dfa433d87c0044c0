"""The pre-tokenizers that GGUF files name (`tokenizer.ggml.pre`): facts of the format, which llama.cpp's llama-vocab.cpp lists.

Where llama.cpp writes a pattern around what its own regular expressions lack (no `(?i:...)`, capitals of ASCII alone, no spaces but those of ASCII in a range), the tokenizer's own
pattern stands here.
"""

from __future__ import annotations

from dataclasses import dataclass

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|\p{{N}}%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN35 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SEED_CODER = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_DEEPSEEK3 = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_HAN_KANA = "[\u4e00-\u9fa5\u3040-\u30ff]+"
_HAN_HANGUL = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_POINTED = r" ?[^(\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
# the letters of deepseek-llm beside those of ASCII, as code points
_CASED_LETTERS = """
    B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1 3A3-3F5 3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA
    1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15 1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3
    1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139 213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4
    2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F A771-A787 A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2
    10CC0-10CF2 118A0-118DF 1E900-1E943
"""


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The splits that are made one after the other before BPE, and what goes with them unless the file says otherwise.

    Args:
        splits: regular expressions; what one matches is a piece, and what lies between matches, too.
        ignore_merges: a piece that is a token is that token, whatever merges there are.
        add_bos: a text begins with the start token where `tokenizer.ggml.add_bos_token` is missing.
    """

    splits: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


def _letters() -> str:
    return "".join("-".join(f"\\x{{{point}}}" for point in span.split("-")) for span in _CASED_LETTERS.split())


_KINDS: tuple[tuple[str, PreTokenizer], ...] = (
    ("gpt-2 phi-2 jina-es jina-de gigachat a.x-4.0 mellum mpt olmo jais trillion granite-docling exaone4", PreTokenizer((_GPT2,))),
    ("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", PreTokenizer((r"\p{N}", _GPT2))),
    ("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano", PreTokenizer((_WORDS % "{1,3}",), ignore_merges=True, add_bos=True)),
    ("glm4", PreTokenizer((_WORDS % "{1,3}",), ignore_merges=True)),
    ("dbrx smaug-bpe chatglm-bpe", PreTokenizer((_WORDS % "{1,3}",))),
    ("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", PreTokenizer((_WORDS % "",))),
    ("qwen35", PreTokenizer((_QWEN35,))),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer((_CASED % (f"{_CONTRACTIONS}?", f"{_CONTRACTIONS}?", "{1,3}"),))),
    ("tekken", PreTokenizer((_CASED % ("", "", ""),), ignore_merges=True, add_bos=True)),
    ("minicpm5", PreTokenizer((r"\p{N}{1,3}", _WORDS % "+"), ignore_merges=True)),
    ("deepseek-v3 hunyuan-dense joyai-llm", PreTokenizer((r"\p{N}{1,3}", _HAN_KANA, _DEEPSEEK3))),
    ("deepseek-coder", PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_HANGUL, r"\p{N}"))),
    ("deepseek-llm", PreTokenizer((r"[\r\n]", rf"\s?[A-Za-z{_letters()}]+", "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+", r"\s+$", _HAN_HANGUL, r"\p{N}+"))),
    ("falcon", PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"))),
    ("viking", PreTokenizer((_POINTED, r"\p{N}"))),
    ("poro-chat bloom gpt3-finnish", PreTokenizer((_POINTED,))),
    ("bailingmoe bailingmoe2 llada-moe", PreTokenizer((_BAILING,))),
    ("seed-coder", PreTokenizer((_SEED_CODER,))),
    ("default", PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))),
)
PRE_TOKENIZERS = {name: kind for names, kind in _KINDS for name in names.split()}
