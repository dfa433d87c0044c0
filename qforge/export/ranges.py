"""Where stored tensors lie in a file."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

from qforge.errors import ModelError


def check_apart(ranges: Iterable[tuple[int, int]], path: Path) -> None:
    """Refuse tensors that overlap; they may share all of their bytes, as tied weights do.

    Args:
        ranges: first byte and number of bytes of each.
        path: of the file that holds them, for a message.

    Raises:
        ModelError: two share a part of their bytes.
    """
    for (begin, length), (later, _) in itertools.pairwise(sorted({(begin, length) for begin, length in ranges if length})):
        if later < begin + length:
            raise ModelError(
                f"{path}: tensors overlap (one has the bytes {begin} to {begin + length}, another begins at {later}); what describes the file, or the file, is damaged"
            )
