"""Files made to do harm: tokenizers, templates, patterns, names and sizes that would end the process, never end, or take all memory; each is one message, soon."""

from __future__ import annotations

import json
import os
import resource
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from qforge import numerics, patterns
from qforge.cli.main import main
from qforge.errors import DataError, ModelError
from qforge.export.gguf import GgufExporter
from qforge.export.hf import write_artifact
from qforge.export.inspection import inspect
from qforge.export.provenance import PROVENANCE, read_provenance
from qforge.layouts import bitsandbytes
from qforge.layouts.bitsandbytes import BitsAndBytes
from qforge.layouts.compressed_tensors import CompressedTensors
from qforge.layouts.mlx import Mlx
from qforge.models.adapter_config import read_adapter_config
from qforge.models.assets import reading_tokenizer
from qforge.models.config import read_json
from qforge.models.gguf_header import read_gguf_header
from qforge.models.lora import with_adapters
from qforge.models.model import open_model
from qforge.models.shards import read_header
from qforge.models.trial import try_template
from qforge.runtime.llm import LLM, SamplingParams
from qforge.scheme import parse
from qforge.text.records import chat_renderer, jsonl_texts

ENDLESS = "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}"


BROKEN = "{% for m in messages %}\n{{ m.content }\n{% endfor %}"


@pytest.fixture(autouse=True)
def soon() -> Iterator[None]:
    """Computing, this process's and its children's: a busy machine is not slow."""
    start = time.process_time() + resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    yield
    assert time.process_time() + resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - start < 5


def tell(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | changes))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (ENDLESS, "takes too long"),
        ("{{ '%4000000000d' % 3 }}", "takes too much memory"),
        ("{{ 'x' * 10000000 }}", "makes 10,000,000 characters"),
        ("{{ lipsum(n=100000000) }}", "takes too"),
    ],
)
def test_a_template_without_measure_is_refused(copy: Path, template: str, message: str) -> None:
    (copy / "chat_template.jinja").write_text(template)
    with pytest.raises(ModelError, match=f"the chat template of .* cannot be used: it {message}"):
        open_model(str(copy)).tokenizer()
    with pytest.raises(ModelError, match=message):
        LLM(str(copy), threads=1).tokenizer  # noqa: B018


def test_a_template_that_waits_for_its_messages_is_stopped(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qforge.text.chat._SECONDS", 0.2)
    endless = "{% if messages[0]['content'] == 'hi' %}" + ENDLESS + "{% endif %}"
    large = "{% if messages[0]['content'] == 'ho' %}{{ 'x' * 3000000000 }}{% endif %}"
    (copy / "chat_template.jinja").write_text(endless + large + "{{ messages[0]['content'] }}")
    llm = LLM(str(copy), threads=1)
    assert llm.generate([[{"role": "user", "content": "mill"}]], SamplingParams(max_tokens=1))
    with pytest.raises(DataError, match="takes more than"):
        llm.generate([[{"role": "user", "content": "hi"}]])
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(DataError, match=r"takes more than 1,073,741,824 bytes of memory"):
        llm.generate([[{"role": "user", "content": "ho"}]])
    assert resource.getrlimit(resource.RLIMIT_AS) == before
    with pytest.raises(DataError, match=r"c\.jsonl:2: .* takes more than .* bytes"):
        jsonl_texts('{"messages": [{"role": "user", "content": "a"}]}\n{"messages": [{"role": "user", "content": "ho"}]}', "c.jsonl", chat_renderer(llm.tokenizer))
    with pytest.raises(DataError, match=r"has 1,000,000 characters"):
        llm.generate(["x" * 1_000_000])


def test_a_template_may_refuse() -> None:
    """Whoever has no conversation can use the model."""
    for template in ("{{ raise_exception('no system role') }}", "{{ 1 / 0 }}", "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"):
        try_template(template, {"bos_token": "<s>"}, "here")


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json", "additional_chat_templates/tool_use.jinja"])
def test_a_template_that_does_not_compile_is_named_before_any_work(copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    if name == "tokenizer_config.json":
        (copy / "chat_template.jinja").unlink()
        tell(copy / name, chat_template=BROKEN)
    else:
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_text(BROKEN)
    said = f"the chat template of {copy / name} cannot be used: line 2 of the template: unexpected '}}'"
    (tmp_path / "r.yaml").write_text(json.dumps({"version": 1, "model": {"source": str(copy)}, "quantize": {"method": "rtn", "scheme": "int4-g32-sym"}}))
    for arguments in (["quantize", "--recipe", str(tmp_path / "r.yaml"), "--out", str(tmp_path / "out")], ["inspect", "--check", str(copy)]):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 2
        assert said in capsys.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "out").exists()


def test_a_template_of_an_adapter_that_does_not_compile_is_named_where_it_is(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QFORGE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a").mkdir()
    tell(tmp_path / "a" / "adapter_config.json", peft_type="LORA", r=1, lora_alpha=1)
    made = {"lora_A": torch.ones(1, 64), "lora_B": torch.zeros(64, 1)}
    save_file({f"base_model.model.model.layers.0.self_attn.q_proj.{part}.weight": t for part, t in made.items()}, tmp_path / "a" / "adapter_model.safetensors")
    (tmp_path / "a" / "chat_template.jinja").write_text("{{ a | no_such_filter }}")
    with pytest.raises(ModelError, match=r"the chat template of \S+/a/chat_template.jinja cannot be used: line 1 of the template: No filter named 'no_such_filter'"):
        with_adapters(open_model(str(base)), [("a", 1.0)], folder=tmp_path)


def test_a_template_of_a_gguf_file_that_does_not_compile_is_named_by_the_file(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QFORGE_CACHE", str(tmp_path / "cache"))
    (path,) = GgufExporter("f32").write(open_model(str(base)), tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"{% endfor %}", b"{% endfot %}"))
    assert path.read_bytes() != whole
    with pytest.raises(ModelError, match=rf"the chat template of {path} \(tokenizer.chat_template\) cannot be used: line 3 of the template: .*'endfot'"):
        open_model(str(path))


def test_templates_that_transformers_takes_compile() -> None:
    try_template("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}{{ strftime_now('%Y') }}", {}, "here")


@pytest.mark.parametrize(
    "normalizer",
    [
        {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 16} for _ in range(12)]},
        {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": "Q"}, "content": "Q" * 16} for _ in range(9)]},
        {"type": "Precompiled", "precompiled_charsmap": "////fwAAAAA="},
    ],
    ids=["growth", "rare", "charsmap"],
)
def test_a_tokenizer_that_ends_its_process_is_refused(copy: Path, normalizer: dict[str, Any]) -> None:
    tell(copy / "tokenizer.json", normalizer=normalizer)
    with pytest.raises(ModelError, match=r"the tokenizer in .* cannot be used"):
        open_model(str(copy)).tokenizer()


def test_an_error_without_words_is_told_by_its_type() -> None:
    with pytest.raises(ModelError, match=r"^it cannot be loaded: LookupError$"), reading_tokenizer("it cannot be loaded"):
        raise LookupError(" \n")


@pytest.mark.parametrize("pattern", ["(.*.*.*)*=", "((((.*)*)*)*)*=", "(a|a|[a-z._0-9]+)+$="])
def test_a_pattern_that_never_ends_is_refused(pattern: str) -> None:
    name = "model.layers.0.self_attn.q_proj" * 3
    with pytest.raises(ModelError, match=r"here holds the pattern .* which takes too long"):
        patterns.matches(pattern, name, "here")


@pytest.mark.parametrize("pattern", ["(", "a{99999999999999999999}", "(" * 5000 + ")" * 5000])
def test_a_pattern_that_is_none_is_refused(pattern: str) -> None:
    with pytest.raises(ModelError, match="not a regular expression"):
        patterns.matches(pattern, "a", "here")


def test_patterns_match_as_re_does() -> None:
    assert patterns.matches(r".*\.q_proj$", "model.layers.0.self_attn.q_proj", "here")
    assert not patterns.matches("proj", "model.q_proj", "here")


def test_many_slow_patterns_are_refused_together() -> None:
    found = iter(lambda: patterns.matches("(?:[a-z._0-9]|[a-z._0-9]){20}=", "model.layers.0.self_attn.q_proj", "there"), None)
    with pytest.raises(ModelError, match="takes too long"):
        all(not f for f in found)


def test_patterns_of_checkpoints_are_under_the_limit(copy: Path) -> None:
    group = {"targets": ["re:(.*.*.*)*="], "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}}
    tell(copy / "config.json", quantization_config={"quant_method": "compressed-tensors", "config_groups": {"g": group}, "format": "pack-quantized"})
    with pytest.raises(ModelError, match="quantization_config holds the pattern"):
        open_model(str(copy))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lora_alpha": 10**400}, "an alpha of 1000"),
        ({"r": 10**400}, "a rank of 1000"),
        ({"rank_pattern": {"a{99999999999999999999}": 3}}, "not a regular expression"),
        ({"rank_pattern": {"(" * 5000 + ")" * 5000: 3}}, "not a regular expression"),
        ({"base_model_name_or_path": "\ud800"}, "surrogates"),
    ],
)
def test_an_adapters_config_without_measure_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    tell(tmp_path / "adapter_config.json", **{"peft_type": "LORA", "r": 8, "lora_alpha": 16} | change)
    with pytest.raises(ModelError, match=message) as e:
        read_adapter_config(tmp_path)
    assert len(str(e.value)) < 500 + len(str(tmp_path))


def test_what_is_no_file_is_not_waited_for(copy: Path) -> None:
    for name in ("model.safetensors", "config.json", "tokenizer.json", "generation_config.json"):
        whole = (copy / name).read_bytes() if (copy / name).exists() else None
        (copy / name).unlink(missing_ok=True)
        os.mkfifo(copy / name)
        with pytest.raises(ModelError, match="pipe, a socket or a device"):
            LLM(str(copy), threads=1).tokenizer  # noqa: B018
        (copy / name).unlink()
        if whole is not None:
            (copy / name).write_bytes(whole)
    (copy / "config.json").unlink()
    (copy / "config.json").symlink_to("/dev/zero")
    with pytest.raises(ModelError, match="pipe, a socket or a device"):
        open_model(str(copy))


def test_half_a_pair_of_surrogates_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"a": "\U0001f642"}))
    assert read_json(tmp_path / "a.json") == {"a": "\U0001f642"}
    (tmp_path / "b.json").write_text(json.dumps({"a": "\ud800"}))
    with pytest.raises(ModelError, match="surrogates"):
        read_json(tmp_path / "b.json")


def test_shapes_that_overflow_are_refused(copy: Path, tmp_path: Path) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelError, match="'x' has the shape"):
        read_header(tmp_path / "x.safetensors")
    (path,) = GgufExporter(type="f16").write(open_model(str(copy)), tmp_path / "gguf")
    whole, name = path.read_bytes(), b"output_norm.weight"
    at = whole.index(name) + len(name)
    path.write_bytes(whole[:at] + (2).to_bytes(4, "little") + (0).to_bytes(8, "little") + (2**63).to_bytes(8, "little") + whole[at + 12 :])
    with pytest.raises(ModelError, match=r"'output_norm\.weight' has the shape"):
        read_gguf_header(path)


@pytest.mark.parametrize(
    "told", [{"model": "x"}, {"adapters": 5}, {"layers": [1]}, {"layers": [{"name": "a", "scheme": [], "relative_error": 0.5}]}, {"quantize": {}, "bits_per_weight": "\n"}], ids=str
)
def test_a_provenance_of_other_types_is_refused(base: Path, tmp_path: Path, told: dict[str, Any]) -> None:
    write_artifact(tmp_path / "a", open_model(str(base)), {}, lambda n: pytest.fail(n), {"qforge_version": "0.1.0", "model": {"source": "m"}})
    assert read_provenance(tmp_path / "a") == {"qforge_version": "0.1.0", "model": {"source": "m"}}
    tell(tmp_path / "a" / PROVENANCE, **told)
    with pytest.raises(ModelError, match=r"qforge\.json is not what qforge writes: (model|adapters|layers|bits)"):
        inspect(tmp_path / "a")


@pytest.mark.parametrize("name", ["vocab.json", "added_tokens.json"])
def test_ids_beyond_every_vocabulary_are_refused_in_every_file(copy: Path, name: str) -> None:
    tell(copy / name, mill=2**31 - 1)
    with pytest.raises(ModelError, match=f"{name} gives a token the id 2147483647"):
        open_model(str(copy)).tokenizer()


@pytest.mark.parametrize("part", ["self_attn.q_proj", "input_layernorm"])
@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16])
def test_integers_in_the_place_of_floats_are_refused(copy: Path, part: str, dtype: torch.dtype) -> None:
    tensors = load_file(copy / "model.safetensors")
    tensors[f"model.layers.0.{part}.weight"] = tensors[f"model.layers.0.{part}.weight"].view(torch.int16).view(dtype)
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(ModelError, match=f"hold integers where the model has floats: model.layers.0.{part}.weight is {dtype}"):
        open_model(str(copy))


@pytest.mark.parametrize("layout", [CompressedTensors(torch.float32), Mlx(), BitsAndBytes()], ids=lambda layout: layout.name)
def test_scales_that_are_integers_are_refused(layout: Any) -> None:
    scheme = parse("nf4-g32@f32") if layout.name == "bitsandbytes" else parse("int4-g32-asym")
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    stored = layout.pack(numerics.quantize(weight, scheme, *numerics.minmax_parameters(weight, scheme)))
    (name,) = (n for n in stored if n in ("weight_scale", "scales", "weight.absmax"))
    with pytest.raises(ModelError, match="where floats are needed"):
        layout.unpack({**stored, name: stored[name].view(torch.int32)}, scheme)


@pytest.mark.parametrize("state", [b'{"quant_type": "nf4", "blocksize": 32.0}', b"[" * 100_000], ids=["float", "deep"])
def test_a_state_of_bitsandbytes_that_is_odd_is_refused(state: bytes) -> None:
    with pytest.raises(ModelError, match=r"quant_state\.bitsandbytes__nf4"):
        bitsandbytes.read_config({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, ["a"], lambda name: torch.tensor(list(state), dtype=torch.uint8))


@pytest.mark.parametrize("shape", [[10**18] * 240, [1] * 200_000, [10**30]], ids=["large", "many", "long"])
def test_shapes_that_no_tensor_has_are_refused_at_once(tmp_path: Path, shape: list[int]) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, 4]}}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ModelError, match="entry for 'x' is malformed"):
        read_header(tmp_path / "x.safetensors")


def test_more_than_there_can_be_is_refused(tmp_path: Path) -> None:
    header = b"{" + b",".join(b'"%d":{}' % i for i in range(263_000)) + b"}"
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelError, match="tells of 263,000 tensors"):
        read_header(tmp_path / "x.safetensors")
    strings = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, 8, 5_000_000)
    with open(tmp_path / "x.gguf", "wb") as f:
        f.write(strings)
        f.truncate(len(strings) + 8 * 5_000_000)
    with pytest.raises(ModelError, match="array of 5000000 strings"):
        read_gguf_header(tmp_path / "x.gguf")
    with open(tmp_path / "a.json", "wb") as f:
        f.truncate(1 << 30)
    with pytest.raises(ModelError, match="has 1,073,741,824 bytes"):
        read_json(tmp_path / "a.json")


def test_experts_without_number_are_refused(tmp_path: Path) -> None:
    folder = tiny.make(tmp_path / "moe", "qwen3_moe", layers=1)
    tell(folder / "config.json", num_local_experts=300_000)
    with pytest.raises(ModelError, match="experts = 300,000"):
        open_model(str(folder))


def test_names_that_are_too_long_are_bad_input(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        main(["inspect", "x" * 5000])
    assert e.value.code == 2
    assert "File name too long" in capsys.readouterr().err
    (copy / "model.safetensors").rename(copy / "model-1.safetensors")
    tell(copy / "model.safetensors.index.json", weight_map={"a": "x" * 300 + ".safetensors"})
    with pytest.raises(ModelError, match=r"must name \.safetensors files that lie beside it"):
        open_model(str(copy))
