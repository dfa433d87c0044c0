"""What guesses by prompt lookup gain and cost: the same requests with and without, in turn, in one process; tokens have to be the same.

    python benchmarks/prompt_lookup.py ARTIFACT --text FILE [--activations int8] [--rounds 3] [--save NAME]

Continued are pieces of 256 tokens of FILE and of this repository's code (192 tokens each, greedy and at a temperature of .8), one sequence after the other and 32 at once; then
the load of vs_llama_cpp.py.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "llama_cpp"))
from load import mixed
from saved import machine, place, rounds_said, save, spread, told
from vs_llama_cpp import weights_of

from qforge.runtime import LLM, SamplingParams

HERE = Path(__file__).parent
PROMPT, NEW, ALONE, TOGETHER = 256, 192, 6, 32
Requests = list[tuple[list[int], SamplingParams]]


def pieces(llm: LLM, text: str, count: int) -> list[list[int]]:
    """Spread over the text."""
    ids = llm.tokenizer.encode(text)
    return [ids[i * (len(ids) - PROMPT) // count :][:PROMPT] for i in range(count)]


def cases(llm: LLM, text: str, vocabulary: int) -> Iterator[tuple[str, list[Requests]]]:
    """What is done, and its batches."""
    code = "".join(p.read_text() for p in sorted((HERE.parent / "qforge").rglob("*.py")))
    for name, given in (("text", pieces(llm, text, TOGETHER)), ("code", pieces(llm, code, TOGETHER))):
        for temperature in (0.0, 0.8):
            requests = [(p, SamplingParams(max_tokens=NEW, temperature=temperature, seed=i, ignore_eos=True)) for i, p in enumerate(given)]
            how = f"{name}, {'greedy' if temperature == 0 else f'temperature {temperature}'}"
            yield f"{how}, one at a time", [[r] for r in requests[:ALONE]]
            yield f"{how}, {TOGETHER} at once", [requests]
    yield "random prompts, greedy, 32 of mixed lengths", [[(r["prompt"], SamplingParams(max_tokens=r["output"], ignore_eos=True)) for r in mixed(32, vocabulary)]]


def run(llm: LLM, batches: list[Requests], speculate: bool) -> tuple[float, int, list[list[int]]]:
    """Seconds, steps, and the tokens."""
    tokens, steps, start = [], 0, time.perf_counter()
    for batch in batches:
        engine = llm.engine(speculate=speculate, prefix_cache=False)
        made = [engine.add(*request) for request in batch]
        while engine.busy():
            engine.step()
            steps += 1
        tokens += [s.generated for s in made]
    return time.perf_counter() - start, steps, tokens


def main() -> int:
    """Run all, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a qforge artifact")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--activations", default="int8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", metavar="NAME", help="also write benchmarks/results/prompt_lookup-NAME.json and .md")
    args = parser.parse_args()
    llm = LLM(str(args.model), activations=args.activations, kv_cache="int8")
    rows = []
    for name, batches in cases(llm, args.text.read_text()[:1_000_000], llm.runner.spec.vocab_size):
        rounds = [(run(llm, batches, False), run(llm, batches, True)) for _ in range(args.rounds)]
        (_, steps, tokens), (_, fewer, same) = rounds[0]
        if tokens != same:
            raise SystemExit(f"{name}: guesses changed tokens")
        outputs = sum(map(len, tokens))
        rows.append({"case": name, "outputs": outputs, "steps": [steps, fewer], "seconds": [[plain[0], guessed[0]] for plain, guessed in rounds]})
        print(line(rows[-1]), file=sys.stderr, flush=True)
    content = {"command": told("prompt_lookup"), "weights": weights_of(args.model), "activations": args.activations, "environment": machine(), "rows": rows}
    head = [
        "# Guesses by prompt lookup", "", f"`{content['command']}`", "",
        f"qforge {content['environment']['qforge']}, {content['weights']}, {args.activations} activations; {place(content['environment'])}. "
        f"{rounds_said(args.rounds)}, both in turn; every token is the same with and without.", "",
        "| | without, tokens/s | with, tokens/s | ratio | steps without | with |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    text = "\n".join(head + [line(r) for r in rows])
    print(text)
    if args.save:
        save("prompt_lookup", args.save, content, text)
    return 0


def line(row: dict) -> str:
    """One case."""
    without, with_guesses = (statistics.median(row["outputs"] / s[i] for s in row["seconds"]) for i in (0, 1))
    ratio = spread(a / b for a, b in row["seconds"])
    steps = " | ".join(map(str, row["steps"]))
    return f"| {row['case']} | {without:.0f} | {with_guesses:.0f} | {ratio} | {steps} |"


if __name__ == "__main__":
    raise SystemExit(main())
