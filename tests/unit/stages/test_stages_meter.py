"""What the C library's allocator is told; figures of work that several processes did."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qforge.stages import meter
from qforge.stages.journal import Journal


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


class Process:
    """One that meters its work: a clock and a size that a test sets."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.size = 0.0, 1
        monkeypatch.setattr(meter.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(meter, "_status", lambda field: self.size)
        self.meter, self.journal = meter.Meter(), Journal(folder / "work")
        self.meter.follow(folder / "meter.json", self.journal)

    def work(self, stage: str, *pieces: tuple[str, float, int]) -> None:
        """A stage: for each piece its name (empty: nothing is kept), seconds and size."""
        with self.meter.stage(stage):
            for name, seconds, size in pieces:
                self.now, self.size = self.now + seconds, size
                if name:
                    self.journal.save(name, {"a": torch.ones(1)}, None)


def test_a_stage_that_was_cut_short_goes_on_and_one_that_finds_all_states_what_it_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Process(tmp_path, monkeypatch)
    first.work("open", ("", 1, 3))
    first.work("quantize", ("b0", 10, 14), ("b1", 10, 9), ("", 5, 9))  # the last of it was not kept, and will be done again
    second = Process(tmp_path, monkeypatch)
    second.work("open", ("", 2, 4))
    second.work("quantize", ("b2", 30, 8))
    second.work("write", ("artifact", 4, 2))
    second.meter.conclude()
    assert second.meter.seconds == {"open": 1, "quantize": 50, "write": 4}
    assert second.meter.peaks == {"open": 3, "quantize": 14, "write": 2}
    third = Process(tmp_path, monkeypatch)
    third.work("open", ("", 2, 40))
    third.work("quantize", ("", 1, 40))
    third.work("write", ("artifact", 3, 1))  # once more, because it was taken away
    third.meter.conclude()
    assert third.meter.seconds == {"open": 1, "quantize": 50, "write": 3}
    assert (third.meter.peaks, third.meter.peak()) == (second.meter.peaks, 14)


def test_a_piece_that_is_there_has_its_peak_kept_and_figures_that_cannot_be_read_count_as_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Process(tmp_path, monkeypatch)
    monkeypatch.setattr("qforge.stages.journal.write_file", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        first.work("quantize", ("b0", 10, 14))
    assert "14" in (tmp_path / "meter.json").read_text()
    for damaged in ("", "{}", "garbage"):
        (tmp_path / "meter.json").write_text(damaged)
        again = Process(tmp_path, monkeypatch)
        again.work("quantize", ("", 1, 2))
        again.meter.conclude()
        assert (again.meter.seconds, again.meter.peak()) == ({"quantize": 1}, 2)


def test_what_was_computed_before_the_meter_knew_its_file_is_kept_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meter, "_status", lambda field: 14)
    early, journal = meter.Meter(), Journal(tmp_path / "work")
    with early.stage("texts"):
        journal.save("generated", {"a": torch.ones(1)}, None)
    early.follow(tmp_path / "meter.json", journal)  # and is killed
    later = Process(tmp_path, monkeypatch)
    later.work("texts", ("", 1, 2))
    later.meter.conclude()
    assert (later.meter.seconds["texts"], later.meter.peak()) == (early.seconds["texts"], 14)
