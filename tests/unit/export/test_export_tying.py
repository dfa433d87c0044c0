"""A quantized head that stays tied to the embedding: one table of codes, the same in the artifact, transformers, our runtime, GGUF and checkpoints that cannot share it."""

import json

import gguf
import pytest
import tiny
import torch
from quantized_models import rtn
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from qforge import numerics
from qforge.engines.transformers_engine import TransformersEngine
from qforge.errors import ModelError
from qforge.export.gguf import GgufExporter
from qforge.export.gptq import GptqExporter
from qforge.export.hf import write_artifact
from qforge.export.inspection import inspect
from qforge.export.verify_gguf import verify_gguf_weights
from qforge.models.blocks import BlockModel
from qforge.models.model import open_model
from qforge.models.tying import shared_table
from qforge.plan import make_plan
from qforge.recipe.model import Recipe
from qforge.scheme import parse

HEAD, TABLE = "lm_head", "model.embed_tokens"
TOKENS = torch.arange(3, 40)[None]


def artifact(folder, head="int8-g32-sym", text="int4-g32-sym", family="llama", only=False, **settings):
    """The folder of a tied model with a quantized head, and the head's linear."""
    source = open_model(str(tiny.make(folder / "source", family, layers=2, tied=True, **settings)))
    schemes, linear = rtn(source, text, head=True)
    schemes[HEAD] = parse(head)
    if only:
        schemes = {HEAD: schemes[HEAD]}
        linear = rtn(source, head, head=True)[1]
    write_artifact(folder / "model", source, schemes, linear, {})
    return folder / "model", linear(HEAD)


@pytest.mark.parametrize("only", [False, True], ids=["all", "head only"])
@pytest.mark.parametrize(("head", "text", "family"), [
    ("int8-g32-sym", "int4-g32-sym", "llama"), ("int8-channel-sym", "int4-g32-asym", "gemma3_text"),
    ("int8-g32-sym", "int8-g32-sym", "qwen2"), ("int8-g64-sym", "w8a8-int8", "qwen3"),
])  # fmt: skip
def test_transformers_dequantizes_one_table_for_both(tmp_path, head, text, family, only):
    folder, q = artifact(tmp_path, head, text, family, only)
    tensors = load_file(folder / "model.safetensors")
    assert tensors[f"{TABLE}.weight"].dtype is torch.int8
    assert f"{HEAD}.weight" not in tensors
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(TOKENS).logits
        hidden = model.model(TOKENS).last_hidden_state
    expected = numerics.dequantize(q)
    assert torch.equal(model.get_input_embeddings().weight, expected)
    assert torch.equal(model.get_output_embeddings().weight, expected)
    torch.testing.assert_close(logits.double(), hidden.double() @ expected.double().T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("head", ["int8-channel-sym", "int4-g32-sym"], ids=["one table", "untied"])
@pytest.mark.parametrize(("family", "table"), [("gpt_neox", "gpt_neox.embed_in"), ("gpt_bigcode", "transformer.wte"), ("phi", TABLE)])
def test_embeddings_by_any_name_and_heads_with_a_bias_are_written_and_read(tmp_path, family, table, head):
    folder, q = artifact(tmp_path, head, family=family, only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = model(TOKENS).logits
        hidden = model.base_model(TOKENS).last_hidden_state
    bias = 0.0 if q.bias is None else q.bias.double()
    assert (q.bias is not None) == (family == "phi")
    torch.testing.assert_close(logits.double(), hidden.double() @ numerics.dequantize(q).double().T + bias, atol=1e-4, rtol=1e-4)
    opened = open_model(str(folder))
    assert opened.linear(HEAD).equals(q)
    assert opened.config.tie_word_embeddings == (head == "int8-channel-sym")
    assert (shared_table(opened, opened.schemes) == table) == (head == "int8-channel-sym")
    torch.testing.assert_close(torch.cat(list(TransformersEngine(opened).score(TOKENS.tolist()))), logits[0, :-1], atol=1e-4, rtol=1e-4)


def test_a_tied_head_by_another_name_is_untied_where_it_is_quantized_and_lm_head_in_a_recipe_means_it(tmp_path):
    source = open_model(str(tiny.make(tmp_path / "source", "biogpt", layers=2, tied=True)))
    schemes = {"output_projection": parse("int8-channel-sym")}
    weight = source.weights.read("biogpt.embed_tokens.weight").float()
    q = numerics.quantize(weight, schemes["output_projection"], *numerics.minmax_parameters(weight, schemes["output_projection"]))
    write_artifact(tmp_path / "model", source, schemes, lambda name: q, {})
    opened = open_model(str(tmp_path / "model"))
    assert not opened.config.tie_word_embeddings
    assert opened.linear("output_projection").equals(q)
    assert torch.equal(opened.weights.read("biogpt.embed_tokens.weight"), weight)
    recipe = Recipe.model_validate({"version": 1, "model": {"source": "x"}, "quantize": {"method": "rtn", "scheme": "int8-channel-sym"}})
    plan = make_plan(recipe, source, BlockModel(source), source)
    assert {p.name: p.reason for p in plan.layers if p.scheme is None} == {"output_projection": "ignored by 'lm_head'"}


def test_it_is_read_as_one_table_and_written_again_as_it_is(tmp_path):
    folder, q = artifact(tmp_path)
    model = open_model(str(folder))
    assert model.config.tie_word_embeddings
    assert model.schemes[HEAD] == q.scheme
    assert model.linear(HEAD).equals(q)
    assert f"{HEAD}.weight" not in model.weights.names()
    assert torch.equal(model.weights.read(f"{TABLE}.weight"), numerics.dequantize(q))
    assert torch.equal(open_model(str(folder), dtype="bfloat16").weights.read(f"{TABLE}.weight"), numerics.dequantize(q))
    write_artifact(tmp_path / "again", model, model.schemes, model.linear, {})
    first, again = load_file(folder / "model.safetensors"), load_file(tmp_path / "again/model.safetensors")
    assert first.keys() == again.keys()
    assert all(t.dtype == again[n].dtype and torch.equal(t, again[n]) for n, t in first.items())


def test_inspect_counts_the_table_once(tmp_path):
    folder, q = artifact(tmp_path)
    found = inspect(folder)
    tensors = load_file(folder / "model.safetensors")
    source = open_model(str(tmp_path / "source")).weights
    assert found["parameters"] == sum(torch.Size(source.info(n).shape).numel() for n in source.names())
    assert found["tensor_bytes"] == sum(t.nbytes for t in tensors.values())
    assert [e["scheme"] for e in found["linears"] if e["name"] == HEAD] == [str(q.scheme)]
    assert found["metadata"]["tie_word_embeddings"]


@pytest.mark.parametrize("kind", ["auto", "f32"])
def test_gguf_holds_the_same_integers_once(tmp_path, kind):
    folder, q = artifact(tmp_path)
    model = open_model(str(folder))
    (path,) = GgufExporter(kind).write(model, tmp_path / "out")
    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
    assert "output.weight" not in tensors
    table = tensors["token_embd.weight"]
    assert table.tensor_type.name == ("Q8_0" if kind == "auto" else "F32")
    assert torch.equal(torch.tensor(gguf.quants.dequantize(table.data, table.tensor_type)), numerics.dequantize(q))
    assert verify_gguf_weights(path, model).weights_equal


def test_a_checkpoint_without_quantized_embeddings_unties_them(tmp_path):
    folder, q = artifact(tmp_path)
    GptqExporter().write(open_model(str(folder)), tmp_path / "gptq")
    assert json.loads((tmp_path / "gptq/config.json").read_text())["tie_word_embeddings"] is False
    model = open_model(str(tmp_path / "gptq"))
    assert torch.equal(model.weights.read(f"{TABLE}.weight").float(), numerics.dequantize(q))
    assert torch.equal(numerics.dequantize(model.linear(HEAD)), numerics.dequantize(q))


@pytest.mark.parametrize("head", ["int4-g32-sym", "int8-g32-asym", "w8a8-int8"])
def test_what_no_embedding_holds_unties_the_head(tmp_path, head):
    folder, _ = artifact(tmp_path, head, only=True)
    model = open_model(str(folder))
    assert not model.config.tie_word_embeddings
    source = open_model(str(tmp_path / "source"))
    assert torch.equal(model.weights.read(f"{TABLE}.weight"), source.weights.read(f"{TABLE}.weight"))


def test_scales_that_differ_are_damage(tmp_path):
    folder, _ = artifact(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{HEAD}.weight_scale"] = tensors[f"{HEAD}.weight_scale"] * 2
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="scales"):
        open_model(str(folder)).linear(HEAD)
