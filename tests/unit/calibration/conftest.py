"""What is compared with exact references is computed in fp32; test_calibration_precision.py says what bf16 changes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from qforge.methods import native


@pytest.fixture(autouse=True, scope="module")
def products() -> Iterator[None]:
    """fp32 everywhere, whatever this CPU can do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "has_bf16_products", lambda: False)
        yield
