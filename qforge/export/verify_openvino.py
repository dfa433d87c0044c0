"""An OpenVINO export read back: each quantized weight dequantized by OpenVINO, alone, all others as it reads them, and the whole run beside our runtime."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qforge import numerics
from qforge.engines import openvino_runtime
from qforge.engines.base import Scorer
from qforge.engines.openvino_runtime import OpenvinoEngine
from qforge.export.agreement import EXACT_KL, agreement, next_token_logprobs
from qforge.models.model import Model
from qforge.models.names import HEAD
from qforge.types import Verification

OPERATORS = "openvino, weight by weight"


def verify_openvino(folder: Path, model: Model, scorer: Scorer, prompts: Sequence[Sequence[int]]) -> tuple[list[Verification], list[str]]:
    """Read an export back; arguments and answer as `verify.verify`."""
    reason = openvino_runtime.missing()
    if reason is not None:
        return [], [f"not executed: {reason}"]
    return [verify_weights(folder, model), verify_execution(folder, model, scorer, prompts)], []


def verify_weights(folder: Path, model: Model) -> Verification:
    """Every weight of the file against the model's: equal bit for bit, the unquantized ones in the model's own dtype?"""
    from qforge.export import openvino_graph

    found = openvino_runtime.read(folder)
    unequal = [module for module in model.schemes if not np.array_equal(_dequantized(found, module), numerics.dequantize(model.linear(module)).numpy())]
    unequal += [name for name, equal in _others(found, model) if not equal]
    kinds = ", ".join(f"{count} {kind}" for kind, count in openvino_graph.operators(found).items())
    note = f"unequal: {', '.join(unequal[:3])}; {kinds}" if unequal else kinds
    return Verification(OPERATORS, openvino_runtime.installed(), weights_equal=not unequal, note=note)


def _dequantized(found: Any, module: str) -> np.ndarray:
    """`[O, I]` as OpenVINO's CPU plugin computes the nodes before the product."""
    from qforge.export import openvino_graph

    alone, by_rows = openvino_graph.weight_of(found, module)
    weight: np.ndarray = openvino_runtime.compiled(alone)([])[0]
    return weight if by_rows else weight.T


def _others(found: Any, model: Model) -> Iterator[tuple[str, bool]]:
    """Name of each unquantized tensor of the model, and whether the file holds it."""
    assert model.spec is not None
    constants = {n.get_friendly_name(): n for n in found.get_ops() if n.get_type_name() == "Constant"}
    for name in model.weights.names():
        module = name.removesuffix(".weight")
        if (module in model.schemes and name.endswith(".weight")) or (module == HEAD and model.config.tie_word_embeddings):
            continue
        tensor = model.weights.read(name)
        if tensor.dim() == 1:
            tensor = tensor.float() + (model.spec.norm_offset if name.endswith("norm.weight") else 0.0)
        yield name, name in constants and constants[name].data.tobytes() == tensor.contiguous().view(torch.uint8).numpy().tobytes()


def verify_execution(folder: Path, model: Model, scorer: Scorer, prompts: Sequence[Sequence[int]]) -> Verification:
    """Divergence of OpenVINO's next-token distributions from the scorer's, computed in fp32; and beside it how far its own settings take it.

    Raises:
        ModelError: OpenVINO refuses the file.
    """
    ours = next_token_logprobs(scorer, prompts)
    engine = OpenvinoEngine(folder)
    kl, same_first, largest = agreement(ours, next_token_logprobs(engine, prompts))
    left_alone, _, _ = agreement(ours, next_token_logprobs(OpenvinoEngine(folder, exact=False), prompts))
    note = f"against {scorer.name}; computed in fp32; largest difference of a log-probability {largest:.2g}"
    note += f"; with OpenVINO's own settings, which round activations and cache, a KL divergence of {left_alone:.2g}"
    bound = None if any(s.activations is not None for s in model.schemes.values()) else EXACT_KL
    return Verification(engine.name, engine.version, kl_mean=kl, top1_agreement=same_first, positions=len(prompts), note=note, executed=True, kl_bound=bound)
