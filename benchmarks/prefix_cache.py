"""What the prefix cache gains and costs: the same requests with and without, in turn, in one process; tokens have to be the same.

    python benchmarks/prefix_cache.py ARTIFACT [--activations int8] [--rounds 3] [--save NAME]

Prompts are seeded random tokens, others in each round. 32 questions at once behind one beginning (512 tokens, each then has 32 of its own and an answer of 32); one conversation of
six turns, each of 64 tokens and an answer of 64; four answers of 64 tokens to one prompt of 512; and the load of vs_llama_cpp.py, which has nothing in common.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "llama_cpp"))
from load import mixed
from saved import machine, place, rounds_said, save, spread, told
from vs_llama_cpp import weights_of

from qforge.runtime import LLM, SamplingParams

BEGINNING, QUESTION, QUESTIONS, TURN, TURNS, ANSWERS = 512, 32, 32, 64, 6, 4
Turn = list[tuple[list[int], SamplingParams]]  # requests that come at once; behind what their place in the turn before got


def cases(vocabulary: int, seed: int) -> dict[str, list[Turn]]:
    """Turns of each case."""
    rng = random.Random(seed)

    def some(count: int) -> list[int]:
        return rng.choices(range(100, vocabulary), k=count)

    def new(tokens: int, number: int = 0, temperature: float = 0.0) -> SamplingParams:
        return SamplingParams(max_tokens=tokens, temperature=temperature, seed=number, ignore_eos=True)

    start, prompt = some(BEGINNING), some(BEGINNING)
    return {
        f"{QUESTIONS} questions behind one beginning": [[(start + some(QUESTION), new(QUESTION)) for _ in range(QUESTIONS)]],
        f"a conversation of {TURNS} turns": [[(some(TURN), new(TURN))] for _ in range(TURNS)],
        f"{ANSWERS} answers to one prompt": [[(prompt, new(TURN, i, 0.8)) for i in range(ANSWERS)]],
        "32 requests with nothing in common": [[(r["prompt"], new(r["output"])) for r in mixed(32, vocabulary, seed)]],
    }


def run(llm: LLM, turns: list[Turn], prefix_cache: bool) -> dict:
    """Seconds; seconds to the first token of each request, the median; tokens of prompts that were in the cache; and all tokens."""
    engine, before, first, cached = llm.engine(prefix_cache=prefix_cache), dict[int, list[int]](), list[float](), 0
    start = time.perf_counter()
    for turn in turns:
        asked = time.perf_counter()
        made = [engine.add(before.get(i, []) + prompt, params) for i, (prompt, params) in enumerate(turn)]
        came = dict[int, float]()
        while engine.busy():
            for sequence, _ in engine.step():
                came.setdefault(sequence.id, time.perf_counter() - asked)
        before = {i: s.tokens for i, s in enumerate(made)}
        first += came.values()
        cached += sum(s.cached for s in made)
    return {"seconds": time.perf_counter() - start, "first": statistics.median(first), "cached": cached, "tokens": [before[i] for i in sorted(before)]}


def main() -> int:
    """Run all, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a qforge artifact")
    parser.add_argument("--activations", default="int8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", metavar="NAME", help="also write benchmarks/results/prefix_cache-NAME.json and .md")
    args = parser.parse_args()
    llm = LLM(str(args.model), activations=args.activations, kv_cache="int8")
    vocabulary = llm.runner.spec.vocab_size
    run(llm, cases(vocabulary, 0)["32 requests with nothing in common"], False)  # touches the cache's memory
    rows: dict[str, list[list[dict]]] = {}
    for seed in range(1, args.rounds + 1):
        for name, turns in cases(vocabulary, seed).items():
            without, with_cache = (run(llm, turns, on) for on in (False, True))
            if without.pop("tokens") != with_cache.pop("tokens"):
                raise SystemExit(f"{name}: the cache changed tokens")
            rows.setdefault(name, []).append([without, with_cache])
    content = {"command": told("prefix_cache"), "weights": weights_of(args.model), "activations": args.activations, "environment": machine(), "rows": rows}
    head = [
        "# The prefix cache", "", f"`{content['command']}`", "",
        f"qforge {content['environment']['qforge']}, {content['weights']}, {args.activations} activations; {place(content['environment'])}. "
        f"{rounds_said(args.rounds)} with other prompts each, both in turn; every token is the same with and without.", "",
        "| | without, s | with, s | times faster | first token without, ms | with | tokens found |", "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    text = "\n".join(head + [line(name, rounds) for name, rounds in rows.items()])
    print(text)
    if args.save:
        save("prefix_cache", args.save, content, text)
    return 0


def line(name: str, rounds: list[list[dict]]) -> str:
    """One case."""
    seconds = [statistics.median(r[i]["seconds"] for r in rounds) for i in (0, 1)]
    first = [statistics.median(r[i]["first"] for r in rounds) * 1e3 for i in (0, 1)]
    ratio, found = spread(a["seconds"] / b["seconds"] for a, b in rounds), rounds[0][1]["cached"]
    return f"| {name} | {seconds[0]:.2f} | {seconds[1]:.2f} | {ratio} | {first[0]:,.0f} | {first[1]:,.0f} | {found:,} |"


if __name__ == "__main__":
    raise SystemExit(main())
