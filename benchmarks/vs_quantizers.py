"""qforge beside other quantizers: same machine, weights, calibration tokens and evaluation tokens, one tool at a time, one judge.

    python benchmarks/vs_quantizers.py --model DIR --calibration FILE --text FILE --samples 64 --length 256 --window 256 --group 32 --out OUT \\
        --tools DIR --envs DIR --runs ours:rtn,ours:gptq,llmcompressor:gptq_static,gptqmodel:gptq_gar,autoround:200,simple:hqq

The model is merged with its adapter into OUT/merged (fp32, not quantized); every tool starts from there, gets the ids of OUT/ids.json, and leaves its dequantized weights in a
folder of its own, which one fp32 engine judges on OUT/windows.json. Seconds: of the quantize call (ours: the stages `choose`, `quantize` and `write`, and `texts` where the model
writes text itself; opening the model and tokenizing are in neither), and of the whole process. Memory: what the tool's libraries take in a process that only imports them, resident
before that call (peers: with the model loaded; ours: before the stage `quantize`), and at its peak.
The peers' results in OUT are used again when model, ids, bits and group are the same; `--reuse none` runs all, `--reuse all` takes ours too.
A run of ours is `ours:METHOD[+METHOD][@SCHEME][/option=value]`, for example ours:awq+gptq@int4-g32-asym/damping=0.02.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
from peers import floor, kept, others, ours, table
from peers.judge import Judge
from peers.runs import OURS, PEERS, Run, parse
from peers.texts import Tokens, gather

from qforge.export.hf import write_artifact
from qforge.models.lora import with_adapters
from qforge.models.model import open_model
from qforge.stages.outcome import environment

RESULTS = Path(__file__).parent / "results"
REUSED = {"none": (), "peers": PEERS, "all": (OURS, *PEERS)}


def main() -> int:
    args = arguments()
    jobs = [parse(text, args.bits, args.group) for text in args.runs.split(",")]
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    merged = merge(args.model, args.adapter, args.out / "merged")
    model = open_model(str(merged))
    tokens = gather(model, args.out, args.calibration, args.samples, args.length, args.text, args.window, args.windows)
    tools = others.Tools(args.tools.absolute(), args.envs.absolute())
    failures = [failure for job in jobs if (failure := execute(job, merged, model.fingerprint(), tokens, tools, args.out, args.reuse))]
    judge = Judge(model, tokens.windows)
    rows = [row(job, args.out / job.folder, judge) for job in jobs if (args.out / job.folder / "meter.json").is_file()]
    least = floor.multiplications(model, tokens.calibration.tokens)
    text = "\n\n".join(filter(None, [table.main_table(rows), table.ratio_table(rows), table.floor_table(rows, least), *failures]))
    print(text)
    content = describe(args, tokens, rows, failures)
    for folder, stem in [(args.out, "table")] + [(RESULTS, f"vs_quantizers-{args.save}")] * bool(args.save):
        folder.mkdir(exist_ok=True)
        (folder / f"{stem}.json").write_text(json.dumps(content, indent=1) + "\n")
        (folder / f"{stem}.md").write_text(page(content, text))
    return 1 if failures else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="what qforge opens: a folder, a .gguf file, demo")
    parser.add_argument("--adapter", help="LoRA folder, merged first")
    parser.add_argument("--calibration", type=Path, required=True, metavar="FILE")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE", help="evaluation text; the same file as --calibration is split, 80 %% of its lines calibrate")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--length", type=int, default=256, help="tokens of a calibration sample")
    parser.add_argument("--window", type=int, default=256, help="tokens of an evaluation window")
    parser.add_argument("--windows", type=int, help="how many windows at most")
    parser.add_argument("--group", type=int, default=32)
    parser.add_argument("--bits", type=int, default=4, choices=(2, 3, 4, 8))
    parser.add_argument("--runs", default="ours:rtn,ours:gptq", help=f"comma-separated; tools: {', '.join((OURS, *PEERS))}")
    parser.add_argument("--tools", type=Path, default=os.environ.get("QFORGE_PEERS", "."), metavar="DIR", help="folder with run_peer.py (default: QFORGE_PEERS)")
    parser.add_argument("--envs", type=Path, default="runs/peers", metavar="DIR", help="folder with a virtual environment for each tool")
    parser.add_argument("--out", type=Path, default="runs/vs_quantizers", metavar="DIR")
    parser.add_argument("--reuse", choices=REUSED, default="peers", help="finished results in --out to take as they are")
    parser.add_argument("--save", metavar="NAME", help="also write benchmarks/results/vs_quantizers-NAME.json and .md")
    return parser.parse_args()


def merge(source: str, adapter: str | None, folder: Path) -> Path:
    """The model with its adapter as a plain fp32 Hugging Face folder, written once."""
    model = open_model(source, dtype="float32")
    if adapter:
        model = with_adapters(model, [(adapter, 1.0)])
    made_from = {"merged_from": model.fingerprint()}
    mark = folder / "qforge.json"
    if not mark.is_file() or json.loads(mark.read_text()) != made_from:
        write_artifact(folder, model, {}, _no_linear, made_from)
    return folder


def _no_linear(name: str) -> NoReturn:
    raise AssertionError(f"{name}: nothing is quantized here")


def execute(job: Run, merged: Path, model_sha256: str, tokens: Tokens, tools: others.Tools, out: Path, reuse: str) -> str | None:
    """Run one job, or find it done; a failure comes back as text."""
    folder, wanted = out / job.folder, kept.key(job, model_sha256, tokens.calibration.sha256)
    if job.tool in REUSED[reuse] and kept.finished(folder, wanted):
        return None
    kept.begin(folder)
    try:
        if job.tool == OURS:
            ours.run(job, merged, tokens, folder)
            ours.dequantize(folder, merged)
        else:
            others.run(job, merged, tokens, folder, tools)
    except RuntimeError as e:
        return f"{job.name} {job.scheme} failed: {e}"
    kept.finish(folder, wanted)
    return None


def row(job: Run, folder: Path, judge: Judge) -> dict[str, Any]:
    """What a table says of one run."""
    meter, figures = json.loads((folder / "meter.json").read_text()), judge.figures(folder)
    return {
        "tool": job.tool,
        "method": job.method,
        "name": job.name,
        "scheme": job.scheme,
        "bits": meter["bits_per_weight"],
        "kl": figures["kl_mean"],
        "kl_ci95": figures["kl_mean_ci95"],
        "kl_p99": figures["kl_p99"],
        "perplexity": figures["candidate"]["perplexity"],
        "original": figures["reference"]["perplexity"],
        "top1": figures["top1_agreement"],
        "seconds": meter["wall_s"],
        "process_seconds": meter["process_s"],
        "mb_libraries": meter["rss_libraries_mb"],
        "mb_before": meter["rss_before_mb"],
        "mb_peak": meter["rss_peak_mb"],
        "load": meter["load"],
        "multiplications_per_s": meter.get("multiplications_per_s"),
        "forward_seconds": meter.get("forward_s"),
        "versions": meter["versions"],
    }


def describe(args: argparse.Namespace, tokens: Tokens, rows: list[dict[str, Any]], failures: list[str]) -> dict[str, Any]:
    """Everything that a reader needs to repeat it; files by name, without this machine's folders."""
    samples, length = tokens.calibration.ids.shape
    return {
        "date": time.strftime("%Y-%m-%d"),
        "environment": environment(),
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *(Path(a).name if "/" in a and Path(a).exists() else a for a in sys.argv[1:])]),
        "model": {"name": Path(args.model).name, "adapter": args.adapter and Path(args.adapter).name},
        "calibration": {"text": args.calibration.name, "samples": samples, "length": length, "sha256": tokens.calibration.sha256},
        "evaluation": {"text": args.text.name, "text_sha256": tokens.windows.sha256, "windows": len(tokens.windows.ids), "tokens": tokens.windows.tokens},
        "rows": rows,
        "failures": failures,
    }


def page(content: dict[str, Any], text: str) -> str:
    """The Markdown page."""
    env, seen, held_out = content["environment"], content["calibration"], content["evaluation"]
    title = " + ".join(filter(None, content["model"].values()))
    machine = f"{content['date']}, {env['cpu']}, {env['cores']} cores, torch {env['torch']}."
    texts = f"Calibration: {seen['samples']} x {seen['length']} tokens of {seen['text']}; evaluation: {held_out['tokens']} tokens of {held_out['text']}."
    return f"# qforge beside other quantizers: {title}\n\n{machine} {texts}\n\n{text}\n\nMade by\n\n    {content['command']}\n"


if __name__ == "__main__":
    sys.exit(main())
