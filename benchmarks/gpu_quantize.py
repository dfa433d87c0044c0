"""Does a card give what the processor gives? Plain rounding bit for bit, methods with calibration by what their models lose; a random model with the shapes of stories15M.

python benchmarks/gpu_quantize.py

The noise that a difference is held against is what other calibration text does to the same figure, on the processor. Exit code 3 where there is no GPU.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from qforge import numerics
from qforge.calibration.room import Room
from qforge.calibration.sequential import Job, quantize_blocks
from qforge.calibration.store import Piece, Store
from qforge.methods import Options, find, find_transforms, find_tuner
from qforge.methods.device import computing_on
from qforge.models.blocks import BlockModel
from qforge.models.model import open_model
from qforge.progress import SILENT
from qforge.qlinear import QuantizedLinear
from qforge.scheme import parse

ROUNDED = (
    "int4-g32-sym", "int4-g32-asym", "int4-channel-asym", "int3-g16-asym@f32", "int4-tensor-sym", "int8-channel-sym+int8-token", "fp8-e4m3-channel", "fp8-e4m3-block128",
    "nf4-g32", "nf4-g32@u8/g256:f32", "mxfp4", "nvfp4", "int4-g32-offset@u6/g256:f16",
)  # fmt: skip
CALIBRATED = (
    ("gptq", "int4-g32-asym"),
    ("awq", "int4-g32-asym"),
    ("awq gptq", "int4-g32-sym"),
    ("smoothquant", "int8-channel-sym+int8-tensor-static"),
    ("signround", "int4-g32-sym"),
)
LEAST_NOISE = 0.02  # of what is lost
Place = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a Llama; `windows` of `length` tokens calibrate it, and SignRound takes so many steps."""

    hidden: int = 288
    intermediate: int = 768
    layers: int = 6
    heads: int = 6
    vocabulary: int = 4096
    windows: int = 16
    length: int = 256
    steps: int = 50

    def text(self, seed: int) -> torch.Tensor:
        """Token ids `[windows, length]`."""
        return torch.randint(0, self.vocabulary, (self.windows, self.length), generator=torch.Generator().manual_seed(seed))


def random_model(folder: Path, shape: Shape) -> Path:
    """A model with weights that make its logits differ."""
    config = LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, intermediate_size=shape.intermediate, num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads, max_position_embeddings=shape.length, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, 0, 1.4 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    Tokenizer(BPE()).save(str(folder / "tokenizer.json"))  # nobody tokenizes, but a model has one
    return folder


def quantized(folder: Path, method: str, scheme: str, text: torch.Tensor, place: Place, steps: int) -> dict[str, QuantizedLinear]:
    """Every linear of a model, by name, quantized in a place, on the processor again."""
    blocks, names = BlockModel(open_model(str(folder))), method.split()
    quantizer, pieces = find(names), dict[int, Piece]()
    assert quantizer is not None
    schemes = {n: parse(scheme) for i in range(blocks.num_blocks) for n in blocks.linears(i)}
    job = Job(blocks, quantizer, schemes, Options(steps=steps), Room(), find_transforms(names), find_tuner(names))
    store = Store(pieces.get, pieces.__setitem__, lambda index: None, lambda index, hidden: None)
    with place():
        quantize_blocks(job, text if job.needs or job.transforms else None, store, SILENT)
    return {n: q for p in pieces.values() for n, q in p.linears.items()}


def logits(folder: Path, linears: Mapping[str, QuantizedLinear], text: torch.Tensor) -> torch.Tensor:
    """fp64 log probabilities `[.., V]` of a model with these linears."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.load_state_dict({f"{n}.weight": numerics.dequantize(q) for n, q in linears.items()}, strict=False)
    with torch.no_grad():
        found: torch.Tensor = model(text[:4]).logits.double().log_softmax(-1)
    return found


def divergence(p: torch.Tensor, q: torch.Tensor) -> float:
    """Mean KL divergence of q from p, nats a token."""
    return float((p.exp() * (p - q)).sum(-1).mean())


def roundings(place: Place, shape: Shape, schemes: Sequence[str] = ROUNDED) -> Iterator[dict[str, Any]]:
    """Rows: weights of a model's shapes rounded here and there."""
    quantizer = find("rtn")
    assert quantizer is not None
    shapes = ((shape.hidden, shape.hidden), (shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate), (shape.vocabulary, shape.hidden))
    for text in schemes:
        scheme = parse(text)
        different = total = 0
        for i, (outputs, inputs) in enumerate(shapes):
            if scheme.problem_with(outputs, inputs) is not None:
                continue
            weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(i)) * 0.05
            here, _ = quantizer.quantize(weight, scheme, None, Options())
            with place():
                there, _ = quantizer.quantize(weight.to(torch.get_default_device()), scheme, None, Options())
            there = there.to("cpu")
            different, total = different + int((here.codes != there.codes).sum()) + int(not here.equals(there)), total + weight.numel()
        yield {"what": "rounding", "scheme": text, "weights": total, "different": different, "right": total > 0 and different == 0}


def methods(place: Place, shape: Shape, calibrated: Sequence[tuple[str, str]] = CALIBRATED) -> Iterator[dict[str, Any]]:
    """Rows: what a model loses by each method, here, there, and with other text."""
    with tempfile.TemporaryDirectory() as at:
        folder, text, others = random_model(Path(at), shape), shape.text(1), (shape.text(2), shape.text(3))
        original = logits(folder, {}, text)
        for method, scheme in calibrated:
            lost, found, seconds = {}, {}, {}
            for name, used, where in (("here", text, _here), ("there", text, place), *((f"other_text_{i}", other, _here) for i, other in enumerate(others))):
                start = time.perf_counter()
                found[name] = quantized(folder, method, scheme, used, where, shape.steps)
                seconds[name] = time.perf_counter() - start
                lost[name] = divergence(original, logits(folder, found[name], text))
            noise = max(LEAST_NOISE * lost["here"], *(abs(lost[name] - lost["here"]) for name in lost if name.startswith("other_text")))
            same = [(found["there"][n].codes == q.codes).float().mean() for n, q in found["here"].items()]
            yield {
                "what": method, "scheme": scheme, "kl_here": lost["here"], "kl_there": lost["there"], "noise": noise, "codes_equal": float(torch.stack(same).mean()),
                "seconds_here": seconds["here"], "seconds_there": seconds["there"], "right": abs(lost["there"] - lost["here"]) <= noise,
            }  # fmt: skip


def _here() -> AbstractContextManager[Any]:
    return computing_on(torch.device("cpu"))


def rows(place: Place, shape: Shape | None = None) -> Iterator[dict[str, Any]]:
    """All rows, printed as they come."""
    shape = shape or Shape()
    for part in (roundings, methods):
        for row in part(place, shape):
            print(row, flush=True)
            yield row


def main() -> int:
    if not torch.cuda.is_available():
        print("nothing was compared: torch finds no NVIDIA GPU", file=sys.stderr)
        return 3
    found = list(rows(lambda: computing_on(torch.device("cuda", 0))))
    return 0 if all(row["right"] for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
