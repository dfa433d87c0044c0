"""Packed weights kept from start to start: the same tokens and logits, no torch, and no harm from what lies in the folder."""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_models import FAMILIES, folder, prompts

from qforge import numerics
from qforge.errors import DataError
from qforge.export.hf import write_artifact
from qforge.models.model import open_model
from qforge.ops.native_weight import NativeWeight
from qforge.qlinear import QuantizedLinear
from qforge.runtime import LLM, SamplingParams, packed_cache, packed_file
from qforge.runtime.packed_cache import entry
from qforge.runtime.tokenizer import PlainTokenizer, plain
from qforge.scheme import ACTIVATIONS, parse
from qforge.types import KvScales

PARAMS = SamplingParams(max_tokens=6)
GIVEN = ["The small mill", "def add(a"]
FRESH = """
import json, sys
from qforge.cli.main import main
try:
    main(sys.argv[1:])
finally:
    print(json.dumps(sorted({m.partition(".")[0] for m in sys.modules} & {"torch", "transformers", "safetensors"})))
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QFORGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("QFORGE_PACKED_GB", "1")
    monkeypatch.setattr(packed_file, "_SETTLED_S", 0.0)  # what is read here moves into huge pages while it is run
    return tmp_path / "cache" / "packed"


def quantized(path: Path, scheme: str, kv_scales: KvScales = MappingProxyType({})) -> Path:
    """A small artifact; one of its linears stays as it is, and another has a scheme of its own."""
    source = open_model(str(folder("qwen2")))
    names = [n.removesuffix(".weight") for n in source.weights.names() if "_proj.weight" in n and "layers.1.mlp.up" not in n]
    schemes = {n: parse("int8-g32-asym" if "layers.0.self_attn.k" in n else scheme) for n in names}

    def linear(name: str) -> QuantizedLinear:
        weight = source.weights.read(f"{name}.weight").float()
        bias = source.weights.read(f"{name}.bias").float() if f"{name}.bias" in source.weights.names() else None
        return numerics.quantize(weight, schemes[name], *numerics.minmax_parameters(weight, schemes[name]), bias=bias)

    write_artifact(path, source, schemes, linear, {}, kv_scales=kv_scales)
    return path


def test_scales_of_keys_and_values_are_kept(tmp_path: Path, cache: Path) -> None:
    model = quantized(tmp_path / "model", "int4-g32-sym", {f"model.layers.{i}.self_attn": (0.5 + i, 0.25) for i in range(3)})
    first, second = LLM(str(model)), LLM(str(model))
    assert len(kept(cache)) == 1
    assert first.kv_cache == second.kv_cache == "fp8"
    assert second.runner.spec.kv_scales == ((0.5, 0.25), (1.5, 0.25), (2.5, 0.25))
    window = prompts(1, 2, seed=3)[0] * 40
    a, b, exact = (torch.cat(list(llm.score([window]))) for llm in (first, second, LLM(str(model), kv_cache="fp32")))
    assert torch.equal(a, b)
    assert not torch.equal(a, exact)


def kept(cache: Path) -> list[Path]:
    return sorted(cache.glob("*.qfpack"))


def tokens(model: Path, **settings: object) -> list[list[int]]:
    return [o.token_ids for o in LLM(str(model), **settings).generate(GIVEN, PARAMS)]  # type: ignore[arg-type]


def fresh(*arguments: object) -> tuple[list[dict[str, object]], list[str]]:
    """(outputs, heavy packages that were imported) of a `generate` in a new process."""
    done = subprocess.run([sys.executable, "-c", FRESH, *map(str, arguments), "--json", "-"], capture_output=True, text=True, check=True)
    *told, imported = done.stdout.splitlines()
    return json.loads("\n".join(told))["outputs"], json.loads(imported)


def test_a_second_start_imports_neither_torch_nor_transformers_and_says_the_same(tmp_path: Path, cache: Path) -> None:
    model = quantized(tmp_path / "model", "int4-g32-sym")
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "The small"}\n{"messages": [{"role": "user", "content": "żółw"}]}\n')
    here = LLM(str(model)).generate(["The small", [{"role": "user", "content": "żółw"}]], SamplingParams(max_tokens=8, temperature=0.8, seed=3))
    outputs, imported = fresh("generate", model, "--prompts", file, "--max-tokens", 8, "--temperature", 0.8, "--seed", 3)
    assert outputs == [{name: asdict(o)[name] for name in ("prompt", "prompt_token_ids", "token_ids", "text", "finish_reason")} for o in here]
    assert imported == []
    assert len(kept(cache)) == 1


@pytest.mark.parametrize("name", FAMILIES)
def test_kept_weights_give_the_same_bits_in_every_family(name: str, cache: Path) -> None:
    first, again = LLM(str(folder(name))), LLM(str(folder(name)))
    assert not isinstance(first.tokenizer, PlainTokenizer)
    assert isinstance(again.tokenizer, PlainTokenizer)
    window = prompts(1, 2, seed=3)[0] * 60
    assert torch.equal(*(torch.cat(list(llm.score([window]))) for llm in (first, again)))
    params = [SamplingParams(max_tokens=8, temperature=t, top_k=20, seed=3) for t in (0.0, 1.0, 0.0, 0.7)]
    asked = prompts(4, 40, seed=6)
    assert first.generate(asked, params) == again.generate(asked, params)
    assert first.kernels() == again.kernels()
    assert first.runner.weight_bytes() == again.runner.weight_bytes()
    (file,) = kept(cache)
    packed = packed_file.read(file, file.stem)
    assert packed is not None
    assert packed_file.nbytes(packed) == file.stat().st_size


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("scheme", ["int4-g32-asym", "int4-g64-sym", "int8-channel-sym", "int8-channel-sym+int8-token"])
def test_kept_weights_of_every_kind_of_product_give_the_same_bits(scheme: str, activations: str, tmp_path: Path) -> None:
    model = quantized(tmp_path / "model", scheme)
    first, again = (LLM(str(model), activations=activations) for _ in range(2))
    assert isinstance(again.tokenizer, PlainTokenizer)
    window = prompts(1, 2, seed=3)[0] * 40
    assert torch.equal(*(torch.cat(list(llm.score([window]))) for llm in (first, again)))


def test_every_array_of_a_weight_is_kept() -> None:
    """Kernels do without some of them, at the cost of time: their bits would not tell."""
    assert {"codes", *packed_file._BUFFERS} == {f.name for f in fields(NativeWeight) if str(f.type).startswith("Buffer")}


@pytest.mark.parametrize(("huge", "free", "moves"), [(True, 2.0, True), (True, 1.99, False), (False, 9.0, False)], ids=["room", "too little memory", "no huge pages"])
def test_a_start_is_mapped_and_moves_where_memory_is_ample(huge: bool, free: float, moves: bool, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    LLM(str(folder("llama")))
    (file,) = kept(cache)
    mapped = SimpleNamespace(asked=[])

    def watched(descriptor: int, size: int) -> SimpleNamespace:
        mapped.file = original(descriptor, size)
        mapped.address, mapped.move_later = mapped.file.address, mapped.asked.append
        return mapped

    original = packed_file._mapped
    monkeypatch.setattr(packed_file, "_mapped", watched)
    monkeypatch.setattr(packed_file, "huge_pages", lambda: huge)
    monkeypatch.setattr(packed_file, "free_memory", lambda: int(free * file.stat().st_size))
    assert packed_file.read(file, file.stem) is not None
    assert mapped.asked == ([0.0] if moves else [])


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 64)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _flip(at: float) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(at * (len(content) - 1))] ^= 4
        path.write_bytes(content)

    return flip


def _swap(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-128:-64], content[-64:] = content[-64:], content[-128:-64]
    path.write_bytes(content)


def _foreign(path: Path) -> None:
    path.write_bytes(b"QFPACK\r\n" + bytes(56) + b"{}" + bytes(62))


def _another(path: Path) -> None:
    """A sound file of another model under this name."""
    LLM(str(tiny.make(path.parent / "other", seed=5)))
    other = next(p for p in path.parent.glob("*.qfpack") if p != path)
    shutil.copy(other, path)


@pytest.mark.parametrize("harm", [_cut, _empty, _flip(0.0), _flip(0.0003), _flip(0.5), _flip(1.0), _swap, _foreign, _another])
def test_a_damaged_file_is_found_and_made_again(harm: Callable[[Path], None], cache: Path) -> None:
    model = folder("llama")
    wanted = tokens(model)
    (path,) = kept(cache)
    whole = path.read_bytes()
    harm(path)
    assert path.read_bytes() != whole
    llm = LLM(str(model))
    assert not isinstance(llm.tokenizer, PlainTokenizer)
    assert [o.token_ids for o in llm.generate(GIVEN, PARAMS)] == wanted
    assert path.read_bytes() == whole
    assert isinstance(LLM(str(model)).tokenizer, PlainTokenizer)


LOADED = """
import json, sys
from pathlib import Path
import qforge
from qforge.runtime import LLM
LLM(sys.argv[1])
files = [Path(m.__file__) for n, m in sys.modules.items() if n.partition(".")[0] == "qforge" and (m.__file__ or "").endswith(".py")]
print(json.dumps(sorted({p.relative_to(Path(qforge.__file__).parent).parent.as_posix() for p in files})))
"""


def test_all_code_that_packs_is_part_of_an_entrys_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Folders of what a first start loads, and the libraries that read the model, decide the name."""
    ran = subprocess.run([sys.executable, "-c", LOADED, str(folder("llama"))], check=True, capture_output=True, text=True)
    assert set(json.loads(ran.stdout)) <= {*packed_cache._PROGRAM}
    before = packed_cache._program.__wrapped__()
    (tmp_path / "transformers.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    assert packed_cache._program.__wrapped__() != before


def test_a_changed_model_is_another_model(tmp_path: Path, cache: Path) -> None:
    model = tiny.make(tmp_path / "m")
    before = tokens(model)
    shutil.copy(tiny.make(tmp_path / "n", seed=1) / "model.safetensors", model / "model.safetensors")  # of the same size
    assert tokens(model) != before
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": before[0][2]}))
    tokens(model)
    assert LLM(str(model))._opened.end_ids == {before[0][2], tiny.tokenizer().eos_token_id}
    assert len(kept(cache)) == 3


def test_files_are_hashed_once_and_again_when_they_change(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, hashed = tiny.make(tmp_path / "m"), []
    real = packed_cache.sha256_file
    monkeypatch.setattr(packed_cache, "sha256_file", lambda p: (hashed.append(p.name), real(p))[1])
    first = entry(model, "fp")
    assert "model.safetensors" in hashed
    hashed.clear()
    entry(model, "fp")
    assert hashed, "what has only just been written may change within the clock's resolution"
    monkeypatch.setattr(packed_cache, "_SETTLED", 0)
    entry(model, "fp")
    hashed.clear()
    assert entry(model, "fp") == first
    assert hashed == []
    os.utime(model / "model.safetensors")
    again = entry(model, "fp")
    assert hashed
    assert first is not None
    assert again is not None
    assert again.path == first.path  # the bytes are the same
    next(cache.glob("*.json")).write_text("{")
    hashed.clear()
    assert entry(model, "fp") == again
    assert hashed


def test_a_full_disk_or_a_folder_that_cannot_be_written_costs_only_the_cache(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = folder("llama")

    def full(path: Path, *rest: object) -> None:
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(packed_file, "write", full)
        wanted = tokens(model)
    assert "No space left" in caplog.text
    assert kept(cache) == []
    assert list(cache.glob(".*")) == []
    caplog.clear()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("QFORGE_CACHE", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        assert tokens(model) == wanted
    assert "not kept for the next start" in caplog.text


def test_what_was_not_used_for_longest_goes_first(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [tiny.make(tmp_path / f"m{seed}", seed=seed) for seed in range(3)]
    tokens(models[0])
    (first,) = kept(cache)
    tokens(models[1])
    (second,) = set(kept(cache)) - {first}
    os.utime(first, (1, 1))
    os.utime(second, (2, 2))
    tokens(models[0])  # used again
    monkeypatch.setenv("QFORGE_PACKED_GB", str(2.5 * first.stat().st_size / 1e9))
    tokens(models[2])
    assert first in kept(cache)
    assert second not in kept(cache)
    assert len(kept(cache)) == 2
    monkeypatch.setenv("QFORGE_PACKED_GB", "0")
    assert entry(models[0], "fp") is None
    monkeypatch.setenv("QFORGE_PACKED_GB", "much")
    with pytest.raises(DataError, match="QFORGE_PACKED_GB is 'much'"):
        LLM(str(models[0]))


def test_products_that_run_outside_the_native_step_are_not_kept(tmp_path: Path, cache: Path) -> None:
    model = quantized(tmp_path / "model", "fp8-e4m3-channel+fp8-e4m3-token")
    assert tokens(model) == tokens(model)
    assert kept(cache) == []


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=40))
def test_a_plain_tokenizer_is_transformers_own(text: str) -> None:
    theirs = tiny.tokenizer()
    ours = plain(theirs)
    assert ours is not None
    for special in (True, False):
        ids = ours.encode(text, add_special_tokens=special)
        assert ids == theirs.encode(text, add_special_tokens=special)
        assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(ids, skip_special_tokens=special, clean_up_tokenization_spaces=False)


TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}\n  {%- if m.role == 'assistant' %}{% generation %}{{ m.content | trim }}{{ eos_token }}{% endgeneration %}{% else %}"
    "[{{ m['role'] }}] {{ m.content }}\n{% endif %}\n{% endfor %}\n{% if add_generation_prompt %}>{% endif %}",
    "{%- set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{% set ns.n = ns.n + 1 %}"
    "{{ m | tojson }}{% break %}{% endfor %}{{ ns.n }}",
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}{{ messages | tojson(indent=2) }}{% if tools %}T{% endif %}{{ strftime_now('%Y') }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("system", [False, True])
def test_chat_templates_render_as_in_transformers(template: str, system: bool) -> None:
    theirs = tiny.tokenizer()
    theirs.chat_template = template
    ours = plain(theirs)
    assert ours is not None
    chat = [{"role": "system", "content": "ü <b>"}] * system + [{"role": "user", "content": " a\n"}, {"role": "assistant", "content": " b "}, {"role": "user", "content": "c"}]
    rendered = []
    for tokenizer in (ours, theirs):
        try:
            rendered.append(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        except Exception as e:
            rendered.append(str(e))
    assert rendered[0] == rendered[1]


def test_a_tokenizer_that_would_differ_is_not_taken() -> None:
    theirs = tiny.tokenizer()
    theirs.chat_template = {"default": "a", "tool_use": "b"}
    assert plain(theirs) is None
    theirs.chat_template = None
    real = theirs.encode
    theirs.encode = lambda text, **k: [1, *real(text, **k)]
    assert plain(theirs) is None
