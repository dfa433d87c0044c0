"""Methods side by side on one model, one calibration text and one held-out text: KL divergence, perplexity, agreement, seconds, memory.

    python benchmarks/methods.py --model demo --adapter examples/demo-adapter --schemes int4-g64-sym
    python benchmarks/methods.py --model DIR --calibration FILE --text FILE --window 256 --schemes int4-g32-sym,int4-g32-asym
    python benchmarks/methods.py --model DIR --calibration FILE --text FILE --window 256 --methods auto --schemes "4.5 bits,4.25 bits"

Each run is a process of its own, one at a time; started afresh.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--adapter")
    parser.add_argument("--calibration", default="builtin")
    parser.add_argument("--text", default="builtin")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument("--schemes", default="int4-g64-sym")
    parser.add_argument("--methods", default="rtn,gptq")
    parser.add_argument("--out", type=Path, default=Path("runs/methods"))
    args = parser.parse_args()
    print(f"| method | scheme | bits | KL | 95 % | perplexity (original) | top-1 | quantize s | peak MB |\n{'|---' * 9}|", flush=True)
    for scheme in args.schemes.split(","):
        for method in args.methods.split(","):
            print(row(run(args, method, scheme)), flush=True)


def run(args: argparse.Namespace, method: str, scheme: str) -> dict:
    out = args.out / f"{Path(args.model).name}-{method}-{scheme}"
    out.mkdir(parents=True, exist_ok=True)
    recipe = {
        "version": 1,
        "model": {"source": absolute(args.model)},
        "adapters": [{"source": absolute(args.adapter)}] if args.adapter else [],
        "calibration": {"source": absolute(args.calibration), "samples": args.samples, "sequence_length": args.window},
        "quantize": {"method": method, "budget" if method == "auto" else "scheme": scheme},
        "evaluate": {"text": absolute(args.text), "window": args.window},
    }
    (out / "recipe.yaml").write_text(json.dumps(recipe, indent=1))
    subprocess.run([sys.executable, "-m", "qforge", "quantize", "--recipe", out / "recipe.yaml", "--out", out / "run", "--fresh"], check=True, stdout=subprocess.DEVNULL)
    return json.loads((out / "run" / "results.json").read_text())


def absolute(name: str) -> str:
    return str(Path(name).absolute()) if Path(name).exists() else name


def row(r: dict) -> str:
    quantize = r["recipe"]["quantize"]
    e, low_high = r["evaluation"], r["evaluation"]["kl_mean_ci95"]
    interval = f"{low_high[0]:.4f}-{low_high[1]:.4f}" if low_high else "-"
    return (
        f"| {quantize['method']} | {quantize['scheme'] or quantize['budget']} | {r['artifact']['bits_per_weight']:.2f} | {e['kl_mean']:.4f} | {interval} "
        f"| {e['candidate']['perplexity']:.3f} ({e['reference']['perplexity']:.3f}) | {e['top1_agreement']:.3f} | {r['timings']['quantize']:.1f} "
        f"| {r['memory']['peak during quantize'] / 1e6:.0f} |"
    )


if __name__ == "__main__":
    main()
