"""From nothing to a first token through qforge: model, prompt, activations, threads, rounds -> JSON (see benchmarks/startup.py). The clock is the machine's."""

import json
import sys
import time

from qforge.runtime import LLM, SamplingParams

MODEL, PROMPT, ACTIVATIONS, THREADS, ROUNDS = sys.argv[1:]
ONE = SamplingParams(max_tokens=1)


def start() -> LLM:
    llm = LLM(MODEL, activations=ACTIVATIONS, threads=int(THREADS))
    llm.generate([PROMPT], ONE)
    return llm


def timed(run: object) -> float:
    begin = time.monotonic()
    run()  # type: ignore[operator]
    return time.monotonic() - begin


def main() -> None:
    llm = start()
    told = {"first": time.monotonic(), "request": [timed(lambda: llm.generate([PROMPT], ONE)) for _ in range(int(ROUNDS))]}
    print(json.dumps(told | {"warm": [timed(start) for _ in range(int(ROUNDS))]}), flush=True)


main()
