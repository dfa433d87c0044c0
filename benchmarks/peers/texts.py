"""One set of calibration and evaluation token ids for all tools, cut by qforge's own text code and written as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from qforge.errors import DataError
from qforge.models.model import Model
from qforge.text.calibration import CalibrationSet, calibration_set
from qforge.text.documents import documents
from qforge.text.overlap import overlap
from qforge.text.windows import EvaluationWindows, evaluation_windows

CALIBRATES = 0.8  # of the lines of a text that serves both purposes; the rest evaluates


@dataclass(frozen=True)
class Tokens:
    """What every tool sees: `calibration_file` and `ids` `[samples, length]` (also in `ids_file`), and the windows that are judged."""

    calibration_file: Path
    ids_file: Path
    calibration: CalibrationSet
    windows: EvaluationWindows


def gather(model: Model, out: Path, calibration: Path, samples: int, length: int, text: Path, window: int, limit: int | None) -> Tokens:
    """Cut both texts and write ids.json and windows.json.

    Args:
        model: gives tokenizer and context.
        out: where the JSON files go, and the two halves of a text that serves both purposes.
        calibration: text file.
        samples: sequences to calibrate on.
        length: tokens of each.
        text: evaluation text file; the same file as `calibration` is split by lines.
        window: tokens of an evaluation window.
        limit: how many windows at most; None takes all.

    Raises:
        DataError: the texts overlap, or the calibration text is too short for `samples` sequences of `length`.
    """
    if calibration.resolve() == text.resolve():
        calibration, text = _split(calibration, out)
    tokenizer = model.tokenizer()
    context = getattr(model.config, "max_position_embeddings", None)
    seen, held_out = (documents(str(path), role=role, folder=Path(), tokenizer=tokenizer) for path, role in ((calibration, "calibration"), (text, "evaluation")))
    shared = overlap(seen, held_out)
    if shared.refusal() is not None:
        raise DataError(str(shared.refusal()))
    chosen = calibration_set(seen, tokenizer, samples=samples, sequence_length=length, seed=0, context=context)
    if tuple(chosen.ids.shape) != (samples, length):
        raise DataError(f"{calibration}: {samples} x {length} tokens asked for, the text and the model's context give {' x '.join(map(str, chosen.ids.shape))}")
    windows = evaluation_windows(held_out, tokenizer, window, context=context)
    windows = replace(
        windows, ids=windows.ids[:limit], documents=windows.documents[:limit], bytes=windows.bytes and windows.bytes[:limit], tokens=sum(len(w) - 1 for w in windows.ids[:limit])
    )
    (out / "ids.json").write_text(json.dumps(chosen.ids.tolist()))
    (out / "windows.json").write_text(json.dumps(windows.ids))
    return Tokens(calibration, out / "ids.json", chosen, windows)


def _split(path: Path, out: Path) -> tuple[Path, Path]:
    """The first lines of a file and the rest, as two files in `out`."""
    lines = path.read_text("utf-8").splitlines(keepends=True)
    middle = round(CALIBRATES * len(lines))
    parts = out / "calibration.txt", out / "evaluation.txt"
    for part, chosen in zip(parts, (lines[:middle], lines[middle:]), strict=True):
        part.write_text("".join(chosen), "utf-8")
    return parts
