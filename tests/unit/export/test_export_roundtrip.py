"""Other people's checkpoints in and out again: integers go from one format to the next without a second quantization, and come back as they were."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny
import torch
from quantized_models import quantized
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from qforge import LLM, SamplingParams
from qforge.errors import ModelError, UnsupportedError
from qforge.export import exporter
from qforge.export.inspection import inspect, summary
from qforge.export.verify_checkpoint import verify_words
from qforge.export.verify_gguf import verify_gguf_weights
from qforge.layouts import gguf_schemes
from qforge.models.model import open_model
from qforge.scheme import parse

GOLDEN = Path(__file__).parents[2] / "golden"
PARTS = ("qweight", "qzeros", "scales", "g_idx")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("QFORGE_CACHE", str(tmp_path / "cache"))


def made_by_gptqmodel(folder: Path, name: str) -> Path:
    """The checkpoint folder of a golden file."""
    tiny.make(folder, layers=1, hidden=64, intermediate=96, heads=2, kv_heads=1)
    golden = GOLDEN / f"gptqmodel_{name}.safetensors"
    with safe_open(golden, "pt") as f:
        (folder / "config.json").write_text(f.metadata()["config"])
    save_file(load_file(golden), folder / "model.safetensors", {"format": "pt"})
    return folder


def written(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for n, t in load_file(folder / "model.safetensors").items() if n.rpartition(".")[2] in PARTS}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert set(a) == set(b)
    assert [n for n in a if not torch.equal(a[n], b[n])] == []


@pytest.mark.parametrize(("name", "kind"), [("sym", "q4_0"), ("asym_v2", "q5_0")])
def test_gptqmodel_to_gguf_and_back_gives_the_first_integers(tmp_path, name, kind):
    source = open_model(str(made_by_gptqmodel(tmp_path / "made", name)))
    (path,) = exporter("gguf").write(source, tmp_path / "gguf")
    assert path.name == f"model-{kind}.gguf"
    assert verify_gguf_weights(path, source).weights_equal
    back = open_model(str(path))
    assert back.schemes == source.schemes
    exporter("gptq").write(back, tmp_path / "again")
    same(written(tmp_path / "again"), written(tmp_path / "made"))


@pytest.mark.parametrize("via", ["awq", "compressed-tensors"])
@pytest.mark.parametrize("name", ["sym", "asym_v2"])
def test_gptqmodel_through_other_checkpoints_and_back(tmp_path, name, via):
    source = open_model(str(made_by_gptqmodel(tmp_path / "made", name)))
    exporter(via).write(source, tmp_path / via)
    back = open_model(str(tmp_path / via))
    assert all(back.linear(n).codes.equal(source.linear(n).codes) for n in source.schemes)
    exporter("gptq").write(back, tmp_path / "again")
    same(written(tmp_path / "again"), written(tmp_path / "made"))


@pytest.mark.parametrize(
    ("name", "text", "options"),
    [
        ("mlx", "int4-g64-asym", {"overrides": {"down_proj": "int8-g128-sym"}}), ("mlx", "int3-g32-sym", {"head": True}),
        ("trtllm", "int4-g64-sym", {}), ("trtllm", "int8-channel-sym", {}), ("trtllm", "fp8-e4m3-channel+fp8-e4m3-token", {}), ("trtllm", "fp8-e4m3-block128+fp8-e4m3-g128", {}),
        ("ascend", "int4-g32-sym", {"overrides": {"down_proj": "int8-channel-sym+int8-token"}}), ("ascend", "int4-channel-sym", {}), ("ascend", "int8-g64-sym", {}),
    ],
)  # fmt: skip
def test_checkpoints_for_other_engines_come_back_as_they_were(tmp_path, name, text, options):
    """qwen2: its linears have biases."""
    model = quantized(open_model(str(tiny.make(tmp_path / "source", "qwen2", layers=2, hidden=128, intermediate=128, dtype=torch.bfloat16))), text, **options)
    exporter(name).write(model, tmp_path / "out")
    back = open_model(str(tmp_path / "out"))
    assert back.schemes == model.schemes
    assert all(back.linear(n).equals(model.linear(n)) for n in model.schemes)
    found = inspect(tmp_path / "out", check=True)
    assert found["kind"] == f"{name} checkpoint"
    assert found["schemes"] == {str(s): list(model.schemes.values()).count(s) for s in set(model.schemes.values())}


def test_an_mlx_checkpoint_with_biases_of_its_own(tmp_path):
    """As mlx-lm makes them: minima that are no multiples of the scales, both in bf16, told of under two names."""
    folder = tiny.make(tmp_path / "made", layers=1, hidden=64, intermediate=64, heads=2, kv_heads=1)
    tensors, expected, generator = load_file(folder / "model.safetensors"), {}, torch.Generator().manual_seed(0)
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        codes = torch.randint(0, 16, tensors[name].shape, generator=generator)
        scales, biases = (torch.randn(len(codes), 1, generator=generator).to(torch.bfloat16) for _ in range(2))
        words = (codes.view(len(codes), -1, 8) << torch.arange(0, 32, 4)).sum(-1)
        tensors[name], tensors[f"{name[:-6]}scales"], tensors[f"{name[:-6]}biases"] = words.to(torch.uint32), scales, biases
        expected[name] = codes * scales.float() + biases.float()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    told = {"group_size": 64, "bits": 4, "mode": "affine"}
    (folder / "config.json").write_text(json.dumps(config | {"quantization": told, "quantization_config": told}))
    model = open_model(str(folder))
    assert {str(s) for s in model.schemes.values()} == {"int4-g64-offset"}
    assert all(torch.equal(model.weights.read(name), weight) for name, weight in expected.items())


@pytest.mark.parametrize(
    ("name", "text", "file", "change", "says"),
    [
        ("mlx", "int4-g64-sym", "config.json", ('"bits": 4', '"bits": 5.5'), "an MLX linear of 5.5 bits"),
        ("mlx", "int4-g64-sym", "config.json", ('"bits": 4', '"bits": 8'), "q_proj"),
        ("trtllm", "int4-g64-sym", "hf_quant_config.json", ("W4A16_AWQ", "W4A8_AWQ"), "tells of 'W4A8_AWQ'"),
        ("trtllm", "int4-g64-sym", "hf_quant_config.json", ('"quantization"', '"other"'), "is no object"),
        ("ascend", "int4-g32-sym", "quant_model_description.json", ('"W4A16"', '"W4A8_DYNAMIC"'), "says 'W4A8_DYNAMIC'"),
        ("ascend", "int4-g32-sym", "quant_model_description.json", ('"group_size": 32', '"group_size": 64'), "weight_scale"),
    ],
)  # fmt: skip
def test_what_such_a_checkpoint_cannot_mean_is_one_message(tmp_path, name, text, file, change, says):
    model = quantized(open_model(str(tiny.make(tmp_path / "source", layers=1, hidden=128, intermediate=128, dtype=torch.bfloat16))), text)
    exporter(name).write(model, tmp_path / "out")
    before = (tmp_path / "out" / file).read_text()
    (tmp_path / "out" / file).write_text(before.replace(*change))
    with pytest.raises(ModelError, match=says):
        inspect(tmp_path / "out", check=True)


def test_activation_order_stays_in_gptq_and_is_refused_elsewhere(tmp_path):
    source = open_model(str(made_by_gptqmodel(tmp_path / "made", "sym_order")))
    exporter("gptq").write(source, tmp_path / "again")
    same(written(tmp_path / "again"), written(tmp_path / "made"))
    for name in ("gguf", "awq", "compressed-tensors"):
        with pytest.raises(UnsupportedError, match="activation order"):
            exporter(name).write(source, tmp_path / name)


@pytest.mark.parametrize("name", ["sym", "asym_v2", "sym_order"])
def test_a_foreign_checkpoint_is_inspected_and_run(tmp_path, name):
    folder = made_by_gptqmodel(tmp_path / "made", name)
    found = inspect(folder, check=True)
    assert found["kind"] == "gptq checkpoint"
    assert found["schemes"] == {f"int4-g32-{'asym' if 'asym' in name else 'sym'}@f16": 7}
    assert list(summary(found))[-1].startswith("sound:")
    (output,) = LLM(str(folder)).generate(["The small mill"], SamplingParams(max_tokens=4))
    assert len(output.token_ids) == 4


@pytest.mark.parametrize("text", ["int4-g32-sym", "int4-g64-asym", "int4-channel-sym"])
def test_awq_holds_the_artifact_and_reads_as_it_was(tmp_path, text):
    source = open_model(str(tiny.make(tmp_path / "source", "qwen2", layers=2, dtype=torch.bfloat16)))
    model = quantized(source, text, ignore=("v_proj",))
    exporter("awq").write(model, tmp_path / "awq")
    assert verify_words(tmp_path / "awq", model).weights_equal
    settings = json.loads((tmp_path / "awq/config.json").read_text())["quantization_config"]
    assert settings["modules_to_not_convert"] == [f"model.layers.{i}.self_attn.v_proj" for i in range(2)]
    back = open_model(str(tmp_path / "awq"))
    assert set(back.schemes) == set(model.schemes)
    for name, scheme in back.schemes.items():
        q = back.linear(name)
        assert scheme.symmetric == model.schemes[name].symmetric
        assert torch.equal(q.codes, model.linear(name).codes)
        assert torch.equal(q.scales, model.linear(name).scales)
        assert (q.bias is not None) == name.endswith(("q_proj", "k_proj"))


def test_awq_verification_sees_one_wrong_bit(tmp_path):
    model = quantized(open_model(str(tiny.make(tmp_path / "source", layers=1))))
    exporter("awq").write(model, tmp_path / "awq")
    tensors = load_file(tmp_path / "awq/model.safetensors")
    tensors["model.layers.0.mlp.up_proj.qweight"][3, 5] ^= 1 << 9
    save_file(tensors, tmp_path / "awq/model.safetensors")
    assert verify_words(tmp_path / "awq", model).weights_equal is False


@pytest.mark.parametrize(
    ("text", "options", "reason"),
    [
        ("int8-g32-sym", {}, "holds int4"),
        ("int4-g32-sym", {"overrides": {"down_proj": "int4-g64-sym"}}, "one group size"),
        ("int4-g32-sym", {"head": True}, "lm_head is quantized"),
        ("int4-g32-sym@f32", {}, "fp16"),
    ],
)
def test_what_awq_cannot_hold(tmp_path, text, options, reason):
    model = quantized(open_model(str(tiny.make(tmp_path / "source", layers=1))), text, **options)
    with pytest.raises(UnsupportedError, match=reason):
        exporter("awq").write(model, tmp_path / "awq")


def llama_cpp_like(path: Path, base: Path, kind: str) -> Path:
    """A file whose blocks the gguf package's own quantizer made, without any word from us."""
    exporter("gguf", "f32").write(open_model(str(base)), path.parent / "f32")
    reader = gguf.GGUFReader(path.parent / "f32/model-f32.gguf")
    writer = gguf.GGUFWriter(path, "llama")
    for field in reader.fields.values():
        if not field.name.startswith(("GGUF.", "general.architecture")):
            sub = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub)
    for tensor in reader.tensors:
        chosen = gguf.GGMLQuantizationType[kind if tensor.name.startswith("blk.") and len(tensor.shape) > 1 else "F32"]
        writer.add_tensor(tensor.name, gguf.quants.quantize(np.asarray(tensor.data), chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(("kind", "bits"), [("Q4_0", 4), ("Q8_0", 8)])
def test_gguf_blocks_of_others_become_gptq_without_a_second_rounding(tmp_path, kind, bits):
    path = llama_cpp_like(tmp_path / "theirs.gguf", tiny.make(tmp_path / "base", layers=1), kind)
    model = open_model(str(path))
    assert set(map(str, model.schemes.values())) == {f"int{bits}-g32-sym@f16"}
    exporter("gptq").write(model, tmp_path / "gptq")
    again = open_model(str(tmp_path / "gptq"))
    theirs = {t.name: t for t in gguf.GGUFReader(path).tensors}
    down = gguf.quants.dequantize(theirs["blk.0.ffn_down.weight"].data, gguf.GGMLQuantizationType[kind])
    assert torch.equal(again.weights.read("model.layers.0.mlp.down_proj.weight"), torch.from_numpy(down))
    assert all(again.linear(n).equals(model.linear(n)) for n in model.schemes)
    (output,) = LLM(model).generate(["The small mill"], SamplingParams(max_tokens=3))
    assert len(output.token_ids) == 3


def test_what_the_metadata_say_counts_only_where_the_type_holds_it():
    tensors = {"a": ("Q4_0", (8, 64)), "b": ("Q5_0", (8, 64)), "c": ("Q4_0", (8, 96))}
    told = {"qforge.schemes": json.dumps({"int4-g64-sym": ["a", "c"], "int4-g32-asym": ["b"], "int8-g32-sym": ["a"], "nonsense": ["b"], "int4-g32-sym@f16": 7})}
    found = gguf_schemes.schemes(told, tensors)
    assert found == {"a": parse("int4-g32-sym@f16"), "b": parse("int4-g32-asym"), "c": parse("int4-g32-sym@f16")}
    for broken in ("{", "[]", "7", '{"a": {}}'):
        assert gguf_schemes.schemes({"qforge.schemes": broken}, {"a": ("Q8_0", (8, 64))}) == {"a": parse("int8-g32-sym@f16")}


@pytest.mark.parametrize("stored", [b"not zlib", b"x\x9c", "text", 5])
def test_damaged_zero_points_are_refused(stored):
    with pytest.raises(ModelError, match="zero points"):
        gguf_schemes.zeros_above({"qforge.zeros.a": stored}, "a", (4, 2))
