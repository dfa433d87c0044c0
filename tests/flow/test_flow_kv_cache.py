"""Keys and values in FP8 from recipe to result: scales in the artifact, rounded alike by our runtime and in transformers, and told in results, report and inspect."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from flows import write_recipe
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import qforge
from qforge.engines.transformers_engine import TransformersEngine
from qforge.errors import ModelError, UnsupportedError
from qforge.export.inspection import inspect, summary
from qforge.export.verify_packed import verify_packed
from qforge.models.model import open_model
from qforge.pipeline import plan
from qforge.progress import Silent
from qforge.runtime import LLM
from qforge.runtime.decoder import Decoder
from qforge.runtime.loader import read
from qforge.stages import exports
from qforge.types import ExportResult, Results

WINDOW = torch.randint(3, 380, (150,), generator=torch.Generator().manual_seed(0)).tolist()
NAMES = [f"model.layers.{i}.self_attn.{n}_scale" for i in range(2) for n in "kv"]


def recipe(folder: Path, family: str = "llama", dtype: torch.dtype = torch.float32, *, export: tuple[str, ...] = (), evaluated: bool = True, **quantize: object) -> Path:
    tiny.make(folder / "model", family, layers=2, dtype=dtype)
    settings = {"method": "rtn", "scheme": "int8-channel-sym", "kv_cache": "fp8", **quantize}
    return write_recipe(folder, quantize=settings, export=[{"format": f} for f in export], evaluate={"text": "evaluation.txt", "window": 64} if evaluated else None)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Results]:
    folder = tmp_path_factory.mktemp("kv")
    return folder, qforge.quantize(recipe(folder, dtype=torch.bfloat16, export=("trtllm",)), out=folder / "out")


def stored(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(next((folder / "out/model").glob("*.safetensors")), "pt") as f:
        return {n: f.get_tensor(n) for n in f.keys() if n.endswith(("k_scale", "v_scale"))}  # noqa: SIM118


def test_the_artifact_holds_scales_and_says_so(done: tuple[Path, Results]) -> None:
    folder, results = done
    tensors, config = stored(folder), json.loads((folder / "out/model/config.json").read_text())["quantization_config"]
    assert sorted(tensors) == NAMES
    assert {(t.dtype, tuple(t.shape)) for t in tensors.values()} == {(torch.bfloat16, (1,))}
    assert config["kv_cache_scheme"] == {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    told = results.artifact["kv_cache"]
    assert told["type"] == "fp8"
    assert [s for pair in told["scales"].values() for s in pair] == [float(tensors[n]) for n in NAMES]
    assert dict(open_model(str(folder / "out")).kv_scales) == told["scales"]
    found = inspect(folder / "out", check=True)
    assert found["kv_cache"] == told
    assert "cache:      keys and values as fp8, scales for 2 layers" in summary(found)
    assert "fp8, scales calibrated for 2 layers" in (folder / "out/report.md").read_text()


def test_what_was_measured_is_with_rounded_keys_and_values(done: tuple[Path, Results]) -> None:
    folder, results = done
    assert results.evaluation is not None
    assert results.evaluation.engine == f"qforge (fp8 keys and values) {qforge.__version__}"
    artifact = open_model(str(folder / "out"))
    assert LLM(artifact).kv_cache == "fp8"
    assert 4 * LLM(artifact).cache_token_bytes == LLM(artifact, kv_cache="fp32").cache_token_bytes
    exact, rounded = (torch.cat(list(LLM(artifact, kv_cache=kind).score([WINDOW]))) for kind in ("fp32", None))
    assert 1e-3 < (rounded - exact).norm() / exact.norm() < 0.2


def test_exports_without_a_place_for_them_are_compared_without_them(done: tuple[Path, Results], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, results = done
    _, planned, _ = plan(folder / "recipe.yaml", overrides=["export=[{format: gguf}, {format: onnx}, {format: trtllm}]"])
    assert "gguf and onnx have no place for the scales of keys and values: what is exported, and compared, is the rest" in planned.notes
    assert not any("no place" in w for w in results.warnings)
    sides = {}
    monkeypatch.setattr(exports, "verify", lambda kind, paths, model, scorer, prompts: sides.update({kind: scorer.name}) or ([], []))
    monkeypatch.setattr(exports, "verify_text", lambda *_: [])
    for kind in ("gguf", "compressed-tensors"):
        exports._verified(ExportResult(kind), None, folder, open_model(str(folder / "out")), "auto", [])
    assert sides == {"gguf": "qforge", "compressed-tensors": "qforge (fp8 keys and values)"}


@pytest.mark.parametrize(("family", "method"), [("qwen2", "none"), ("gemma3_text", "rtn"), ("phi3", "gptq")])
def test_every_engine_computes_the_same(tmp_path: Path, family: str, method: str) -> None:
    """transformers with compressed-tensors rounds keys and values to the same bits; the runtime to the same but where sums fall to the other side of a border."""
    results = qforge.quantize(recipe(tmp_path, family, method=method, scheme=None if method == "none" else "int8-channel-sym"), out=tmp_path / "out")
    assert results.evaluation is not None
    assert results.evaluation.kl_mean is not None
    assert 0 < results.evaluation.kl_mean < 0.1
    artifact = open_model(str(tmp_path / "out"))
    ours, exact = (torch.cat(list(TransformersEngine(m).score([WINDOW]))) for m in (artifact, replace(artifact, kv_scales={})))
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out/model", dtype=torch.float32).eval()(torch.tensor([WINDOW])).logits[0, :-1]
    assert torch.equal(ours, theirs)
    far = (ours - exact).norm()
    assert far > 0
    native, reference = LLM(artifact), LLM(artifact)
    reference.runner = Decoder(read(artifact), num_blocks=reference.num_blocks, block_size=16, kv_cache="fp8")
    for llm in (native, reference):
        assert (torch.cat(list(llm.score([WINDOW]))) - ours).norm() < 0.1 * far


def test_another_cache_is_another_artifact_of_the_same_work(tmp_path: Path) -> None:
    file = recipe(tmp_path, evaluated=False, method="gptq")
    first, again = (qforge.quantize(file, out=tmp_path / "out") for _ in range(2))
    assert again.work["computed"] == 0
    assert again.artifact == first.artifact
    off = qforge.quantize(file, out=tmp_path / "out", overrides=["quantize.kv_cache=null"])
    assert off.work["computed"] == 1  # the artifact
    assert off.artifact["kv_cache"] is None
    assert off.artifact["sha256"] != first.artifact["sha256"]
    assert not stored(tmp_path)


def test_a_source_with_a_cache_is_told_that_its_scales_go(done: tuple[Path, Results]) -> None:
    _, planned, _ = plan(done[0] / "recipe.yaml", overrides=["model.source=out/model", "quantize.kv_cache=null", "export=[]"])
    assert any("what is written does not, unless quantize.kv_cache: fp8" in note for note in planned.notes)


def test_tensorrt_llm_gets_them(done: tuple[Path, Results]) -> None:
    folder = done[0] / "out/exports/trtllm"
    artifact = open_model(str(done[0] / "out"))
    assert json.loads((folder / "hf_quant_config.json").read_text())["quantization"]["kv_cache_quant_algo"] == "FP8"
    assert done[1].exports[0].lossless
    assert open_model(str(folder)).kv_scales == artifact.kv_scales
    file = next(folder.glob("*.safetensors"))
    save_file(load_file(file) | {"model.layers.1.self_attn.v_proj.v_scale": torch.tensor([7.0])}, file)
    (found,), _ = verify_packed("trtllm", folder, artifact)
    assert found.note == "unequal or missing: model.layers.1.self_attn.v_proj.v_scale"


def test_damaged_scales_are_refused(done: tuple[Path, Results], tmp_path: Path) -> None:
    folder, _ = done
    for change, says in (
        ({NAMES[0]: torch.tensor([float("nan")])}, "finite and greater than 0"),
        ({NAMES[3]: None}, f"hold no {NAMES[3]}"),
        ({NAMES[2]: None, NAMES[3]: None}, "1 of 2 layers have scales"),
    ):
        copied = tmp_path / str(len(list(tmp_path.iterdir())))
        copied.mkdir()
        for path in (folder / "out/model").iterdir():
            if path.suffix == ".safetensors":
                save_file({n: t for n, t in (load_file(path) | change).items() if t is not None}, copied / path.name, metadata={"format": "pt"})
            else:
                (copied / path.name).write_bytes(path.read_bytes())
        with pytest.raises(ModelError, match=says):
            inspect(copied)


@pytest.mark.parametrize(("family", "quantize", "says"), [("llama", {"method": "nf4", "scheme": None}, "bitsandbytes"), ("bloom", {}, "takes no cache of keys and values")])
def test_what_cannot_be_is_refused_before_work_starts(tmp_path: Path, family: str, quantize: dict[str, object], says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        qforge.quantize(recipe(tmp_path, family, **quantize), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_trtllm_has_no_place_for_scales_of_fused_linears(tmp_path: Path) -> None:
    file = recipe(tmp_path, "phi3", torch.bfloat16, evaluated=False)
    with pytest.raises(UnsupportedError, match=r"stored with k_proj and v_proj, and model\.layers\.0\.self_attn has none"):
        qforge.quantize(file, out=tmp_path / "out", overrides=["export=[{format: trtllm}]"])
    assert not (tmp_path / "out").exists()  # before work starts
    qforge.quantize(file, out=tmp_path / "out")
    with pytest.raises(UnsupportedError, match=r"stored with k_proj and v_proj, and model\.layers\.0\.self_attn has none"):
        qforge.pipeline.export(tmp_path / "out", "trtllm", out=tmp_path / "trtllm")


class Notes(Silent):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None:
        """Keep it."""
        self.said.append(text)


HOLDING = [("mlx", None, False), ("compressed-tensors", None, True), ("trtllm", None, True), ("triton", "onnx", False), ("triton", "vllm", True)]


@pytest.mark.parametrize(("format_name", "type_name", "held"), HOLDING)
def test_an_export_says_whether_it_leaves_the_scales_out(
    done: tuple[Path, Results], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format_name: str, type_name: str | None, held: bool
) -> None:
    notes, sides, verify = Notes(), [], exports.verify
    monkeypatch.setattr(exports, "verify", lambda kind, paths, model, scorer, prompts: sides.append(scorer.name) or verify(kind, paths, model, scorer, prompts))
    qforge.pipeline.export(done[0] / "out", format_name, type=type_name, out=tmp_path / "there", progress=notes)
    assert any("no place for scales of keys and values" in note for note in notes.said) != held
    assert sides == ["qforge (fp8 keys and values)" if held else "qforge"]
    written = [name for file in (tmp_path / "there").rglob("*.safetensors") for name in load_file(file)]
    assert any(name.endswith("k_scale") for name in written) == held
    entry = f"export=[{{format: {format_name}, type: {type_name or 'null'}}}]"
    if format_name != "compressed-tensors":  # what every run writes
        assert any("no place for the scales of keys and values" in note for note in plan(done[0] / "recipe.yaml", overrides=[entry])[1].notes) != held
