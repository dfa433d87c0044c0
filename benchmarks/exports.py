"""Every export of a real model, read and run by engines that are not ours: are the weights that the engine makes equal bit for bit, and are its distributions ours?

    python benchmarks/exports.py --model DIR --text FILE --out OUT [--formats gptq,awq] [--save NAME]

The model is rounded to nearest in each scheme (an export transcribes integers, whoever chose them), written as an artifact, exported and verified as `qforge export` does it.
KL divergence is of the engine's next-token distributions from our runtime's over the same integers. An engine that is not installed here is a row that says so.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from qforge import numerics
from qforge.engines.runtime_engine import RuntimeEngine
from qforge.engines.transformers_engine import TransformersEngine
from qforge.errors import QforgeError
from qforge.export import exporter
from qforge.export.agreement import seeded_prompts
from qforge.export.hf import write_artifact
from qforge.export.verify import verify
from qforge.export.verify_checkpoint import verify_in_engine
from qforge.models.model import Model, open_model
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Scheme, parse
from qforge.stages.outcome import environment
from qforge.text.documents import documents
from qforge.text.windows import evaluation_windows
from qforge.types import Verification

RESULTS = Path(__file__).parent / "results"
HELD = {"gptq", "awq"}  # also run by transformers, which takes them through GPTQModel's kernels
ROWS: list[tuple[str, str | None, str]] = [
    ("gptq", None, "int4-g32-sym"),
    ("gptq", None, "int4-g32-asym"),
    ("gptq", None, "int8-channel-sym"),
    ("awq", None, "int4-g32-sym"),
    ("awq", None, "int4-g32-asym"),
    ("compressed-tensors", None, "int4-g32-sym"),
    ("compressed-tensors", None, "int4-g32-asym"),
    ("compressed-tensors", None, "int8-channel-sym"),
    ("compressed-tensors", None, "int8-channel-sym+int8-token"),
    ("compressed-tensors", None, "fp8-e4m3-channel"),
    ("compressed-tensors", None, "fp8-e4m3-channel+fp8-e4m3-token"),
    ("compressed-tensors", None, "fp8-e4m3-tensor+fp8-e4m3-token"),
    ("compressed-tensors", None, "fp8-e4m3-block32+fp8-e4m3-g32"),
    ("compressed-tensors", None, "nvfp4"),
    ("compressed-tensors", None, "mxfp4"),
    ("bitsandbytes", None, "nf4-g32@u8/g256:f32"),
    ("gguf", "f32", "int4-g32-asym"),
    ("gguf", "q4_0", "int4-g32-sym"),
    ("gguf", "q5_0", "int4-g32-asym"),
    ("gguf", "q8_0", "int8-channel-sym"),
]


def main() -> int:
    args = arguments()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    source = open_model(str(args.model))
    tokenizer = source.tokenizer()
    windows = evaluation_windows(documents(str(args.text), role="evaluation", folder=Path(), tokenizer=tokenizer), tokenizer, 256, context=source.config.max_position_embeddings)
    prompts = seeded_prompts(windows.ids, args.positions)
    rows = []
    for format_name, kind, scheme in ROWS:
        if args.formats is None or format_name in args.formats.split(","):
            for row in measured(source, format_name, kind, scheme, args.out, prompts):
                rows.append(row)
                print(line(row), flush=True)
            if args.save:
                save(args, len(prompts), rows)
    return 1 if any(r["weights_equal"] is False for r in rows) else 0


def save(args: argparse.Namespace, positions: int, rows: list[dict[str, Any]]) -> None:
    content = {"model": args.model.name, "text": args.text.name, "positions": positions, "date": time.strftime("%Y-%m-%d"), "environment": environment(), "rows": rows}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"exports-{args.save}.json").write_text(json.dumps(content, indent=1) + "\n")
    (RESULTS / f"exports-{args.save}.md").write_text(page(content))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("--model", "--text", "--out"):
        parser.add_argument(flag, type=Path, required=True)
    parser.add_argument("--formats")
    parser.add_argument("--positions", type=int, default=32)
    parser.add_argument("--save")
    return parser.parse_args()


def measured(source: Model, format_name: str, kind: str | None, text: str, out: Path, prompts: list[list[int]]) -> Iterator[dict[str, Any]]:
    """One row for each engine that read the export."""
    scheme = parse(text)
    modules = [n.removesuffix(".weight") for n in source.weights.names() if n.endswith("_proj.weight")]
    write_artifact(out / "artifact", source, dict.fromkeys(modules, scheme), lambda name: rounded(source, name, scheme), {})
    artifact = open_model(str(out / "artifact"))
    folder = out / f"{format_name}-{kind or 'auto'}"
    shutil.rmtree(folder, ignore_errors=True)
    paths = exporter(format_name, kind).write(artifact, folder)
    scorer = RuntimeEngine(artifact)
    found, left_out = verify(format_name, paths, artifact, scorer, prompts)
    if format_name in HELD and not left_out:
        try:
            found.append(verify_in_engine(format_name, folder, artifact, scorer, prompts, engine="transformers"))
        except QforgeError as e:
            left_out.append(str(e))
    if scheme.activations is not None:  # a code of an activation turns on differences of 1e-6 between engines; transformers' own code on our rounding has none
        found.append(verify_in_engine(format_name, folder, artifact, TransformersEngine(artifact), prompts))
    for verification in found:
        yield {"format": format_name, "type": kind, "scheme": text, **asdict(verification)}
    for reason in left_out:
        yield {"format": format_name, "type": kind, "scheme": text, **asdict(Verification("none", "", note=reason))}


def rounded(source: Model, name: str, scheme: Scheme) -> QuantizedLinear:
    weight = source.weights.read(f"{name}.weight").float()
    return numerics.quantize(weight, scheme, *numerics.minmax_parameters(weight, scheme), upper=numerics.super_scales(weight, scheme))


def line(row: dict[str, Any]) -> str:
    kl = "" if row["kl_mean"] is None else f"{row['kl_mean']:.2g}"
    top1 = "" if row["top1_agreement"] is None else f"{row['top1_agreement']:.3f}"
    equal = {True: "equal", False: "UNEQUAL", None: ""}[row["weights_equal"]]
    return f"| {row['format']} {row['type'] or ''} | {row['scheme']} | {row['engine']} {row['version']} | {equal} | {kl} | {top1} | {row['note'] or ''} |"


def page(content: dict[str, Any]) -> str:
    when = f"{content['date']}, {content['positions']} positions of {content['text']}, rounded to nearest; KL divergence in nats from our runtime."
    head = f"# Exports run by other engines: {content['model']}\n\n{when}\n"
    table = ["| format | scheme | engine | weights, bit for bit | KL | top-1 | note |", "|---|---|---|---|---|---|---|", *map(line, content["rows"])]
    return "\n".join([head, *table, "", "Made by `python benchmarks/exports.py`, see there.", ""])


if __name__ == "__main__":
    raise SystemExit(main())
