"""Numbers of a file that must be finite."""

from __future__ import annotations

import numpy as np

from qforge.errors import ModelError

_AT_ONCE = 1 << 22  # values looked at together


def check_finite(values: np.ndarray, what: str) -> None:
    """Refuse NaN and infinity in an array of any float type.

    Raises:
        ModelError: naming `what` holds them.
    """
    flat = values.reshape(-1)
    for start in range(0, flat.size, _AT_ONCE):
        with np.errstate(invalid="ignore"):  # ml_dtypes' types warn of what is looked for
            wide = flat[start : start + _AT_ONCE].astype(np.float64)
        if not np.isfinite(wide).all():
            raise ModelError(f"{what} holds values that are not finite; the file is damaged or was made from such weights")
