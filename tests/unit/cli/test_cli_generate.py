"""`qforge generate` and `qforge bench`: outputs, order, and one clear line for bad input."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from qforge.cli.main import main
from qforge.runtime import LLM, SamplingParams, read_speed
from qforge.scheme import ACTIVATIONS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("generate") / "m")


def _run(*args: object) -> int:
    with pytest.raises(SystemExit) as e:
        main([str(a) for a in args])
    return int(e.value.code or 0)


def test_json_on_stdout_is_all_that_is_there_in_input_order(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "p.jsonl"
    prompts = [{"prompt": "The small"}, {"messages": [{"role": "user", "content": "żółw"}]}, {"prompt": "When the storm came, they closed"}]
    file.write_text("\n".join(json.dumps(p) for p in prompts) + "\n\n", encoding="utf-8")
    assert _run("generate", model, "--prompts", file, "--max-tokens", 5, "--json", "-") == 0
    outputs = json.loads(capsys.readouterr().out)["outputs"]
    assert [set(o) for o in outputs] == [{"prompt", "prompt_token_ids", "token_ids", "text", "finish_reason"}] * 3
    assert [o["prompt"] for o in outputs] == ["The small", "<|im_start|>user\nżółw<|im_end|>\n<|im_start|>assistant\n", "When the storm came, they closed"]
    wanted = LLM(str(model)).generate(["The small"], SamplingParams(max_tokens=5))[0]
    assert outputs[0]["token_ids"] == wanted.token_ids


def test_text_is_printed_and_json_written_beside_it(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    assert _run("generate", model, "--prompt", "The small", "--max-tokens", 4, "--temperature", 1, "--seed", 7, "--json", out) == 0
    text = json.loads(out.read_text())["outputs"][0]["text"]
    assert capsys.readouterr().out == text + "\n"


def test_several_prompts_are_all_continued(model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert _run("generate", model, "--prompt", "a", "--prompt", "The", "--max-tokens", 3, "--json", "-") == 0
    both = json.loads(capsys.readouterr().out)["outputs"]
    assert [o["prompt"] for o in both] == ["a", "The"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"prompt": "a"}\n{"prompt": "The"}\n')))
    assert _run("generate", model, "--prompts", "-", "--max-tokens", 3, "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["outputs"] == both


@pytest.mark.parametrize("verb", [["quantize", "--recipe", "r.yaml"], ["export", "m", "--format", "gguf"], ["compare", "a.json", "b.json"]])
def test_an_empty_folder_name_is_not_the_current_folder(verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(*verb, "--out", "") == 2
    assert "its name is empty" in capsys.readouterr().err


def test_prompts_beyond_the_short_factors_run_on_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny.make(tmp_path / "phi3", "phi3", layers=2, **{**tiny.longrope(), "original_max_position_embeddings": 48})  # type: ignore[arg-type]
    assert _run("generate", folder, "--prompt", "The mill. " * 30, "--prompt", "a", "--max-tokens", 4, "--json", "-") == 0
    said = capsys.readouterr()
    outputs = json.loads(said.out)["outputs"]
    assert "(longrope)" in said.err
    ids = torch.tensor([outputs[0]["prompt_token_ids"]])
    assert ids.shape[1] > 48
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert outputs[0]["token_ids"] == theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)[0, ids.shape[1] :].tolist()
    assert _run("generate", folder, "--prompt", "The mill", "--max-tokens", 60, "--json", "-") == 0  # begins within them
    said = capsys.readouterr()
    assert "reaches the end of the context of 48 tokens" in said.err
    found = json.loads(said.out)["outputs"][0]
    ids = torch.tensor([found["prompt_token_ids"]])
    assert found["token_ids"] == theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=60, do_sample=False)[0, ids.shape[1] :].tolist()
    assert len(found["token_ids"]) > 46
    assert _run("generate", folder, "--prompt", "The mill", "--max-tokens", 60, "--activations", "int8", "--json", "-") == 0  # which transformers does not round to
    (kept,) = json.loads(capsys.readouterr().out)["outputs"]
    assert (len(kept["prompt_token_ids"] + kept["token_ids"]), kept["finish_reason"]) == (48, "length")


def test_a_family_that_the_runtime_does_not_list_runs_on_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tiny.make(tmp_path / "stablelm", "stablelm")
    assert _run("generate", other, "--prompt", "The small", "--max-tokens", 5, "--json", "-") == 0
    out, err = capsys.readouterr()
    found = json.loads(out)["outputs"][0]
    assert "take transformers for it, in fp32" in err
    module = AutoModelForCausalLM.from_pretrained(other, dtype=torch.float32)
    given = torch.tensor([found["prompt_token_ids"]])
    wanted = module.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=5, do_sample=False)[0, given.shape[1] :].tolist()
    assert found["token_ids"] == wanted
    assert found["finish_reason"] == ("length" if len(wanted) == 5 else "stop")
    assert found["text"] == AutoTokenizer.from_pretrained(other).decode(wanted, skip_special_tokens=True)
    assert _run("generate", other, "--prompt", "The small", "--activations", "int8") == 2
    assert "runs on transformers" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"prompt": "a"}\nnot json\n', "line 2 is not JSON"),
        ('{"text": "a"}\n', "line 1 is no prompt"),
        ('{"messages": []}\n', "line 1 is no prompt"),
        ('{"messages": [{"role": "user"}]}\n', "line 1 is no prompt"),
        ('{"prompt": 5}\n', "line 1 is no prompt"),
        ("\n\n", "holds no prompts"),
        ('{"prompt": "fine"}\n{"prompt": ""}\n', "prompt 2 of 2: it is empty"),
        (json.dumps({"prompt": "mill " * 300}), "leaves no room in the model's context of 256"),
        ('{"prompt": "\\ud800"}\n', "line 1 holds half a character"),
        ("[" * 100_000, "line 1 is not JSON"),
    ],
)
def test_bad_prompts_are_one_clear_line(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, message: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(content)
    assert _run("generate", model, "--prompts", file, "--json", "-") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert len(captured.err.strip().splitlines()) == 1


def test_files_that_are_no_text_or_not_there_are_refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "b").write_bytes(b"\xff\xfe\x00")
    for file, message in ((tmp_path / "b", "not UTF-8"), (tmp_path / "missing", "No such file"), (tmp_path, "directory")):
        assert _run("generate", model, "--prompts", file) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags", [[], ["--prompt", "a", "--prompts", "b"], ["--prompt", "a", "--max-tokens", "0"], ["--prompt", "a", "--temperature", "-1"], ["--prompt", "a", "--activations", "int4"]]
)
def test_bad_flags_exit_with_2(model: Path, flags: list[str]) -> None:
    assert _run("generate", model, *flags) == 2


def test_bench_writes_the_keys_of_the_contract(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("bench", model, "--json", "-") == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result) == {"environment", "prefill", "decode", "ttft_ms", "tpot_ms", "peak_rss_bytes", "load_seconds", "new_process"}
    assert [tuple(r.values())[:3] for r in result["prefill"]] == [(n, b, a) for a in ACTIVATIONS for n, b in ((128, 1), (128, 8))]
    assert [set(r) for r in result["prefill"]] == [{"tokens", "batch", "activations", "tokens_per_second"}] * 2 * len(ACTIVATIONS)
    assert [(r["batch"], r["context"], r["activations"]) for r in result["decode"]] == [(b, 128, a) for a in ACTIVATIONS for b in (1, 8, 32)]
    assert all(r["read_bandwidth_fraction"] > 0 for r in result["decode"])
    measured = result["environment"]["read_bandwidths"]
    assert len(measured) == 1 + len(ACTIVATIONS)
    assert result["environment"]["read_bandwidth"] == max(measured) > 1e8
    assert all(r["tokens_per_second"] > 0 for r in result["prefill"] + result["decode"])
    assert [(result[name]["activations"], result[name]["prompt_tokens"]) for name in ("ttft_ms", "tpot_ms")] == [(ACTIVATIONS[0], 128)] * 2
    assert result["ttft_ms"]["p50"] <= result["ttft_ms"]["p99"]
    assert result["peak_rss_bytes"] > 1 << 26
    assert set(result["new_process"]) == {"activations", "first_token_ms", "prompt_tokens"}
    assert result["new_process"]["first_token_ms"] > max(1e3 * result["load_seconds"], 10)


def test_bench_says_of_what_its_figures_are(model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_speed, "last_level_cache", lambda: 300 << 20)
    assert _run("bench", model, "--activations", "int8") == 0
    lines = capsys.readouterr().out.splitlines()
    decode = [line for line in lines if line.startswith("decode")]
    assert len(decode) == 3
    assert all(line.endswith("% of the read bandwidth (weights may lie in the 300 MiB last-level cache)") for line in decode)
    assert any(line.startswith("first token, int8, prompt of 128 tokens  ") for line in lines)
    assert any(line.startswith("each further token, int8, prompt of 128 tokens  ") for line in lines)
    assert any(re.match(r"new process: start to first token, int8, prompt of \d+ tokens +[\d.]+ ms", line) for line in lines)
    assert lines[-1].startswith("opened by this running process in ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
@pytest.mark.parametrize(
    ("asked", "code", "message"),
    [
        (("generate", "--prompt", "a", "--device", "cuda"), 3, "torch finds no NVIDIA GPU"),
        (("bench", "--device", "cuda:1"), 3, "torch finds no NVIDIA GPU"),
        (("generate", "--prompt", "a", "--device", "0xcuda"), 2, "give cpu, cuda or cuda:N"),
        (("generate", "--prompt", "a", "--device", "3xcpu"), 2, "3 processes cannot share 4 attention heads; this model can be shared by 1, 2"),
        (("generate", "--prompt", "a", "--device", "2xcuda:0"), 3, "torch finds no NVIDIA GPU"),
        (("eval", "--engine", "llama.cpp", "--device", "2xcpu"), 2, "tensor_parallel: 2 is for the built-in runtime, and llama.cpp was asked for; use tensor_parallel: 1"),
        (("eval", "--engine", "onnxruntime", "--activations", "int8"), 2, "activations: int8 is for the built-in runtime, and onnxruntime was asked for; use activations: fp"),
        (("eval", "--engine", "transformers", "--device", "cuda"), 2, "device: cuda is for the built-in runtime, and this runs on transformers; use device: cpu"),
    ],
)
def test_a_device_that_is_not_here_is_one_clear_line(model: Path, capsys: pytest.CaptureFixture[str], asked: tuple[str, ...], code: int, message: str) -> None:
    assert _run(asked[0], model, *asked[1:]) == code
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


def test_two_processes_evaluate_as_one(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "t.txt"
    text.write_text("\n".join(tiny.TEXT), encoding="utf-8")
    found = []
    for device in ("1xcpu", "2xcpu"):
        assert _run("eval", model, "--text", text, "--window", 64, "--device", device, "--json", "-") == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["tokens"] == found[1]["tokens"] > 60
    assert found[1]["candidate"]["perplexity"] == pytest.approx(found[0]["candidate"]["perplexity"], rel=1e-5)


def test_a_panic_of_a_library_is_a_damaged_file(model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of Rust code, which is no Exception."""
    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})

    def fails(*args: object) -> None:
        raise panic("range end index 2 out of range")

    monkeypatch.setattr(LLM, "generate", fails)
    assert _run("generate", model, "--prompt", "The small mill") == 2
    assert capsys.readouterr().err.startswith("error: a library that reads the model's files stopped (range end index 2 out of range)")


def test_messages_are_one_line_that_a_terminal_does_not_obey(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = shutil.copytree(model, tmp_path / "m")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"model_type": "a\nb\x1b[31m"}))
    assert _run("inspect", copy) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "a b\\x1b[31m" in err


@pytest.mark.parametrize("verb", [["eval", "no model"], ["bench", "no model"], ["generate", "no model", "--prompt", "a"], ["compare", "no.json", "no.json"]])
def test_where_no_json_can_go_is_said_before_anything_is_done(tmp_path: Path, verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    for target, says in ((tmp_path, "is a folder: name a file"), (tmp_path / "file" / "x.json", "lies in no folder")):
        assert _run(*verb, "--json", target) == 2
        assert says in capsys.readouterr().err
    _run(*verb, "--json", tmp_path / "new" / "x.json")
    assert "--json" not in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_where_json_may_not_be_written_is_said_before_anything_is_done(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kept").mkdir(mode=0o500)
    assert _run("eval", "no model", "--json", tmp_path / "kept" / "x.json") == 2
    assert "may not be written" in capsys.readouterr().err
