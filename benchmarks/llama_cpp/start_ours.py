"""From nothing to a first token through qforge: model, prompt, activations, threads, rounds -> JSON (see benchmarks/startup.py)."""

import sys

from starting import tell

from qforge.runtime import LLM, SamplingParams

MODEL, PROMPT, ACTIVATIONS, THREADS, ROUNDS = sys.argv[1:]
ONE = SamplingParams(max_tokens=1)


def start() -> LLM:
    llm = LLM(MODEL, activations=ACTIVATIONS, threads=int(THREADS), prefix_cache=False)
    ask(llm)
    return llm


def ask(llm: LLM) -> None:
    llm.generate([PROMPT], ONE)


tell(start, ask, int(ROUNDS))
