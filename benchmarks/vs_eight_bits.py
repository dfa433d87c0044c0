"""Eight bits on both sides, executed: our artifacts on our runtime, llm-compressor's checkpoints in transformers, each rounding activations as its scheme says.

    python benchmarks/vs_eight_bits.py --model DIR --calibration FILE --text FILE --samples 64 --length 256 --window 256 --out OUT --tools DIR --envs DIR

Same merged model, calibration ids and evaluation tokens for all, as in vs_quantizers.py. Seconds: of the quantize call. Finished runs in OUT are used again with `--reuse`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from peers import eight_bits_adapter, kept, others, ours
from peers.judge import Original
from peers.runs import OURS, Run
from peers.texts import Tokens, gather
from vs_quantizers import RESULTS, REUSED, describe, merge, page

from qforge.engines.base import Scorer, chunks
from qforge.engines.runtime_engine import RuntimeEngine
from qforge.evaluate.divergence import evaluate
from qforge.models.model import open_model

PEER = "llmcompressor"
METHODS = ("rtn", "gptq", "smoothquant", "smoothquant+gptq")
RUNS = {
    "w8a8-int8": {PEER: METHODS, OURS: METHODS},
    "fp8-dynamic": {PEER: ("rtn",), OURS: ("rtn", "gptq", "gptq/tune=20")},
}
RESULT = {OURS: "run", PEER: "checkpoint"}  # where a run leaves what is executed
INTRODUCTION = "Eight bits on both sides, executed: ours on our runtime, the others' checkpoints in transformers, each rounding activations as its scheme says."
HEAD = "| run | scheme | KL | 95 % | perplexity | ratio to the original | top-1 | seconds |"


class Checkpoint:
    """A `Scorer`: a compressed-tensors checkpoint as transformers loads and runs it, with its rounding of activations."""

    name = "transformers"

    def __init__(self, folder: Path) -> None:
        import transformers

        self.version = transformers.__version__
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        schemes = (getattr(module, "quantization_scheme", None) for module in self._model.modules())
        if not any(scheme is not None and scheme.input_activations is not None for scheme in schemes):
            raise RuntimeError(f"{folder}: no linear rounds its activations")

    @torch.inference_mode()
    def score(self, windows: list[list[int]]) -> Iterator[torch.Tensor]:
        """See `Scorer.score`."""
        for window in windows:
            logits = self._model(input_ids=torch.tensor([window])).logits[0]
            for start, stop in chunks(len(logits)):
                yield logits[start:stop]


def main() -> int:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    merged = merge(args.model, args.adapter, args.out / "merged")
    model = open_model(str(merged))
    tokens = gather(model, args.out, args.calibration, args.samples, args.length, args.text, args.window, args.windows)
    tools = others.Tools(args.tools.absolute(), args.envs.absolute())
    jobs = [run(tool, text, scheme) for scheme, found in RUNS.items() for tool, texts in found.items() for text in texts if text.partition("/")[0] in args.methods]
    failures = [failure for job in jobs if (failure := execute(job, merged, model.fingerprint(), tokens, tools, args.out / job.folder, args.reuse))]
    original = Original(model)
    rows = [row(job, args.out / job.folder, original, tokens) for job in jobs if (args.out / job.folder / kept.KEY).is_file()]
    text = "\n\n".join(filter(None, [INTRODUCTION, main_table(rows), ratio_table(rows), *failures]))
    print(text)
    content = describe(args, tokens, rows, failures)
    for folder, stem in [(args.out, "table")] + [(RESULTS, f"vs_eight_bits-{args.save}")] * bool(args.save):
        (folder / f"{stem}.json").write_text(json.dumps(content, indent=1) + "\n")
        (folder / f"{stem}.md").write_text(page(content, text))
    return 1 if failures else 0


def run(tool: str, text: str, scheme: str) -> Run:
    """Of a method, and options of the recipe behind slashes."""
    method, *settings = text.split("/")
    return Run(tool, method, scheme, 8, 0, tuple((key, int(value)) for key, _, value in (s.partition("=") for s in settings)))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="what qforge opens: a folder, a .gguf file, demo")
    parser.add_argument("--adapter", help="LoRA folder, merged first")
    parser.add_argument("--calibration", type=Path, required=True, metavar="FILE")
    parser.add_argument("--text", type=Path, required=True, metavar="FILE")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--windows", type=int)
    parser.add_argument("--methods", nargs="+", default=METHODS, choices=METHODS, help="of both tools")
    parser.add_argument("--tools", type=Path, default=os.environ.get("QFORGE_PEERS", "."), metavar="DIR")
    parser.add_argument("--envs", type=Path, default="runs/peers", metavar="DIR")
    parser.add_argument("--out", type=Path, default="runs/vs_eight_bits", metavar="DIR")
    parser.add_argument("--reuse", choices=REUSED, default="peers", help="finished results in --out to take as they are")
    parser.add_argument("--save", metavar="NAME", help="also write benchmarks/results/vs_eight_bits-NAME.json and .md")
    return parser.parse_args()


def execute(job: Run, merged: Path, model_sha256: str, tokens: Tokens, tools: others.Tools, folder: Path, reuse: str) -> str | None:
    """Run one job, or find it done; a failure comes back as text."""
    wanted = kept.key(job, model_sha256, tokens.calibration.sha256) | {"scheme": job.scheme}
    if job.tool in REUSED[reuse] and kept.finished(folder, wanted, RESULT[job.tool]):
        return None
    kept.begin(folder)
    inputs = ["--tools", tools.runner, "--model", merged.resolve(), "--calibration", tokens.ids_file.resolve(), "--out", folder.resolve()]
    try:
        if job.tool == OURS:
            ours.run(job, merged, tokens, folder)
        else:
            others.launch(job, [eight_bits_adapter.__file__, job.method, job.scheme, *map(str, inputs)], folder, tools, {"bits_per_weight": float(job.bits)})
    except RuntimeError as e:
        return f"{job.name} {job.scheme} failed: {e}"
    kept.finish(folder, wanted)
    return None


def candidate(job: Run, folder: Path) -> Scorer:
    """The run's result, as it is executed."""
    result = folder / RESULT[job.tool]
    return RuntimeEngine(open_model(str(result))) if job.tool == OURS else Checkpoint(result)


def row(job: Run, folder: Path, original: Original, tokens: Tokens) -> dict[str, Any]:
    """What the table says of one run."""
    meter = json.loads((folder / "meter.json").read_text())
    figures = asdict(evaluate(candidate(job, folder), original, tokens.windows))
    return {
        "tool": job.tool,
        "method": job.method,
        "name": job.name,
        "scheme": job.scheme,
        "engine": figures["engine"],
        "kl": figures["kl_mean"],
        "kl_ci95": figures["kl_mean_ci95"],
        "perplexity": figures["candidate"]["perplexity"],
        "original": figures["reference"]["perplexity"],
        "top1": figures["top1_agreement"],
        "seconds": meter["wall_s"],
        "versions": meter["versions"],
    }


def main_table(rows: list[dict[str, Any]]) -> str:
    """All runs, scheme by scheme, the lowest divergence first."""
    lines = [
        f"| {r['name']} | {r['scheme']} | {r['kl']:.4f} | {r['kl_ci95'][0]:.4f}-{r['kl_ci95'][1]:.4f} | {r['perplexity']:.3f} "
        f"| {r['perplexity'] / r['original']:.4f} | {r['top1']:.3f} | {r['seconds']:.1f} |"
        for r in sorted(rows, key=lambda r: (r["scheme"], r["kl"]))
    ]
    return "\n".join([HEAD, "|---" * HEAD.count("| ") + "|", *lines])


def ratio_table(rows: list[dict[str, Any]]) -> str:
    """Ours of lowest divergence over the peer's of lowest divergence, for each scheme that both have."""
    lines = []
    for scheme in RUNS:
        found = [[row for row in rows if row["scheme"] == scheme and (row["tool"] == OURS) is own] for own in (True, False)]
        if all(found):
            best, rival = (min(of_one, key=lambda row: float(row["kl"])) for of_one in found)
            lines.append(f"| {scheme} | {best['name']} | {rival['name']} | {best['kl'] / rival['kl']:.2f} | {best['seconds'] / rival['seconds']:.2f} |")
    head = f"| scheme | our best | {PEER}'s best | KL | seconds |"
    return "\n".join([head, "|---" * 5 + "|", *lines]) if lines else ""


if __name__ == "__main__":
    sys.exit(main())
