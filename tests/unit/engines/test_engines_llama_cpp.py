"""llama.cpp's adapter, over stand-ins of the package: what it does where llama.cpp itself misbehaves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import qforge.engines.llama_cpp as llama_cpp

ADAPTER = Path(llama_cpp.__file__).with_name("llama_cpp_adapter.py")
STAND_IN = """
import http.server, threading, time
from types import SimpleNamespace as N
__version__ = "0"

class Answer(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200 if self.path == "/tokenize" else 500)
        self.end_headers()
        self.wfile.write(b'{"tokens": [1, 2]}')

class Server:
    def __init__(self, params):
        self.served = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        threading.Thread(target=self.served.serve_forever, daemon=True).start()
        self.listening_address = f"http://127.0.0.1:{self.served.server_port}"
    def __del__(self):
        time.sleep(600)

CommonParams = lambda: N(model=N(), cpuparams=N(), cpuparams_batch=N())
"""


@pytest.mark.parametrize(
    ("conversations", "expected"), [([], {"version": "xllamacpp 0", "ids": [[1, 2]], "rendered": []}), ([[]], {"error": "HTTPError: HTTP Error 500: Internal Server Error"})]
)
def test_a_server_that_cannot_be_taken_down_does_not_hold_the_answer_up(tmp_path: Path, conversations: list[object], expected: dict[str, object]) -> None:
    (tmp_path / "xllamacpp.py").write_text(STAND_IN)
    request = {"texts": ["a"], "conversations": conversations, "context": 64, "threads": 1, "model": "m.gguf", "output": str(tmp_path / "output")}
    (path := tmp_path / "request.json").write_text(json.dumps(request))
    run = f"import runpy, sys; sys.path.insert(0, {str(tmp_path)!r}); sys.argv = ['adapter', {str(path)!r}]; runpy.run_path({str(ADAPTER)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-I", "-c", run], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, json.loads(done.stdout)) == (0, expected)
