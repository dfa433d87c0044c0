"""Make generated.jsonl: the demo model answers prompts.txt and continues the openings of calibration.jsonl, by seeded sampling.

    python calibration_data/generate.py --out calibration_data/generated.jsonl

What a model writes itself has the statistics that its activations meet in use. Answers that run into repetition are dropped. The same seed, thread count and
versions of torch and transformers give the same file; README.md holds the hash of the shipped one.
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

import torch

HERE = Path(__file__).resolve().parent
OPENING_TOKENS = 24
LEAST_CHARACTERS = 160
MOST_COMPRESSION = 2.6  # bytes over deflated bytes: prose and code of this length stay below, loops rise above


@dataclass(frozen=True)
class Prompt:
    """What the model is given: `question` (a chat turn) or, without one, the opening of a text. `ids` are its tokens."""

    question: str | None
    ids: list[int]


def load(source: str) -> tuple[Any, Any]:
    """The model in fp32 and its tokenizer: `demo`, or anything that transformers can load."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if source != "demo":
        return AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(source)
    from qforge.models.model import open_model

    opened = open_model(source)
    model = AutoModelForCausalLM.from_config(opened.config, dtype=torch.float32)
    model.load_state_dict({name: opened.weights.read(name).float() for name in opened.weights.names()}, strict=False)
    model.tie_weights()
    return model.eval(), opened.tokenizer()


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


@torch.no_grad()
def sample(model: Any, batch: list[Prompt], args: argparse.Namespace, pad: int) -> list[list[int]]:
    """Up to `args.tokens` sampled tokens after each prompt, without the end token."""
    length = max(len(p.ids) for p in batch)
    ids = torch.tensor([[pad] * (length - len(p.ids)) + p.ids for p in batch])
    mask = torch.tensor([[0] * (length - len(p.ids)) + [1] * len(p.ids) for p in batch])
    rows = model.generate(input_ids=ids, attention_mask=mask, do_sample=True, temperature=args.temperature, top_p=args.top_p, top_k=0, max_new_tokens=args.tokens, pad_token_id=pad)
    return [[token for token in row[length:].tolist() if token != pad] for row in rows]


def record(prompt: Prompt, answer: str, opening: str) -> dict[str, object]:
    """The record of one answer."""
    if prompt.question is not None:
        return {"messages": [{"role": "user", "content": prompt.question}, {"role": "assistant", "content": answer.strip()}]}
    return {"text": opening + answer.rstrip()}


def is_sound(answer: str) -> bool:
    """Whether an answer is long enough and does not repeat itself."""
    data = answer.strip().encode()
    return len(answer.strip()) >= LEAST_CHARACTERS and len(data) <= MOST_COMPRESSION * len(zlib.compress(data, 9)) and "\ufffd" not in answer


def main() -> None:
    """Sample, filter, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="demo, or a Hugging Face folder or hub id")
    parser.add_argument("--out", type=Path, default=Path("generated.jsonl"))
    parser.add_argument("--tokens", type=int, default=256, help="at most so many tokens a record")
    parser.add_argument("--temperature", type=float, default=0.9)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, default=None, help="only the first so many prompts")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    model, tokenizer = load(args.model)
    todo = prompts(tokenizer)
    todo = random.Random(args.seed).sample(todo, len(todo))[: args.limit]
    start, written = time.time(), 0
    with args.out.open("w", encoding="utf-8") as out:
        for i in range(0, len(todo), args.batch):
            batch = todo[i : i + args.batch]
            for prompt, ids in zip(batch, sample(model, batch, args, tokenizer.eos_token_id), strict=True):
                answer = tokenizer.decode(ids, skip_special_tokens=True)
                if is_sound(answer):
                    out.write(json.dumps(record(prompt, answer, tokenizer.decode(prompt.ids)), ensure_ascii=False) + "\n")
                    written += 1
            out.flush()
            print(f"{i + len(batch)} of {len(todo)} prompts, {written} records kept, {time.time() - start:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
