"""What every exporter does with what its `check` says."""

from __future__ import annotations

from qforge.errors import UnsupportedError


def refuse(name: str, reason: str | None) -> None:
    """Refuse to write a model, if there is a reason to.

    Raises:
        UnsupportedError: there is.
    """
    if reason is not None:
        raise UnsupportedError(f"{name}: {reason}")
