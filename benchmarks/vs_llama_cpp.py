"""qforge's runtime beside llama.cpp on the same weights: both run in turn, in processes of their own, several rounds; the table has medians and the ratio of each round.

    python benchmarks/vs_llama_cpp.py ARTIFACT [--gguf FILE ...] [--activations int8] [--llama-python PYTHON] [--save NAME]

ARTIFACT is a qforge artifact whose GGUF export llama.cpp runs: the same integers, the output head's included (made in a temporary folder unless --gguf names files; of several
the best counts). benchmarks/llama_cpp/artifacts.py makes a symmetric and an asymmetric one of SmolLM2 and of a model with 1.1 billion parameters.
decode: one sequence, 127 tokens after 3. prefill: 512 tokens. mixed: 32 requests at once, prompts of 32-512 and outputs of 16-256 tokens (seed 0), end-of-text ignored.
One sequence runs through llama.cpp's C API where PYTHON has llama_cpp (no sampling is timed there; ours samples), else through the xllamacpp server's own clock; mixed always
through that server, with 32 slots. Keys and values are kept in 16 bits by both. llama.cpp runs one sequence with each number of threads of --llama-threads, and its best counts.
xllamacpp's wheel is built for AVX2: QFORGE_ISA=avx2 in the environment limits ours to that.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "llama_cpp"))
from load import mixed
from saved import machine, place, rounds_said, save, spread, told
from served import Engine

from qforge.export.inspection import inspect
from qforge.runtime.read_speed import read_bandwidth
from qforge.scheme import ACTIVATIONS

HERE = Path(__file__).parent
_PATIENCE, _LONGEST_WAIT = 4, 900  # rounds left out for each that counts; seconds
FIGURES = ("decode", "prefill", "mixed")
Round = dict[str, dict[str, Any]]


def main() -> int:
    args = arguments()
    with tempfile.TemporaryDirectory() as folder:
        ggufs = args.gguf or [export(args.model, Path(folder))]
        rounds, left_out = [], 0
        while len(rounds) < args.rounds:
            wait_for(args.memory, args.threads)
            found = one_round(args, ggufs, Path(folder))
            steady = args.memory is None or min(b or 0.0 for b in found["memory"]["read_bandwidths"]) >= args.memory * 1e9
            rounds += [found] if steady else []
            left_out += not steady
            if left_out > _PATIENCE * args.rounds:
                raise SystemExit(f"memory did not give {args.memory} GB/s for long enough: {left_out} rounds were left out, {len(rounds)} were not")
    content = {
        "command": told("vs_llama_cpp"), "activations": args.activations, "threads": args.threads,
        "weights": weights_of(args.model),
        "environment": machine(read_bandwidth=read_bandwidth(args.threads)), "rounds": rounds,
        **({} if args.memory is None else {"memory_wanted": args.memory, "left_out": left_out}),
    }  # fmt: skip
    text = page(content)
    print(text)
    if args.save:
        save("vs_llama_cpp", args.save, content, text)
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a qforge artifact")
    parser.add_argument("--gguf", type=Path, action="append", help="what llama.cpp runs; repeatable")
    parser.add_argument("--activations", choices=ACTIVATIONS, default="int8", help="llama.cpp always rounds activations to int8 (default: so do we)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--llama-threads", type=lambda s: [int(n) for n in s.split(",")], help="tried by llama.cpp for one sequence (default: 1 and --threads)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["single", "mixed"], help="half of the work")
    parser.add_argument("--memory", type=float, metavar="GBPS", help="rounds during which memory was read at less (before, between or after) do not count and are run again")
    parser.add_argument("--llama-python", type=Path, default=sys.executable, help="an interpreter that has llama_cpp")
    parser.add_argument("--save", metavar="NAME", help="also write benchmarks/results/vs_llama_cpp-NAME.json and .md")
    return parser.parse_args()


def wait_for(memory: float | None, threads: int) -> None:
    """Until memory is read at so many GB/s: a host moves its guest's cores."""
    end = time.monotonic() + _LONGEST_WAIT
    while memory is not None and (read_bandwidth(threads) or 0.0) < memory * 1e9:
        if time.monotonic() > end:
            raise SystemExit(f"memory did not give {memory} GB/s within {_LONGEST_WAIT} s")
        time.sleep(2)


def export(model: Path, folder: Path) -> Path:
    """The artifact as GGUF, of the types that hold its codes."""
    subprocess.run([sys.executable, "-m", "qforge", "export", str(model), "--format", "gguf", "--out", str(folder / "gguf")], check=True, stdout=sys.stderr)
    return next(p for p in (folder / "gguf").rglob("*.gguf"))


def one_round(args: argparse.Namespace, ggufs: list[Path], folder: Path) -> Round:
    """Every engine once: ours, and the best of llama.cpp's over the files that it is given."""
    vocabulary = json.loads((args.model / "config.json").read_text())["vocab_size"]
    words = [100 + i % 1000 for i in range(512)]
    request = {
        "model": str(args.model), "activations": args.activations, "kv_cache": "fp16", "threads": args.threads, "repeats": 0 if args.only == "mixed" else 2, "loads": 2,
        "single": {"prompt": words, "output": 1}, "short": {"prompt": [5, 6, 7], "output": 128}, "mixed": [] if args.only == "single" else mixed(32, vocabulary),
    }  # fmt: skip
    has_api = subprocess.run([str(args.llama_python), "-c", "import llama_cpp"], capture_output=True, check=False).returncode == 0
    theirs: dict[str, Any] = {}
    memory = [read_bandwidth(args.threads)]
    for gguf in ggufs:
        for threads in sorted({*(args.llama_threads or [1]), args.threads}, reverse=True):
            asked = request | {"gguf": str(gguf), "threads": threads}
            if threads != args.threads:
                asked["mixed"] = []  # many requests take all threads
            found: dict[str, Any] = work(args.llama_python, "api.py", asked | {"mixed": []}, folder) if has_api and request["repeats"] else {}
            if importlib.util.find_spec("xllamacpp") is not None and (asked["mixed"] or (not has_api and request["repeats"])):
                found = work(Path(sys.executable), "server.py", asked | {"repeats": 0 if has_api else request["repeats"]}, folder) | found
            theirs = best_of(theirs, found | {"from": {name: f"{weights_of(gguf)}, {threads} threads" for name in FIGURES if name in found}})
    memory.append(read_bandwidth(args.threads))
    found_ours = ours(request, folder)
    return {"ours": found_ours, "llama.cpp": theirs, "memory": {"read_bandwidths": [*memory, read_bandwidth(args.threads)]}}


def ours(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Ours once: of each figure the best of all repeats."""
    repeats = range(request["repeats"])
    with Engine(Path(sys.executable), "ours.py", request, folder) as engine:
        found = engine.about | {name: max(engine.ask(word)[name] for _ in repeats) for word, name in (("single", "prefill"), ("short", "decode")) if repeats}
        if request["mixed"]:
            loads = [engine.ask("mixed") for _ in range(request["loads"])]
            found["mixed"] = {k: v for k, v in max(loads, key=lambda load: load["tokens_per_second"]).items() if k not in ("ends", "tokens")}
    return found


def weights_of(path: Path) -> str:
    """In what an engine stores the layers and the output head: of a GGUF file, or of an artifact."""
    found = inspect(path)
    if found["kind"] != "GGUF file":
        schemes = {e["name"]: e["scheme"] for e in found["linears"]}
        return f"{found['linears'][0]['scheme']}, head {schemes.get('lm_head', found['dtype'])}"
    types = {t["name"]: t["type"] for t in found["tensors"]}
    return f"{types['blk.0.attn_q.weight']}, head {types.get('output.weight', types['token_embd.weight'])}"


def best_of(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Of each figure the better one."""
    rate = {name: lambda d, name=name: d.get(name, {}).get("tokens_per_second", 0.0) if name == "mixed" else d.get(name, 0.0) for name in FIGURES}
    better = {name: max((a, b), key=rate[name]) for name in FIGURES if name in a or name in b}
    return {**a, **b, **{name: d[name] for name, d in better.items()}, "from": {name: d["from"][name] for name, d in better.items()}}


def work(python: Path, script: str, request: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One engine in a process of its own."""
    file = folder / "request.json"
    file.write_text(json.dumps(request))
    done = subprocess.run([str(python), str(HERE / "llama_cpp" / script), str(file)], capture_output=True, text=True, errors="replace", check=False)
    if done.returncode != 0:
        raise SystemExit(f"{script} ended with {done.returncode}: {done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return answer


def page(content: dict[str, Any]) -> str:
    """The table."""
    where, first = content["environment"], content["rounds"][0]
    head = [
        f"# qforge beside llama.cpp ({content['activations']} activations, {content['threads']} threads)", "", f"`{content['command']}`", "",
        f"{first['ours']['version']}, {content['weights']}; {first['llama.cpp']['version']}, of each figure the best of its files and numbers of threads ("
        f"{'; '.join(f'{name}: {what}' for name, what in first['llama.cpp']['from'].items())}); {place(where)}, "
        f"memory read at {where['read_bandwidth'] / 1e9:.1f} GB/s. {rounds_said(len(content['rounds']))}, both in turn.", "",
        "| | qforge | llama.cpp | ratio |", "|---|---|---|---|",
    ]  # fmt: skip
    out = [f"Rounds during which memory was read at less than {content['memory_wanted']:g} GB/s did not count: {content['left_out']}."] if content.get("memory_wanted") else []
    return "\n".join(head + [line for name in ROWS if (line := row(name, content["rounds"])) is not None] + by_round(content["rounds"]) + out)


def by_round(rounds: list[Round]) -> list[str]:
    """One sequence waits for memory, which is twice as fast where a host has its guest's cores on two chiplets, and moves them in between."""
    found = [
        f"{r['ours']['decode'] / r['llama.cpp']['decode']:.2f} ({', '.join(f'{b / 1e9:.0f}' for b in r['memory']['read_bandwidths'])})"
        for r in rounds if "memory" in r and "decode" in r["ours"] and None not in r["memory"]["read_bandwidths"]
    ]  # fmt: skip
    return ["", f"Decode, round by round (GB/s of memory before theirs, between and after ours): {', '.join(found)}."] if found else []


ROWS = {
    "decode": "decode, one sequence, tokens/s", "prefill": "prefill of 512, tokens/s", "mixed.tokens_per_second": "32 requests, output tokens/s",
    "mixed.ttft_ms_p50": "32 requests, first token p50, ms", "mixed.ttft_ms_p99": "32 requests, first token p99, ms",
    "mixed.tpot_ms_p50": "32 requests, each further token p50, ms", "mixed.tpot_ms_p99": "32 requests, each further token p99, ms",
    "lookup.tokens_per_second": "32 requests, both with prompt lookup, output tokens/s",
}  # fmt: skip


def row(name: str, rounds: list[Round], other: str = "llama.cpp") -> str | None:
    """One line; a ratio above 1 is ours being better, be it a rate or a time."""
    pairs = [(value(r["ours"], name), value(r[other], name)) for r in rounds]
    if any(a is None or b is None for a, b in pairs):
        return None
    ratios = [b / a if "_ms" in name else a / b for a, b in pairs if a is not None and b is not None]
    ours, theirs = (statistics.median(p[i] or 0.0 for p in pairs) for i in (0, 1))
    return f"| {ROWS[name]} | {ours:.1f} | {theirs:.1f} | {spread(ratios)} |"


def value(answer: dict[str, Any], name: str) -> float | None:
    """A figure by its dotted name."""
    found: Any = answer
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return None if found is None else float(found)


if __name__ == "__main__":
    raise SystemExit(main())
