"""Files damaged at random: `inspect` and the loaders read what is still sound or end with one clear error; no crash, no hang, no memory beyond what the file has.

Seeds are fixed: the fast ring runs the first few hundred of the kinds below, the slow ring 100,000.
"""

from __future__ import annotations

import json
import random
import re
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import tiny
import torch
from mutations import bytes_changed, external_changed, graph_changed, header_changed, header_end, json_changed, metadata_changed

from qforge import numerics
from qforge.engines import openvino_runtime
from qforge.errors import QforgeError
from qforge.export import exporter
from qforge.export.gguf import GgufExporter
from qforge.export.hf import write_artifact
from qforge.export.inspection import inspect
from qforge.export.onnx import OnnxExporter
from qforge.models.gguf_header import read_gguf_header
from qforge.models.model import Model, open_model
from qforge.models.shards import read_header
from qforge.qlinear import QuantizedLinear
from qforge.runtime.llm import LLM, SamplingParams
from qforge.scheme import parse

SLOWEST_S = 5.0
MOST_BYTES = 512 << 20  # above what the test itself has: tiny files, and a config may ask for anything
pytestmark = pytest.mark.filterwarnings("ignore:::transformers")  # what its configs say of odd values
KINDS = ("compressed-tensors", "gptq", "awq", "plain", "mlx", "trtllm", "ascend")
TOLD = ("config.json", "hf_quant_config.json", "quant_model_description.json")
USED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model as each kind of checkpoint, and as GGUF."""
    root = tmp_path_factory.mktemp("fuzz")
    source = open_model(str(tiny.make(root / "plain", layers=1, hidden=32, intermediate=64, heads=2, kv_heads=1, dtype=torch.bfloat16)))
    artifact = made(source, "int4-g32-asym", root / "compressed-tensors")
    (artifact.assets / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": [0, 2]}))
    for name in ("gptq", "awq", "mlx", *(("openvino",) if openvino_runtime.missing() is None else ())):
        exporter(name).write(artifact, root / name)
    symmetric = made(source, "int8-channel-sym", root / "symmetric")
    for name in ("trtllm", "ascend"):
        exporter(name).write(symmetric, root / name)
    (path,) = GgufExporter().write(artifact, root)
    path.rename(root / "model.gguf")
    for kind in ("matmulnbits", "qdq"):
        OnnxExporter(kind).write(artifact, root / f"onnx-{kind}")
    return root


def made(source: Model, text: str, folder: Path) -> Model:
    """The model's artifact, all linears of blocks rounded to nearest."""
    schemes = {n.removesuffix(".weight"): parse(text) for n in source.weights.names() if n.endswith("_proj.weight")}

    def rounded(name: str) -> QuantizedLinear:
        weight = source.weights.read(f"{name}.weight").float()
        return numerics.quantize(weight, schemes[name], *numerics.minmax_parameters(weight, schemes[name]))

    write_artifact(folder, source, schemes, rounded, {})
    return open_model(str(folder))


def attempt(action: Callable[[], object], seed: int) -> bool:
    """Whether the action succeeded; a QforgeError of one line is the only failure."""
    start, said = time.process_time(), None
    try:
        action()
    except QforgeError as e:
        said = str(e)
    assert time.process_time() - start < SLOWEST_S, seed
    assert said is None or len(said.strip().splitlines()) == 1, (seed, said)
    return said is None


def limited() -> None:
    """From here on the process may take no more than MOST_BYTES of address space."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))


@pytest.fixture
def little_memory() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    limited()
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def safetensors_headers(files: Path, tmp_path: Path, seeds: range) -> int:
    whole = (files / "gptq" / "model.safetensors").read_bytes()
    path = tmp_path / "model.safetensors"
    read = 0
    for seed in seeds:
        rng = random.Random(seed)
        path.write_bytes(header_changed(whole, rng) if seed % 2 else bytes_changed(whole, rng, header_end(whole)))
        read += attempt(lambda: read_header(path), seed)
    return read


def gguf_headers(files: Path, tmp_path: Path, seeds: range) -> int:
    whole = (files / "model.gguf").read_bytes()
    end = min(t.start for t in read_gguf_header(files / "model.gguf").tensors.values())
    path = tmp_path / "model.gguf"
    read = 0
    for seed in seeds:
        path.write_bytes(bytes_changed(whole, random.Random(seed), end))
        read += attempt(lambda: read_gguf_header(path), seed)
    return read


def checkpoints(files: Path, tmp_path: Path, seeds: range) -> int:
    """Folders whose config.json, description of the quantization or weights are damaged, read whole by `inspect --check`."""
    read = 0
    for seed in seeds:
        rng = random.Random(seed)
        kind = KINDS[seed % len(KINDS)]
        folder = tmp_path / f"c-{kind}"
        if not folder.exists():
            shutil.copytree(files / kind, folder)
        weights = next(p.name for p in folder.glob("*.safetensors"))
        name = rng.choice((rng.choice([n for n in TOLD if (folder / n).exists()]), "config.json", weights))
        whole = (files / kind / name).read_bytes()
        changed = json_changed(whole, rng) if name.endswith("json") else header_changed(whole, rng) if seed % 3 else bytes_changed(whole, rng, len(whole))
        (folder / name).write_bytes(changed)
        read += attempt(partial(inspect, folder, check=True), seed)
        (folder / name).write_bytes(whole)
    return read


def gguf_files(files: Path, tmp_path: Path, seeds: range) -> int:
    """GGUF files read by `inspect`."""
    whole = (files / "model.gguf").read_bytes()
    path = tmp_path / "whole.gguf"
    read = 0
    for seed in seeds:
        path.write_bytes(bytes_changed(whole, random.Random(seed), len(whole)))
        read += attempt(lambda: inspect(path, check=True), seed)
    return read


def used(path: Path) -> None:
    """Opened and run as `generate` does: a text, and a conversation."""
    llm = LLM(str(path), threads=1)
    chat = [[{"role": "user", "content": "hi"}]] if llm.tokenizer.chat_template else []
    llm.generate(["the mill", *chat], SamplingParams(max_tokens=2))


def gguf_metadata(files: Path, tmp_path: Path, seeds: range) -> int:
    """GGUF files that are whole and say something else: of the model, of its tokenizer, of a tensor."""
    whole = (files / "model.gguf").read_bytes()
    path = tmp_path / "said.gguf"
    read = 0
    for seed in seeds:
        path.write_bytes(metadata_changed(whole, random.Random(seed)))
        read += attempt(lambda: used(path), seed)
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    return read


def folders_used(files: Path, tmp_path: Path, seeds: range) -> int:
    """Folders whose config, generation config or tokenizer say something else."""
    read = 0
    for seed in seeds:
        rng, kind = random.Random(seed), ("plain", "compressed-tensors")[seed % 2]
        folder = tmp_path / f"u-{kind}"
        if not folder.exists():
            shutil.copytree(files / kind, folder)
        name = rng.choice(USED)
        whole = (files / kind / name).read_bytes()
        (folder / name).write_bytes(json_changed(whole, rng))
        read += attempt(partial(used, folder), seed)
        (folder / name).write_bytes(whole)
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
    return read


def onnx_files(files: Path, tmp_path: Path, seeds: range) -> int:
    """ONNX files damaged as bytes, in their graph or in what they say of their data, beside data that may be cut."""
    read = 0
    for seed in seeds:
        rng, kind = random.Random(seed), ("matmulnbits", "qdq")[seed % 2]
        whole, data = ((files / f"onnx-{kind}" / name).read_bytes() for name in ("model.onnx", "model.onnx.data"))
        damaged = (bytes_changed(whole, rng, len(whole)), external_changed(whole, rng), graph_changed(whole, rng))[seed % 3]
        (tmp_path / "model.onnx").write_bytes(damaged)
        (tmp_path / "model.onnx.data").write_bytes(data[: rng.randrange(len(data))] if rng.random() < 0.1 else data)
        read += attempt(lambda: inspect(tmp_path / "model.onnx", check=True), seed)
    return read


def openvino_files(files: Path, tmp_path: Path, seeds: range) -> int:
    """OpenVINO's graphs, damaged as bytes or in what they say of their constants, beside data that may be cut."""
    if not (files / "openvino").exists():
        pytest.skip("openvino is not installed")
    whole, data = ((files / "openvino" / f"openvino_model.{suffix}").read_bytes() for suffix in ("xml", "bin"))
    numbers = [m.span(1) for m in re.finditer(rb'(?:offset|size|shape)="([-0-9, ]*)"', whole)]
    path, read = tmp_path / "openvino_model.xml", 0
    for seed in seeds:
        rng = random.Random(seed)
        start, end = rng.choice(numbers)
        told = whole[:start] + str(rng.choice((-1, 0, 7, 1 << 31, 1 << 63, 10**400, "", "x", "1, -1", "9, " * 5000))).encode() + whole[end:]
        path.write_bytes(told if seed % 2 else bytes_changed(whole, rng, len(whole)))
        path.with_suffix(".bin").write_bytes(data[: rng.randrange(len(data))] if rng.random() < 0.1 else data)
        read += attempt(lambda: inspect(path, check=True), seed)
    return read


@pytest.mark.parametrize(
    ("damage", "count"),
    [(safetensors_headers, 1500), (gguf_headers, 1500), (checkpoints, 210), (gguf_files, 200), (gguf_metadata, 250), (folders_used, 250), (onnx_files, 400), (openvino_files, 200)],
)
def test_damaged_files_end_in_one_clear_error(files, tmp_path, monkeypatch, little_memory, damage, count):
    monkeypatch.setenv("QFORGE_CACHE", str(tmp_path / "cache"))
    read = damage(files, tmp_path, range(count))
    assert 0 < read < count


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("damage", "count"),
    [
        (safetensors_headers, 41_000),
        (gguf_headers, 41_000),
        (checkpoints, 3_500),
        (gguf_files, 2_000),
        (gguf_metadata, 4_000),
        (folders_used, 3_000),
        (onnx_files, 10_000),
        (openvino_files, 2_500),
    ],
)
def test_a_hundred_thousand_damaged_files(files, tmp_path, monkeypatch, little_memory, damage, count):
    monkeypatch.setenv("QFORGE_CACHE", str(tmp_path / "cache"))
    assert damage(files, tmp_path, range(10_000_000, 10_000_000 + count)) < count
