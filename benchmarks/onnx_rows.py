"""What `exports.py` asks ONNX Runtime about files that round activations: is the distance of its distributions from ours flipped codes and nothing else?

Each linear of the graph, given what it was given there in a run of the whole file, against our product of the same integers with our rounding.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper
from vllm_rows import LINEAR, apart

from qforge import numerics
from qforge.engines.onnx_runtime import MODEL, OnnxRuntimeEngine
from qforge.errors import ModelError
from qforge.models.model import Model
from qforge.types import Verification


def explained(ran: Verification, folder: Path, artifact: Model, prompts: Sequence[Sequence[int]], scratch: Path) -> Verification:
    """A run's figures, with how far its linears are from ours.

    Raises:
        ModelError: further than the order of sums can make them.
    """
    off = max(_distances(folder, artifact, max(prompts, key=len), scratch))
    if off > LINEAR:
        raise ModelError(f"ONNX Runtime: a linear is {off:.2g} of its largest output away from ours over the same integers")
    return replace(ran, note=f"{ran.note}; its {len(artifact.schemes)} linears, given what they are given in a run, are at most {off:.1g} of their largest output away from ours")


def _distances(folder: Path, artifact: Model, prompt: Sequence[int], scratch: Path) -> list[float]:
    """Of each linear: largest difference of its output from ours, relative to our largest value."""
    graph = onnx.load(str(folder / MODEL), load_external_data=False)
    nodes = {n.name: n for n in graph.graph.node}
    ends = []
    for module in artifact.schemes:
        name = f"/{module.replace('.', '/')}"
        ends += [nodes[f"{name}/input/Abs"].input[0], nodes[f"{name}/MatMul"].output[0]]
    graph.graph.output.extend(helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in dict.fromkeys(ends))
    scratch.mkdir(parents=True, exist_ok=True)
    (scratch / f"{MODEL}.data").unlink(missing_ok=True)
    os.link(folder / f"{MODEL}.data", scratch / f"{MODEL}.data")
    onnx.save(graph, str(scratch / MODEL))
    _, found = OnnxRuntimeEngine(scratch).step(np.array([prompt]), np.ones((1, len(prompt)), np.int64))
    values = dict(zip(dict.fromkeys(ends), map(torch.from_numpy, found[-len(set(ends)) :]), strict=True))
    pairs = zip(artifact.schemes, ends[::2], ends[1::2], strict=True)
    return [apart(numerics.linear(values[x][0], artifact.linear(module)), values[y][0]) for module, x, y in pairs]
