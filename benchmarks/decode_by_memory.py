"""One sequence beside llama.cpp's, by what memory gave: both wait for weights, and a host that moves its guest's cores doubles or halves the speed of memory within seconds.

    python benchmarks/decode_by_memory.py ARTIFACT --gguf FILE [--turns 200] [--save NAME]

ARTIFACT and FILE hold the same integers (benchmarks/llama_cpp/artifacts.py). Both engines stay loaded, and the one that waits is stopped. A turn is 23 tokens of each, after 4
and the first, with memory read before, between and after; it counts where these three differ by no more than an eighth, and belongs to the ten GB/s in which they lie. llama.cpp's
figure is its server's own clock, with all threads (fewer were never faster in benchmarks/vs_llama_cpp.py); keys and values are kept in 16 bits by both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from itertools import groupby
from pathlib import Path
from typing import Any

import gguf
from saved import machine, place, save, told
from served import Engine
from vs_llama_cpp import weights_of

from qforge.runtime.read_speed import read_bandwidth
from qforge.scheme import ACTIVATIONS

_STEADY = 9 / 8
_BAND = 10  # GB/s
_LEAST_TURNS = 5  # of a row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a qforge artifact")
    parser.add_argument("--gguf", type=Path, required=True, help="what llama.cpp runs")
    parser.add_argument("--activations", choices=ACTIVATIONS, default="int8", help="llama.cpp always rounds activations to int8 (default: so do we)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--save", metavar="NAME", help="also write benchmarks/results/decode_by_memory-NAME.json and .md")
    args = parser.parse_args()
    if read_bandwidth(args.threads) is None:
        raise SystemExit("the native module is missing, which reads memory")
    with tempfile.TemporaryDirectory() as folder:
        about, turns = in_turn(args, Path(folder))
    read = {"ours": about["ours"]["weight_bytes"], "llama.cpp": read_bytes(args.gguf)}
    content = {
        "command": told("decode_by_memory"), "activations": args.activations, "threads": args.threads,
        "weights": {"ours": weights_of(args.model), "llama.cpp": weights_of(args.gguf)},
        "engines": {name: found["version"] for name, found in about.items()}, "weight_bytes": read,
        "environment": machine(), "rows": rows(turns, read), "turns": turns,
    }  # fmt: skip
    text = page(content)
    print(text)
    if args.save:
        save("decode_by_memory", args.save, content, text)
    return 0


def in_turn(args: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the engines are, and of each turn tokens/s of both and GB/s of memory, three times. Who is first changes from turn to turn; the first two warm up and are left out."""
    short = {"prompt": [5, 6, 7, 8], "output": 24}
    request = {"model": str(args.model), "gguf": str(args.gguf), "activations": args.activations, "kv_cache": "fp16", "threads": args.threads, "short": short, "served": True}

    def memory() -> float:
        return (read_bandwidth(args.threads) or 0.0) / 1e9

    with Engine(Path(sys.executable), "ours.py", request, folder) as ours, Engine(Path(sys.executable), "server.py", request, folder) as theirs:
        engines, turns = [("ours", ours), ("llama.cpp", theirs)], []
        for _ in range(args.turns + 2):
            turn: dict[str, Any] = {"memory": [memory()]}
            for name, engine in engines:
                turn[name] = engine.ask("short")["decode"]
                turn["memory"].append(memory())
            engines.reverse()
            turns.append(turn)
        return {"ours": ours.about, "llama.cpp": theirs.about}, turns[2:]


def read_bytes(path: Path) -> int:
    """Bytes of weights that a token reads of a GGUF file: all, but of an embedding that is not the head one row."""
    tensors = gguf.GGUFReader(path).tensors
    has_head = any(t.name == "output.weight" for t in tensors)
    return sum(int(t.n_bytes) for t in tensors if t.name != "token_embd.weight" or not has_head)


def rows(turns: list[dict[str, Any]], read: dict[str, int]) -> list[dict[str, Any]]:
    """Turns during which memory kept its speed, by the band in which it lay: medians (GB/s, tokens/s, ratio), shares of memory's speed, and the ratio that memory allows at most,
    since no engine that reads all of its weights for each token gets more than memory's speed over their bytes."""
    kept = [(statistics.median(t["memory"]) // _BAND, t) for t in turns if max(t["memory"]) <= _STEADY * min(t["memory"])]
    found = []
    for _, pairs in groupby(sorted(kept, key=lambda pair: pair[0]), key=lambda pair: pair[0]):
        of_band = [t for _, t in pairs]
        if len(of_band) < _LEAST_TURNS:
            continue
        memory = statistics.median(statistics.median(t["memory"]) for t in of_band)
        rate = {name: statistics.median(t[name] for t in of_band) for name in ("ours", "llama.cpp")}
        ratios = [t["ours"] / t["llama.cpp"] for t in of_band]
        found.append({
            "memory": memory, "turns": len(of_band), **rate, "shares": {name: rate[name] * read[name] / memory / 1e9 for name in rate},
            "ratio": statistics.median(ratios), "ratio_tenths": statistics.quantiles(ratios, n=10, method="inclusive")[::8],
            "most": memory * 1e9 / read["ours"] / rate["llama.cpp"],
        })  # fmt: skip
    return found


def page(content: dict[str, Any]) -> str:
    """The table."""
    read, named, kept = content["weight_bytes"], content["weights"], sum(r["turns"] for r in content["rows"])
    head = [
        f"# One sequence beside llama.cpp, by what memory gave ({content['activations']} activations, {content['threads']} threads)", "", f"`{content['command']}`", "",
        f"{content['engines']['ours']}, {named['ours']}, {read['ours'] / 1e6:.0f} MB of weights a token; {content['engines']['llama.cpp']}, {named['llama.cpp']}, "
        f"{read['llama.cpp'] / 1e6:.0f} MB; {place(content['environment'])}. {len(content['turns'])} turns, of which {len(content['turns']) - kept} do not count: "
        f"memory changed its speed during them, or fewer than {_LEAST_TURNS} have about the same. Medians; of ratios also where the middle four fifths of the turns lie.", "",
        "| memory, GB/s | turns | qforge, tokens/s (of memory's speed) | llama.cpp | ratio | most that memory allows |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    return "\n".join(head + [line(r) for r in content["rows"]])


def line(r: dict[str, Any]) -> str:
    """One band."""
    speeds = [f"{r[name]:.1f} ({r['shares'][name]:.0%})" for name in ("ours", "llama.cpp")]
    return f"| {r['memory']:.0f} | {r['turns']} | {speeds[0]} | {speeds[1]} | {r['ratio']:.2f} ({r['ratio_tenths'][0]:.2f}-{r['ratio_tenths'][1]:.2f}) | {r['most']:.2f} |"


if __name__ == "__main__":
    raise SystemExit(main())
