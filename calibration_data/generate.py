"""Make generated.jsonl: the demo model answers prompts.txt and continues the openings of calibration.jsonl, by seeded sampling.

    python calibration_data/generate.py --out calibration_data/generated.jsonl

What a model writes itself has the statistics that its activations meet in use. It is written by our own runtime; answers that run into repetition are dropped.
The same seed on the same kind of machine gives the same file; README.md holds the hash of the shipped one.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qforge.runtime import LLM, SamplingParams

HERE = Path(__file__).resolve().parent
OPENING_TOKENS = 24
LEAST_CHARACTERS = 160
MOST_COMPRESSION = 2.6  # bytes over deflated bytes: prose and code of this length stay below, loops rise above


@dataclass(frozen=True)
class Prompt:
    """What the model is given: `question` (a chat turn) or, without one, the opening of a text. `ids` are its tokens."""

    question: str | None
    ids: list[int]


def prompts(tokenizer: Any) -> list[Prompt]:
    """The questions of prompts.txt, then the openings of the plain texts of calibration.jsonl."""
    found = []
    for question in (HERE / "prompts.txt").read_text("utf-8").splitlines():
        text = tokenizer.apply_chat_template([{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True)
        found.append(Prompt(question, tokenizer(text, add_special_tokens=False).input_ids))
    for line in (HERE / "calibration.jsonl").read_text("utf-8").splitlines():
        text = json.loads(line).get("text")
        if text:
            found.append(Prompt(None, tokenizer(text[:400], add_special_tokens=False).input_ids[:OPENING_TOKENS]))
    return found


def record(prompt: Prompt, answer: str, opening: str) -> dict[str, object]:
    """The record of one answer."""
    if prompt.question is not None:
        return {"messages": [{"role": "user", "content": prompt.question}, {"role": "assistant", "content": answer.strip()}]}
    return {"text": opening + answer.rstrip()}


def is_sound(answer: str) -> bool:
    """Whether an answer is long enough, does not repeat itself, and names no address on the web (the model invents them)."""
    data = answer.strip().encode()
    return len(answer.strip()) >= LEAST_CHARACTERS and len(data) <= MOST_COMPRESSION * len(zlib.compress(data, 9)) and "\ufffd" not in answer and "://" not in answer


def main() -> None:
    """Sample, filter, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="demo, or any model that qforge opens")
    parser.add_argument("--out", type=Path, default=Path("generated.jsonl"))
    parser.add_argument("--tokens", type=int, default=224, help="at most so many tokens a record")
    parser.add_argument("--temperature", type=float, default=0.9)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, default=None, help="only the first so many prompts")
    args = parser.parse_args()
    llm = LLM(args.model, max_num_seqs=args.batch)
    todo = prompts(llm.tokenizer)
    todo = random.Random(args.seed).sample(todo, len(todo))[: args.limit]
    start, written = time.time(), 0
    with args.out.open("w", encoding="utf-8") as out:
        for i in range(0, len(todo), args.batch):
            batch = todo[i : i + args.batch]
            sampling = [SamplingParams(max_tokens=args.tokens, temperature=args.temperature, top_p=args.top_p, seed=args.seed + i + j) for j in range(len(batch))]
            for prompt, output in zip(batch, llm.generate([p.ids for p in batch], sampling), strict=True):
                if is_sound(output.text):
                    out.write(json.dumps(record(prompt, output.text, llm.tokenizer.decode(prompt.ids)), ensure_ascii=False) + "\n")
                    written += 1
            out.flush()
            print(f"{i + len(batch)} of {len(todo)} prompts, {written} records kept, {time.time() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
