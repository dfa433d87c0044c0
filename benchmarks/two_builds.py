"""Builds of the native module, or whole checkouts, on the load of vs_llama_cpp.py: a process for each, stepped in turn, so that a host whose speed changes does so for all.

    python benchmarks/two_builds.py ARTIFACT OLD NEW [MORE ...] [--activations int8] [--rounds 3] [--rows N] [--temperature T]

A build is the file `qforge/ops/_native*.so` of an installation or, where Python differs too, the folder of a checkout in which that file lies in its place.
Printed for each: the least time of each step over all rounds, added up, in all and by what steps do (prompts; 16 sequences and more; fewer), and the median
of its loads' times by the first build's. --rows: N sequences with short prompts instead. --temperature: tokens are drawn. Tokens have to be the same.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "llama_cpp"))
from load import mixed

Step = dict[str, Any]  # seconds, whether it computed prompts, tokens that were chosen, whether there is more


def work(build: str, model: str, activations: str, rows: int, temperature: float) -> None:
    """Answer each line of stdin: `new` begins the load, `step` does a step of it."""
    if Path(build).is_dir():
        sys.meta_path[:] = [f for f in sys.meta_path if "Redirecting" not in type(f).__name__]  # that of the installation, which comes before all folders
        sys.path.insert(0, build)
    else:
        loader = importlib.machinery.ExtensionFileLoader("qforge.ops._native", build)
        spec = importlib.util.spec_from_loader("qforge.ops._native", loader)
        assert spec is not None
        sys.modules["qforge.ops._native"] = native = importlib.util.module_from_spec(spec)
        loader.exec_module(native)

    import time

    from qforge.ops import native_module
    from qforge.runtime import LLM, SamplingParams

    assert Path(str(native_module.module().__file__)).is_relative_to(build), "the build is not what runs"
    llm = LLM(model, activations=activations, kv_cache="int8")
    requests = mixed(32, json.loads(Path(model, "config.json").read_text())["vocab_size"])
    if rows:
        requests = [{"prompt": [100 + (7 * i + s) % 1000 for i in range(16)], "output": 60} for s in range(rows)]
    engine = llm.engine(speculate=False, prefix_cache=False)
    for line in sys.stdin:
        if line.strip() == "new":
            engine = llm.engine(speculate=False, prefix_cache=False)
            for seed, r in enumerate(requests):
                engine.add(r["prompt"], SamplingParams(max_tokens=r["output"], temperature=temperature, seed=seed, ignore_eos=True))
        prompts = bool(engine.scheduler.waiting) or any(s.computed < s.num_prompt for s in engine.scheduler.running)
        start = time.perf_counter()
        chosen = engine.step()
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "prompts": prompts, "chosen": [token for _, token in chosen], "more": engine.busy()}), flush=True)


def load(workers: list[subprocess.Popen[str]]) -> list[list[Step]]:
    """One load in each process, step by step in turn; whoever is first changes."""
    steps: list[list[Step]] = [[] for _ in workers]
    word = "new"
    while word == "new" or steps[0][-1]["more"]:
        turn = len(steps[0]) % len(workers)
        for i in [*range(turn, len(workers)), *range(turn)]:
            pipe, answer = workers[i].stdin, workers[i].stdout
            assert pipe is not None
            assert answer is not None
            pipe.write(word + "\n")
            pipe.flush()
            steps[i].append(json.loads(answer.readline()))
        word = "step"
        if any(s[-1]["chosen"] != steps[0][-1]["chosen"] for s in steps):
            raise SystemExit(f"step {len(steps[0])} chose other tokens")
    return steps


def main() -> int:
    """Run all, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a qforge artifact")
    parser.add_argument("builds", nargs="+", type=Path)
    parser.add_argument("--activations", default="int8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(str(args.builds[0]), args.model, args.activations, args.rows, args.temperature)
        return 0
    call = [sys.executable, __file__, args.model, "--activations", args.activations, "--rows", str(args.rows), "--temperature", str(args.temperature), "--work"]
    workers = [subprocess.Popen([*call, str(b.resolve())], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for b in args.builds]
    rounds = [load(workers) for _ in range(args.rounds)]
    for w in workers:
        w.communicate()
    first = rounds[0][0]
    kinds = ["prompts" if s["prompts"] else "many" if len(s["chosen"]) >= 16 else "few" for s in first]
    print(f"{'':24s}{'least, s':>10s}{'prompts':>10s}{'many':>10s}{'few':>10s}{'ratio':>10s}")
    for i, build in enumerate(args.builds):
        least = [min(r[i][n]["seconds"] for r in rounds) for n in range(len(first))]
        sums = [sum(t for t, kind in zip(least, kinds, strict=True) if wanted in ("all", kind)) for wanted in ("all", "prompts", "many", "few")]
        ratio = statistics.median(sum(s["seconds"] for s in r[i]) / sum(s["seconds"] for s in r[0]) for r in rounds)
        print(f"{build.name:24s}" + "".join(f"{t:10.3f}" for t in sums) + f"{ratio:10.3f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
