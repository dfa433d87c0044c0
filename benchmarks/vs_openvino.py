"""qforge's runtime beside OpenVINO GenAI's continuous batching, the strongest CPU server of others: the load of vs_llama_cpp.py, both in turn, in processes of their own,
of which the one that waits is stopped.

    python -m venv DIR && DIR/bin/pip install torch openvino-genai optimum-intel nncf && DIR/bin/pip uninstall torchvision
    DIR/bin/optimum-cli export openvino -m MODEL --task text-generation-with-past --weight-format int4 --group-size 64 --sym --ratio 1.0 IR
    python benchmarks/vs_openvino.py ARTIFACT --other IR --python DIR/bin/python [--rounds 3] [--save NAME]

IR has the shapes, bits and group size of ARTIFACT (NNCF keeps embedding and head in 8 bits); the plugin chooses the precision of
activations and keeps keys and values in 8 bits by itself, as ours does here. Only speed is compared.
The last row is the same load with prompt lookup in both, which ours does by default; all other rows are without.
QFORGE_ISA=avx2 ONEDNN_MAX_CPU_ISA=AVX2 in the environment: as on a CPU that has no more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ceiling import integer_rate, multiplications, said
from saved import machine, place, rounds_said, save, spread, told
from served import Engine
from vs_llama_cpp import ROWS, Round, mixed, row, value, weights_of

from qforge.ops.native_module import instruction_sets
from qforge.runtime.read_speed import read_bandwidth
from qforge.scheme import ACTIVATIONS


@dataclass(frozen=True)
class Other:
    """The engine beside ours: its name, what the benchmark is called, the script that its interpreter runs, and its weights and cache in words."""

    name: str
    benchmark: str
    script: str
    runs: str


OPENVINO = Other("OpenVINO GenAI", "vs_openvino", "openvino_genai_speed.py", "4-bit weights by NNCF; keys and values in 8 bits by both")


def main(other: Other = OPENVINO, doc: str | None = __doc__) -> int:
    """Run both and print the table."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a qforge artifact")
    parser.add_argument("--other", type=Path, required=True, help=f"a model of the same shape for {other.name}")
    parser.add_argument("--python", type=Path, required=True, help=f"an interpreter that has {other.name}")
    parser.add_argument("--activations", default="int8", choices=ACTIVATIONS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", metavar="NAME", help=f"also write benchmarks/results/{other.benchmark}-NAME.json and .md")
    args = parser.parse_args()
    requests, first_set = load(args.model), next(iter(instruction_sets()), "")

    def rate() -> float | None:
        return integer_rate(args.threads, first_set) if args.activations == "int8" else None

    before = rate()
    with tempfile.TemporaryDirectory() as folder:
        rounds = in_turn(args, other, Path(folder))
    least = without_steps(rounds)
    best_rate = max((r for r in (before, rate()) if r is not None), default=None)  # a host may be slow at either time
    content = {
        "command": told(other.benchmark), "activations": args.activations, "threads": args.threads, "weights": weights_of(args.model),
        "environment": machine(read_bandwidth=read_bandwidth(args.threads)), "rounds": rounds,
        "load": {"multiplications": multiplications(args.model, requests), "outputs": sum(r["output"] for r in requests), "integer_rate": best_rate},
        "least_steps": least,
    }  # fmt: skip
    text = page(content, other)
    print(text)
    if args.save:
        save(other.benchmark, args.save, content, text)
    return 0


def load(model: Path) -> list[dict[str, Any]]:
    """The 32 requests."""
    return mixed(32, json.loads((model / "config.json").read_text())["vocab_size"])


def in_turn(args: argparse.Namespace, other: Other, folder: Path) -> list[Round]:
    """Both engines, each in one process for all rounds; what a round asks goes from one to the other, and who is first changes. A round before the first is not counted."""
    request = {
        "model": str(args.model), "other": str(args.other), "activations": args.activations, "kv_cache": "int8", "threads": args.threads,
        "single": {"prompt": [100 + i % 1000 for i in range(512)], "output": 1}, "short": {"prompt": [5, 6, 7], "output": 128}, "mixed": load(args.model),
    }  # fmt: skip
    rounds: list[Round] = []
    with Engine(Path(sys.executable), "ours.py", request, folder) as ours, Engine(args.python, other.script, request, folder) as theirs:
        engines = [("ours", ours), ("theirs", theirs)]
        for _ in range(args.rounds + 1):
            answers: Round = {name: dict(engine.about) for name, engine in engines}
            for word in ("single", "short", "mixed", "lookup"):
                for name, engine in engines:
                    if word in ("single", "short"):
                        answers[name] |= engine.ask(word)
                    elif word in engine.about["loads"]:
                        answers[name][word] = engine.ask(word)
            engines.reverse()
            rounds.append(answers)
    return rounds[1:]


def without_steps(rounds: list[Round]) -> dict[str, float]:
    """Output tokens/s of each engine if each step of the load had taken what it took at least, of all rounds (an engine whose steps differ from round to round has none).
    Takes the steps and tokens out of `rounds`, and leaves how many continuations prompt lookup changes."""
    found = {}
    for who in rounds[0]:
        loads = [r[who]["mixed"] for r in rounds]
        steps = [[b - a for a, b in pairwise([0.0, *one["ends"]])] for one in loads]
        if len({len(s) for s in steps}) == 1:
            found[who] = sum(map(len, loads[0]["tokens"])) / sum(map(min, zip(*steps, strict=True)))
        for r in rounds:
            if "lookup" in r[who]:
                r[who]["changed"] = sum(a != b for a, b in zip(r[who]["mixed"]["tokens"], r[who]["lookup"]["tokens"], strict=True))
            for word in r[who]["loads"]:
                del r[who][word]["ends"], r[who][word]["tokens"]
    return found


def page(content: dict[str, Any], other: Other) -> str:
    """The table."""
    where, first = content["environment"], content["rounds"][0]
    head = [
        f"# qforge beside {other.name} ({content['threads']} threads)", "", f"`{content['command']}`", "",
        f"{first['ours']['version']}, {content['weights']}, {content['activations']} activations; "
        f"{first['theirs']['version']}, {first['theirs']['precisions']}; {other.runs}; {place(where)}, "
        f"memory read at {where['read_bandwidth'] / 1e9:.1f} GB/s. {rounds_said(len(content['rounds']))}, both in turn.", "",
        f"| | qforge | {other.name} | ratio |", "|---|---|---|---|",
    ]  # fmt: skip
    of_load, theirs = content["load"], [v for r in content["rounds"] if (v := value(r["theirs"], "mixed.tokens_per_second")) is not None]
    goal = said(of_load["integer_rate"], of_load["multiplications"], of_load["outputs"], statistics.median(theirs) if theirs else None)
    rows = [line for name in ROWS if (line := row(name, content["rounds"], "theirs")) is not None]
    return "\n".join(head + rows + [part for line in (goal, quiet(content, other), guesses(content["rounds"], other)) if line for part in ("", line)])


def quiet(content: dict[str, Any], other: Other) -> str:
    """Each engine's best of all rounds, where there are several: a busy host only ever takes speed away."""
    if len(content["rounds"]) == 1:
        return ""
    ours, theirs = (max(r[who]["mixed"]["tokens_per_second"] for r in content["rounds"]) for who in ("ours", "theirs"))
    text = f"Each one's best of all rounds, nearest to a quiet machine: {ours:.0f} and {theirs:.0f} output tokens/s ({other.name}), {ours / theirs:.2f} times"
    least = content["least_steps"]
    if len(least) < 2:
        return text + "."
    return text + f"; were each step what it was at least: {least['ours']:.0f} and {least['theirs']:.0f}, {least['ours'] / least['theirs']:.2f} times."


def guesses(rounds: list[Round], other: Other) -> str:
    """What prompt lookup changes, and the load as each engine comes: ours guesses, others do not."""
    ratio = spread(r["ours"]["lookup"]["tokens_per_second"] / r["theirs"]["mixed"]["tokens_per_second"] for r in rounds)
    changed = {name: rounds[0][who].get("changed") for name, who in (("qforge's", "ours"), (f"{other.name}'s", "theirs"))}
    return (
        f"Prompt lookup changes {' and '.join(f'{n} of {name} 32 continuations' for name, n in changed.items() if n is not None)}. "
        f"As each comes (ours with it, {other.name} without) ours makes {ratio} times the output tokens/s. "
        "Random prompts make a model repeat itself; benchmarks/prompt_lookup.py has what others gain."
    )


if __name__ == "__main__":
    raise SystemExit(main())
