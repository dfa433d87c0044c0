"""Our GGUF files' tokenizers: for nasty strings transformers, llama.cpp and our own reading of the file give the same ids, and the stored chat template renders the same."""

from __future__ import annotations

import random
import unicodedata
from pathlib import Path

import pytest
import tiny
from real_models import STORIES, needs_stories
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from qforge.engines import llama_cpp
from qforge.export.gguf import GgufExporter
from qforge.export.gguf_vocabulary import _PRE_TOKENIZERS
from qforge.export.verify_text import verify_text
from qforge.models.model import open_model

pytestmark = pytest.mark.slow
ASCII_CASE = ("gpt-4o", "tekken")  # llama.cpp's own patterns of these know capitals of ASCII only and no combining marks, and split words at others
SPACES = [" ", "  ", "   ", "\t", "\n", "\r\n", "\n\n", "\n \n", "\u00a0", "\u2003", "\u3000", "\u200b", "\ufeff", "\u2028", "\u0085", "\x0b", " " * 33, "\n" * 17]  # fmt: skip
WORDS = """the The river HTTPServer camelCase I'm WE'LL don't 'S ’s naïve Straße ŒUVRE ﬁ ǅ İstanbul e\u0301 a\u0300\u0316b русский Ελληνικά עברית العربية हिन्दी ไทย 中文字符
    日本語テスト 한국어 ᄒ\u1161\u11ab 😀 👩\u200d👩\u200d👧\u200d👦 🏳\ufe0f\u200d🌈 🇩🇪 👍🏽 ½ Ⅷ ² ٤٥٦ १२३ 123 1234567 3.14 1e-9 0x1F $5 99% ... !!!??? == -> // /usr/bin a\\b "q"
    `x` #tag @you _a_b_ ▁ ▁▁x Ġ Ċ <0x0A> � \u202e \u0378 \U0001f9ff \ue000 \U000e0041 \x00 \x01 \x7f \u00ad"""
RANGES = [(0x20, 0x7F), (0xA0, 0x24F), (0x370, 0x52F), (0x590, 0x6FF), (0x900, 0xD7F), (0x1E00, 0x2BFF), (0x3000, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xFB00, 0xFFEF),
          (0x10000, 0x1FAFF), (0x0, 0xD7FF)]  # fmt: skip
QUESTION, LAST = "  What's 2 + 2?\n", "naïve 日本 <b>&amp;</b> {{x}}"
CONVERSATIONS = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}, {"role": "assistant", "content": "4."}, {"role": "user", "content": LAST}],
]


def nasty(tokenizer: PreTrainedTokenizerFast, count: int) -> list[str]:
    """Seeded strings of words of many scripts, odd spaces, random characters, and special tokens whole, cut and glued to text."""
    rng, words = random.Random(0), WORDS.split()
    special = [str(t) for t in tokenizer.all_special_tokens] + [t.content for t in tokenizer.added_tokens_decoder.values()]

    def piece() -> str:
        kind = rng.random()
        if kind < 0.35:
            return rng.choice(words)
        if kind < 0.6:
            return rng.choice(SPACES)
        if kind < 0.75:
            low, high = rng.choice(RANGES)
            return "".join(chr(rng.randrange(low, high)) for _ in range(rng.randrange(1, 6)))
        if kind < 0.85:
            return rng.choice(special)
        if kind < 0.9:
            return rng.choice(special)[: rng.randrange(1, 8)]
        return rng.choice(tiny.TEXT)[: rng.randrange(1, 60)]

    return ["", " ", "\n", "a", *SPACES, *words, *special, *("".join(piece() for _ in range(rng.randrange(1, 12))) for _ in range(count))]


def byte_level(name: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer that splits as one of llama.cpp's pre-tokenizers."""
    raw = Tokenizer(models.BPE())
    splits = [pre_tokenizers.Split(Regex(s), "isolated") for s in _PRE_TOKENIZERS[name]]
    raw.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    raw.decoder = decoders.ByteLevel()
    if name == "qwen2":
        raw.normalizer = normalizers.NFC()  # as all of Qwen's have it
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<|end|>", "<|im_start|>", "<|im_end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    raw.train_from_iterator([*tiny.TEXT, *[WORDS] * 3, "1234 567 8901 \n\n\t\t   x" * 9], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>")


def sentence_piece() -> PreTrainedTokenizerFast:
    """SentencePiece's BPE with byte fallback, as Llama 2 has it, with a start token."""
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    raw = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=["<unk>", "<s>", "</s>", *bytes_], show_progress=False)
    raw.train_from_iterator([line.replace(" ", "▁") for line in [*tiny.TEXT, "naïve русский 中文字符"] * 4], trainer)
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", raw.token_to_id("<s>"))])
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


TOKENIZERS = {
    "demo": lambda: open_model("demo").tokenizer(),
    "stories15M": lambda: AutoTokenizer.from_pretrained(STORIES),
    "tiny": tiny.tokenizer,
    "sentence pieces": sentence_piece,
    **{name: lambda name=name: byte_level(name) for name in _PRE_TOKENIZERS},
}


def exported(tokenizer: PreTrainedTokenizerFast, folder: Path) -> Path:
    """A GGUF file of a model of 32 inputs with this tokenizer."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 64, "tie_word_embeddings": True}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder / "source")
    tokenizer.save_pretrained(folder / "source")
    model = open_model(str(folder / "source"))
    assert GgufExporter("f32").check(model) is None
    (path,) = GgufExporter("f32").write(model, folder / "out")
    return path


@pytest.mark.parametrize("name", [pytest.param(name, marks=needs_stories if name == "stories15M" else ()) for name in TOKENIZERS])
def test_a_thousand_strings_give_the_same_ids(tmp_path: Path, name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    texts = [
        t
        for t in nasty(tokenizer, 2000 if name in (*ASCII_CASE, "qwen2") else 1000)
        if name not in ASCII_CASE or not any(c > "~" and unicodedata.category(c) in ("Lu", "Lt", "Mn", "Mc", "Me") for c in t)
        if name != "qwen2"
        or (unicodedata.is_normalized("NFC", t) and "Cn" not in map(unicodedata.category, t))  # llama.cpp composes no characters, and has another Unicode's letters
    ]
    path = exported(tokenizer, tmp_path)
    ids, _ = llama_cpp.tokenized(path, texts)
    different = [(t, tokenizer(t).input_ids, theirs) for t, theirs in zip(texts, ids, strict=True) if tokenizer(t).input_ids != theirs]
    assert len(texts) > 1000
    assert not different, (len(different), different[:5])
    back = open_model(str(path)).tokenizer()
    assert [t for t, theirs in zip(texts, ids, strict=True) if back(t).input_ids != theirs] == []


@pytest.mark.parametrize("name", ["demo", "tiny"])
def test_the_chat_template_renders_the_same(tmp_path: Path, name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    _, rendered = llama_cpp.tokenized(exported(tokenizer, tmp_path), [], CONVERSATIONS)
    assert rendered == [tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True) for c in CONVERSATIONS]
    assert tokenizer.chat_template


@pytest.mark.parametrize(("name", "said"), [("qwen2", "cafe"), ("gpt-4o", "reads"), ("smollm", None)])
def test_what_llama_cpp_reads_otherwise_is_told(tmp_path: Path, name: str, said: str | None) -> None:
    path = exported(byte_level(name), tmp_path)
    (found,) = verify_text("gguf", [path], open_model(str(tmp_path / "source")))
    assert found.text_equal
    assert found.note is None if said is None else said in found.note and "llama.cpp's own limits" in found.note
