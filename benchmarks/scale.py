"""A model that does not fit: GPTQ of a sharded random-weight Llama, its peak resident memory and its time by part, beside what --dry-run predicts.

    python benchmarks/scale.py --out runs/scale                                   TinyLlama's shape (1.1 billion parameters), 128 x 512 tokens
    python benchmarks/scale.py --out runs/scale --layers 2 --samples 16           the same blocks, fewer of them, in minutes

The model is made by a seed, shard by shard, and made again only when its shape changes. The run is a process of its own. Its memory is watched from outside
(VmHWM, which counts resident pages of every kind) and read from its own results; the bytes of its unnamed spill files, which lie in the page cache or on disk, are given beside it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from qforge import pipeline
from qforge.export.hf import write_json
from qforge.export.writer import Piece, write_safetensors
from qforge.models.weights import TensorInfo

RESULTS = Path(__file__).parent / "results"
SHAPE = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 2048}
SHARD_BYTES = 500_000_000
POLL_SECONDS = 0.05  # a peak lasts longer: it is made of matrix products


def main() -> int:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    make_model(args.out / "model", args.layers, args.seed)
    recipe = write_recipe(args)
    _, plan, predicted = pipeline.plan(recipe)
    run, seen = execute(recipe, args.out / "run")
    content = describe(args, plan, predicted, run, seen)
    text = page(content)
    print(text)
    for folder, stem in [(args.out, "scale")] + [(RESULTS, f"scale-{args.save}")] * bool(args.save):
        folder.mkdir(exist_ok=True)
        (folder / f"{stem}.json").write_text(json.dumps(content, indent=1) + "\n")
        (folder / f"{stem}.md").write_text(text + "\n")
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for model, recipe, run and table")
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--scheme", default="int4-g128-sym")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--save", metavar="NAME", help="also write benchmarks/results/scale-NAME.json and .md")
    return parser.parse_args()


def make_model(folder: Path, layers: int, seed: int) -> None:
    """A sharded bf16 Llama of seeded normal weights and a tokenizer of one token a word, unless it is there."""
    made = {**SHAPE, "layers": layers, "seed": seed}
    mark = folder / "made.json"
    if mark.is_file() and json.loads(mark.read_text()) == made:
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = LlamaConfig(**SHAPE, num_hidden_layers=layers, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0, dtype="bfloat16", architectures=["LlamaForCausalLM"])
    config.save_pretrained(folder)
    write_safetensors(folder, [weight(i, name, shape, seed) for i, (name, shape) in enumerate(shapes(layers).items())], shard_bytes=SHARD_BYTES)
    tokenizer().save_pretrained(folder)
    write_json(mark, made)


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model, in the order of the file."""
    d, f, v = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["vocab_size"]
    kv = d * SHAPE["num_key_value_heads"] // SHAPE["num_attention_heads"]
    block = {
        "input_layernorm": (d,), "self_attn.q_proj": (d, d), "self_attn.k_proj": (kv, d), "self_attn.v_proj": (kv, d), "self_attn.o_proj": (d, d),
        "post_attention_layernorm": (d,), "mlp.gate_proj": (f, d), "mlp.up_proj": (f, d), "mlp.down_proj": (d, f),
    }  # fmt: skip
    blocks = {f"model.layers.{i}.{name}.weight": shape for i in range(layers) for name, shape in block.items()}
    return {"model.embed_tokens.weight": (v, d), **blocks, "model.norm.weight": (d,), "lm_head.weight": (v, d)}


def weight(index: int, name: str, shape: tuple[int, ...], seed: int) -> Piece:
    """One tensor, made when it is written: norms of ones, normal values that keep the size of activations elsewhere."""

    def read() -> dict[str, torch.Tensor]:
        if len(shape) == 1:
            return {name: torch.ones(shape, dtype=torch.bfloat16)}
        generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
        return {name: (torch.randn(shape, generator=generator) * shape[1] ** -0.5).bfloat16()}

    return Piece({name: TensorInfo(shape, torch.bfloat16)}, read)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, so that a text of random words is a text of random ids."""
    raw = Tokenizer(models.WordLevel({"<s>": 0, **{f"w{i}": i for i in range(1, SHAPE["vocab_size"])}}, unk_token="<s>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<s>", unk_token="<s>")


def write_recipe(args: argparse.Namespace) -> Path:
    """The recipe and its calibration text, in the output folder."""
    rng = random.Random(args.seed)
    (args.out / "words.txt").write_text(" ".join(f"w{rng.randrange(1, SHAPE['vocab_size'])}" for _ in range(args.samples * args.length)))
    recipe = {
        "version": 1,
        "model": {"source": "./model"},
        "calibration": {"source": "./words.txt", "samples": args.samples, "sequence_length": args.length},
        "quantize": {"method": "gptq", "scheme": args.scheme},
        "evaluate": None,
        "run": {"threads": args.threads},
    }
    path = args.out / "recipe.yaml"
    path.write_text(json.dumps(recipe, indent=1))
    return path


def execute(recipe: Path, out: Path) -> tuple[dict[str, Any], dict[str, float]]:
    """Run the recipe in a process of its own and watch it; its results, and what was seen from outside."""
    command = [sys.executable, "-m", "qforge", "quantize", "--recipe", str(recipe), "--out", str(out), "--fresh"]
    seen = {"peak_bytes": 0.0, "spilled_bytes": 0.0}
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    for code in iter(process.poll, 0):
        if code is not None:
            raise SystemExit(f"{' '.join(command)} ended with {code}")
        for name, value in (("peak_bytes", resident(process.pid)), ("spilled_bytes", spilled(process.pid))):
            seen[name] = max(seen[name], value)
        time.sleep(POLL_SECONDS)
    used = os.times()
    seen |= {"seconds": time.perf_counter() - start, "user_seconds": used.children_user, "system_seconds": used.children_system}
    return json.loads((out / "results.json").read_text()), seen


def resident(pid: int) -> int:
    """The peak of a process's resident memory since it was last reset, bytes; 0 when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def spilled(pid: int) -> int:
    """Bytes of a process's open files that have no name any more."""
    total = 0
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if str(os.readlink(link)).endswith(" (deleted)"):
                total += link.stat().st_blocks * 512
    except OSError:
        pass
    return total


def describe(args: argparse.Namespace, plan: Any, predicted: Any, run: dict[str, Any], seen: dict[str, float]) -> dict[str, Any]:
    """Everything that the table says."""
    measured = {"peak_bytes": max(seen["peak_bytes"], run["peak_rss_bytes"]), "weights_bytes": run["artifact"]["weights_bytes"], "seconds": run["timings"]["quantize"]}
    estimated = {"peak_bytes": sum(predicted.peak_bytes.values()), "weights_bytes": plan.size_bytes, "seconds": predicted.seconds["quantize"]}
    return {
        "date": time.strftime("%Y-%m-%d"),
        "environment": run["environment"],
        "shape": {**SHAPE, "layers": args.layers, "parameters": plan.parameters},
        "calibration": {"samples": args.samples, "length": args.length},
        "scheme": args.scheme,
        "measured": measured,
        "estimated": estimated,
        "estimated_parts": predicted.peak_bytes,
        "seen": seen,
        "memory": run["memory"],
        "timings": run["timings"],
        "parts": run["parts"]["quantize"],
    }


def page(content: dict[str, Any]) -> str:
    """The Markdown page."""
    shape, env, seen, billions = content["shape"], content["environment"], content["seen"], content["shape"]["parameters"] / 1e9
    units = {"peak_bytes": ("peak resident memory, MiB", 2**20), "weights_bytes": ("artifact, MB", 1e6), "seconds": ("seconds to quantize", 1)}
    rows = []
    for name, (label, unit) in units.items():
        real, expected = content["measured"][name], content["estimated"][name]
        rows.append(f"| {label} | {real / unit:,.0f} | {expected / unit:,.0f} | {expected / real:.2f} |")
    parts = content["timings"] | {f"quantize: {name}": value for name, value in content["parts"].items()}
    timed = [f"| {name} | {value:,.1f} | {value / billions:,.1f} |" for name, value in parts.items()]
    tokens = f"{content['calibration']['samples']} x {content['calibration']['length']} calibration tokens"
    process = f"{seen['seconds']:,.0f} s, {seen['user_seconds']:,.0f} s of user and {seen['system_seconds']:,.0f} s of system time"
    head = [
        f"# GPTQ of {billions:.2f} billion random parameters, {shape['layers']} layers, {content['scheme']}",
        f"{content['date']}, {env['cpu']}, {env['threads']} threads, torch {env['torch']}; {tokens}, sharded bf16, nothing evaluated.",
        f"Spill file: {seen['spilled_bytes'] / 1e6:,.0f} MB at most. Process: {process}.",
        "\n".join(["| | measured | --dry-run | ratio |", "|---|---|---|---|", *rows]),
        "\n".join(["| part | seconds | per billion parameters |", "|---|---|---|", *timed]),
    ]
    return "\n\n".join(head)


if __name__ == "__main__":
    sys.exit(main())
