"""A process may end while daemon threads of it compute."""

from __future__ import annotations

import subprocess
import sys

from runtime_models import folder

ENDS = """
import sys, threading, time
from qforge.runtime import LLM, SamplingParams
llm, begun = LLM(sys.argv[1]), threading.Event()

def generate():
    engine = llm.engine()
    engine.add([5, 6, 7], SamplingParams(max_tokens=400, ignore_eos=True))
    while engine.busy():
        engine.step()
        begun.set()

threading.Thread(target=generate, daemon=True).start()
begun.wait()
"""


def test_a_process_ends_in_the_middle_of_a_step() -> None:
    for _ in range(8):
        done = subprocess.run([sys.executable, "-c", ENDS, str(folder("llama"))], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
