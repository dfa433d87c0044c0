"""A tokenizer and a chat template tried in a process of their own before this one runs them.

Both are programs that a stranger wrote: a few replacements in tokenizer.json can ask for more memory than there is, where `tokenizers` ends its process, and a template's loops can
run for ever. What passes the trial has encoded, decoded and rendered short texts with little memory and time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path

from qforge import apart
from qforge.errors import ModelError, first_line
from qforge.files import sha256_file

SAMPLES = (
    "The small mill stands by the river, isn't it?",
    " two  spaces\n\ttab\r\nand 12345.678",
    "żółw 東京 🙂 \u200d e\u0301",
    "<s></s> [INST] <|im_start|>user\nhi<|im_end|>",
    "def f(x):\n    return x ** 2\n",
)
CHATS: tuple[list[dict[str, str]], ...] = (
    [{"role": "user", "content": "Hello {{ there }}?"}],
    [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "a\n"}, {"role": "assistant", "content": "<think>b</think>c"}, {"role": "user", "content": "d"}],
)
_SECONDS, _BYTES = 2, 1 << 30  # of computing and of address space, for a small file
_SECONDS_PER_BYTE, _BYTES_PER_BYTE = 1 / (8 << 20), 40  # of tokenizer.json; one of 22 MB (262,144 tokens) takes 1.3 s and 0.33 GB
_MOST_CHARACTERS = 1 << 20  # of the text of a short conversation
_LONGEST_SAMPLE = 1 << 14
_MOST_TOKENS = 1 << 16  # of a short text
_problems: dict[str, str | None] = {}  # by what was tried


def try_tokenizer(path: Path) -> None:
    """Encode and decode samples with a tokenizer.json.

    Raises:
        ModelError: it fails, ends the process, or takes too much time or memory.
    """
    size = path.stat().st_size
    limits = int(_SECONDS + size * _SECONDS_PER_BYTE), _BYTES + size * _BYTES_PER_BYTE
    _judge(sha256_file(path), "tokenizer_problem", [str(path)], "", limits, f"the tokenizer in {path.parent} cannot be used")


def try_template(template: str, special_tokens: Mapping[str, str], where: str) -> None:
    """Compile a template and render short conversations; that it refuses one, or fails at it, is for who uses it.

    Args:
        template: Jinja.
        special_tokens: see `chat_template.render`.
        where: what holds it, for a message.

    Raises:
        ModelError: it does not compile, ends the process, takes too much time or memory, or makes too long a text.
    """
    told = json.dumps({"template": template, "special_tokens": dict(special_tokens)})
    _judge(told, "template_problem", [], told, (_SECONDS, _BYTES), f"the chat template of {where} cannot be used")


def _judge(key: str, function: str, arguments: Sequence[str], told: str, limits: tuple[int, int], failed: str) -> None:
    """Tried once in a process's life; `key` stands for all that decides the outcome."""
    if key not in _problems:
        _problems[key] = apart.problem(f"{__name__}:{function}", arguments, *limits, told.encode())
    if _problems[key] is not None:
        raise ModelError(f"{failed}: {_problems[key]}")


def tokenizer_problem(path: str, told: bytes) -> str | None:
    """What is wrong with a tokenizer.json, in a line; None if nothing. Runs in the separate process."""
    from tokenizers import Tokenizer

    fast = Tokenizer.from_file(path)
    tokens = [fast.encode(sample).ids for sample in (*SAMPLES, _named(Path(path)))]
    for ids in tokens:
        fast.decode(ids)
    longest = max(map(len, tokens))
    return f"it makes {longest:,} tokens of a short text" if longest > _MOST_TOKENS else None


def _named(path: Path) -> str:
    """A sample text made of the tokenizer's own rules (normalizer, pre-tokenizer, post-processor, decoder), cut to a length, so that each finds something to apply to."""
    words = json.loads(path.read_bytes())
    return json.dumps([words.get(part) for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder")], ensure_ascii=False)[:_LONGEST_SAMPLE]


def template_problem(told: bytes) -> str | None:
    """What is wrong with a chat template, in a line; None if nothing. Runs in the separate process."""
    from jinja2 import TemplateSyntaxError

    from qforge.models.chat_template import compiled, render

    template, special_tokens = itemgetter("template", "special_tokens")(json.loads(told))
    try:
        compiled(template)
    except TemplateSyntaxError as e:
        return f"line {e.lineno} of the template: {first_line(e)}"
    for conversation in CHATS:
        try:
            text = render(template, conversation, special_tokens, add_generation_prompt=True)
        except MemoryError:
            raise
        except Exception:
            continue
        if len(text) > _MOST_CHARACTERS:
            return f"it makes {len(text):,} characters of a short conversation"
    return None
