"""`inspect` of ONNX graphs that no engine could run, and of sound ones by other exporters."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qforge.errors import ModelError
from qforge.export.inspection import inspect

CONTRIB = "com.microsoft"
BOTH = (("", 21), (CONTRIB, 1))


def value(name, kind=TensorProto.FLOAT, shape=(1, 32)):
    return helper.make_tensor_value_info(name, kind, shape)


def node(kind, inputs, outputs, domain="", **attributes):
    return helper.make_node(kind, inputs.split(" ") if inputs else [], outputs.split(" "), name=f"{kind}-{outputs}", domain=domain, **attributes)


def weight(name, *shape, dtype=np.float32):
    return numpy_helper.from_array(np.ones(shape, dtype), name)


def graph(nodes, *, inputs=("x",), outputs=("y",), weights=()):
    return helper.make_graph(nodes, "g", [value(n) for n in inputs], [value(n) for n in outputs], list(weights))


def model(inner, opsets=BOTH):
    return helper.make_model(inner, opset_imports=[helper.make_opsetid(*o) for o in opsets], ir_version=10)


def packed(*, shape=(8, 2, 8), scales=(16,), zeros=(8,), told=()):
    """MatMulNBits of 32 inputs, 8 outputs, 4 bits in blocks of 16."""
    about = {"K": 32, "N": 8, "bits": 4, "block_size": 16} | dict(told)
    weights = [weight("w", *shape, dtype=np.uint8), weight("s", *scales), weight("z", *zeros, dtype=np.uint8)]
    return model(graph([node("MatMulNBits", "x w s z", "y", CONTRIB, **about)], weights=weights))


def rotated(*, cos=(64, 8), sin=(64, 8)):
    """RotaryEmbedding of 2 heads 16 wide."""
    weights = [weight("p", 1, 1, dtype=np.int64), weight("c", *cos), weight("s", *sin)]
    return model(graph([node("RotaryEmbedding", "x p c s", "y", CONTRIB, num_heads=2)], weights=weights))


def branching(body, **other):
    """If with a body that reads `x` of the outer graph."""
    bodies = {"then_branch": graph([node("Relu", "x", "a")], inputs=(), outputs=("a",)), "else_branch": body}
    return model(graph([node("If", "c", "y", **bodies)], weights=[weight("c", dtype=np.bool_)], **other))


RELU = node("Relu", "x", "y")
BROKEN = {
    "an input from nowhere": (model(graph([node("Relu", "lost", "y")])), "'lost'"),
    "an input taken away": (model(graph([RELU], inputs=())), "'x'"),
    "an output from nowhere": (model(graph([node("Relu", "x", "z")])), "'y'"),
    "no outputs": (model(graph([RELU], outputs=())), "no outputs"),
    "a cycle": (model(graph([node("Relu", "b", "a"), node("Relu", "a", "b"), node("Relu", "b", "y")])), "'b'"),
    "not in order": (model(graph([node("Relu", "a", "y"), node("Relu", "x", "a")])), "'a'"),
    "operators of the future": (model(graph([RELU]), [("", 999)]), "version 999"),
    "no operator sets": (model(graph([RELU]), []), "opset"),
    "no operator set for contributed operators": (model(graph([node("FastGelu", "x", "y", CONTRIB)]), []), "opset"),
    "two weights of one name": (model(graph([node("Add", "x w", "y")], weights=[weight("w", 32), weight("w", 32)])), "'w'"),
    "two nodes of one output": (model(graph([RELU, node("Abs", "x", "y")])), "'y'"),
    "an operator that there is not": (model(graph([node("Rleu", "x", "y")])), "Rleu"),
    "a lost input in a body": (branching(graph([node("Relu", "lost", "b")], inputs=(), outputs=("b",))), "'lost'"),
    "two weights of one name in a body": (branching(graph([node("Add", "x w", "b")], inputs=(), outputs=("b",), weights=[weight("w", 32), weight("w", 32)])), "'w'"),
    "K": (packed(told={"K": 1 << 62}), "K 4611686018427387904"),
    "no K": (packed(told={"K": 0}), "K 0"),
    "K as a text": (packed(told={"K": "32"}), "K 0"),
    "bits": (packed(told={"bits": 8}), "8 bits"),
    "block size": (packed(told={"block_size": 32}), "blocks of 32"),
    "N": (packed(told={"N": 9}), "N 9"),
    "packed weights": (packed(shape=(8, 2, 4)), "'w'"),
    "scales": (packed(scales=(8,)), "'s'"),
    "rotation": (rotated(cos=(8, 64)), "cosines of shape"),
    "zero points": (packed(zeros=(4,)), "'z'"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_graph_is_refused_by_name(tmp_path, case):
    broken, named = BROKEN[case]
    (tmp_path / "model.onnx").write_bytes(broken.SerializeToString())
    with pytest.raises(ModelError, match=named) as said:
        inspect(tmp_path / "model.onnx")
    assert "\n" not in str(said.value)


REFUSED = {
    "an operator that ONNX Runtime lacks": node("FooBar", "x", "y", CONTRIB),
    "a type that there is not": node("Cast", "x", "y", to=999),
    "an output beyond those that there are, at which ONNX Runtime 1.31 ends its process": node("Split", "x", "y z", axis=-1, num_outputs=1),
    "no permutation": node("Transpose", "x", "y", perm=[0, 0]),
    "integers where floats belong": node("MatMulNBits", "i w s", "y", CONTRIB, K=32, N=8, bits=4, block_size=16),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_graph_that_the_engine_refuses_is_not_called_sound(tmp_path, case):
    weights = [weight("w", 8, 2, 8, dtype=np.uint8), weight("s", 16), weight("i", 1, 32, dtype=np.int64)]
    (tmp_path / "model.onnx").write_bytes(model(graph([REFUSED[case]], weights=weights)).SerializeToString())
    with pytest.raises(ModelError, match=r"onnxruntime refuses|onnxruntime cannot open .*SIGABRT") as said:
        inspect(tmp_path / "model.onnx", check=True)
    assert "\n" not in str(said.value)


def outside(folder, tensor):
    """The tensor, its data in a file beside the model."""
    (folder / "weights.bin").write_bytes(tensor.raw_data)
    onnx.external_data_helper.set_external_data(tensor, "weights.bin", 0, len(tensor.raw_data))
    tensor.ClearField("raw_data")
    return tensor


def genai(folder):
    """As onnxruntime-genai's builder makes them: the runtime's own operators, some in the standard domain, some with optional inputs left out."""
    weights = [outside(folder, weight("w", 8, 2, 8, dtype=np.uint8)), weight("s", 8, 2), weight("n", 32)]
    nodes = [node("SimplifiedLayerNormalization", "x n", "a", axis=-1), node("MatMulNBits", "a w s   ", "y", CONTRIB, K=32, N=8, bits=4, block_size=16)]
    return model(graph(nodes, weights=weights), [("", 21)])


def optimum(folder):
    """As ONNX Runtime's optimizer leaves BERT: LayerNormalization before the standard had it, weights among the inputs."""
    norm = node("LayerNormalization", "x n b", "y", axis=-1)
    return model(graph([norm], inputs=("x", "n", "b"), weights=[weight("n", 1, 32), weight("b", 1, 32)]), [("", 11), (CONTRIB, 1)])


def torch_onnx(folder):
    """As torch.onnx makes them: functions of a domain of its own, and optional inputs left out."""
    made = model(graph([node("Clip", "x  ", "a"), node("aten_relu", "a", "y", "pkg.onnxscript")]), [("", 18), ("pkg.onnxscript", 1)])
    made.functions.append(helper.make_function("pkg.onnxscript", "aten_relu", ["i"], ["o"], [node("Relu", "i", "o")], [helper.make_opsetid("", 18)]))
    return made


def loop(folder):
    """A body with weights of its own that reads a name of the outer graph."""
    body = helper.make_graph(
        [node("Identity", "go", "on"), node("Add", "state w", "a"), node("Add", "a x", "next")],
        "body",
        [value("i", TensorProto.INT64, []), value("go", TensorProto.BOOL, []), value("state")],
        [value("on", TensorProto.BOOL, []), value("next")],
        [outside(folder, weight("w", 32))],
    )
    return model(graph([node("Loop", "n  x", "y", body=body)], weights=[weight("n", dtype=np.int64)]))


def constant_outside(folder):
    return model(graph([node("Constant", "", "w", value=outside(folder, weight("", 32))), node("Add", "x w", "y")]))


def omitted(folder):
    return packed(shape=(8, 0, 8), scales=(0,), zeros=(0,))


def plain(folder):
    return branching(graph([node("Relu", "x", "b")], inputs=(), outputs=("b",)))


@pytest.mark.parametrize("made", [genai, optimum, torch_onnx, loop, constant_outside, omitted, plain])
def test_files_of_other_exporters_are_sound(tmp_path, monkeypatch, made):
    """Wherever the process stands, and when what is beside is a link, as in the cache of Hugging Face."""
    kept = tmp_path / "kept"
    kept.mkdir()
    (tmp_path / "model.onnx").write_bytes(made(kept).SerializeToString())
    for blob in kept.iterdir():
        (tmp_path / blob.name).symlink_to(blob)
    monkeypatch.chdir(kept)
    assert inspect(tmp_path / "model.onnx", check=True)["sound"]


def test_data_of_a_body_must_be_there(tmp_path):
    (tmp_path / "model.onnx").write_bytes(loop(tmp_path).SerializeToString())
    (tmp_path / "weights.bin").write_bytes(b"short")
    with pytest.raises(ModelError, match=r"weights\.bin"):
        inspect(tmp_path / "model.onnx")


def test_weights_may_share_all_of_their_bytes_but_no_part(tmp_path):
    (tmp_path / "weights.bin").write_bytes(bytes(512))
    for second, sound in ((0, True), (128, True), (64, False)):
        weights = [weight("v", 32), weight("w", 32)]
        for tensor, offset in zip(weights, (0, second), strict=True):
            onnx.external_data_helper.set_external_data(tensor, "weights.bin", offset, 128)
            tensor.ClearField("raw_data")
        inner = graph([node("Add", "x v", "a"), node("Add", "a w", "y")], weights=weights)
        (tmp_path / "model.onnx").write_bytes(model(inner).SerializeToString())
        if sound:
            assert inspect(tmp_path / "model.onnx")["sound"]
            continue
        with pytest.raises(ModelError, match=r"weights\.bin: tensors overlap"):
            inspect(tmp_path / "model.onnx")
