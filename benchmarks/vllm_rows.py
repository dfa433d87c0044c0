"""What `exports.py` asks vLLM's CPU build about W8A8 and FP8 checkpoints: how far is it from our runtime, and is that the rounding of activations and nothing else?

Three answers. Each of its linears alone, given the same random inputs, against our product of the same integers with activations rounded as vLLM does. Its distributions against
transformers' code with that rounding. And its distributions over the dequantized weights, where nothing is rounded, against our runtime over these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch

from qforge import numerics
from qforge.engines import checkpoints
from qforge.engines.runtime_engine import RuntimeEngine
from qforge.engines.transformers_engine import TransformersEngine
from qforge.errors import ModelError
from qforge.export.agreement import agreement, next_token_logprobs
from qforge.export.hf import write_artifact
from qforge.models.model import Model, open_model
from qforge.scheme import Number, Scheme
from qforge.types import Verification

LINEAR = 1e-5  # of its largest output; a wrong code in one place is 1e-3
TWIN = "dequantized twin"
OWN_ROUNDING = "transformers with vLLM's rounding"


def rows(folder: Path, artifact: Model, prompts: Sequence[Sequence[int]], scratch: Path) -> list[Verification]:
    """What vLLM makes of a checkpoint, and of its twin without any quantization, which is written to `scratch`.

    Raises:
        MissingCapabilityError: vLLM is not installed.
        ModelError: it refuses the checkpoint.
    """
    ran = _run(folder, artifact, prompts)
    off = max(_distance(artifact, *product) for product in ran.products)
    if off > LINEAR:
        raise ModelError(f"vLLM: a linear alone is {off:.2g} of its largest output away from ours over the same integers")
    note = f"its {len(ran.products)} linears alone are at most {off:.1g} of their largest output away from ours"
    found = [_compared(ran, "qforge", next_token_logprobs(RuntimeEngine(artifact), prompts), note)]
    with vllm_rounding():
        found.append(_compared(ran, OWN_ROUNDING, next_token_logprobs(TransformersEngine(artifact), prompts), note))
    write_artifact(scratch, artifact, {}, artifact.linear, {})
    twin = open_model(str(scratch))
    found.append(_compared(_run(scratch, twin, prompts), "qforge", next_token_logprobs(RuntimeEngine(twin), prompts), f"{TWIN}: the same weights in {twin.dtype}, nothing rounded"))
    return found


def _run(folder: Path, model: Model, prompts: Sequence[Sequence[int]]) -> checkpoints.Executed:
    parameters = sum(torch.Size(model.weights.info(n).shape).numel() for n in model.weights.names())
    return checkpoints.run("compressed-tensors", folder, prompts, list(model.schemes), model.config.vocab_size, parameters, engine="vLLM")


def _compared(ran: checkpoints.Executed, name: str, expected: torch.Tensor, note: str) -> Verification:
    kl, same_first, largest = agreement(expected, ran.logprobs)
    note = f"against {name}; {note}; largest difference of a log-probability {largest:.2g}"
    return Verification(ran.engine, ran.version, kl_mean=kl, top1_agreement=same_first, positions=len(expected), note=note, executed=True)


def _distance(artifact: Model, names: Sequence[str], x: torch.Tensor, theirs: torch.Tensor) -> float:
    """How far a product is from ours over the same integers."""
    with vllm_rounding():
        ours = torch.cat([numerics.linear(x, artifact.linear(name)) for name in names], 1)
    return apart(ours, theirs)


def apart(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Largest difference, relative to our largest value."""
    return float((ours - theirs).abs().max() / ours.abs().max())


@contextmanager
def vllm_rounding() -> Iterator[None]:
    """Our reference rounds activations as vLLM does while this is open."""
    with mock.patch.object(numerics, "quantize_activations", as_vllm_rounds):
        yield


def as_vllm_rounds(x: torch.Tensor, scheme: Scheme, static_scale: torch.Tensor | None = None) -> torch.Tensor:
    """Dynamic activations as vLLM 0.32 rounds them on CPUs, dequantized: int8 in 127 steps to either side (compressed-tensors and we: 127.5), FP8 by reciprocals of scales."""
    assert scheme.activations is not None
    assert static_scale is None
    amount = x.abs().amax(-1, keepdim=True)
    if scheme.activations.number is Number.FP8_E4M3:
        scale = (amount / 448).clamp(min=1 / (448 * 512))
        return (x * scale.reciprocal()).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    scale = amount / 127
    return (x / scale).round() * scale
