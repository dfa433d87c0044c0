"""Read prompts for `generate`: one from the command line, or a JSON Lines file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from qforge.errors import DataError

Messages = list[dict[str, str]]
_SHAPE = 'write {"prompt": "..."} or {"messages": [{"role": "user", "content": "..."}]} on each line'


def read_prompts(path: Path) -> list[str | Messages]:
    """The prompts of a JSON Lines file (`-`: of stdin), one a line; empty lines are passed over.

    Raises:
        DataError: the file is missing, empty or malformed; the message names the line.
    """
    try:
        text = (sys.stdin.buffer.read() if path == Path("-") else path.read_bytes()).decode()
    except UnicodeDecodeError as e:
        raise DataError(f"{path} is not UTF-8 text; {_SHAPE}") from e
    except OSError as e:
        raise DataError(f"cannot read the prompts in {path}: {e.strerror}") from e
    prompts = [_prompt(line, f"{path}, line {number}") for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not prompts:
        raise DataError(f"{path} holds no prompts; {_SHAPE}")
    return prompts


def _prompt(line: str, where: str) -> str | Messages:
    try:
        value = json.loads(line)
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as e:
        raise DataError(f"{where} holds half a character (a lone surrogate); write valid Unicode") from e
    except (ValueError, RecursionError) as e:
        raise DataError(f"{where} is not JSON ({e}); {_SHAPE}") from e
    if isinstance(value, dict) and isinstance(value.get("prompt"), str) and "messages" not in value:
        return str(value["prompt"])
    messages = value.get("messages") if isinstance(value, dict) and "prompt" not in value else None
    if isinstance(messages, list) and messages and all(_is_message(m) for m in messages):
        return [{"role": m["role"], "content": m["content"]} for m in messages]
    raise DataError(f"{where} is no prompt; {_SHAPE}")


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)
