"""Writes the built-in tasks: multiple choices made from our own evaluation text, and sums. Seeded: the same text gives the same bytes. Run: python calibration_data/tasks.py"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
PER_DOCUMENT = 5
SUMS = 100
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'])")


def sentences(text: str) -> list[str]:
    """Sentences of 6 to 40 words, in order; what is longer or shorter keeps its place as an empty text."""
    found = [" ".join(s.split()) for s in _SENTENCE.split(text)]
    return [s if 6 <= len(s.split()) <= 40 else "" for s in found]


def continuations(texts: list[str], seed: int = 0) -> list[dict[str, object]]:
    """Which of four sentences comes next: the other three stand further on in the same document, so that words and register do not give the answer away."""
    rng = random.Random(seed)
    made: list[dict[str, object]] = []
    for text in texts:
        found = sentences(text)
        places = [i for i in range(1, len(found)) if found[i] and found[i - 1] and len({s for s in found[i + 1 :] if s}) >= 3]
        for place in sorted(rng.sample(places, min(PER_DOCUMENT, len(places)))):
            others = rng.sample(sorted({s for s in found[place + 1 :] if s} - {found[place]}), 3)
            choices = rng.sample([found[place], *others], 4)
            context = " ".join(s for s in found[max(0, place - 3) : place] if s)
            made.append({"context": context, "choices": choices, "answer": choices.index(found[place])})
    return made


def sums(count: int = SUMS, seed: int = 0) -> list[dict[str, object]]:
    """The sum of two numbers below 50 after three that are done, and four answers close to each other."""
    rng = random.Random(seed)
    made: list[dict[str, object]] = []
    for _ in range(count):
        pairs = [(rng.randrange(2, 50), rng.randrange(2, 50)) for _ in range(4)]
        done = "".join(f"{a} + {b} = {a + b}\n" for a, b in pairs[:3])
        a, b = pairs[3]
        right = a + b
        wrong = rng.sample([right + d for d in (-10, -2, -1, 1, 2, 10) if right + d > 0], 3)
        choices = [str(c) for c in rng.sample([right, *wrong], 4)]
        made.append({"context": f"{done}{a} + {b} =", "choices": choices, "answer": choices.index(str(right))})
    return made


def main() -> None:
    """Write both files."""
    texts = [json.loads(line)["text"] for line in (FOLDER / "evaluation.jsonl").read_text("utf-8").splitlines()]
    for name, records in (("task_continuation.jsonl", continuations(texts)), ("task_sums.jsonl", sums())):
        (FOLDER / name).write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), "utf-8")
        print(name, len(records))


if __name__ == "__main__":
    main()
