"""How fast does the runtime decode on this machine's GPU, beside transformers' generate in the same process?

python benchmarks/gpu_runtime.py [--models 1B 8B] [--out benchmarks/results/gpu-runtime]

Models have the shapes of Llama 3.2 1B and Llama 3.1 8B and random weights: int4-g128 (and bf16) here, bf16 for transformers. Decoding: the median step of so many sequences after
128 tokens each, scheduling and sampling included, with and without recorded steps. Throughput: 64 requests of mixed lengths, tokens that were asked for by the second; transformers
takes them one by one (the first 4 of them) and all in one padded batch, which goes on until the longest is done.
Exit code 3 where there is no GPU or no Triton.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import itertools
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from qforge.models.spec import model_spec
from qforge.ops.layers import AttentionParameters
from qforge.ops.triton.present import missing
from qforge.qlinear import QuantizedLinear
from qforge.runtime.blocks import BlockPool
from qforge.runtime.cache_turn import CacheTurn
from qforge.runtime.decode_graphs import Capture, cuda_capture
from qforge.runtime.engine import Engine
from qforge.runtime.gpu_decoder import GpuDecoder
from qforge.runtime.linears import Dense, Linear, Weight, joined
from qforge.runtime.places import Gpu
from qforge.runtime.sequence import SamplingParams
from qforge.runtime.weights import Layer, Mlp, Weights
from qforge.scheme import parse
from qforge.types import ModelSpec

ROOT = Path(__file__).resolve().parent.parent
BLOCK, CONTEXT, PROMPT, STEPS = 16, 1024, 128, 48
BATCHES = (1, 8, 32, 64)
SCHEMES = ("int4-g128-sym", "none")
REQUESTS, ALONE = 64, 4
LENGTHS = (32, 256)  # tokens of a prompt, and of its continuation: from, to


@dataclass(frozen=True)
class Shape:
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocabulary, hidden_size=self.hidden, intermediate_size=self.intermediate, num_hidden_layers=self.layers, num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads, max_position_embeddings=CONTEXT, tie_word_embeddings=self.tied, bos_token_id=None, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip


SHAPES = {"1B": Shape(2048, 8192, 16, 32, 8, 128256, True), "8B": Shape(4096, 14336, 32, 32, 8, 128256, False)}


class Mute:
    """A tokenizer of requests that nobody reads."""

    def decode(self, tokens: list[int], **how: Any) -> str:
        return ""


def random_weights(spec: ModelSpec, place: Gpu, scheme: str, tied: bool) -> Weights:
    """Weights that keep activations of about one size."""
    g = torch.Generator(place.device).manual_seed(0)

    def weight(outputs: int, inputs: int) -> Weight:
        if scheme == "none":
            return Dense(torch.randn(outputs, inputs, generator=g, device=place.device, dtype=place.dtype) * inputs**-0.5)
        parsed = parse(scheme)
        codes = torch.randint(-8, 8, (outputs, inputs), generator=g, device=place.device, dtype=torch.int8)
        return QuantizedLinear(parsed, codes, torch.full(parsed.scale_shape(outputs, inputs), inputs**-0.5 / 4.6, device=place.device))  # 4.6: how far such codes deviate

    def product(*outputs: int, inputs: int) -> Linear:
        return joined([weight(n, inputs) for n in outputs], place.linear)

    heads, kv, width, inner = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.hidden_size, spec.intermediate_size
    ones = torch.ones(width, device=place.device)
    attention = AttentionParameters(spec.num_heads, spec.num_kv_heads, spec.head_dim, 0, spec.attention_scale)
    layers = []
    for rope in spec.layer_ropes:
        qkv, output = product(heads, kv, kv, inputs=width), product(width, inputs=heads)
        mlp = Mlp(product(inner, inner, inputs=width), product(width, inputs=inner))
        layers.append(Layer(ones, qkv, attention, output, None, ones, None, (mlp,), None, rope))
    table = torch.randn(spec.vocab_size, width, generator=g, device=place.device, dtype=place.dtype)
    head = place.tied(Dense(table))
    if not tied:
        head = type(head)(table, place.linear(Dense(torch.randn_like(table)), wide=True))
    return Weights(spec, layers, ones, head)


def engine(runner: GpuDecoder, blocks: int, most: int) -> Engine:
    """A fresh engine over a runner's weights and cache."""
    return Engine(runner, Mute(), turn=CacheTurn(BlockPool(blocks)), block_size=BLOCK, max_num_seqs=most, max_step_tokens=2048, max_context=CONTEXT, end_ids=frozenset())  # type: ignore[arg-type]


def prompt(tokens: int, vocabulary: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(vocabulary), k=tokens)


def requests(vocabulary: int) -> list[tuple[list[int], int]]:
    """(prompt, new tokens) of each."""
    draw = random.Random(1)
    return [(prompt(draw.randint(*LENGTHS), vocabulary, i), draw.randint(*LENGTHS)) for i in range(REQUESTS)]


def decode_ms(made: Engine, vocabulary: int, batch: int) -> float:
    """Median milliseconds of a step in which so many sequences each get a token."""
    for i in range(batch):
        made.add(prompt(PROMPT, vocabulary, i), SamplingParams(max_tokens=STEPS, ignore_eos=True))
    taken = []
    while made.busy():
        start = time.perf_counter()
        tokens = len(made.step())  # chosen tokens are on the host by then: the GPU has finished
        if tokens == batch:
            taken.append(time.perf_counter() - start)
    return statistics.median(taken[len(taken) // 4 :]) * 1e3


def served(made: Engine, work: list[tuple[list[int], int]]) -> float:
    """Tokens a second, all requests given at once."""
    start = time.perf_counter()
    for tokens, new in work:
        made.add(tokens, SamplingParams(max_tokens=new, ignore_eos=True))
    while made.busy():
        made.step()
    return sum(new for _, new in work) / (time.perf_counter() - start)


def ours(name: str, place: Gpu, capture: Callable[[], Capture], shape: Shape | None = None, ways: Iterable[bool] = (True, False)) -> Iterator[dict[str, Any]]:
    """Rows of the runtime: steps recorded or not, in these ways; a shape other than the name's for what is not measured."""
    shape = shape or SHAPES[name]
    spec = model_spec(shape.config())
    assert spec is not None
    most, work = max(*BATCHES, REQUESTS), requests(shape.vocabulary)
    blocks = most * -(-max(PROMPT + STEPS, 2 * LENGTHS[1]) // BLOCK)
    for scheme in SCHEMES:
        weights = random_weights(spec, place, scheme, shape.tied)
        for recorded in ways:
            runner = GpuDecoder(
                weights, place, num_blocks=blocks, block_size=BLOCK, stored=place.dtype, max_num_seqs=most, capture=capture() if recorded else None
            )  # fmt: skip
            base: dict[str, Any] = {"model": name, "engine": "qforge", "scheme": scheme, "recorded": recorded}
            if runner.graphs is not None:
                yield {**base, "what": "recording", "sizes": list(runner.graphs.sizes), "seconds": runner.graphs.seconds}
            decode_ms(engine(runner, blocks, most), shape.vocabulary, 1)  # compiles what is not compiled yet
            for batch in BATCHES:
                ms = decode_ms(engine(runner, blocks, most), shape.vocabulary, batch)
                yield {**base, "what": "decode", "batch": batch, "ms": ms, "tokens_per_second": batch / ms * 1e3, "weight_bytes": runner.weight_bytes()}
            served(engine(runner, blocks, most), work[:4])
            yield {**base, "what": "throughput", "requests": REQUESTS, "tokens_per_second": served(engine(runner, blocks, most), work)}
            del runner
            _free()
        del weights
        _free()


def theirs(name: str, place: Gpu) -> Iterator[dict[str, Any]]:
    """Rows of transformers' generate, greedy."""
    torch.manual_seed(0)
    with torch.device(place.device):
        model = LlamaForCausalLM(SHAPES[name].config()).to(place.dtype).eval()
    work = requests(SHAPES[name].vocabulary)
    base: dict[str, Any] = {"model": name, "engine": "transformers", "scheme": "none", "what": "throughput"}
    _generated(model, work[:1], place)
    for batch in BATCHES:
        steps = _seconds(lambda b=batch: _generated(model, [(prompt(PROMPT, SHAPES[name].vocabulary, i), STEPS) for i in range(b)], place))
        first = _seconds(lambda b=batch: _generated(model, [(prompt(PROMPT, SHAPES[name].vocabulary, i), 1) for i in range(b)], place))
        ms = (steps - first) / max(1, STEPS - 1) * 1e3
        yield {**base, "what": "decode", "batch": batch, "ms": ms, "tokens_per_second": batch / ms * 1e3}
    alone = work[:ALONE]
    seconds = _seconds(lambda: [_generated(model, [one], place) for one in alone])
    yield {**base, "how": "one by one", "requests": len(alone), "tokens_per_second": sum(new for _, new in alone) / seconds}
    seconds = _seconds(lambda: _generated(model, work, place))
    yield {**base, "how": "one batch", "requests": len(work), "tokens_per_second": sum(new for _, new in work) / seconds}


@torch.inference_mode()
def _generated(model: PreTrainedModel, work: list[tuple[list[int], int]], place: Gpu) -> None:
    longest = max(len(tokens) for tokens, _ in work)
    ids = torch.tensor([[0] * (longest - len(tokens)) + tokens for tokens, _ in work], device=place.device)
    mask = torch.tensor([[0] * (longest - len(tokens)) + [1] * len(tokens) for tokens, _ in work], device=place.device)
    model.generate(ids, attention_mask=mask, max_new_tokens=max(new for _, new in work), do_sample=False).cpu()


def _seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure(models: Iterable[str] = tuple(SHAPES), place: Gpu | None = None, capture: Callable[[], Capture] = cuda_capture) -> Iterator[dict[str, Any]]:
    """All rows, printed as they come."""
    place = place or Gpu(torch.device("cuda", 0), torch.bfloat16)
    _free()
    for name in models:
        for row in itertools.chain(ours(name, place, capture), theirs(name, place)):
            print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
            yield row
        _free()


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By model: what recording saves, and how many times transformers' throughput ours is, as far as the rows say."""
    found = []
    for name in dict.fromkeys(r["model"] for r in rows):
        of = [r for r in rows if r["model"] == name]
        ms = {r["recorded"]: r["ms"] for r in of if r["engine"] == "qforge" and r["what"] == "decode" and r["batch"] == 1 and r["scheme"] == SCHEMES[0]}
        ours_ = [r["tokens_per_second"] for r in of if r["engine"] == "qforge" and r["what"] == "throughput" and r["recorded"] and r["scheme"] == SCHEMES[0]]
        row: dict[str, Any] = {"model": name}
        if len(ms) == 2:
            row |= {"plain_ms": ms[False], "recorded_ms": ms[True], "recording_divides_by": ms[False] / ms[True]}
        row |= {f"times_{r['how'].replace(' ', '_')}": ours_[0] / r["tokens_per_second"] for r in of if "how" in r and ours_}
        found.append(row)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=tuple(SHAPES), default=tuple(SHAPES))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/gpu-runtime")
    args = parser.parse_args()
    reason = missing("cuda") if torch.cuda.is_available() else "torch finds no NVIDIA GPU"
    if reason:
        print(f"nothing was measured: {reason}", file=sys.stderr)
        return 3
    import triton

    rows = list(measure(args.models))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    facts = {
        "device": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "torch": torch.__version__, "triton": triton.__version__, "commit": commit,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M"),
    }  # fmt: skip
    args.out.with_suffix(".json").write_text(json.dumps({**facts, "summary": summary(rows), "rows": rows}, indent=1) + "\n")
    print(json.dumps(summary(rows), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
