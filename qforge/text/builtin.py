"""Where the built-in calibration and evaluation text lies, in a wheel and in a source checkout."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from qforge.errors import MissingCapabilityError

Role = Literal["calibration", "evaluation"]
FILES: dict[Role, tuple[str, ...]] = {"calibration": ("calibration.jsonl", "generated.jsonl"), "evaluation": ("evaluation.jsonl",)}
PACKAGE = Path(__file__).resolve().parents[1]


def builtin_folder() -> Path:
    """The folder `calibration_data`: inside the package in a wheel, beside it in a checkout.

    Raises:
        MissingCapabilityError: neither exists (a damaged installation).
    """
    for folder in (PACKAGE / "calibration_data", PACKAGE.parent / "calibration_data"):
        if folder.is_dir():
            return folder
    raise MissingCapabilityError("the built-in text (calibration_data) is not part of this installation; install qforge again, or name a .txt or .jsonl file")


def builtin_files(role: Role) -> tuple[Path, ...]:
    """The files of a role, in the order in which they are read."""
    folder = builtin_folder()
    return tuple(folder / name for name in FILES[role])
