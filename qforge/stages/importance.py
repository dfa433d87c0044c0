"""The importance matrix of a run: where an export asks for one, found once, from the calibration text."""

from __future__ import annotations

from qforge.calibration.importance import square_sums
from qforge.calibration.room import Room
from qforge.export.gguf_types import MIXES
from qforge.export.imatrix import Imatrix
from qforge.models.blocks import BlockModel
from qforge.models.model import Model
from qforge.plan import Plan
from qforge.progress import Progress
from qforge.recipe import Recipe
from qforge.stages.journal import Journal, key
from qforge.text.calibration import CalibrationSet

_SEARCH_S = 450e-9  # seconds of one core a weight, K types with minima (docs/log.md)


def weighs(format_name: str, type_name: str | None) -> bool:
    """Whether an export quantizes anew, and so weighs inputs by their importance."""
    return format_name == "gguf" and type_name in MIXES


def wanted(recipe: Recipe) -> bool:
    """Whether any export of the recipe does."""
    return any(weighs(e.format, e.type) for e in recipe.export)


def said(recipe: Recipe, plan: Plan) -> tuple[str, ...]:
    """What a run's exports that quantize anew cost, for its notes."""
    mixes = [str(e.type) for e in recipe.export if weighs(e.format, e.type)]
    if not mixes or not plan.schemes:
        return ()
    seconds = len(mixes) * plan.parameters * _SEARCH_S
    return (f"export gguf {', '.join(mixes)} quantizes the artifact anew: about {seconds:,.0f} s of one core, and a rounding error of its own, which the report measures",)


def measured(artifact: Model, artifact_sha256: str, calibration: CalibrationSet, dataset: str, journal: Journal, progress: Progress) -> Imatrix:
    """The importance matrix of an artifact, kept in the journal.

    Args:
        artifact: opened from disk.
        artifact_sha256: of its folder.
        calibration: the text.
        dataset: its name.
        journal: keeps it, and has the room for hidden states.
        progress: is told.
    """
    name = key("importance", form=2, artifact=artifact_sha256, calibration=calibration.sha256)
    found = journal.load(name)
    if found is None:
        found = square_sums(BlockModel(artifact), calibration.ids, Room(journal.folder), progress)
        journal.save(name, *found)
    sequences, length = calibration.ids.shape
    sums, tokens = found
    return Imatrix(sums, tokens, int(sequences), int(length), dataset)
