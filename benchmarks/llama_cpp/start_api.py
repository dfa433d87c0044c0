"""The same through llama-cpp-python."""

import json
import sys
import time

from llama_cpp import Llama

MODEL, PROMPT, _, THREADS, ROUNDS = sys.argv[1:]


def ask(running: Llama) -> None:
    running.reset()
    running.create_completion(PROMPT, max_tokens=1, temperature=0)


def start() -> Llama:
    running = Llama(MODEL, n_ctx=1024, n_threads=int(THREADS), n_threads_batch=int(THREADS), verbose=False)
    ask(running)
    return running


def timed(run: object) -> float:
    begin = time.monotonic()
    run()  # type: ignore[operator]
    return time.monotonic() - begin


def main() -> None:
    llm = start()
    told = {"first": time.monotonic(), "request": [timed(lambda: ask(llm)) for _ in range(int(ROUNDS))]}
    print("\n" + json.dumps(told | {"warm": [timed(start) for _ in range(int(ROUNDS))]}), flush=True)


main()
