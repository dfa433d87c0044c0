"""Every export of a real model, read and run by engines that are not ours: are the weights that the engine makes equal bit for bit, and are its distributions ours?

    python benchmarks/exports.py --model DIR --text FILE --out OUT [--formats gptq,awq:int4-g32-sym] [--threads N] [--save NAME]

The model is rounded to nearest in each scheme (an export transcribes integers, whoever chose them), written as an artifact, exported and verified as `qforge export` does it.
KL divergence is of the engine's next-token distributions from our runtime's over the same integers. An engine that is not installed here is a row that says so, and then the exit
code is 1, as it is where weights differ or an engine that computes in fp32 is too far away. Saved rows become docs/exports.md (`make docs`); with `--formats` the other rows
stay as they were measured.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import onnx_rows
import torch
import vllm_rows
from safetensors import safe_open

from qforge import numerics
from qforge.engines.runtime_engine import RuntimeEngine
from qforge.engines.transformers_engine import TransformersEngine
from qforge.errors import QforgeError
from qforge.export import exporter
from qforge.export.agreement import EXACT_KL, seeded_prompts
from qforge.export.hf import write_artifact
from qforge.export.verify import verify
from qforge.export.verify_checkpoint import verify_in_engine
from qforge.export.verify_gguf import verify_gguf_weights, verify_in_llama_cpp
from qforge.export.verify_onnx import read, verify_execution
from qforge.models.model import Model, open_model
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Scheme, parse
from qforge.stages.outcome import environment
from qforge.text.documents import documents
from qforge.text.windows import evaluation_windows
from qforge.types import Verification

RESULTS = Path(__file__).parent / "results"
VLLM = {"int8-channel-sym+int8-token", "fp8-e4m3-channel+fp8-e4m3-token"}  # what vLLM's CPU build runs without AMX, of compressed-tensors
HELD = {"gptq", "awq"}  # also run by transformers, which takes them through GPTQModel's kernels
ROWS: list[tuple[str, str | None, str]] = [
    ("gguf", "f32", "int4-g32-asym"),
    ("gguf", "q4_0", "int4-g32-sym"),
    ("gguf", "q5_0", "int4-g32-asym"),
    ("gguf", "q8_0", "int8-channel-sym"),
    ("gguf", "q4_k_m", "int8-channel-sym"),
    ("gguf", "q6_k", "int8-channel-sym"),
    ("onnx", "matmulnbits", "int4-g32-sym"),
    ("onnx", "matmulnbits", "int4-g32-asym"),
    ("onnx", "matmulnbits", "int8-channel-sym"),
    ("onnx", "matmulnbits-level4", "int4-g32-sym"),
    ("onnx", "qdq", "int4-g32-sym"),
    ("onnx", "qdq", "int4-g32-asym"),
    ("onnx", "qdq", "int8-channel-sym"),
    ("onnx", "qdq", "fp8-e4m3-channel"),
    ("onnx", "qdq", "int8-channel-sym+int8-token"),
    ("onnx", "qdq", "fp8-e4m3-channel+fp8-e4m3-token"),
    ("openvino", None, "int4-g32-sym"),
    ("openvino", None, "int4-g32-asym"),
    ("openvino", None, "int8-channel-sym"),
    ("openvino", None, "fp8-e4m3-channel"),
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
    ("mlx", None, "int4-g32-sym"),
    ("mlx", None, "int4-g32-asym"),
    ("mlx", None, "int8-channel-sym"),
    ("gptq", None, "int4-g32-sym"),
    ("gptq", None, "int4-g32-asym"),
    ("gptq", None, "int8-channel-sym"),
    ("awq", None, "int4-g32-sym"),
    ("awq", None, "int4-g32-asym"),
]


def main() -> int:
    args = arguments()
    torch.set_num_threads(args.threads)
    source = open_model(str(args.model))
    tokenizer = source.tokenizer()
    windows = evaluation_windows(documents(str(args.text), role="evaluation", folder=Path(), tokenizer=tokenizer), tokenizer, 256, context=source.config.max_position_embeddings)
    prompts = seeded_prompts(windows.ids, args.positions)
    path = None if args.save is None else RESULTS / f"exports-{args.save}.json"
    rows = kept(path, [r for r in ROWS if not wanted(r, args)], args)
    failed = False
    for case in (r for r in ROWS if wanted(r, args)):
        for row in measured(source, *case, args.out, prompts):
            rows.append(row)
            failed |= bool(row["failed"])
            print(line(row), flush=True)
        if path is not None:
            content = {"model": args.model.name, "text": args.text.name, "positions": args.positions, "date": time.strftime("%Y-%m-%d"), "environment": environment()}
            path.write_text(json.dumps({**content, "rows": sorted(rows, key=place)}, indent=1) + "\n")
    return int(failed)


def wanted(row: tuple[str, str | None, str], args: argparse.Namespace) -> bool:
    return args.formats is None or bool({row[0], f"{row[0]}:{row[2]}"} & set(args.formats.split(",")))


def kept(path: Path | None, cases: list[tuple[str, str | None, str]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of an earlier run over the same positions that this one does not measure again."""
    if path is None or not path.exists() or not cases:
        return []
    earlier = json.loads(path.read_text())
    if (earlier["model"], earlier["text"], earlier["positions"]) != (args.model.name, args.text.name, args.positions):
        raise SystemExit(f"{path.name} is of {earlier['positions']} positions of {earlier['text']}: give the same, or measure all formats")
    return [row for row in earlier["rows"] if (row["format"], row["type"], row["scheme"]) in cases]


def place(row: dict[str, Any]) -> int:
    return ROWS.index((row["format"], row["type"], row["scheme"]))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("--model", "--text", "--out"):
        parser.add_argument(flag, type=Path, required=True)
    parser.add_argument("--formats")
    parser.add_argument("--positions", type=int, default=32)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--save")
    return parser.parse_args()


def measured(source: Model, format_name: str, kind: str | None, text: str, out: Path, prompts: list[list[int]]) -> Iterator[dict[str, Any]]:
    """One row for each engine that read the export, and one for each that could not."""
    scheme = parse(text)
    modules = [n.removesuffix(".weight") for n in source.weights.names() if n.endswith("_proj.weight")]
    if not (out / text / "config.json").exists():
        write_artifact(out / text, source, dict.fromkeys(modules, scheme), lambda name: rounded(source, name, scheme), {})
    artifact = open_model(str(out / text))
    folder = out / "export"
    shutil.rmtree(folder, ignore_errors=True)
    paths = exporter(format_name, kind).write(artifact, folder)
    try:
        found, left_out = read_back(format_name, paths, folder, artifact, prompts, out / "twin")
    except QforgeError as e:
        found, left_out = [], [str(e)]
    held = tensors(folder)
    for verification in [*found, *(Verification("none", "", note=reason) for reason in left_out)]:
        yield {"format": format_name, "type": kind, "scheme": text, "tensors": held, **asdict(verification), "failed": problem(kind, scheme, verification)}


def tensors(folder: Path) -> str | None:
    """How many tensors of each kind and type a checkpoint holds; of other files their readers tell."""
    kinds: Counter[str] = Counter()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            kinds.update(f"{name.rpartition('.')[2]} {file.get_slice(name).get_dtype()}" for name in file.keys())  # noqa: SIM118  (a safetensors handle, not a dictionary)
    return ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or None


def read_back(format_name: str, paths: list[Path], folder: Path, artifact: Model, prompts: list[list[int]], scratch: Path) -> tuple[list[Verification], list[str]]:
    """What `verify` finds, and more: transformers beside GPTQModel; llama.cpp over the same weights in F32; bitsandbytes without its bf16 kernel; vLLM; and where activations are
    rounded, since a code turns on differences of 1e-6, ONNX Runtime's linears one by one and transformers with our rounding."""
    scorer = RuntimeEngine(artifact)
    found, left_out = verify(format_name, paths, artifact, scorer, prompts)
    if format_name in HELD and not left_out:
        try:
            found.append(verify_in_engine(format_name, folder, artifact, scorer, prompts, engine="transformers"))
        except QforgeError as e:
            left_out.append(str(e))
    if format_name == "gguf" and not left_out and "f32" not in paths[0].stem:
        found.append(twin_in_llama_cpp(paths[0], prompts, scratch))
    if format_name == "bitsandbytes" and not left_out:
        found.append(verify_in_engine(format_name, folder, artifact, scorer, prompts, engine="portable"))
    if any(s.activations is not None for s in artifact.schemes.values()):
        reference = TransformersEngine(artifact)
        if format_name == "onnx":
            found.append(verify_execution(read(folder), reference, prompts))
            found = [onnx_rows.explained(v, folder, artifact, prompts, scratch) if v.engine == "onnxruntime" else v for v in found]
        else:
            found.append(verify_in_engine(format_name, folder, artifact, reference, prompts))
        if format_name == "compressed-tensors" and next(iter(map(str, artifact.schemes.values()))) in VLLM:
            try:
                found += vllm_rows.rows(folder, artifact, prompts, scratch)
            except QforgeError as e:
                left_out.append(str(e))
    return found, left_out


def twin_in_llama_cpp(path: Path, prompts: list[list[int]], scratch: Path) -> Verification:
    """What llama.cpp makes of the weights that a GGUF file holds where they stand in F32: its kernels round no activations then."""
    held = open_model(str(path), dtype="float32")
    (twin,) = exporter("gguf", "f32").write(held, scratch)
    ran = verify_in_llama_cpp(twin, held, RuntimeEngine(held), prompts)
    return replace(ran, weights_equal=verify_gguf_weights(twin, held).weights_equal, note=f"{ran.note}; {vllm_rows.TWIN}: the same weights in F32")


def problem(kind: str | None, scheme: Scheme, found: Verification) -> str | None:
    """What of a row must not be: other weights, or, where the engine computes in fp32, other distributions."""
    if found.weights_equal is False:
        return "weights differ"
    rounds = scheme.activations is not None or kind in ("q4_0", "q5_0", "q8_0", "q4_k_m", "q6_k", "matmulnbits-level4") or found.engine == "GPTQModel"
    rounds &= vllm_rows.TWIN not in str(found.note)
    if found.kl_mean is not None and not rounds and found.kl_mean >= EXACT_KL:
        return f"KL divergence of {EXACT_KL} or more in fp32"
    return None if found.engine != "none" else "not run"


def rounded(source: Model, name: str, scheme: Scheme) -> QuantizedLinear:
    weight = source.weights.read(f"{name}.weight").float()
    return numerics.quantize(weight, scheme, *numerics.minmax_parameters(weight, scheme), upper=numerics.super_scales(weight, scheme))


def line(row: dict[str, Any]) -> str:
    kl = "" if row["kl_mean"] is None else f"{row['kl_mean']:.2g}"
    top1 = "" if row["top1_agreement"] is None else f"{row['top1_agreement']:.3f}"
    equal = {True: "equal", False: "UNEQUAL", None: ""}[row["weights_equal"]]
    return f"| {row['format']} {row['type'] or ''} | {row['scheme']} | {row['engine']} {row['version']} | {equal} | {kl} | {top1} | {row['failed'] or ''} | {row['note'] or ''} |"


if __name__ == "__main__":
    raise SystemExit(main())
