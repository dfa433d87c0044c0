"""A recipe that quantizes nothing itself and asks for K-quants: the importance matrix is found, used, written, and the file is run by llama.cpp."""

from __future__ import annotations

import json
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM

import qforge
from qforge.export.gguf_mix import GgufMixExporter
from qforge.export.gguf_types import MIXES
from qforge.models.model import open_model
from qforge.models.names import gguf_names
from qforge.superblocks import TYPES

TEXT = "\n\n".join(f"Story {i}: the miller grinds wheat number {i * 37 % 101} for the village, and {i} children watch the river." for i in range(200))


def recipe(folder: Path, **changes: object) -> Path:
    (folder / "calibration.txt").write_text(TEXT)
    given = {
        "version": 1,
        "model": {"source": "model"},
        "calibration": {"source": "calibration.txt", "samples": 4, "sequence_length": 64},
        "quantize": {"method": "none"},
        "export": [{"format": "gguf", "type": "q4_k_m"}],
        "evaluate": None,
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(given | changes))
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mix")
    tiny.make(folder / "model", hidden=96, intermediate=256, layers=4)
    results = qforge.quantize(recipe(folder), out=folder / "out")
    return folder, results


def test_the_export_says_that_it_requantized_and_is_run_by_llama_cpp(run):
    folder, results = run
    (export,) = results.exports
    assert export.lossless is None
    assert re.search(r"^requantized to q4_k_m, .*; \d+ F32, \d+ Q4_K, \d+ Q5_0, \d+ Q6_K, \d+ Q8_0$", export.verified_by[0].note)
    assert export.verified_by[1].engine == "llama.cpp"
    assert export.verified_by[1].kl_mean < 0.05
    assert sorted(p.name for p in (folder / "out" / "exports" / "gguf").iterdir()) == ["imatrix.gguf", "model-q4_k_m.gguf"]
    again = qforge.quantize(recipe(folder), out=folder / "out")
    assert again.work["computed"] == 0
    assert again.exports[0].sha256 == export.sha256


def test_the_importance_matrix_is_what_transformers_feeds_its_linears(run):
    folder, _ = run
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float64)
    tokens = open_model(str(folder / "model")).tokenizer()(TEXT)["input_ids"]
    assert len(tokens) > 4 * 64
    file = {t.name: np.array(t.data) for t in gguf.GGUFReader(folder / "out" / "exports" / "gguf" / "imatrix.gguf").tensors}
    names = gguf_names(model.config)
    ids = chosen_windows(folder)
    sums: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda m, args, n=name: sums.__setitem__(n, args[0].flatten(0, -2).square().sum(0)))
    with torch.no_grad():
        model(ids)
    assert len(file) == 2 * len(sums)
    for name, expected in sums.items():
        tensor = "token_embd.weight" if name == "lm_head" else names[f"{name}.weight"]
        assert file[f"{tensor}.counts"].item() == ids.numel()
        found = file[f"{tensor}.in_sum2"].ravel()
        assert np.linalg.norm(found - expected.numpy()) < 0.02 * np.linalg.norm(expected.numpy()), name  # products of blocks may be in bf16
        assert np.allclose(found, expected.numpy(), rtol=0.1), name


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_each_expert_is_weighed_by_the_tokens_that_it_is_sent(tmp_path: Path, family: str) -> None:
    experts = {"mixtral": {"num_local_experts": 8}, "qwen3_moe": {"num_experts": 6, "moe_intermediate_size": 256, "norm_topk_prob": True}}[family]
    tiny.make(tmp_path / "model", family, hidden=256, intermediate=256, layers=2, num_experts_per_tok=2, **experts)
    (export,) = qforge.quantize(recipe(tmp_path), out=tmp_path / "out").exports
    assert export.verified_by[1].kl_mean < 0.2  # llama.cpp rounds activations to 8 bits, and a token of eight may go to another expert
    held = gguf.GGUFReader(tmp_path / "out" / "exports" / "gguf" / "model-q4_k_m.gguf")
    kinds = {t.name: t.tensor_type.name for t in held.tensors}
    assert kinds["blk.0.attn_v.weight"] == ("Q8_0" if family == "mixtral" else "Q4_K")
    assert [kinds[f"blk.{i}.ffn_down_exps.weight"] for i in (0, 1)] == ["Q4_K", "Q6_K"]
    assert kinds["blk.0.ffn_gate_inp.weight"] == "F32"
    file = {t.name: np.array(t.data) for t in gguf.GGUFReader(tmp_path / "out" / "exports" / "gguf" / "imatrix.gguf").tensors}
    assert held.fields["quantize.imatrix.entries_count"].contents() == len(file) / 2 == 2 * 7 + 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for i, layer in enumerate(model.model.layers):
        layer.mlp.experts.register_forward_pre_hook(lambda m, args, i=i: seen.__setitem__(i, (args[0], args[1])))
    ids = chosen_windows(tmp_path)
    with torch.no_grad():
        model(ids)
    for i, (x, chosen) in ((i, (x.double(), chosen)) for i, (x, chosen) in seen.items()):
        sent = torch.stack([(chosen == e).any(-1).double() for e in range(8 if family == "mixtral" else 6)])
        counts = file[f"blk.{i}.ffn_up_exps.weight.counts"]
        assert counts.shape == (len(sent), 1)
        assert np.abs(counts[:, 0] - sent.sum(-1).numpy()).max() <= 3  # a router's near tie may fall otherwise in fp32
        assert counts.sum() == 2 * ids.numel()
        wanted = (sent @ x.square()).numpy()
        for part in ("gate", "up"):
            assert np.linalg.norm(file[f"blk.{i}.ffn_{part}_exps.weight.in_sum2"] - wanted) < 0.03 * np.linalg.norm(wanted)
        assert file[f"blk.{i}.ffn_down_exps.weight.in_sum2"].shape == (len(sent), 256)


def chosen_windows(folder: Path) -> torch.Tensor:
    from qforge.text.calibration import calibration_set
    from qforge.text.documents import documents

    tokenizer = open_model(str(folder / "model")).tokenizer()
    read = documents("calibration.txt", role="calibration", folder=folder, tokenizer=tokenizer)
    return calibration_set(read, tokenizer, samples=4, sequence_length=64, seed=0, context=256).ids


def test_the_file_tells_where_its_importance_comes_from(run):
    folder, _ = run
    reader = gguf.GGUFReader(folder / "out" / "exports" / "gguf" / "model-q4_k_m.gguf")
    told = {name: field.contents() for name, field in reader.fields.items() if name.startswith(("quantize.", "general.file_type"))}
    expected = {"file": "imatrix.gguf", "dataset": "calibration.txt", "entries_count": 29, "chunks_count": 4}
    assert told == {"general.file_type": int(gguf.LlamaFileType.MOSTLY_Q4_K_M)} | {f"quantize.imatrix.{k}": v for k, v in expected.items()}
    matrix = gguf.GGUFReader(folder / "out" / "exports" / "gguf" / "imatrix.gguf")
    assert matrix.fields["general.type"].contents() == "imatrix"
    assert matrix.fields["imatrix.chunk_size"].contents() == 64


def test_a_quantized_model_is_requantized_outside_a_run(run, tmp_path):
    folder, _ = run
    qforge.quantize(recipe(folder, quantize={"method": "rtn", "scheme": "int8-channel-sym"}, export=[]), out=tmp_path / "int8")
    result = qforge.export(tmp_path / "int8", "gguf", type="q6_k", out=tmp_path / "k")
    assert "requantized to q6_k" in result.verified_by[0].note
    assert (tmp_path / "k" / "imatrix.gguf").exists()


@pytest.mark.parametrize("mix", MIXES)
def test_every_mix_is_written_and_reads_back(mix, tmp_path):
    source = open_model(str(tiny.make(tmp_path / "model", hidden=64, intermediate=256, layers=2, tied=False)))
    (path,) = GgufMixExporter(mix).write(source, tmp_path / mix)
    again = open_model(str(path), dtype="float32")
    for name in source.weights.names():
        wrong = (again.weights.read(name).float() - source.weights.read(name).float()).norm() / source.weights.read(name).float().norm()
        assert wrong < (0.2 if mix.startswith(("q2", "q3")) else 0.1), name
    assert {t.tensor_type.name for t in gguf.GGUFReader(path).tensors} <= {*TYPES, "F32"}
