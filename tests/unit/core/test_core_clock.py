"""Parts sum to what was measured, and a part inside another is taken out of it."""

from __future__ import annotations

import contextlib

import pytest

from qforge import clock as clocks
from qforge.clock import Clock


def test_inner_parts_are_taken_out_of_outer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(clocks.time, "perf_counter", lambda: now[0])
    clock = Clock()
    with clock.part("outer"):
        now[0] += 1
        with clock.part("inner"):
            now[0] += 2
            with clock.part("outer"):
                now[0] += 4
        now[0] += 8
    now[0] += 16  # in no part
    with contextlib.suppress(ZeroDivisionError), clock.part("inner"):
        now[0] += 32
        now[0] /= 0
    assert clock.seconds == {"outer": 13.0, "inner": 34.0}
