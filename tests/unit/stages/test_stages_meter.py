"""What the C library's allocator is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from qforge.stages import meter


def test_freed_memory_is_kept_for_gradients_alone_and_not_under_a_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(meter, "_set_malloc", lambda mmap, trim: told.append((mmap, trim)))
    meter.return_freed_memory()
    with meter.reusing_freed_memory():
        assert told[1][0] >= 1 << 30
    assert told[2:] == told[:1]
    with meter.reusing_freed_memory(sparing=True):
        assert len(told) == 3
    assert told[3] != told[0]


def test_without_proc_the_peak_stands_for_what_is_resident_and_the_allocator_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(meter, "_set_malloc", lambda mmap, trim: told.append((mmap, trim)))
    monkeypatch.setattr(meter, "Path", lambda _: tmp_path / "none")
    assert meter._status("VmRSS") >= 1 << 20
    assert not told
