"""`qforge inspect`: what it says of each kind of file, and one line with exit code 2 for damaged ones."""

from __future__ import annotations

import json
import re
import resource
import shutil
import struct

import onnx
import pytest
import tiny
import torch
from quantized_models import quantized, rtn

from qforge.cli.main import main
from qforge.engines import openvino_runtime
from qforge.errors import ModelError
from qforge.export.gguf import GgufExporter
from qforge.export.gptq import GptqExporter
from qforge.export.hf import write_artifact
from qforge.export.inspection import inspect
from qforge.export.onnx import OnnxExporter
from qforge.export.openvino import OpenvinoExporter
from qforge.export.triton_server import TritonExporter
from qforge.models.model import open_model
from qforge.ops.native_module import instruction_sets
from qforge.runtime import LLM

OPENVINO = pytest.mark.skipif(openvino_runtime.missing() is not None, reason="openvino is not installed")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inspect")
    source = open_model(str(tiny.make(folder / "plain", layers=2, dtype=torch.bfloat16)))
    schemes, linear = rtn(source, "int4-g32-sym", overrides={"down_proj": "int8-g64-sym"})
    write_artifact(folder / "run/model", source, schemes, linear, {"recipe": {"version": 1}, "recipe_sha256": "abc"})
    model = quantized(source)
    GptqExporter().write(model, folder / "gptq")
    GgufExporter().write(model, folder / "gguf")
    OnnxExporter().write(model, folder / "onnx")
    OnnxExporter("qdq").write(model, folder / "qdq")
    TritonExporter().write(model, folder / "triton")
    TritonExporter("vllm").write(model, folder / "served")
    if openvino_runtime.missing() is None:
        OpenvinoExporter().write(model, folder / "openvino")
    return folder


def run(capsys, *args):
    with pytest.raises(SystemExit) as ended:
        main(["inspect", *map(str, args)])
    out, err = capsys.readouterr()
    return ended.value.code, out, err


@pytest.mark.parametrize(
    ("name", "kind", "schemes"),
    [
        ("plain", "Hugging Face model", {}),
        ("run", "qforge artifact", {"int4-g32-sym": 12, "int8-g64-sym": 2}),
        ("gptq", "gptq checkpoint", {"int4-g32-sym@f16": 14}),
        ("gguf/model-q4_0.gguf", "GGUF file", {"Q4_0": 14, "BF16": 1}),
        ("gguf", "GGUF file", {"Q4_0": 14, "BF16": 1}),
        ("onnx", "ONNX model", {"MatMulNBits int4 level 1": 14}),
        ("onnx/model.onnx", "ONNX model", {"MatMulNBits int4 level 1": 14}),
        ("qdq", "ONNX model", {"DequantizeLinear INT4": 14}),
        ("triton", "ONNX model", {"MatMulNBits int4 level 1": 14}),
        ("served", "qforge artifact", {"int4-g32-sym": 14}),
        pytest.param("openvino", "OpenVINO model", {"i4, groups of 32": 14}, marks=OPENVINO),
    ],
)
def test_what_it_says(files, capsys, name, kind, schemes):
    code, out, _ = run(capsys, files / name, "--json", "--check")
    found = json.loads(out)
    assert code == 0
    assert (found["kind"], found["family"], found["schemes"], found["sound"]) == (kind, "llama", schemes, True)
    plain = open_model(str(files / "plain")).weights
    assert found["parameters"] == sum(torch.Size(plain.info(n).shape).numel() for n in plain.names())
    assert 3 < found["bits_per_parameter"] < 33  # of all that is stored; `bits_per_weight` means the quantized layers, as in results.json
    assert "bits_per_weight" not in found
    assert (found["provenance"] or {}).get("recipe_sha256") == ("abc" if name == "run" else None)
    code, out, _ = run(capsys, files / name)
    assert code == 0
    assert kind in out
    assert f"{found['bits_per_parameter']:.2f} bits per parameter" in out
    assert "sound:      yes" in out


def test_bits_of_the_quantized_weights(files, capsys):
    found = json.loads(run(capsys, files / "run", "--json")[1])
    by_name = {e["name"]: e for e in found["linears"]}
    assert by_name["model.layers.0.mlp.up_proj"]["bits_per_weight"] == 4.5
    assert by_name["model.layers.1.mlp.down_proj"]["bits_per_weight"] == 8.25
    assert 4.5 < found["quantized_bits_per_weight"] < 8.25


def test_the_kernel_of_each_linear_is_named(files, capsys):
    found = json.loads(run(capsys, files / "run", "--json")[1])
    for e in found["linears"]:
        both = "native-bf16" if "amx" in instruction_sets() else "native-a16"
        assert {a: k.split()[0] for a, k in e["kernels"].items()} == {"fp": "native", "int16": "native-a16", "bf16": both, "int8": "native-a8"}
        floats = next(isa for isa in ("avx512-vnni", "avx2", "neon-dotprod", "portable") if isa in instruction_sets())
        assert all(k.split()[1].rstrip("],") == f"[{code}" for k, code in ((e["kernels"]["int8"], instruction_sets()[0]), (e["kernels"]["fp"], floats)))
        assert "(not native-a8: it rounds activations, for --activations int8)" in e["kernels"]["fp"]
    assert found["runtime"] == {"runs": True, "reason": None}
    text = run(capsys, files / "run")[1]
    assert f"kernels:    native-a8 [{instruction_sets()[0]}] ({len(found['linears'])}) with --activations int8" in text
    assert "native-dense" in text


@pytest.mark.parametrize("name", ["plain", "run", "gptq", "gguf/model-q4_0.gguf"])
@pytest.mark.parametrize("activations", ["fp", "int8"])
def test_it_names_the_kernels_that_run(files, capsys, name, activations):
    found = json.loads(run(capsys, files / name, "--json")[1])
    runs = LLM(str(files / name), activations=activations, num_blocks=8).kernels()
    named = [e["kernels"][activations].split()[0] for e in found["linears"]] + [e["kernel"].split()[0] for e in found["unquantized"]]
    assert {k.split()[0] for k in runs} == set(named)
    assert len(named) == 15
    assert [e["shape"] for e in found["unquantized"] if e["name"] == "lm_head"] == [[found["metadata"].get("vocab_size") or 384, 64]]


def test_a_gguf_without_a_linear_does_not_run_and_says_why(files, tmp_path, capsys):
    data = (files / "gguf/model-q4_0.gguf").read_bytes()
    assert b"blk.1.attn_q.weight" in data
    (tmp_path / "m.gguf").write_bytes(data.replace(b"blk.1.attn_q.weight", b"blk.1.attn_x.weight"))
    code, out, _ = run(capsys, tmp_path / "m.gguf", "--json")
    assert code == 0
    assert json.loads(out)["runtime"] == {"runs": False, "reason": "tensor 'model.layers.1.self_attn.q_proj.weight' is missing"}


def test_a_gguf_tensor_without_values_is_one_line_and_exit_code_2(files, tmp_path, capsys):
    data = (files / "gguf/model-q4_0.gguf").read_bytes()
    name = b"blk.0.attn_q.weight"
    rows = data.rindex(name) + len(name) + 4 + 8  # behind the number of dimensions and the first of them
    (tmp_path / "m.gguf").write_bytes(data[:rows] + bytes(8) + data[rows + 8 :])
    code, out, err = run(capsys, tmp_path / "m.gguf")
    assert (code, out) == (2, "")
    assert err.strip().splitlines() == [err.strip()]
    assert "tensor 'blk.0.attn_q.weight' has no values (shape [0, 64])" in err


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_metadata_that_json_has_no_number_for_are_texts(files, tmp_path, capsys, value):
    data = (files / "gguf/model-q4_0.gguf").read_bytes()
    key = b"llama.rope.freq_base"
    at = data.index(key) + len(key) + 4  # behind its type
    (tmp_path / "m.gguf").write_bytes(data[:at] + struct.pack("<f", float(value)) + data[at + 4 :])
    code, out, _ = run(capsys, tmp_path / "m.gguf", "--json")
    assert code == 0
    assert json.loads(out, parse_constant=pytest.fail)["metadata"]["llama.rope.freq_base"] == value
    assert f"llama.rope.freq_base = {value}\n" in run(capsys, tmp_path / "m.gguf")[1]


def test_a_limited_instruction_set_is_named(files, capsys, monkeypatch):
    monkeypatch.setenv("QFORGE_ISA", "portable")
    found = json.loads(run(capsys, files / "run", "--json")[1])
    assert {e["kernels"][a].split()[1] for e in found["linears"] for a in ("fp", "int8")} | {e["kernel"].split()[1] for e in found["unquantized"]} == {"[portable]"}


def _cut(data, n):
    return data[:n]


def _flip_header_length(data):
    return struct.pack("<Q", 1 << 60) + data[8:]


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("run/model/model.safetensors", lambda d: _cut(d, len(d) - 100)),
        ("run/model/model.safetensors", lambda d: _cut(d, 4)),
        ("run/model/model.safetensors", _flip_header_length),
        ("run/model/model.safetensors", lambda d: b""),
        ("run/model/config.json", lambda d: d[: len(d) // 2]),
        ("run/model/config.json", lambda d: d.replace(b'"num_bits": 4', b'"num_bits": 77')),
        ("run/model/config.json", lambda d: d.replace(b'"group_size": 32', b'"group_size": 16')),
        ("gptq/config.json", lambda d: d.replace(b'"bits": 4', b'"bits": "four"')),
        ("plain/generation_config.json", lambda d: d[: len(d) // 2]),
        ("plain/model.safetensors", lambda d: d.replace(b'"__metadata__":{"format":"pt"}', b'"__metadata__":"formats of pt"')),
        ("onnx/tokenizer.json", lambda d: d[: len(d) // 2]),
        ("onnx/genai_config.json", lambda d: d.replace(b'"decoder": {', b'"coder": {')),
        ("onnx/genai_config.json", lambda d: d.replace(b'"past_key_values.%d.key"', b'"past.%d.key"')),
        ("onnx/genai_config.json", lambda d: d.replace(b'"num_hidden_layers": 2', b'"num_hidden_layers": 3')),
        ("onnx/genai_config.json", lambda d: d.replace(b'"num_hidden_layers": 2', b'"num_hidden_layers": 2000000000')),
        ("onnx/genai_config.json", lambda d: d.replace(b'"head_size": 16', b'"head_size": 32')),
        ("onnx/genai_config.json", lambda d: d.replace(b'"vocab_size": ', b'"vocab_size": 1')),
        ("onnx/genai_config.json", lambda d: d.replace(b'"logits"', b"[]", 1)),
        pytest.param("openvino/openvino_model.bin", lambda d: _cut(d, len(d) - 100), marks=OPENVINO),
        pytest.param("openvino/openvino_model.xml", lambda d: _cut(d, len(d) - 100), marks=OPENVINO),
        pytest.param("openvino/openvino_model.xml", lambda d: d.replace(b'type="i4"', b'type="i5"', 1), marks=OPENVINO),
        pytest.param("openvino/openvino_model.xml", lambda d: d.replace(b'type="i4"', b'type="i8"', 1), marks=OPENVINO),
        pytest.param("openvino/openvino_model.xml", lambda d: d.replace(b'offset="', b'offset="99999999', 1), marks=OPENVINO),
        ("gguf/model-q4_0.gguf", lambda d: _cut(d, len(d) - 100)),
        ("gguf/model-q4_0.gguf", lambda d: _cut(d, 30)),
        ("gguf/model-q4_0.gguf", lambda d: b"GGML" + d[4:]),
        ("gguf/model-q4_0.gguf", lambda d: d[:8] + struct.pack("<Q", 1 << 61) + d[16:]),
    ],
)
def test_damaged_files_are_one_line_and_exit_code_2(files, capsys, name, damage):
    path = files / name
    whole = path.read_bytes()
    changed = damage(whole)
    assert changed != whole
    path.write_bytes(changed)
    try:
        target = path if path.suffix == ".gguf" else path.parent
        code, out, err = run(capsys, target, "--check")
    finally:
        path.write_bytes(whole)
    assert code == 2, (out, err)
    assert err.startswith("error: ")
    assert len(err.strip().splitlines()) == 1


def test_not_a_number_is_found_by_reading(files, capsys):
    path = files / "plain/model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-2] + struct.pack("<H", 0x7FC0))
    try:
        assert run(capsys, files / "plain")[0] == 0
        code, _, err = run(capsys, files / "plain", "--check")
    finally:
        path.write_bytes(whole)
    assert code == 2
    assert "not finite" in err


@pytest.mark.parametrize("kind", ["onnx", "qdq", "openvino"])
@pytest.mark.parametrize("which", [0, -1])
def test_not_a_number_is_found_in_the_data_of_graphs(files, capsys, kind, which):
    """In the first and the last constant of floats that lies beside a graph."""
    if not (files / kind).exists():
        pytest.skip("openvino is not installed")
    if kind == "openvino":
        found = re.findall(r'<data element_type="f(16|32)" [^>]*offset="(\d+)" size="(\d+)"', (files / kind / "openvino_model.xml").read_text())
        places, data = [(int(offset), int(bits) // 8) for bits, offset, size in found if int(size) > 100], files / kind / "openvino_model.bin"
    else:
        floats = {onnx.TensorProto.FLOAT: 4, onnx.TensorProto.FLOAT16: 2, onnx.TensorProto.BFLOAT16: 2}
        stored = onnx.load(files / kind / "model.onnx", load_external_data=False).graph.initializer
        outside = [(t.external_data, floats[t.data_type]) for t in stored if t.external_data and t.data_type in floats]
        places, data = [(int(next(e.value for e in told if e.key == "offset")), width) for told, width in outside], files / kind / "model.onnx.data"
    at, width = places[which]
    whole = data.read_bytes()  # all bits set: not a number in every type
    assert run(capsys, files / kind, "--check")[0] == 0
    data.write_bytes(whole[:at] + b"\xff" * width + whole[at + width :])
    try:
        assert run(capsys, files / kind)[0] == 0
        code, _, err = run(capsys, files / kind, "--check")
    finally:
        data.write_bytes(whole)
    assert code == 2
    assert "not finite" in err


def _doubled(xml, found):
    return xml.replace(found, found + found, 1)


EDGE = re.compile(rb'<edge from-layer="(\d+)" from-port="(\d+)" to-layer="(\d+)" to-port="(\d+)"\s*/>')


@OPENVINO
@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda x: EDGE.sub(b"", x), "no edges"),
        (lambda x: EDGE.sub(b"", x, count=1), "no edges lead to port"),
        (lambda x: _doubled(x, EDGE.search(x)[0]), "2 edges lead to port"),
        (lambda x: EDGE.sub(rb'<edge from-layer="99999" from-port="\2" to-layer="\3" to-port="\4"/>', x, count=1), "layer '99999'"),
        (lambda x: EDGE.sub(rb'<edge from-layer="\1" from-port="77" to-layer="\3" to-port="\4"/>', x, count=1), "port '77'"),
        (lambda x: EDGE.sub(rb'<edge from-layer="\1" from-port="\2" to-layer="88888" to-port="\4"/>', x, count=1), "layer '88888'"),
        (lambda x: EDGE.sub(rb'<edge from-layer="\1" from-port="\2" to-layer="\3" to-port="66"/>', x, count=1), "port '66'"),
        (lambda x: EDGE.sub(rb'<edge to-layer="\3"/>', x, count=1), "None"),
        (lambda x: x.replace(b'<layer id="1"', b'<layer id="0"', 1), "two layers of the id '0'"),
        (lambda x: x.replace(b'<layer id="1"', b"<layer", 1), "an edge leads"),
    ],
)
def test_a_graph_of_openvino_that_hangs_together_badly(files, tmp_path, damage, named):
    whole = (files / "openvino/openvino_model.xml").read_bytes()
    (tmp_path / "openvino_model.bin").write_bytes((files / "openvino/openvino_model.bin").read_bytes())
    (tmp_path / "openvino_model.xml").write_bytes(damage(whole))
    with pytest.raises(ModelError, match=named) as said:
        inspect(tmp_path)
    assert "\n" not in str(said.value)


NET = '<net><layers><layer id="0" type="If"><output><port id="0"/></output>%s</layer></layers></net>'
LOOP = """<layer id="0" type="Add"><input><port id="0"/></input><output><port id="1"/></output></layer>
<layer id="1" type="Relu"><input><port id="0"/></input><output><port id="1"/></output></layer>"""


@pytest.mark.parametrize(("before", "after"), [("<a>" * 1000, "</a>" * 1000), ("<a/>" * (1 << 21), "")])
def test_xml_deeper_or_larger_than_a_model(tmp_path, before, after):
    (tmp_path / "openvino_model.xml").write_text(NET % f"<layer id='1' type='Parameter'>{before}{after}</layer>")
    with pytest.raises(ModelError, match="its XML has more than"):
        inspect(tmp_path / "openvino_model.xml")


@OPENVINO
def test_constants_of_openvino_that_overlap(files, tmp_path):
    shutil.copytree(files / "openvino", tmp_path / "openvino")
    path = tmp_path / "openvino/openvino_model.xml"
    path.write_text(re.sub(r'offset="(\d{4,})"', lambda m: f'offset="{int(m[1]) - 2}"', path.read_text(), count=1))
    with pytest.raises(ModelError, match="tensors overlap"):
        inspect(path)


def test_bodies_of_openvino_and_cycles(tmp_path):
    path = tmp_path / "openvino_model.xml"
    edges = '<edge from-layer="0" from-port="1" to-layer="1" to-port="0"/><edge from-layer="1" from-port="1" to-layer="0" to-port="0"/>'
    path.write_text(NET % f"<body><layers>{LOOP}</layers><edges>{edges}</edges></body>")
    with pytest.raises(ModelError, match="follows itself"):
        inspect(path)
    path.write_text(NET % "<body><layers><layer id='0' type='Parameter'/></layers></body>")
    assert inspect(path)["sound"]


def test_entities_that_grow_are_refused(tmp_path):
    """A billion laughs: expat stops them before they take memory; so it does ten thousand references to one long text."""
    path = tmp_path / "openvino_model.xml"
    laughs = "".join(f"<!ENTITY a{i} '{f'&a{i - 1};' * 10 if i else 'ha' * 10}'>" for i in range(12))
    for entities, last in ((laughs, "&a11;"), (f"<!ENTITY b '{'x' * 1_000_000}'>", "&b;" * 10_000)):
        path.write_text(f"<!DOCTYPE net [{entities}]><net><layers><layer id='0' name='n'>{last}</layer></layers></net>")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(ModelError, match="amplification"):
            inspect(path)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 256 << 10


def test_nothing_there(capsys, tmp_path):
    code, _, err = run(capsys, tmp_path / "no")
    assert code == 2
    assert "there is nothing at" in err
    (tmp_path / "x.bin").write_bytes(b"x")
    assert run(capsys, tmp_path / "x.bin")[0] == 2


@OPENVINO
@pytest.mark.parametrize(
    ("old", "new"), [(b'type="MatMul"', b'type="MatFul"'), (b'version="opset1"', b'version="opset99"'), (b'destination_type="f32"', b'destination_type="none"')]
)
def test_a_graph_that_openvino_refuses_is_not_called_sound(files, tmp_path, old, new):
    whole = (files / "openvino/openvino_model.xml").read_bytes()
    assert old in whole
    (tmp_path / "openvino_model.bin").write_bytes((files / "openvino/openvino_model.bin").read_bytes())
    (tmp_path / "openvino_model.xml").write_bytes(whole.replace(old, new, 1))
    with pytest.raises(ModelError, match="openvino refuses"):
        inspect(tmp_path / "openvino_model.xml", check=True)
