"""Files damaged at random: `inspect` and the loaders read what is still sound or end with one clear error; no crash, no hang, no memory beyond what the file has.

Seeds are fixed: the fast ring runs the first of each kind below, the slow ring 100,000.
"""

from __future__ import annotations

import json
import random
import re
import resource
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from unittest import mock

import pytest
import tiny
import torch
from mutations import bytes_changed, external_changed, file_changed, graph_changed, header_changed, header_end, metadata_changed
from safetensors.torch import save_file

from qforge import numerics
from qforge.cli.main import main
from qforge.engines import openvino_runtime
from qforge.errors import QforgeError
from qforge.export import exporter
from qforge.export.gguf import GgufExporter
from qforge.export.hf import write_artifact
from qforge.export.inspection import inspect
from qforge.export.onnx import OnnxExporter
from qforge.models.gguf_header import read_gguf_header
from qforge.models.lora import with_adapters
from qforge.models.model import Model, open_model
from qforge.models.shards import read_header
from qforge.qlinear import QuantizedLinear
from qforge.runtime.llm import LLM, SamplingParams
from qforge.scheme import parse

SLOWEST_S = 5.0  # of computing; on the clock as long again, for a machine that is busy otherwise
MOST_BYTES = 512 << 20  # above what the test itself has: tiny files, and a config may ask for anything
OPENED = 25  # of so many graphs one is opened by its engine, too
pytestmark = pytest.mark.filterwarnings("ignore:::transformers")  # what its configs say of odd values
KINDS = ("compressed-tensors", "gptq", "awq", "plain", "mlx", "trtllm", "ascend")
TOLD = ("config.json", "hf_quant_config.json", "quant_model_description.json")
USED = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


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
    adapter(root / "plain", root / "adapter")
    template = root / "compressed-tensors" / "chat_template.jinja"
    config = template.with_name("tokenizer_config.json")
    config.write_text(json.dumps(json.loads(config.read_bytes()) | {"chat_template": template.read_text()}))
    template.unlink()
    return root


def adapter(base: Path, folder: Path) -> None:
    """An adapter of two linears and the embedding, with patterns of its own and the base's tokenizer."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "use_rslora": False, "use_dora": False, "init_lora_weights": True, "ensure_weight_tying": False}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"v_proj|o_proj": 8.0}}))
    shapes = {"model.layers.0.self_attn.q_proj": (3, 32, 32), "model.layers.0.mlp.up_proj": (2, 64, 32), "model.layers.0.self_attn.o_proj": (2, 32, 32)}
    tensors = {f"base_model.model.{n}.lora_{part}.weight": torch.ones(size) for n, (r, o, i) in shapes.items() for part, size in (("A", (r, i)), ("B", (o, r)))}
    save_file(tensors, folder / "adapter_model.safetensors")
    for path in (*base.glob("tokenizer*.json"), *base.glob("*.jinja")):
        shutil.copy(path, folder)


def made(source: Model, text: str, folder: Path) -> Model:
    """The model's artifact, all linears of blocks rounded to nearest."""
    schemes = {n.removesuffix(".weight"): parse(text) for n in source.weights.names() if n.endswith("_proj.weight")}

    def rounded(name: str) -> QuantizedLinear:
        weight = source.weights.read(f"{name}.weight").float()
        return numerics.quantize(weight, schemes[name], *numerics.minmax_parameters(weight, schemes[name]))

    origin = {
        "qforge_version": "0.1.0", "model": {"source": "demo"}, "adapters": [{"source": "mine", "weight": 1.0}], "quantize": {"method": "rtn", "scheme": text},
        "calibration": {"source": "builtin", "tokens": 512}, "bits_per_weight": 4.5, "layers": [{"name": n, "scheme": text, "relative_error": 0.1} for n in schemes],
    }  # fmt: skip
    write_artifact(folder, source, schemes, rounded, origin)
    return open_model(str(folder))


def attempt(action: Callable[[], object], seed: int) -> bool:
    """Whether the action succeeded; a QforgeError of one line is the only failure."""
    start, computed, said = time.monotonic(), time.process_time(), None
    try:
        action()
    except QforgeError as e:
        said = str(e)
    assert time.process_time() - computed < SLOWEST_S, seed
    assert time.monotonic() - start < 2 * SLOWEST_S, seed
    assert said is None or len(said.strip().splitlines()) == 1, (seed, said)
    return said is None


def read(cases: Iterable[tuple[int, Path]], action: Callable[[Path], object]) -> int:
    """How many of the damaged files or folders the action reads."""
    return sum(attempt(partial(action, path), seed) for seed, path in cases)


def single(path: Path, seeds: range, damage: Callable[[random.Random], bytes]) -> Iterator[tuple[int, Path]]:
    """A file, each time damaged otherwise."""
    for seed in seeds:
        path.write_bytes(damage(random.Random(seed)))
        yield seed, path
        shutil.rmtree(path.parent / "cache", ignore_errors=True)


def folders(files: Path, tmp_path: Path, seeds: range, kinds: Sequence[str], patterns: Sequence[str]) -> Iterator[tuple[int, Path]]:
    """Folders of these kinds, in each of which one of the files of these names is damaged."""
    for kind in kinds:
        shutil.copytree(files / kind, tmp_path / kind)
    for seed in seeds:
        rng, kind = random.Random(seed), kinds[seed % len(kinds)]
        name = rng.choice([path.name for pattern in patterns for path in sorted((files / kind).glob(pattern))])
        whole = (files / kind / name).read_bytes()
        (tmp_path / kind / name).write_bytes(file_changed(name, whole, rng))
        yield seed, tmp_path / kind
        (tmp_path / kind / name).write_bytes(whole)
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)


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
    damages = (header_changed, partial(bytes_changed, end=header_end(whole)))
    return read(single(tmp_path / "model.safetensors", seeds, lambda rng: rng.choice(damages)(whole, rng)), read_header)


def gguf_headers(files: Path, tmp_path: Path, seeds: range) -> int:
    whole = (files / "model.gguf").read_bytes()
    end = min(t.start for t in read_gguf_header(files / "model.gguf").tensors.values())
    return read(single(tmp_path / "model.gguf", seeds, lambda rng: bytes_changed(whole, rng, end)), read_gguf_header)


def gguf_files(files: Path, tmp_path: Path, seeds: range) -> int:
    """GGUF files read by `inspect`."""
    whole = (files / "model.gguf").read_bytes()
    return read(single(tmp_path / "model.gguf", seeds, lambda rng: bytes_changed(whole, rng, len(whole))), partial(inspect, check=True))


def gguf_metadata(files: Path, tmp_path: Path, seeds: range) -> int:
    """GGUF files that are whole and say something else: of the model, of its tokenizer, of a tensor."""
    whole = (files / "model.gguf").read_bytes()
    return read(single(tmp_path / "model.gguf", seeds, partial(metadata_changed, whole)), used)


def checkpoints(files: Path, tmp_path: Path, seeds: range) -> int:
    """Folders whose config.json, description of the quantization, provenance or weights are damaged, read whole by `inspect --check`."""
    return read(folders(files, tmp_path, seeds, KINDS, (*TOLD, "qforge.json", "*.safetensors")), partial(inspect, check=True))


def folders_used(files: Path, tmp_path: Path, seeds: range) -> int:
    """Folders whose config, generation config, tokenizer or chat template say something else."""
    return read(folders(files, tmp_path, seeds, ("plain", "compressed-tensors"), USED), used)


def used(path: Path) -> None:
    """Opened and run as `generate` does: a text, and a conversation."""
    llm = LLM(str(path), threads=1)
    chat = [[{"role": "user", "content": "hi"}]] if llm.tokenizer.chat_template else []
    llm.generate(["the mill", *chat], SamplingParams(max_tokens=2))


def adapters(files: Path, tmp_path: Path, seeds: range) -> int:
    """Adapters whose config, weights, tokenizer or chat template are damaged, merged into a whole model."""

    def merge(folder: Path) -> None:
        merged = with_adapters(open_model(str(files / "plain")), [(str(folder), 1.0)])
        for name in merged.weights.names():
            merged.weights.read(name)
        merged.tokenizer()

    return read(folders(files, tmp_path, seeds, ("adapter",), ("adapter_config.json", "adapter_model.safetensors", "tokenizer*.json", "*.jinja")), merge)


def commands(files: Path, tmp_path: Path, seeds: range) -> int:
    """Folders as above given to the command line: exit code 0, 2 or 3, and one line on stderr."""
    text, prompts, out = tmp_path / "text.txt", tmp_path / "prompts.jsonl", tmp_path / "out"
    text.write_text("\n".join(tiny.TEXT))
    prompts.write_text('{"prompt": "the mill"}\n{"messages": [{"role": "user", "content": "hi"}]}\n')
    verbs = (
        ["inspect", "--check"], ["generate", "--prompts", str(prompts), "--max-tokens", "2"], ["eval", "--text", str(text), "--window", "16"],
        ["export", "--format", "gguf", "--out", str(out)], ["export", "--format", "gptq", "--out", str(out)],
    )  # fmt: skip

    def command(folder: Path, verb: str, *options: str) -> None:
        shutil.rmtree(out, ignore_errors=True)
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as err, pytest.raises(SystemExit) as ended:
            main([verb, str(folder), *options])
        assert ended.value.code in ((0, 1, 2, 3) if verb == "export" else (0, 2, 3)), (verb, err.getvalue())  # 1: what was written reads text otherwise
        if ended.value.code in (2, 3):
            raise QforgeError(err.getvalue()[err.getvalue().lower().index("error: ") :])  # notes stand before it

    damaged = folders(files, tmp_path, seeds, ("compressed-tensors", "plain", "gptq"), (*USED, *TOLD, "qforge.json", "*.safetensors"))
    return sum(attempt(partial(command, folder, *verbs[seed % len(verbs)]), seed) for seed, folder in damaged)


def inspected(cases: Callable[[Iterable[int]], Iterator[tuple[int, Path]]], seeds: range, module: str) -> int:
    """`inspect --check` of graphs; their engine, which opens them in a process of its own, sees one of `OPENED`."""
    with mock.patch(f"qforge.export.{module}.check_opens"):
        count = read(cases(s for s in seeds if s % OPENED), partial(inspect, check=True))
    return count + read(cases(s for s in seeds if s % OPENED == 0), partial(inspect, check=True))


def onnx_files(files: Path, tmp_path: Path, seeds: range) -> int:
    """ONNX files damaged as bytes, in their graph or in what they say of their data, beside data that may be cut."""

    def cases(seeds: Iterable[int]) -> Iterator[tuple[int, Path]]:
        for seed in seeds:
            rng, kind = random.Random(seed), ("matmulnbits", "qdq")[seed % 2]
            whole, data = ((files / f"onnx-{kind}" / name).read_bytes() for name in ("model.onnx", "model.onnx.data"))
            damaged = bytes_changed(whole, rng, len(whole)) if seed % 3 == 0 else external_changed(whole, rng) if seed % 3 == 1 else graph_changed(whole, rng)
            (tmp_path / "model.onnx").write_bytes(damaged)
            (tmp_path / "model.onnx.data").write_bytes(data[: rng.randrange(len(data))] if rng.random() < 0.1 else data)
            yield seed, tmp_path / "model.onnx"

    return inspected(cases, seeds, "inspect_onnx")


def openvino_files(files: Path, tmp_path: Path, seeds: range) -> int:
    """OpenVINO's graphs, damaged as bytes or in the numbers of their constants, ports and edges, beside data that may be cut."""
    if not (files / "openvino").exists():
        pytest.skip("openvino is not installed")
    whole, data = ((files / "openvino" / f"openvino_model.{suffix}").read_bytes() for suffix in ("xml", "bin"))
    numbers = [m.span(1) for m in re.finditer(rb'(?:offset|size|shape|id|from-layer|to-port)="([-0-9, ]*)"', whole)]

    def cases(seeds: Iterable[int]) -> Iterator[tuple[int, Path]]:
        for seed in seeds:
            rng = random.Random(seed)
            start, end = rng.choice(numbers)
            told = whole[:start] + str(rng.choice((-1, 0, 7, 1 << 31, 1 << 63, 10**400, "", "x", "1, -1", "9, " * 5000))).encode() + whole[end:]
            (tmp_path / "openvino_model.xml").write_bytes(told if seed % 2 else bytes_changed(whole, rng, len(whole)))
            (tmp_path / "openvino_model.bin").write_bytes(data[: rng.randrange(len(data))] if rng.random() < 0.1 else data)
            yield seed, tmp_path / "openvino_model.xml"

    return inspected(cases, seeds, "inspect_openvino")


@pytest.mark.parametrize(
    ("damage", "count"),
    [
        (safetensors_headers, 1500),
        (gguf_headers, 1500),
        (checkpoints, 210),
        (gguf_files, 120),
        (gguf_metadata, 60),
        (folders_used, 30),
        (adapters, 30),
        (commands, 20),
        (onnx_files, 400),
        (openvino_files, 200),
    ],
)
def test_damaged_files_end_in_one_clear_error(files, tmp_path, monkeypatch, little_memory, damage, count):
    monkeypatch.setenv("QFORGE_CACHE", str(tmp_path / "cache"))
    assert 0 < damage(files, tmp_path, range(count)) < count


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("damage", "count"),
    [
        (safetensors_headers, 44_000),
        (gguf_headers, 44_000),
        (checkpoints, 3_500),
        (gguf_files, 2_000),
        (gguf_metadata, 2_000),
        (folders_used, 1_500),
        (adapters, 1_000),
        (commands, 800),
        (onnx_files, 4_000),
        (openvino_files, 2_500),
    ],
)
def test_a_hundred_thousand_damaged_files(files, tmp_path, monkeypatch, little_memory, damage, count):
    monkeypatch.setenv("QFORGE_CACHE", str(tmp_path / "cache"))
    assert damage(files, tmp_path, range(10_000_000, 10_000_000 + count)) < count
