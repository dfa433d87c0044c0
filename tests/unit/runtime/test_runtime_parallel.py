"""Several processes share a model: their parts make the whole, and two real ones give the tokens and logits of one."""

from __future__ import annotations

import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_models import folder, model, prompts, quantized
from shared_models import Exchange, together
from tolerances import LOGITS

from qforge import numerics
from qforge.errors import MissingCapabilityError, UnsupportedError
from qforge.export.hf import write_artifact
from qforge.models.model import open_model
from qforge.qlinear import QuantizedLinear
from qforge.runtime import LLM, SamplingParams, parallel, shared_loader
from qforge.runtime.decoder import Decoder
from qforge.runtime.linears import Dense, rows
from qforge.runtime.loader import read
from qforge.runtime.new_process import start_to_first_token
from qforge.runtime.parallel import Followers, Job, SharedRunner, check_size
from qforge.runtime.places import Host
from qforge.runtime.running import How, Limits
from qforge.runtime.scheduler import Piece
from qforge.runtime.sequence import Sequence
from qforge.runtime.shared_loader import read_share
from qforge.runtime.shares import Share, of_inputs, of_outputs, of_parts, of_spec
from qforge.runtime.step import build_step
from qforge.scheme import parse

SCHEMES = (
    "int4-g32-sym", "int4-g16-asym", "int8-channel-sym", "int8-channel-asym", "int8-tensor-sym", "nf4-g16", "fp8-e4m3-block16", "int8-channel-sym+int8-g32",
    "int4-g32-offset@u6/g256:f16", "nvfp4",
)  # fmt: skip


def weight(text: str, shape: tuple[int, int], seed: int = 0) -> QuantizedLinear:
    scheme = parse(text)
    w = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    upper = numerics.super_scales(w, scheme)
    return numerics.quantize(w, scheme, *numerics.minmax_parameters(w, scheme), upper=upper, bias=torch.randn(shape[0], generator=torch.Generator().manual_seed(seed + 1)))


@settings(deadline=None, max_examples=60)
@given(text=st.sampled_from(SCHEMES), size=st.sampled_from([1, 2, 4]), seed=st.integers(0, 1000))
def test_shares_make_the_whole(text: str, size: int, seed: int) -> None:
    q = weight(text, (64, 256) if "g256" not in text else (64, 1024), seed)
    x = torch.randn(3, q.in_features, generator=torch.Generator().manual_seed(seed))
    shares = [Share(r, size) for r in range(size)]
    whole = numerics.linear(x, q)
    assert torch.equal(torch.cat([numerics.dequantize(_q(of_outputs(q, s, "w"))) for s in shares]), numerics.dequantize(q))
    assert torch.equal(torch.cat([numerics.dequantize(_q(of_inputs(q, s, "w"))) for s in shares], 1), numerics.dequantize(q))
    side = torch.cat([numerics.linear(x, _q(of_outputs(q, s, "w"))) for s in shares], 1)
    total = sum(numerics.linear(x[:, s.of(q.in_features)], _q(of_inputs(q, s, "w"))) for s in shares)
    assert (side - whole).norm() < 1e-5 * whole.norm()
    assert (total - whole).norm() < 1e-5 * whole.norm()


@pytest.mark.parametrize("text", SCHEMES)
def test_parts_of_several_weights_in_one_make_the_whole(text: str) -> None:
    """And any rows in any order are those rows: codes, scales, zero points and bias alike."""
    q = weight(text, (64, 1024 if "g256" in text else 256))
    sizes, index = (32, 16, 16), torch.randperm(64)
    first, second = (numerics.dequantize(_q(of_parts(q, Share(r, 2), sizes))) for r in range(2))
    whole = numerics.dequantize(q)
    assert torch.equal(torch.cat([torch.cat([a, b]) for a, b in zip(first.split((16, 8, 8)), second.split((16, 8, 8)), strict=True)]), whole)
    moved = _q(rows(q, index))
    assert torch.equal(numerics.dequantize(moved), whole[index])
    assert q.bias is not None
    assert moved.bias is not None
    assert torch.equal(moved.bias, q.bias[index])
    x = torch.randn(3, q.in_features)
    assert (numerics.linear(x, moved) - numerics.linear(x, q)[:, index]).abs().max() < 1e-4


def _q(w: object) -> QuantizedLinear:
    assert isinstance(w, QuantizedLinear)
    return w


def test_unquantized_shares_make_the_whole() -> None:
    d = Dense(torch.randn(8, 12), torch.randn(8))
    x, shares = torch.randn(2, 12), [Share(r, 2) for r in range(2)]
    parts = [(of_outputs(d, s, "w"), of_inputs(d, s, "w"), s) for s in shares]
    want = torch.nn.functional.linear(x, d.weight, d.bias)
    linear = torch.nn.functional.linear
    assert torch.allclose(torch.cat([linear(x, o.weight, o.bias) for o, _, _ in parts if isinstance(o, Dense)], 1), want, atol=1e-5)
    assert torch.allclose(torch.stack([linear(x[:, s.of(12)], i.weight, i.bias) for _, i, s in parts if isinstance(i, Dense)]).sum(0), want, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "shape", "size", "says"),
    [
        ("int4-g32-sym", (64, 96), 2, "groups of 32 do not divide into 2"),
        ("int8-channel-sym+int8-g32", (64, 96), 2, "groups of 32"),
        ("fp8-e4m3-block16", (64, 48), 2, "groups of 16"),
    ],
)
def test_a_group_is_not_cut(text: str, shape: tuple[int, int], size: int, says: str) -> None:
    with pytest.raises(UnsupportedError, match=f"cannot share model.x.*{says}"):
        of_inputs(weight(text, shape), Share(0, size), "model.x")


def test_what_cannot_be_shared_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="groups of 16 do not divide"):
        of_outputs(weight("fp8-e4m3-block16", (48, 64)), Share(0, 2), "w")
    shuffled = replace(weight("int4-g32-sym", (8, 64)), group_index=(torch.arange(64) % 2).int())
    with pytest.raises(UnsupportedError, match="act order"):
        of_inputs(shuffled, Share(0, 2), "w")
    spec = model("llama").spec
    assert spec is not None
    with pytest.raises(UnsupportedError, match="4 processes cannot share 2 key/value heads; this model can be shared by 1, 2"):
        of_spec(spec, Share(0, 4))
    for size, device in ((0, "cpu"), (2, "cuda:1")):
        with pytest.raises(UnsupportedError):
            check_size(size, device)


@pytest.mark.parametrize("name", ["llama", "llama-biases", "qwen3", "gemma3", "llama-untied-rope3", "granite", "phi3", "phi3-long", "glm4", "exaone4"])
@pytest.mark.parametrize("scheme", ["int4-g32-asym", None])
def test_two_shares_compute_what_one_model_does(name: str, scheme: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_loader, "distributed", Exchange())
    of, _ = quantized(name, lambda n: scheme, head="int8-g32-sym" if name == "gemma3" else None)
    runners = [Decoder(read_share(of, Host(1), Share(r, 2)), num_blocks=6, block_size=16) for r in range(2)]
    whole = Decoder(read(of, Host(1)), num_blocks=6, block_size=16)
    tokens = prompts(1, 2, seed=3)[0] * 50
    sequence = Sequence(0, tokens[:50], 50, SamplingParams(prompt_logprobs=0), 0, 60, frozenset(), block_table=[3, 1, 0, 2])
    for start, stop in ((0, 33), (33, 50)):
        step = build_step([Piece(sequence, start, stop)], 16)
        first, second = together([lambda r=r, s=step: r.step(s) for r in runners])  # type: ignore[misc]
        assert torch.equal(first, second)
        assert (first - whole.step(step)).abs().max() < LOGITS
    assert sum(r.weight_bytes() for r in runners) < 1.1 * whole.weight_bytes() + 1000


def artifact(path: Path) -> Path:
    source = open_model(str(folder("llama")))
    schemes = {n.removesuffix(".weight"): parse("int4-g32-asym") for n in source.weights.names() if "_proj.weight" in n}

    def linear(name: str) -> QuantizedLinear:
        w = source.weights.read(f"{name}.weight").float()
        return numerics.quantize(w, schemes[name], *numerics.minmax_parameters(w, schemes[name]))

    write_artifact(path, source, schemes, linear, {})
    return path


def test_two_processes_give_the_tokens_and_logits_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = artifact(tmp_path / "model")
    (tmp_path / "meeting").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "meeting"))
    one, two = LLM(path, max_step_tokens=13, threads=1), LLM(path, max_step_tokens=13, threads=2, tensor_parallel=2)
    window = prompts(1, 60, seed=5)[0] * 3
    a, b = (torch.cat(list(llm.score([window]))) for llm in (one, two))
    assert (a - b).abs().max() < LOGITS
    given_ = prompts(8, 40, seed=6)
    params = [SamplingParams(max_tokens=12, temperature=0.9 * (i % 2), seed=i) for i in range(8)]
    assert [o.token_ids for o in two.generate(given_, params)] == [o.token_ids for o in one.generate(given_, params)]
    assert one.runner.weight_bytes() <= two.runner.weight_bytes() < 1.2 * one.runner.weight_bytes()
    with pytest.raises(UnsupportedError, match="shares another model already"):
        LLM(path, threads=2, tensor_parallel=2)
    assert two.generate(given_[:1], params[:1])[0].token_ids == one.generate(given_[:1], params[:1])[0].token_ids  # it has what it had
    processes = two.runner._followers._processes  # type: ignore[attr-defined]
    assert [p.poll() for p in processes] == [None]
    two.runner._followers.end()  # type: ignore[attr-defined]
    assert [p.poll() for p in processes] == [0]
    assert not list((tmp_path / "meeting").iterdir())


class Torn:
    """A runner whose exchange with other processes fails."""

    spec, batch_invariant = None, True

    def step(self, step: object) -> torch.Tensor:
        raise RuntimeError("connection closed by peer")


def started(source: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Followers:
    """A follower that runs this script."""
    monkeypatch.setattr("qforge.apart.command", lambda _: [sys.executable, "-c", script])
    return Followers([job(source)])


def job(source: Path) -> Job:
    return Job(str(source), "auto", 1, 2, Limits("cpu", 16, 4, 1, 16), How("fp", 1, None, graphs=False), str(source.parent / "meeting" / "rendezvous"))


def test_a_follower_that_cannot_open_the_model_says_why(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(MissingCapabilityError, match=r"process 1 of 2 .* has ended \(exit code 2\)"):
        Followers([job(tmp_path / "none")]).ready()
    said = capfd.readouterr()
    assert said.out == ""
    assert "none" in said.err
    assert "Traceback" not in said.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_follower_that_has_its_weights_ends_with_its_input_and_not_by_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    """A terminal and systemd send theirs to all processes, and the server goes on for what runs."""
    followers = Followers([job(artifact(tmp_path / "model"))])
    followers.ready()
    followers._processes[0].send_signal(number)
    followers.end()
    assert [p.poll() for p in followers._processes] == [0]


PRINTS = """
import os
import qforge.runtime.follower as follower
opens = follower.open_model
follower.open_model = lambda *args, **named: print("a library opens") or opens(*args, **named)
follower.join = lambda _: os.write(1, b"a library joins\\n" * 10000)  # more than a pipe holds
follower.main()
"""


def test_what_libraries_print_in_a_follower_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    followers = started(artifact(tmp_path / "model"), monkeypatch, PRINTS)
    assert followers.ready() == [4]
    followers.tell(4)
    followers.end()
    assert [p.poll() for p in followers._processes] == [0]
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.count("a library opens\n") == 1
    assert said.err.count("a library joins\n") == 10000


def test_processes_take_no_python_file_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "transformers", "numpy"):
        (tmp_path / f"{name}.py").write_text("import os, sys; print('a stranger was here', file=sys.stderr, flush=True); os._exit(77)")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingCapabilityError, match=r"exit code 2\b"):
        Followers([job(tmp_path / "none")]).ready()
    assert "none" in start_to_first_token(str(tmp_path / "none"), {})["failed"]


def test_a_process_that_does_not_end_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the process group is left to whoever made it."""
    monkeypatch.setattr(parallel, "_PATIENCE", 0.2)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.destroy_process_group", None)
    followers = started(tmp_path / "none", monkeypatch, "import time; time.sleep(600)")
    followers.end()
    assert [p.poll() for p in followers._processes] == [-9]


@pytest.mark.parametrize("failed", ["the pipe", "the exchange"])
def test_a_process_that_has_ended_is_told_by_its_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed: str) -> None:
    followers = started(tmp_path / "none", monkeypatch, "import os, sys; print(4, flush=True); sys.stdin.buffer.read(1); os._exit(7)")
    assert followers.ready() == [4]
    runner = SharedRunner(Torn(), followers, 2)  # type: ignore[arg-type]
    for _ in range(2):  # it stays so
        with pytest.raises(MissingCapabilityError, match=r"process 1 of 2 that share the model has ended \(exit code 7\)"):
            followers.tell(bytes(10 << 20)) if failed == "the pipe" else runner.step(None)  # type: ignore[arg-type]  # more than a pipe holds


def test_another_error_of_a_step_is_told_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "_MOMENT", 0.1)
    followers = started(tmp_path / "none", monkeypatch, "import sys; print(4, flush=True); sys.stdin.buffer.read()")
    assert followers.ready() == [4]
    with pytest.raises(RuntimeError, match="connection closed"):
        SharedRunner(Torn(), followers, 2).step(None)  # type: ignore[arg-type]
    followers.end()
    assert [p.poll() for p in followers._processes] == [0]


class Interrupted(Torn):
    """A runner whose step an interrupt ends."""

    def step(self, step: object) -> torch.Tensor:
        raise KeyboardInterrupt


def test_who_would_wait_for_the_rest_of_an_interrupted_step_is_killed_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    followers = started(tmp_path / "none", monkeypatch, "import sys; print(4, flush=True); sys.stdin.buffer.read()")
    assert followers.ready() == [4]
    with pytest.raises(KeyboardInterrupt):
        SharedRunner(Interrupted(), followers, 2).step(None)  # type: ignore[arg-type]
    followers.end()
    assert [p.poll() for p in followers._processes] == [-9]
