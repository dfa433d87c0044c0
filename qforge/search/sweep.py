"""A sweep: the variants of one recipe, run one after the other over one model, sharing whatever is equal, and held against each other at the end."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from qforge import __version__, pipeline, report
from qforge.errors import NumericalError, OutputError, QforgeError, RecipeError, UnsupportedError
from qforge.files import LOCK, lock, readable_errors
from qforge.models.model import open_model
from qforge.progress import SILENT, Progress
from qforge.recipe import Recipe, load_members, load_recipe
from qforge.recipe.sweep import members
from qforge.runtime import LLM
from qforge.runtime.bench import decode_speed
from qforge.runtime.decoder import supports
from qforge.search.front import Variant, ranked, variant
from qforge.stages.journal import Journal, key
from qforge.types import Results

FINISHED = ("sweep.json", "sweep.md", "sweep.html")
FOLDERS = ("work", "variants")


@dataclass(frozen=True, slots=True)
class Sweep:
    """What sweep.json says.

    Attributes:
        recipe: name of the recipe file.
        model: source, parameters, sha256 of the original, and `bytes_at_16_bits`.
        text_sha256, tokens, clusters: what was evaluated.
        reference: the original's own figures.
        variants: in the order of the recipe.
    """

    qforge_version: str
    recipe: str
    model: dict[str, Any]
    text_sha256: str | None
    tokens: int
    clusters: int
    reference: dict[str, Any] | None
    variants: list[Variant]
    schema_version: int = 1

    @property
    def exit_code(self) -> int:
        """2 where a variant could not be computed, 1 where a gate failed, else 0."""
        return 2 if any(v.error for v in self.variants) else 1 if any(v.passed is False for v in self.variants) else 0

    def to_json(self) -> str:
        """The text of sweep.json."""
        return json.dumps(asdict(self), indent=1, allow_nan=False) + "\n"


def sweep(recipe: str | Path, *, out: str | Path | None = None, overrides: Sequence[str] = (), fresh: bool = False, progress: Progress = SILENT) -> Sweep:
    """Run every variant of a recipe with a `sweep`.

    What variants have in common is computed once: they keep their finished pieces in one journal (`OUT/work`), where each finds the original's states on the evaluation text,
    the base's figures, what `auto` measured, and whatever else has the same inputs. A killed sweep is taken up where it was by the same call.

    Args:
        recipe: path of the YAML file.
        out: output folder, `runs/<recipe name>` unless given: `variants/<name>/` as of a run each, sweep.json, sweep.md and sweep.html.
        overrides: `key.path=value` for all variants.
        fresh: forget finished work first.
        progress: told what is going on.

    Raises:
        QforgeError: what any variant would refuse before it starts. One that fails later for its own numbers is listed with its error.
    """
    whole = load_recipe(recipe, overrides)
    recipes = load_members(recipe, overrides)
    assert whole.sweep is not None
    changes = {name: {path: str(value) for path, value in changed.items()} for name, changed in members(whole.sweep)}
    folder = Path(out) if out is not None else Path("runs") / whole.name
    refuse_foreign(folder)
    for member in recipes:
        _check(member, folder / "variants" / member.name)
    with lock(folder):
        _start(folder, fresh)
        _clear_others(folder, [member.name for member in recipes], progress)
        rows, results = [], []
        for i, member in enumerate(recipes):
            progress.note(f"variant {i + 1} of {len(recipes)}: {member.name}")
            row, found = _run(member, changes[member.name], folder, progress)
            rows.append(row)
            results.append(found)
        made = _sweep(whole, ranked(rows, results), results)
        report.write_sweep(made.to_json(), folder)
    return made


def _check(member: Recipe, out: Path) -> None:
    """Refuse before any work what this variant would be refused for.

    Raises:
        QforgeError: the message begins with the variant's name.
    """
    try:
        pipeline.plan(member, out=out)
    except QforgeError as e:
        raise type(e)(f"variant {member.name}: {e}") from e


def _run(member: Recipe, changes: dict[str, str], folder: Path, progress: Progress) -> tuple[Variant, Results | None]:
    path = f"variants/{member.name}"
    try:
        results = pipeline.quantize(member, out=folder / path, shared=folder / "work", progress=progress)
    except (NumericalError, RecipeError, UnsupportedError) as e:
        return Variant(member.name, changes, path, error=str(e)), None
    return variant(member.name, changes, path, results, _speed(folder, path, member, results)), results


def _speed(folder: Path, path: str, member: Recipe, results: Results) -> float | None:
    """Tokens per second of the built-in runtime, measured once for an artifact."""
    journal = Journal(folder / "work")
    name = key("speed", artifact=results.artifact["sha256"], activations=member.run.activations)
    found = journal.load(name)
    if found is None:
        model = open_model(str(folder / path / "model"), trust_remote_code=member.model.trust_remote_code)
        if supports(model.spec) is not None:
            return None
        found = ({}, decode_speed(LLM(model, activations=member.run.activations, threads=member.run.threads)))
        journal.save(name, {"done": torch.ones(1)}, found[1])
    return None if found[1] is None else float(found[1])


def _sweep(recipe: Recipe, variants: list[Variant], results: Sequence[Results | None]) -> Sweep:
    first = next((r for r in results if r is not None and r.evaluation is not None), None)
    if first is None or first.evaluation is None:
        return Sweep(__version__, recipe.name, {"source": recipe.model.source}, None, 0, 0, None, variants)
    e = first.evaluation
    model = {
        "source": first.model["source"],
        "parameters": first.model["parameters"],
        "sha256": first.model["sha256"],
        "bytes_at_16_bits": first.artifact["original_bytes_at_16_bits"],
    }
    return Sweep(__version__, recipe.name, model, e.text_sha256, e.tokens, len(e.clusters), e.reference, variants)


def refuse_foreign(folder: Path) -> None:
    """Keep other people's files: a sweep's folder is empty, or an earlier one's.

    Raises:
        OutputError: it is not.
    """
    found = [] if (folder / LOCK).exists() else [n for n in (*FINISHED, *FOLDERS) if (folder / n).exists()]
    if found:
        raise OutputError(f"{folder} is not an output folder of qforge, and has {', '.join(found)} in it, which a sweep would replace; choose another --out")


def _start(folder: Path, fresh: bool) -> None:
    """What looks finished goes first, then, if asked, all that is finished."""
    with readable_errors(folder):
        for name in FINISHED:
            (folder / name).unlink(missing_ok=True)
        for name in FOLDERS if fresh else ():
            shutil.rmtree(folder / name, ignore_errors=True)
        (folder / "work").mkdir(exist_ok=True)


def _clear_others(folder: Path, names: Sequence[str], progress: Progress) -> None:
    """Remove the variants of an earlier sweep, which would look like this one's; what is no run's stays.

    Raises:
        OutputError: one of them is in use.
    """
    others = [p for p in sorted((folder / "variants").glob("*")) if p.name not in names and (p / LOCK).exists()]
    for path in others:
        with lock(path), readable_errors(path):
            shutil.rmtree(path)
    if others:
        progress.note(f"removed what an earlier sweep left: {', '.join(p.name for p in others)}")
