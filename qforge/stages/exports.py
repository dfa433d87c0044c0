"""Exports of a run: written from the artifact on disk, kept when they are there already, read back and executed by others."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from qforge import __version__
from qforge.engines import checkpoints, llama_cpp, onnx_runtime, openvino_runtime, tensorrt_runtime
from qforge.errors import MissingCapabilityError, OutputError, UnsupportedError
from qforge.export import exporter
from qforge.export.agreement import seeded_prompts
from qforge.export.card import write_card
from qforge.export.gguf_mix import GgufMixExporter
from qforge.export.imatrix import Imatrix
from qforge.export.provenance import read_provenance
from qforge.export.verify import lasting, verify, versions
from qforge.export.verify_checkpoint import FORMATS as CHECKPOINTS
from qforge.export.verify_text import verify_text
from qforge.export.verify_triton import client_missing
from qforge.files import LOCK, atomic_folder, readable_errors, sha256_tree, size_of
from qforge.models.model import Model
from qforge.progress import Progress
from qforge.recipe import Recipe
from qforge.recipe.model import CalibrationSection
from qforge.stages import importance
from qforge.stages.evidence import engine_for
from qforge.stages.journal import Journal, key
from qforge.stages.texts import Texts
from qforge.text.calibration import calibration_set
from qforge.text.documents import documents
from qforge.text.windows import EvaluationWindows, evaluation_windows
from qforge.types import Evaluation, ExportResult, Verification

POSITIONS = 64  # at which a foreign engine's next-token distribution is compared with ours


def check(recipe: Recipe, planned: Model) -> dict[int, str]:
    """Why an *optional* export cannot be made, by its place in the recipe's list.

    Args:
        recipe: with its `export` list.
        planned: the merged model with the schemes that it will have.

    Raises:
        UnsupportedError: a required export cannot be made.
        MissingCapabilityError: this machine lacks what a required export needs.
    """
    skipped = {}
    for place, section in enumerate(recipe.export):
        try:
            problem = exporter(section.format, section.type).check(planned)
        except UnsupportedError as e:
            problem = str(e)
        except MissingCapabilityError as e:
            if not section.optional:
                raise
            problem = str(e)
        if problem is not None and not section.optional:
            raise UnsupportedError(problem if problem.startswith("export ") else f"export {section.format}: {problem}")
        if problem is not None:
            skipped[place] = problem
    return skipped


def said(recipe: Recipe) -> tuple[str, ...]:
    """For a run's notes: which exports do without the scales of keys and values that it calibrates."""
    without: set[str] = set()
    for section in recipe.export if recipe.quantize.kv_cache is not None else ():
        with contextlib.suppress(UnsupportedError):  # `check` says so
            without |= set() if exporter(section.format, section.type).holds_kv_scales else {section.format}
    if not without:
        return ()
    which = f"{' and '.join(sorted(without))} {'has' if len(without) == 1 else 'have'} no place for the scales of keys and values"
    return (f"{which}: what is exported, and compared, is the rest",)


def make(
    recipe: Recipe, artifact: Model, artifact_sha256: str, skipped: Mapping[int, str], evaluation: Evaluation | None, texts: Texts, out: Path, journal: Journal, progress: Progress
) -> list[ExportResult]:
    """Write every export of the recipe; one that is there, whole and unchanged, stays.

    Args:
        recipe: with its `export` list.
        artifact: opened from disk.
        artifact_sha256: of its folder.
        skipped: from `check`.
        evaluation: of the artifact, for model cards.
        texts: of the run; exports that quantize anew weigh inputs by the calibration text.
        out: the run's folder; exports go to `exports/<format>` (`exports/<format>-<type>` where a format is asked for twice).
        journal: keeps hashes.
        progress: is told.
    """
    wanted_types = [(e.format, e.type) for e in recipe.export]
    results: list[ExportResult] = []
    for place, section in enumerate(progress.track(recipe.export, "export", len(recipe.export))):
        if place in skipped:
            results.append(ExportResult(section.format, skipped_because=skipped[place]))
            continue
        relative = _place(wanted_types, section.format, section.type)
        measured = evaluation if section.format in CHECKPOINTS else None
        weighed = texts.calibration if importance.weighs(section.format, section.type) else None
        given = {"evaluation": None if measured is None else asdict(measured), "calibration": None if weighed is None else weighed.sha256}
        name = key("export", artifact=artifact_sha256, format=section.format, type=section.type, path=relative, **given)
        found = journal.load(name)
        if found is None or not (out / relative).is_dir() or sha256_tree(out / relative) != found[1]["sha256"]:
            matrix = None if weighed is None else importance.measured(artifact, artifact_sha256, weighed, recipe.calibration.source, journal, progress)
            found = ({}, _write(artifact, section.format, section.type, out / relative, measured, matrix))
            journal.save(name, {"done": torch.ones(1)}, found[1])
        results.append(ExportResult(section.format, relative, **found[1]))
    wanted = {out / r.path for r in results if r.path is not None}
    for left in (out / "exports").glob("*"):
        if left not in wanted:
            progress.note(f"removing {left}: it is no export of this recipe")
            shutil.rmtree(left, ignore_errors=True)
    return results


def _place(of_run: Sequence[tuple[str, str | None]], format_name: str, type_name: str | None) -> str:
    """The folder of an export in that of its run, of which formats and types are given: by the format, and by the type as well where the run has the format otherwise."""
    others = [kind for name, kind in of_run if name == format_name]
    plain = others == [type_name] or (type_name is None and not others)
    return f"exports/{format_name}" + ("" if plain else f"-{type_name or 'auto'}")


def _of_run(run: Path) -> list[tuple[str, str | None]]:
    """Formats and types of a run's own exports, by its results.json; empty where it has none."""
    try:
        listed = json.loads((run / "results.json").read_bytes())["recipe"]["export"]
        return [(e["format"], e.get("type")) for e in listed]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []


def _write(artifact: Model, format_name: str, type_name: str | None, folder: Path, evaluation: Evaluation | None, matrix: Imatrix | None) -> dict[str, Any]:
    """Beside an export that is there already, which it replaces when complete."""
    with readable_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        earlier = folder.is_dir() and any(folder.iterdir())
    if earlier:
        with atomic_folder(folder) as temporary:
            return _written(artifact, format_name, type_name, temporary, evaluation, matrix)
    return _written(artifact, format_name, type_name, folder, evaluation, matrix)


def _written(artifact: Model, format_name: str, type_name: str | None, folder: Path, evaluation: Evaluation | None, matrix: Imatrix | None) -> dict[str, Any]:
    chosen = exporter(format_name, type_name)
    (replace(chosen, imatrix=matrix) if isinstance(chosen, GgufMixExporter) else chosen).write(artifact, folder)
    if format_name in CHECKPOINTS:
        write_card(folder, format_name, read_provenance(artifact.assets) or {"qforge_version": __version__, "model": {"source": Path(artifact.source).name}}, evaluation)
    return {"sha256": sha256_tree(folder), "size_bytes": size_of(folder)}


def verify_all(
    recipe: Recipe,
    exports: Sequence[ExportResult],
    artifact: Model,
    artifact_sha256: str,
    engine: str,
    windows: EvaluationWindows | None,
    out: Path,
    journal: Journal,
    progress: Progress,
) -> list[ExportResult]:
    """Read every written export back; what was verified is kept in the journal, unless something was left out for a reason that may pass.

    Args:
        recipe: with its `export` list.
        exports: from `make`.
        artifact: opened from disk.
        artifact_sha256: of its folder.
        engine: that gives our side of a comparison, as in `evidence.engine_for`.
        windows: the evaluation text; None takes the built-in one.
        out: the run's folder.
        journal: keeps results.
        progress: is told.
    """
    if not any(e.path for e in exports):
        return list(exports)
    prompts = seeded_prompts((windows or _builtin_windows(artifact)).ids, POSITIONS)
    done, programs = [], versions()
    for section, result in progress.track(list(zip(recipe.export, exports, strict=True)), "verify", len(exports)):
        if result.path is None:
            done.append(result)
            continue
        missing = [llama_cpp.missing(), onnx_runtime.missing(), onnx_runtime.genai_missing(), openvino_runtime.missing(), client_missing(), *map(checkpoints.missing, CHECKPOINTS)]
        missing += [tensorrt_runtime.missing(out / result.path)] if result.format == "tensorrt" else []
        given = {"artifact": artifact_sha256, "export": result.sha256, "format": result.format, "prompts": prompts, "engine": engine}
        name = key("verify", form=4, missing=missing, versions=programs, **given)
        found = journal.load(name)
        if found is None:
            found = ({}, _verified(result, section.type, out / result.path, artifact, engine, prompts))
            if lasting(found[1]["left_out"], missing):
                journal.save(name, {"done": torch.ones(1)}, found[1])
        done.append(_with(result, found[1]))
    return done


def _verified(result: ExportResult, type_name: str | None, folder: Path, artifact: Model, engine: str, prompts: list[list[int]]) -> dict[str, Any]:
    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    compared = artifact if exporter(result.format, type_name).holds_kv_scales else replace(artifact, kv_scales={})
    verified, left_out = verify(result.format, paths, artifact, engine_for(compared, engine), prompts)
    try:
        verified = [*verified, *verify_text(result.format, paths, artifact)]
    except MissingCapabilityError as e:
        left_out = [*left_out, f"texts not compared: {e}"]
    equal = [v.weights_equal for v in verified if v.weights_equal is not None]
    lossless = all(equal) and not any(v.rounded for v in verified) if equal else None
    return {"lossless": lossless, "verified_by": [asdict(v) for v in verified], "left_out": left_out}


def _with(result: ExportResult, value: dict[str, Any]) -> ExportResult:
    """What `_verified` gave of an export, beside what is known of it."""
    return replace(result, lossless=value["lossless"], verified_by=[Verification(**v) for v in value["verified_by"]], skipped_because="; ".join(value["left_out"]) or None)


def export_one(artifact: Model, source: Path, format_name: str, type_name: str | None, folder: Path | None, progress: Progress) -> ExportResult:
    """Write and verify one export outside a run.

    Args:
        artifact: opened from `source`.
        source: a run's folder, its `model/`, or any quantized checkpoint.
        format_name: the format.
        type_name: the format's own type, or None.
        folder: where to; None chooses `exports/<format>` of the run (`exports/<format>-<type>` beside its own export of another type), or `<format>` beside the model.
        progress: is told.

    Raises:
        UnsupportedError: the format cannot hold the model; the message says why.
    """
    chosen = exporter(format_name, type_name)
    problem = chosen.check(artifact)
    if problem is not None:
        raise UnsupportedError(f"export {format_name}: {problem}")
    run = source if (source / "model").is_dir() else source.parent
    own = folder is None and (run / LOCK).exists()
    if folder is None:
        folder = run / _place(_of_run(run), format_name, type_name) if own else _beside(source, format_name)
    if not own and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OutputError(f"{folder} is not empty; --out names a new or empty folder, which the export will fill")
    if folder.resolve() == artifact.assets.resolve() or folder.resolve() in artifact.assets.resolve().parents:
        raise OutputError(f"{folder} holds the model that is exported; choose another --out")
    progress.note(f"writing {folder}")
    if artifact.kv_scales and not chosen.holds_kv_scales:
        progress.note(f"{format_name} has no place for scales of keys and values: they are left out, and its engines keep keys and values as they like")
    matrix = _builtin_importance(artifact, progress) if importance.weighs(format_name, type_name) else None
    result = ExportResult(format_name, str(folder), **_write(artifact, format_name, type_name, folder, None, matrix))
    return _with(result, _verified(result, type_name, folder, artifact, "auto", seeded_prompts(_builtin_windows(artifact).ids, POSITIONS)))


def _beside(source: Path, format_name: str) -> Path:
    """Named after the file without its ending, or after the folder: `Q-1.7B` has none."""
    named = source.resolve() if source.name in ("", "..") else source
    return named.parent / f"{named.stem if named.is_file() else named.name}-{format_name}"


def _builtin_importance(model: Model, progress: Progress) -> Imatrix:
    """From the calibration text that a recipe takes if it says nothing."""
    section, tokenizer = CalibrationSection(), model.tokenizer()
    read = documents(section.source, role="calibration", folder=Path(), tokenizer=tokenizer)
    context = getattr(model.config, "max_position_embeddings", None)
    chosen = calibration_set(read, tokenizer, samples=section.samples, sequence_length=section.sequence_length, seed=section.seed, context=context)
    with tempfile.TemporaryDirectory() as folder:
        return importance.measured(model, model.fingerprint(), chosen, section.source, Journal(Path(folder)), progress)


def _builtin_windows(model: Model) -> EvaluationWindows:
    tokenizer = model.tokenizer()
    read = documents("builtin", role="evaluation", folder=Path(), tokenizer=tokenizer)
    return evaluation_windows(read, tokenizer, 256, context=getattr(model.config, "max_position_embeddings", None))
