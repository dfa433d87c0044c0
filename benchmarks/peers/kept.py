"""Finished results of a run, found again when the same thing is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from peers.runs import OURS, Run

KEY = "key.json"


def key(job: Run, model_sha256: str, calibration_sha256: str) -> dict[str, Any]:
    """What decides a result (of ours, beside our own code)."""
    own = {"scheme": job.scheme, "options": dict(job.options)} if job.tool == OURS else {}
    return {"tool": job.tool, "method": job.method, "bits": job.bits, "group": job.group, "model": model_sha256, "calibration": calibration_sha256} | own


def finished(folder: Path, wanted: dict[str, Any], result: str = "weights.safetensors") -> bool:
    """Whether `folder` holds the `result` (a file's or folder's name in it) of exactly this run."""
    path = folder / KEY
    return path.is_file() and (folder / result).exists() and json.loads(path.read_text()) == wanted


def begin(folder: Path) -> None:
    """Make room: nothing that an earlier run left is taken for this one's."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (KEY, "meter.json"):
        (folder / name).unlink(missing_ok=True)


def finish(folder: Path, wanted: dict[str, Any]) -> None:
    """Say what the folder holds."""
    (folder / KEY).write_text(json.dumps(wanted, indent=1))
