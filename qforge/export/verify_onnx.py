"""An ONNX export read back: each quantized weight dequantized by ONNX Runtime, all others by the onnx package, and the whole run beside our runtime.

Letters: O output features, I input features.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import NodeProto, TensorProto, external_data_helper, helper, numpy_helper

from qforge import numerics
from qforge.engines import onnx_runtime
from qforge.engines.base import Scorer
from qforge.errors import MissingCapabilityError
from qforge.export.agreement import EXACT_KL, agreement, next_token_logprobs
from qforge.export.onnx_graph import CONTRIB, IR_VERSION, OPSET, TYPES, attribute
from qforge.models.model import Model
from qforge.models.names import HEAD
from qforge.qlinear import QuantizedLinear
from qforge.types import Verification

_SLAB = 256  # inputs whose weights are read from MatMulNBits in one call
_PROMPTS, _TOKENS = 4, 24  # of greedy generation


@dataclass(frozen=True, slots=True)
class Stored:
    """A file without its data: initializers by name, nodes in order, and the folder that holds the data."""

    folder: Path
    initializers: dict[str, TensorProto]
    nodes: list[NodeProto]
    metadata: dict[str, str]

    def tensor(self, name: str) -> TensorProto:
        """An initializer with its data, read by the onnx package."""
        found = TensorProto()
        found.CopyFrom(self.initializers[name])
        if found.data_location == TensorProto.EXTERNAL:
            external_data_helper.load_external_data_for_tensor(found, str(self.folder))
            found.data_location = TensorProto.DEFAULT
            del found.external_data[:]
        return found

    def operators(self) -> Counter[str]:
        """How often each operator occurs, DequantizeLinear with the type that it takes: `MatMulNBits int4`, `DequantizeLinear FLOAT8E4M3FN`, `Gather BFLOAT16`, `Add`."""
        return Counter(self._label(n) for n in self.nodes)

    def _label(self, node: NodeProto) -> str:
        if node.op_type == "MatMulNBits":
            return f"MatMulNBits int{attribute(node, 'bits')} level {attribute(node, 'accuracy_level')}"
        if node.op_type in ("DequantizeLinear", "Gather", "Transpose") and node.input[0] in self.initializers:
            return f"{node.op_type} {TensorProto.DataType.Name(self.initializers[node.input[0]].data_type)}"
        return str(node.op_type)


def read(folder: Path) -> Stored:
    """The file of an export, its data left where it is."""
    model = onnx.load(str(folder / onnx_runtime.MODEL), load_external_data=False)
    return Stored(folder, {t.name: t for t in model.graph.initializer}, list(model.graph.node), {p.key: p.value for p in model.metadata_props})


def verify_onnx(folder: Path, model: Model, scorer: Scorer, prompts: Sequence[Sequence[int]]) -> tuple[list[Verification], list[str]]:
    """Read an export back; arguments and answer as `verify.verify`."""
    stored = read(folder)
    reason = onnx_runtime.missing()
    if reason is not None:
        return [], [f"{onnx_runtime.NAME}: {reason}"]
    done = [verify_weights(stored, model), verify_execution(stored, model, scorer, prompts)]
    try:
        done.append(verify_greedy(folder, scorer, prompts, kl_bound=_kl_bound(stored, model)))
    except MissingCapabilityError as e:
        return done, [f"{onnx_runtime.GENAI}: {e}"]
    return done, []


def verify_weights(stored: Stored, model: Model) -> Verification:
    """Every weight of the file against the model's: equal bit for bit, plain matrices in the model's own dtype, vectors and input scales in that of activations?"""
    seen: set[str] = set()
    unequal, rounded = [], set()
    for node in stored.nodes:
        module, _, part = (node.input[1 if node.op_type == "MatMulNBits" else 0] if node.input else "").rpartition(".")
        if module in model.schemes and node.op_type in ("MatMulNBits", "DequantizeLinear"):
            seen |= {n for n in node.input[1:] if n in stored.initializers} | {f"{module}.{part}"}
            q, scale = model.linear(module), f"{module}.input_scale"
            if not _linear_equal(stored, node, q):
                unequal.append(module)
            if q.input_scale is not None:
                seen.add(scale)
                held = _held(stored, scale, q.input_scale.reshape(()))
                unequal += [scale] if held is None else []
                rounded |= {"input scales rounded to 16 bits"} if held is False else set()
    for name, held in _others(stored, model):
        seen.add(name)
        unequal += [name] if held is None else []
        rounded |= {"norms and biases rounded to 16 bits"} if held is False else set()
    missing = sorted(set(model.schemes) - {n.rpartition(".")[0] for n in seen})
    extra = sorted(n for n in stored.initializers if n not in seen and not n.startswith(("/constants/", "model.rope.")))
    problems = [f"{what}: {', '.join(names[:3])}" for what, names in (("unequal", unequal), ("missing", missing), ("not in the model", extra)) if names]
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(stored.operators().items()) if " " in kind)
    told = ", ".join(sorted(rounded)) or None
    return Verification("onnxruntime, operator by operator", version("onnxruntime"), weights_equal=not problems, note="; ".join([*problems, kinds]), rounded=told)


def _linear_equal(stored: Stored, node: NodeProto, q: QuantizedLinear) -> bool:
    """Run the node alone, as it stands in the file, and compare what it makes of the weight `[I, O]` with the artifact's."""
    expected = numerics.dequantize(q).T.numpy()
    return all(np.array_equal(found, expected[start : start + len(found)]) for start, found in _dequantized(stored, node, len(expected)))


def _dequantized(stored: Stored, node: NodeProto, inputs: int) -> Iterator[tuple[int, np.ndarray]]:
    """fp32 rows of the weight, and where they begin: of DequantizeLinear what it gives, of MatMulNBits its product with rows of the identity."""
    alone = NodeProto()
    alone.CopyFrom(node)
    del alone.output[:]
    alone.output.append("y")
    packed = node.op_type == "MatMulNBits"
    for a in alone.attribute:
        if a.name == "accuracy_level":
            a.i = 1  # level 4 would round the identity
    weights = [_wide(stored.tensor(n)) for n in node.input if n in stored.initializers]
    ends = [helper.make_tensor_value_info(node.input[0], TensorProto.FLOAT, None)] if packed else []
    graph = helper.make_graph([alone], "weight", ends, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)], weights)
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(CONTRIB, 1)]
    session = onnx_runtime.session(helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION).SerializeToString())
    if not packed:
        yield 0, session.run(None, {})[0]
        return
    for start in range(0, inputs, _SLAB):
        yield start, session.run(None, {node.input[0]: np.eye(min(_SLAB, inputs - start), inputs, start, dtype=np.float32)})[0]


def _wide(tensor: TensorProto) -> TensorProto:
    """A tensor as it is, but fp16 scales in fp32: the same values, and products that are not rounded."""
    if tensor.data_type != TensorProto.FLOAT16:
        return tensor
    return numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name)


def _others(stored: Stored, model: Model) -> Iterator[tuple[str, bool | None]]:
    """Name of each plain tensor that the file must hold, and whether it does, as `_held`: matrices as the model stores them, vectors in the type of activations."""
    assert model.spec is not None
    for name in model.weights.names():
        module = name.removesuffix(".weight")
        if module in model.schemes and name.endswith(".weight"):
            continue
        if module == HEAD and model.config.tie_word_embeddings:
            continue
        tensor = model.weights.read(name)
        if tensor.dim() > 1:
            yield name, (name in stored.initializers and _equal(stored.tensor(name), tensor)) or None
        else:
            yield name, _held(stored, name, tensor.float() + (model.spec.norm_offset if name.endswith("norm.weight") else 0.0))


def _equal(found: TensorProto, tensor: torch.Tensor) -> bool:
    return bool(found.data_type == TYPES[tensor.dtype]) and found.raw_data == tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def _held(stored: Stored, name: str, expected: torch.Tensor) -> bool | None:
    """Whether the file has a vector or a scale (fp32) in the type of activations: True as it is, False rounded once to it, None where it has none, or another."""
    if name not in stored.initializers:
        return None
    values: Any = numpy_helper.to_array(stored.tensor(name))
    once = expected.numpy().astype(values.dtype)
    return bool(np.array_equal(once.astype(np.float32), expected.numpy())) if np.array_equal(values, once) else None


def verify_execution(stored: Stored, model: Model, scorer: Scorer, prompts: Sequence[Sequence[int]]) -> Verification:
    """Divergence of ONNX Runtime's next-token distributions from the scorer's.

    Raises:
        ModelError: ONNX Runtime refuses the file.
    """
    engine = onnx_runtime.OnnxRuntimeEngine(stored.folder)
    kind = stored.metadata["qforge.type"]
    note = {
        "matmulnbits": "MatMulNBits at accuracy level 1 (fp32)",
        "matmulnbits-level4": "MatMulNBits at accuracy level 4: it rounds activations to 8 bits as it runs",
        "qdq": "standard operators in fp32 (session.qdq_matmulnbits_accuracy_level: 1)",
        "qdq-f16": "standard operators in fp16",
    }[kind]
    kl, same_first, largest = agreement(next_token_logprobs(scorer, prompts), next_token_logprobs(engine, prompts))
    note = f"against {scorer.name}; {note}; largest difference of a log-probability {largest:.2g}"
    bound = _kl_bound(stored, model)
    return Verification(engine.name, engine.version, kl_mean=kl, top1_agreement=same_first, positions=len(prompts), note=note, executed=True, kl_bound=bound)


def _kl_bound(stored: Stored, model: Model) -> float | None:
    """Of a file that is computed in fp32: neither ONNX Runtime nor the scheme rounds activations."""
    rounded = any(s.activations is not None for s in model.schemes.values())
    return EXACT_KL if stored.metadata["qforge.type"] in ("matmulnbits", "qdq") and not rounded else None


def verify_greedy(folder: Path, scorer: Scorer, prompts: Sequence[Sequence[int]], *, kl_bound: float | None = None) -> Verification:
    """Divergence of onnxruntime-genai's next-token distributions from the scorer's, and whether each token that it generates is the one that the scorer ranks first there;
    `kl_bound` as in `Verification`.

    Raises:
        MissingCapabilityError: onnxruntime-genai is not installed.
        ModelError: it refuses the folder.
    """
    equal = total = 0
    for prompt in list(prompts)[:: max(1, len(prompts) // _PROMPTS)][:_PROMPTS]:
        tokens = onnx_runtime.greedy(folder, prompt, _TOKENS)
        scored = torch.cat([piece.argmax(-1) for piece in scorer.score([[*prompt, *tokens]])])[len(prompt) - 1 :]
        equal += int((scored == torch.tensor(tokens)).sum())
        total += len(tokens)
    kl, _, largest = agreement(next_token_logprobs(scorer, prompts), onnx_runtime.genai_logprobs(folder, prompts))
    note = f"greedy generation from {min(_PROMPTS, len(prompts))} prompts: {equal} of {total} tokens are those that {scorer.name} ranks first"
    note += f"; largest difference of a log-probability after {len(prompts)} prompts {largest:.2g}"
    same = equal / max(total, 1)
    return Verification(onnx_runtime.GENAI, version(onnx_runtime.GENAI), kl_mean=kl, top1_agreement=same, positions=total, note=note, executed=True, kl_bound=kl_bound)
