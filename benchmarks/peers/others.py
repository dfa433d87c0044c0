"""A run of a peer: the shared runner, or our adapter where that one lacks something, under the interpreter of the peer's own environment."""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from peers.libraries import resident
from peers.runs import Run
from peers.texts import Tokens

RUNNER_BITS = 4
ADAPTER = Path(__file__).with_name("adapter.py")
PACKAGES = ("torch", "transformers", "llmcompressor", "compressed-tensors", "gptqmodel", "auto-round", "hqq", "bitsandbytes")
ASK_VERSIONS = f"""
import importlib.metadata as m, json
found = {{}}
for name in {PACKAGES!r}:
    try: found[name] = m.version(name)
    except m.PackageNotFoundError: pass
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Tools:
    """Where the peers are, as absolute paths: `runner` is the folder with run_peer.py, `environments` holds one virtual environment for each tool."""

    runner: Path
    environments: Path

    def interpreter(self, tool: str) -> Path:
        """The Python of a tool's environment."""
        return self.environments / tool / "bin" / "python"

    def lacks(self, tool: str) -> str | None:
        """Why a tool cannot run here, or None."""
        if not (self.runner / "run_peer.py").is_file():
            return f"{self.runner} has no run_peer.py; name the folder of the peers' runner with --tools or QFORGE_PEERS"
        if not self.interpreter(tool).exists():
            return f"{self.interpreter(tool)} does not exist; make it with {self.runner / 'make_env.sh'} {tool} {self.environments / tool}"
        return None


def run(job: Run, model: Path, tokens: Tokens, folder: Path, tools: Tools) -> None:
    """Run a peer on the same ids; leaves weights.safetensors and meter.json in `folder`.

    Raises:
        RuntimeError: the environment is missing, or the peer failed.
    """
    shared = job.bits == RUNNER_BITS and job.method != "nf4"
    script = [str(tools.runner / "run_peer.py")] if shared else [str(ADAPTER), "--tools", str(tools.runner), "--bits", str(job.bits)]
    inputs = ["--model", str(model.resolve()), "--calibration", str(tokens.ids_file.resolve()), "--group", str(job.group), "--out", str(folder.resolve())]
    launch(job, [*script, job.tool, job.method, *inputs], folder, tools, {"bits_per_weight": job.stored_bits})


def launch(job: Run, script: list[str], folder: Path, tools: Tools, known: dict[str, float]) -> None:
    """Run a script, with its arguments, under the interpreter of a peer; what it writes to meter.json in `folder` gets the seconds of the process, versions, and what is `known`.

    Raises:
        RuntimeError: the environment is missing, or the peer failed.
    """
    reason = tools.lacks(job.tool)
    if reason is not None:
        raise RuntimeError(reason)
    python = str(tools.interpreter(job.tool))
    cores = str(len(os.sched_getaffinity(0)))
    environment = {"OMP_NUM_THREADS": cores, "GPTQMODEL_CPU_WORKERS": cores} | dict(os.environ)
    start = time.perf_counter()
    with open(folder / "log.txt", "w") as log:
        code = subprocess.run([python, *script], stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=folder).returncode
    seconds = time.perf_counter() - start
    if code != 0:
        raise RuntimeError(f"{job.name} ended with {code}; see {folder / 'log.txt'}")
    meter = json.loads((folder / "meter.json").read_text())
    versions = json.loads(subprocess.run([python, "-c", ASK_VERSIONS], capture_output=True, text=True, check=True).stdout)
    meter |= {"process_s": round(seconds, 2), "rss_libraries_mb": resident(python, job.tool), "versions": versions} | known
    (folder / "meter.json").write_text(json.dumps(meter, indent=1))
