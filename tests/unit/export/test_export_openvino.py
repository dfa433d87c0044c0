"""OpenVINO exports: integers as OpenVINO decompresses them are ours, its runs give our distributions, equal models give equal bytes; and what it is told when it is missing."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import tiny
import torch
from quantized_models import quantized

from qforge.engines import openvino_runtime
from qforge.engines.runtime_engine import RuntimeEngine
from qforge.engines.transformers_engine import TransformersEngine
from qforge.errors import MissingCapabilityError, ModelError, UnsupportedError
from qforge.export import exporter
from qforge.export.verify import verify
from qforge.files import sha256_tree
from qforge.models.model import open_model

installed = pytest.mark.skipif(openvino_runtime.missing() is not None, reason="openvino is not installed")
FAMILIES = {
    "llama": {}, "qwen2": {"tied": False, "dtype": torch.bfloat16}, "gemma3_text": {"layers": 7, "sliding_window": 16, "query_pre_attn_scalar": 16, "dtype": torch.float16},
    "granite": tiny.GRANITE, "phi3": {"hidden": 128, "sliding_window": 20, **tiny.longrope(16, 32)},
}  # fmt: skip


def opened(tmp_path, family="llama", **options):
    return open_model(str(tiny.make(tmp_path / f"source-{family}", family, **{"layers": 2, **FAMILIES[family], **options})))


def prompts(*lengths):
    return [torch.randint(3, 380, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in lengths]


def test_without_openvino_it_says_what_to_install(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "openvino" else find(name, *a))
    with pytest.raises(MissingCapabilityError, match=r"pip install 'qforge\[openvino\]'"):
        exporter("openvino").check(quantized(opened(tmp_path)))
    assert openvino_runtime.missing() is not None


@installed
@pytest.mark.slow
@pytest.mark.parametrize("text", ["int4-g32-sym", "int4-g32-asym", "int3-channel-asym", "int8-channel-sym", "int8-tensor-sym", "fp8-e4m3-channel", "int8-channel-sym+int8-token"])
@pytest.mark.parametrize("family", FAMILIES)
def test_openvino_runs_the_models_integers(tmp_path, family, text):
    model = quantized(opened(tmp_path, family), text)
    paths = exporter("openvino").write(model, tmp_path / "out")
    rounds = model.schemes[next(iter(model.schemes))].activations is not None
    scorer = TransformersEngine(model) if rounds else RuntimeEngine(model)
    (weights, run), left_out = verify("openvino", paths, model, scorer, prompts(5, 40, 200))  # 200 tokens go through the cache in two pieces
    assert left_out == []
    assert weights.weights_equal, weights.note
    assert run.executed
    assert run.kl_mean < (1e-2 if rounds else 1e-9), run  # codes of activations on an edge flip with the last bit of a sum
    stored = {"int8": "i8", "fp8-": "f8e4m3"}.get(text[:4], "i4" if text.endswith("-sym") else "u4")
    embeddings = f"{1 if model.config.tie_word_embeddings else 2} weight {({torch.float32: 'f32', torch.float16: 'f16', torch.bfloat16: 'bf16'})[model.dtype]}"
    expected = [embeddings, f"{len(model.schemes)} weight {stored}"] + ([f"{len(model.schemes)} zero_point u4"] if text.endswith("-asym") else [])
    assert sorted(weights.note.split(", ")) == sorted(expected)


@installed
@pytest.mark.slow
def test_equal_models_give_equal_bytes_and_one_wrong_code_is_seen(tmp_path):
    model = quantized(opened(tmp_path))
    exporter("openvino").write(model, tmp_path / "first")
    paths = exporter("openvino").write(model, tmp_path / "second")
    assert sha256_tree(tmp_path / "first") == sha256_tree(tmp_path / "second")
    name = next(iter(model.schemes))
    flipped = model.linear(name)
    flipped.codes[3, 5] ^= 1
    wrong = replace(model, linears=lambda n: flipped if n == name else model.linear(n))
    (weights, _), _ = verify("openvino", paths, wrong, RuntimeEngine(model), prompts(5))
    assert weights.weights_equal is False
    assert name in weights.note


@installed
@pytest.mark.slow
def test_the_state_holds_each_beam_of_a_batch(tmp_path):
    """Two sequences at once, the second padded at the left, then swapped by beam_idx: each goes on where it was."""
    model = quantized(opened(tmp_path))
    exporter("openvino").write(model, tmp_path / "out")
    request = openvino_runtime.compiled(openvino_runtime.read(tmp_path / "out")).create_infer_request()
    long, short = prompts(9, 5)
    tokens, mask = torch.tensor([long, [0] * 4 + short]), torch.ones(2, 9, dtype=torch.int64)
    mask[1, :4] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    request.infer({"input_ids": tokens.numpy(), "attention_mask": mask.numpy(), "position_ids": positions.numpy(), "beam_idx": torch.arange(2, dtype=torch.int32).numpy()})
    order, then = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([[7], [8]])
    mask = torch.cat((mask[order.long()], torch.ones(2, 1, dtype=torch.int64)), -1)
    feeds = {"input_ids": then, "attention_mask": mask, "position_ids": torch.tensor([[5], [9]]), "beam_idx": order}
    found = torch.from_numpy(request.infer({k: v.numpy() for k, v in feeds.items()})["logits"].copy())
    scorer = TransformersEngine(model)
    for row, prompt in enumerate(([*short, 7], [*long, 8])):
        expected = torch.cat(list(scorer.score([[*prompt, 0]])))[-1]
        assert torch.allclose(found[row, -1], expected, atol=1e-4)


@installed
def test_a_damaged_file_is_one_message(tmp_path):
    (tmp_path / openvino_runtime.MODEL).write_text("<net")
    with pytest.raises(ModelError, match="openvino refuses"):
        openvino_runtime.read(tmp_path)


@installed
def test_what_it_cannot_hold(tmp_path):
    with pytest.raises(UnsupportedError, match=r"OpenVINO: .*nf4"):
        exporter("openvino").write(quantized(opened(tmp_path), "nf4-g32@f32"), tmp_path / "out")
