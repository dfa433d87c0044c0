"""`qforge serve` as a process: it says where it listens, ends with 0 when it is told to, and says what is wrong."""

from __future__ import annotations

import functools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
import tiny
from click.testing import CliRunner

from qforge.cli import serve_command
from qforge.errors import DataError, MissingCapabilityError, UnsupportedError
from qforge.files import LOCK

COMMAND = [sys.executable, "-m", "qforge", "serve"]


@pytest.mark.parametrize(("end", "key"), [(signal.SIGTERM, None), (signal.SIGINT, "sk-1")])
def test_it_serves_until_it_is_told_to_end(tmp_path: Path, end: signal.Signals, key: str | None) -> None:
    folder = tiny.make(tmp_path / "small", layers=1)
    given = {} if key is None else {"QFORGE_API_KEY": key}
    with subprocess.Popen([*COMMAND, str(folder), "--port", "0"], stderr=subprocess.PIPE, text=True, env={**os.environ, **given}) as process:
        assert process.stderr is not None
        watch = threading.Timer(120, process.kill)
        watch.start()
        line = process.stderr.readline()
        found = re.fullmatch(r"small is served on (http://127\.0\.0\.1:\d+/v1)\n", line)
        assert found, line + process.stderr.read()
        assert httpx.get(f"{found[1]}/models").status_code == (401 if key else 200)
        ask = functools.partial(httpx.post, f"{found[1]}/completions", headers={"Authorization": f"Bearer {key}"}, timeout=60)
        answer = ask(json={"model": "small", "prompt": "a", "max_tokens": 3, "temperature": 0})
        assert answer.json()["usage"]["completion_tokens"] == 3
        assert ask(json={"model": str(folder), "prompt": "a", "max_tokens": 1}).status_code == 200
        answers: list[httpx.Response] = []
        body = {"prompt": "a", "max_tokens": 250, "ignore_eos": True, "n": 128}  # more than is done before it is told to end
        asks = threading.Thread(target=lambda: answers.append(ask(json=body)))
        asks.start()
        metrics = found[1].replace("/v1", "/metrics")
        while "qforge_requests_running 0.0" in httpx.get(metrics).text:
            time.sleep(0.01)
        process.send_signal(end)
        time.sleep(0.2)
        process.send_signal(end)  # once more: now, and not when all is done
        assert process.wait(30) == 0
        assert process.stderr.read() == ""
        asks.join(30)
        assert answers[0].status_code == 503
        watch.cancel()


@pytest.mark.parametrize("key", ["", "two words", "sk-\u00fc"])
def test_a_key_that_no_header_can_have_is_refused(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QFORGE_API_KEY", key)
    done = CliRunner().invoke(serve_command.command, ["demo"])
    assert isinstance(done.exception, DataError)
    assert "QFORGE_API_KEY" in str(done.exception)


def test_a_model_is_called_after_its_folder_or_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine" / "model").mkdir(parents=True)
    assert serve_command._name(str(tmp_path / "mine" / "model")) == "model"
    (tmp_path / "mine" / LOCK).touch()
    assert serve_command._name(str(tmp_path / "mine" / "model")) == "mine"
    monkeypatch.chdir(tmp_path / "mine")
    assert [serve_command._name(name) for name in (".", "model", "HuggingFaceTB/SmolLM2-135M", "demo")] == ["mine", "mine", "SmolLM2-135M", "demo"]


LOADS = """
import signal, sys, time
import qforge.runtime
from qforge.cli.main import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has what it runs in the background ignore it, which then stays so
qforge.runtime.LLM = lambda *_, **__: print("loads", flush=True) or time.sleep(60)
main(sys.argv[1:])
"""


def test_clients_are_refused_while_the_model_is_loaded_and_an_interrupt_then_resumes_nothing() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-c", LOADS, "serve", "any", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "loads\n"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), timeout=5)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert process.stderr.read().split() == ["interrupted"]


def test_a_port_that_is_taken_is_said_before_the_model_is_read() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = CliRunner().invoke(serve_command.command, ["no such model", "--port", str(taken.getsockname()[1])])
    assert isinstance(found.exception, UnsupportedError)
    assert re.search(r"cannot listen on 127\.0\.0\.1, port \d+: Address already in use; choose another", str(found.exception))


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7"])
def test_a_host_that_is_not_this_machine_is_said(host: str) -> None:
    found = CliRunner().invoke(serve_command.command, ["no such model", "--host", host])
    assert isinstance(found.exception, UnsupportedError)
    assert f"cannot listen on {host}" in str(found.exception)


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_command, "_PACKAGES", ("starlette", "no_such_server"))
    found = CliRunner().invoke(serve_command.command, ["demo"])
    assert isinstance(found.exception, MissingCapabilityError)
    assert str(found.exception) == "no_such_server is not installed: pip install 'qforge[serve]'"
