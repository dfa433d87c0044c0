"""From the start of a new process to a model's first token: what a user waits for who runs a script."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

from qforge import apart

PROMPT = "The capital of France is"


def start_to_first_token(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Start Python once, open the model there and ask for one token: `first_token_ms` by the machine's clock and `prompt_tokens`. Where that fails, `first_token_ms` is None
    and `failed` the last line that it said.

    Args:
        model, options: what `LLM` takes.
    """
    begin = time.monotonic()
    done = subprocess.run([*apart.command(f"{__name__}:tell"), json.dumps([model, options])], capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        return {"first_token_ms": None, "prompt_tokens": None, "failed": next(iter(reversed(done.stderr.strip().splitlines())), f"exit code {done.returncode}")}
    told: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return {"first_token_ms": (told["first"] - begin) * 1e3, "prompt_tokens": told["prompt_tokens"]}


def tell() -> None:
    """Main function of the new process: opens the model, asks for one token, and prints when it came."""
    from qforge.runtime.llm import LLM
    from qforge.runtime.sequence import SamplingParams

    model, options = json.loads(sys.argv[1])
    output = LLM(model, **options).generate([PROMPT], SamplingParams(max_tokens=1))[0]
    print("\n" + json.dumps({"first": time.monotonic(), "prompt_tokens": len(output.prompt_token_ids)}), flush=True)
