"""`qforge generate` and `qforge bench`: outputs, order, and one clear line for bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny

from qforge.cli.main import main
from qforge.runtime import LLM, SamplingParams
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
    assert set(result) == {"environment", "prefill", "decode", "ttft_ms", "tpot_ms", "peak_rss_bytes", "load_seconds"}
    assert [tuple(r.values())[:3] for r in result["prefill"]] == [(n, b, a) for a in ACTIVATIONS for n, b in ((128, 1), (128, 8))]
    assert [set(r) for r in result["prefill"]] == [{"tokens", "batch", "activations", "tokens_per_second"}] * 6
    assert [(r["batch"], r["context"], r["activations"]) for r in result["decode"]] == [(b, 128, a) for a in ACTIVATIONS for b in (1, 8, 32)]
    assert all(r["read_bandwidth_fraction"] > 0 for r in result["decode"])
    assert result["environment"]["read_bandwidth"] > 1e8
    assert all(r["tokens_per_second"] > 0 for r in result["prefill"] + result["decode"])
    assert result["ttft_ms"]["p50"] <= result["ttft_ms"]["p99"]
    assert result["peak_rss_bytes"] > 1 << 26
