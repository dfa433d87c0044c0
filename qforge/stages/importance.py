"""The importance matrix of a run: where an export asks for one, found once, from the calibration text."""

from __future__ import annotations

from qforge.calibration.importance import square_sums
from qforge.calibration.room import Room
from qforge.export.gguf_types import MIXES
from qforge.export.imatrix import Imatrix
from qforge.models.blocks import BlockModel
from qforge.models.model import Model
from qforge.progress import Progress
from qforge.recipe import Recipe
from qforge.stages.journal import Journal, key
from qforge.text.calibration import CalibrationSet


def weighs(format_name: str, type_name: str | None) -> bool:
    """Whether an export quantizes anew, and so weighs inputs by their importance."""
    return format_name == "gguf" and type_name in MIXES


def wanted(recipe: Recipe) -> bool:
    """Whether any export of the recipe does."""
    return any(weighs(e.format, e.type) for e in recipe.export)


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
    name = key("importance", artifact=artifact_sha256, calibration=calibration.sha256)
    found = journal.load(name)
    if found is None:
        found = square_sums(BlockModel(artifact), calibration.ids, Room(journal.folder), progress), None
        journal.save(name, *found)
    sequences, length = calibration.ids.shape
    return Imatrix(found[0], int(sequences), int(length), dataset)
