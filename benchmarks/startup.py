"""From the start of a process to the first token, beside llama.cpp through Python: both in turn, a new process each, several rounds; medians, and the ratio of each round.

    python benchmarks/startup.py ARTIFACT [--gguf FILE] [--rounds 7] [--activations int8] [--save NAME]

ARTIFACT is a qforge artifact whose GGUF export llama.cpp runs (as in vs_llama_cpp.py). Its packed weights are cached before the first round, and both models lie in the page cache.
new process: until a script that imports the library, opens the model and asks for one token after a short prompt has that token.
warm process: the model opened once more where it was opened before, and one token. further request: one more prompt to an open model.
llama.cpp runs in the xllamacpp wheel without its warm-up.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from saved import machine, place, rounds_said, save, spread, told
from vs_llama_cpp import export

from qforge.scheme import ACTIVATIONS

HERE = Path(__file__).parent
PROMPT = "The capital of France is"
ROWS = {"new": "new process, ms", "warm": "warm process, ms", "request": "further request, ms"}
Times = dict[str, float]


def main() -> int:
    args = arguments()
    with tempfile.TemporaryDirectory() as folder:
        gguf = args.gguf or export(args.model, Path(folder))
        ours = [sys.executable, str(HERE / "llama_cpp" / "start_ours.py"), str(args.model)]
        theirs = [sys.executable, str(HERE / "llama_cpp" / "start_server.py"), str(gguf)]
        run(args, ours), run(args, theirs)  # packs and caches; reads both files once
        rounds = [(run(args, ours), run(args, theirs)) for _ in range(args.rounds)]
    content = {"command": told("startup"), "threads": args.threads, "activations": args.activations, "rounds": rounds,
               "environment": machine(xllamacpp=importlib.metadata.version("xllamacpp"))}  # fmt: skip
    text = page(content)
    print(text)
    if args.save:
        save("startup", args.save, content, text)
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a qforge artifact")
    parser.add_argument("--gguf", type=Path, help="what llama.cpp runs")
    parser.add_argument("--activations", choices=ACTIVATIONS, default="int8", help="llama.cpp always rounds activations to int8 (default: so do we)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", metavar="NAME", help="also write benchmarks/results/startup-NAME.json and .md")
    return parser.parse_args()


def run(args: argparse.Namespace, command: list[str]) -> Times:
    """Milliseconds of one process."""
    begin = time.monotonic()
    done = subprocess.run([*command, PROMPT, args.activations, str(args.threads), "3"], capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        raise SystemExit(f"{command[1]} ended with {done.returncode}: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return {"new": (found["first"] - begin) * 1e3, **{name: statistics.median(found[name]) * 1e3 for name in ("warm", "request")}}


def page(content: dict[str, Any]) -> str:
    """The table; a ratio below 1 is ours being faster."""
    where = content["environment"]
    lines = [
        f"# Start to first token beside llama.cpp ({content['activations']} activations, {content['threads']} threads)", "", f"`{content['command']}`", "",
        f"qforge {where['qforge']}; xllamacpp {where['xllamacpp']}; {place(where)}. {rounds_said(len(content['rounds']))}, both in turn.", "",
        "| | qforge | llama.cpp | time of ours to theirs |", "|---|---|---|---|",
    ]  # fmt: skip
    for name, label in ROWS.items():
        pairs = [(ours[name], theirs[name]) for ours, theirs in content["rounds"]]
        ours, theirs = (statistics.median(p[i] for p in pairs) for i in (0, 1))
        lines.append(f"| {label} | {ours:.0f} | {theirs:.0f} | {spread(a / b for a, b in pairs)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
