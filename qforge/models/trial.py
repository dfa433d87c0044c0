"""A tokenizer and a chat template tried in a process of their own before this one runs them.

Both are programs that a stranger wrote: a few replacements in tokenizer.json can ask for more memory than there is, where `tokenizers` ends its process, and a template's loops can
run for ever. What passes the trial has encoded, decoded and rendered short texts with little memory and time.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from qforge.errors import ModelError
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
_PATIENCE = 60  # seconds on the clock
_MOST_CHARACTERS = 1 << 20  # of the text of a short conversation
_LONGEST_SAMPLE = 1 << 14
_MOST_TOKENS = 1 << 16  # of a short text
_problems: dict[str, str | None] = {}  # by what was tried
_ENDS = {signal.SIGXCPU: "it takes too long", signal.SIGKILL: "it takes too long"}


def try_tokenizer(path: Path) -> None:
    """Encode and decode samples with a tokenizer.json.

    Raises:
        ModelError: it fails, ends the process, or takes too much time or memory.
    """
    size = path.stat().st_size
    limits = int(_SECONDS + size * _SECONDS_PER_BYTE), _BYTES + size * _BYTES_PER_BYTE
    _judge(sha256_file(path), ("tokenizer", str(path)), "", limits, f"the tokenizer in {path.parent} cannot be used")


def try_template(template: str, special_tokens: Mapping[str, str], where: str) -> None:
    """Render short conversations; that a template refuses one, or has no sense, is for who uses it.

    Args:
        template: Jinja.
        special_tokens: see `chat_template.render`.
        where: what holds it, for a message.

    Raises:
        ModelError: it ends the process, takes too much time or memory, or makes too long a text.
    """
    told = json.dumps({"template": template, "special_tokens": dict(special_tokens)})
    _judge(told, ("template", ""), told, (_SECONDS, _BYTES), f"the chat template of {where} cannot be used")


def _judge(key: str, what: tuple[str, str], told: str, limits: tuple[int, int], failed: str) -> None:
    """Tried once in a process's life; `key` stands for all that decides the outcome."""
    if key not in _problems:
        _problems[key] = _tried(what, told, limits)
    if _problems[key] is not None:
        raise ModelError(f"{failed}: {_problems[key]}")


def _tried(what: tuple[str, str], told: str, limits: tuple[int, int]) -> str | None:
    """What is wrong; None if nothing."""
    command = [sys.executable, "-P", "-c", "from qforge.models.trial import main; main()", *what, *map(str, limits)]
    try:
        done = subprocess.run(command, input=told.encode(), capture_output=True, timeout=_PATIENCE, env={**os.environ, "TOKENIZERS_PARALLELISM": "false"}, check=False)
    except subprocess.TimeoutExpired:
        return "it takes too long"
    if done.returncode < 0:
        number = signal.Signals(-done.returncode)
        return _ENDS.get(number, f"it ends the process that runs it ({number.name})")
    return done.stdout.decode(errors="replace").strip() or None


def main() -> None:
    """The trial itself, as the process's only work: prints what is wrong, in a line."""
    kind, path, seconds, memory = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    try:
        _limit(seconds, memory)
        problem = _tokenizer(Path(path)) if kind == "tokenizer" else _template(**json.loads(sys.stdin.buffer.read()))
    except MemoryError:
        problem = "it takes too much memory"
    except BaseException as e:  # panics of Rust code among it
        problem = (str(e) or type(e).__name__).strip().splitlines()[0]
    sys.stdout.buffer.write((problem or "").encode(errors="replace"))


def _limit(seconds: int, memory: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (memory if hard == resource.RLIM_INFINITY else min(memory, hard), hard))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _tokenizer(path: Path) -> str | None:
    from tokenizers import Tokenizer

    fast = Tokenizer.from_file(str(path))
    tokens = [fast.encode(sample).ids for sample in (*SAMPLES, _named(path))]
    for ids in tokens:
        fast.decode(ids)
    longest = max(map(len, tokens))
    return f"it makes {longest:,} tokens of a short text" if longest > _MOST_TOKENS else None


def _named(path: Path) -> str:
    """What the tokenizer's own rules name, up to a length: replacements meet what they replace."""
    words = json.loads(path.read_bytes())
    return json.dumps([words.get(part) for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder")], ensure_ascii=False)[:_LONGEST_SAMPLE]


def _template(template: str, special_tokens: dict[str, str]) -> str | None:
    from qforge.models.chat_template import render

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
