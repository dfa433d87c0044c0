"""The folder that a run writes: whose it is, and room in it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from qforge.errors import OutputError
from qforge.files import LOCK, expanded, readable_errors
from qforge.models.locate import model_folder
from qforge.recipe import Recipe

FINISHED = ("results.json", "report.md", "report.html", "junit.xml")
OURS = ("work", "model", "exports")


def check(out: Path, recipe: Recipe) -> None:
    """Keep other people's files: an output folder is empty, or an earlier run's; and nothing that the run reads lies where it writes.

    Raises:
        OutputError: see above.
    """
    if out.exists() and not out.is_dir():
        raise OutputError(f"{out} is a file; choose another --out")
    written = [out / name for name in (*OURS, *FINISHED)]
    if not (out / LOCK).exists():
        found = [p.name for p in written if p.exists()]
        if found:
            raise OutputError(f"{out} is not an output folder of qforge, and has {', '.join(found)} in it, which a run would replace; choose another --out")
    for source, path in _read(recipe):
        if path == out.resolve():
            raise OutputError(f"{out} is the folder of '{source}', which the run reads; choose another --out")
        if any(path.is_relative_to(w.resolve()) for w in written):
            raise OutputError(f"the run reads {source}, which lies in {out}, where it writes; choose another --out")
    if (out / "config.json").exists() and not (out / LOCK).exists():
        raise OutputError(f"{out} is a model's folder, and has a config.json in it; choose another --out")


def _read(recipe: Recipe) -> Iterator[tuple[str, Path]]:
    """Files and folders of this machine that a run reads: as the recipe names them, and where they are (what is read of an earlier run's folder is its model)."""
    named: list[tuple[str, tuple[str, ...]]] = [(recipe.model.source, ("demo",)), *((a.source, ()) for a in recipe.adapters), (recipe.calibration.source, ("builtin", "generated"))]
    named += [] if recipe.evaluate is None else [(recipe.evaluate.text, ("builtin",))]
    for source, words in named:
        path = recipe.folder / expanded(source)
        if source not in words and path.exists():
            yield source, model_folder(path).resolve()


def start(out: Path, disk_bytes: int, fresh: bool) -> None:
    """Make room: what looks finished goes first, then, if asked, all that is finished.

    Args:
        out: the folder.
        disk_bytes: what the run will have written to it.
        fresh: whether all goes.

    Raises:
        OutputError: the disk has no such room, or the folder cannot be written.
    """
    with readable_errors(out):
        free = shutil.disk_usage(out).free
    present = sum(p.stat().st_size for p in out.rglob("*") if p.is_file())
    needed = disk_bytes - present
    if needed > free:
        raise OutputError(f"{out}: this run needs about {needed / 1e6:,.1f} MB more on disk, and {free / 1e6:,.1f} MB are free; free some space or choose another --out")
    with readable_errors(out):
        for name in FINISHED:
            (out / name).unlink(missing_ok=True)
        if fresh:
            for name in OURS:
                shutil.rmtree(out / name, ignore_errors=True)
        (out / "work").mkdir(exist_ok=True)
