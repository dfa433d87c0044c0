"""An OpenVINO model made of our standard ONNX graph: weights in the form that its plugins decompress inside of products, and the cache as its state.

Letters: B batch, P cached tokens, K key/value heads, D head size, O output features, I input features.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import openvino as ov
import torch
from openvino import opset13 as ops
from openvino._offline_transformations import apply_make_stateful_transformation

from qforge.layouts.openvino_weights import OpenvinoWeights
from qforge.models.model import Model
from qforge.scheme import Scheme

BEAM = "beam_idx"
_FORMS = {(True, 4): ov.Type.i4, (True, 8): ov.Type.i8, (False, 4): ov.Type.u4, (False, 8): ov.Type.u8}


def build(onnx_file: Path, model: Model, metadata: Mapping[str, str]) -> ov.Model:
    """The whole model: inputs `input_ids`, `attention_mask`, `position_ids`, `beam_idx`, output `logits`, as optimum-intel and OpenVINO GenAI name them.

    Args:
        onnx_file: our standard form (`qdq`) of `model`, its data beside it.
        model: gives the integers.
        metadata: goes into `rt_info`.
    """
    found = ov.Core().read_model(onnx_file)
    _compress(found, model)
    _hold_cache(found)
    _name_all(found)
    for key, value in metadata.items():
        found.set_rt_info(value, ["qforge", key])
    return found


def _compress(found: ov.Model, model: Model) -> None:
    """Give each product with integer weights its weight `[O, I]` anew, grouped along the inputs (ONNX has it `[I, O]`, which plugins would transpose when they load it)."""
    layout = OpenvinoWeights()
    products = {node.get_friendly_name(): node for node in found.get_ops() if node.get_type_name() == "MatMul"}
    for module, scheme in model.schemes.items():
        if layout.supports(scheme) is not None:
            continue  # floats of 8 bits stay as ONNX has them
        node = products[f"/{module.replace('.', '/')}/MatMul"]
        product = ops.matmul(node.input_value(0), _weight(model, module, scheme), False, True, name=node.get_friendly_name())
        node.output(0).replace(product.output(0))


def _weight(model: Model, module: str, scheme: Scheme) -> ov.Node:
    layout, q = OpenvinoWeights(), model.linear(module)
    packed, kind = layout.pack(q), _FORMS[scheme.symmetric, layout.bits(scheme)]
    rows, groups, _ = packed["scale"].shape
    codes = (rows, groups, q.in_features // groups)
    weight = ops.convert(_constant(packed["weight"], codes, kind, f"{module}.weight"), "f32")
    if "zero_point" in packed:
        weight = ops.subtract(weight, ops.convert(_constant(packed["zero_point"], (rows, groups, 1), kind, f"{module}.zero_point"), "f32"))
    weight = ops.multiply(weight, ops.constant(packed["scale"].numpy(), name=f"{module}.scale"))
    return ops.reshape(weight, ops.constant(np.array([rows, q.in_features])), False, name=f"{module}.weight/dequantized")


def _constant(raw: torch.Tensor, shape: tuple[int, ...], kind: ov.Type, name: str) -> ov.Node:
    """A constant of packed bytes."""
    data = raw.flatten().numpy()
    assert data.nbytes == math.ceil(math.prod(shape) * kind.bitwidth / 8), (name, data.nbytes, shape)
    made = ov.op.Constant(ov.Tensor(data, ov.Shape(list(shape)), kind), shared_memory=False)
    made.set_friendly_name(name)
    return made


def _hold_cache(found: ov.Model) -> None:
    """Turn the cache's inputs and outputs into state, reordered by `beam_idx`, empty before the first call."""
    beam = ops.parameter([-1], ov.Type.i32, name=BEAM)
    beam.output(0).get_tensor().set_names({BEAM})
    found.add_parameters([beam])
    names = {}
    for past in [i for i in found.inputs if i.any_name.startswith("past_key_values.")]:
        readers = list(past.get_target_inputs())
        reordered = ops.gather(past, beam, ops.constant(0))
        for reader in readers:
            reader.replace_source_output(reordered.output(0))
        names[past.any_name] = past.any_name.replace("past_key_values", "present")
    found.validate_nodes_and_infer_types()
    apply_make_stateful_transformation(found, names)
    batch = ops.gather(ops.shape_of(found.input("input_ids")), ops.constant([0]), ops.constant(0))
    for node in found.get_ops():
        if node.get_type_name() == "ReadValue":
            _, heads, _, size = (d.get_length() if d.is_static else 0 for d in node.get_output_partial_shape(0))
            shape = ops.concat([batch, ops.constant(np.array([heads, 0, size]))], 0)
            node.set_arguments([ops.broadcast(ops.constant(0.0, node.get_output_element_type(0)), shape)])
    found.validate_nodes_and_infer_types()


def _name_all(found: ov.Model) -> None:
    """Give nodes that have no name of ours one by their place: OpenVINO's own count how many the process has made, and equal models must give equal bytes."""
    for place, node in enumerate(found.get_ordered_ops()):
        kind = node.get_type_name()
        if node.get_friendly_name().rpartition("_")[0] == kind:
            node.set_friendly_name(f"{kind}/{place}")


def weight_of(found: ov.Model, module: str) -> tuple[ov.Model, bool]:
    """A model without inputs that gives the dequantized weight of a linear, and whether it is `[O, I]` (else `[I, O]`)."""
    node = next(n for n in found.get_ops() if n.get_friendly_name() == f"/{module.replace('.', '/')}/MatMul")
    return ov.Model([ops.result(node.input_value(1))], [], module), bool(node.get_attributes()["transpose_b"])


def operators(found: ov.Model) -> dict[str, int]:
    """How many constants of codes the model holds, by type, and how its other matrices are stored."""
    counts: Counter[str] = Counter()
    for node in found.get_ops():
        if node.get_type_name() == "Constant" and node.get_friendly_name().endswith((".weight", ".zero_point")) and len(node.get_output_shape(0)) > 1:
            part = node.get_friendly_name().rpartition(".")[2]
            counts[f"{part} {node.get_output_element_type(0).to_string()}"] += 1
    return dict(sorted(counts.items()))
