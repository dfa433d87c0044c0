"""Exported files measured in the engines that run them, on the same token ids as the artifact, beside the same original."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from qforge.engines import onnx_runtime
from qforge.engines.base import Scorer
from qforge.engines.llama_cpp import LlamaCppEngine
from qforge.engines.onnx_runtime import MODEL as ONNX
from qforge.engines.onnx_runtime import OnnxRuntimeEngine
from qforge.engines.opening import check_opens
from qforge.engines.tensorrt_build import ENGINE as TENSORRT
from qforge.engines.tensorrt_runtime import TensorrtEngine
from qforge.engines.transformers_engine import TransformersEngine
from qforge.errors import MissingCapabilityError, UnsupportedError
from qforge.evaluate.divergence import evaluate
from qforge.export.imatrix import FILE as IMATRIX
from qforge.export.verify_checkpoint import FORMATS as CHECKPOINTS
from qforge.files import size_of
from qforge.models.locate import model_folder
from qforge.models.model import Model, open_model
from qforge.progress import Progress
from qforge.stages.journal import Journal, key
from qforge.stages.reference import KeptReference
from qforge.text.windows import EvaluationWindows
from qforge.types import Evaluation, ExportFigures, ExportResult

FOREIGN = ("llama.cpp", "onnxruntime", "tensorrt")  # engines that run files which are not checkpoints


def foreign(engine: str, path: Path) -> Scorer:
    """A scorer of a file by an engine of `FOREIGN`.

    Args:
        engine: its name.
        path: a GGUF file or a folder with one, the folder of an ONNX or TensorRT export, or a file in it.

    Raises:
        MissingCapabilityError: the engine is not installed, or lacks its GPU.
        ModelError: it refuses the file.
        UnsupportedError: this is no file that the engine runs.
    """
    if engine == "llama.cpp":
        gguf = model_folder(path)
        if gguf.suffix != ".gguf" or not gguf.is_file():
            raise UnsupportedError(f"engine llama.cpp: {path} is no .gguf file; give one, or a folder that holds one")
        return LlamaCppEngine(gguf)
    folder = path if path.is_dir() else path.parent
    file, kind = (TENSORRT, "a tensorrt") if engine == "tensorrt" else (ONNX, "an ONNX")
    if not (folder / file).is_file():
        raise UnsupportedError(f"engine {engine}: {path} holds no {file}; give the folder of {kind} export")
    if engine == "tensorrt":
        return TensorrtEngine(folder)
    if onnx_runtime.missing() is None:
        check_opens(engine, folder / file, size_of(folder))
    return OnnxRuntimeEngine(folder)


def scored(exports: Sequence[ExportResult], merged: Model, windows: EvaluationWindows, out: Path, journal: Journal, progress: Progress) -> list[ExportResult]:
    """The same exports with `measured` for each that an engine at hand runs; why another was left out is added to `skipped_because`. Kept in the journal.

    Args:
        exports: from `exports.verify_all`.
        merged: the reference.
        windows: the evaluation text.
        out: the run's folder.
        journal: keeps figures, and the reference's states for all of them.
        progress: is told.
    """
    done = []
    for result in progress.track(exports, "score exports", len(exports)):
        try:
            done.append(replace(result, measured=_figures(result, merged, windows, out, journal)))
        except MissingCapabilityError as e:
            done.append(replace(result, skipped_because="; ".join(filter(None, (result.skipped_because, f"not measured: {e}")))))
    return done


def _figures(result: ExportResult, merged: Model, windows: EvaluationWindows, out: Path, journal: Journal) -> ExportFigures | None:
    scorer = None if result.path is None else _scorer(result.format, out / result.path, trust_remote_code=merged.trust_remote_code)
    if scorer is None:
        return None
    name = key("exported", export=result.sha256, reference=merged.fingerprint(), engine=[scorer.name, scorer.version], text=windows.sha256, protocol=windows.protocol)
    found = journal.load(name)
    if found is None:
        made = figures(evaluate(scorer, KeptReference(merged, windows, journal), windows))
        found = ({}, asdict(made))
        journal.save(name, {"done": torch.ones(1)}, found[1])
    value: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in found[1].items()}
    return ExportFigures(**value)


def _scorer(format_name: str, folder: Path, *, trust_remote_code: bool) -> Scorer | None:
    """What runs an export; None for a format that nothing here runs."""
    if format_name == "gguf":
        return foreign("llama.cpp", next(p for p in sorted(folder.glob("*.gguf")) if p.name != IMATRIX))
    if format_name == "onnx":
        return foreign("onnxruntime", folder)
    if format_name == "tensorrt":
        return foreign("tensorrt", folder)
    return TransformersEngine(open_model(str(folder), trust_remote_code=trust_remote_code)) if format_name in CHECKPOINTS else None


def figures(e: Evaluation) -> ExportFigures:
    """What a table of exports shows of an evaluation."""
    return ExportFigures(
        e.engine, e.tokens, e.candidate["perplexity"], e.candidate["perplexity_ci95"], e.perplexity_ratio, e.perplexity_ratio_ci95, e.kl_mean, e.kl_mean_ci95,
        e.top1_agreement, e.top1_agreement_ci95,
    )  # fmt: skip
