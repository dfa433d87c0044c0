"""What decoding is held beside: the last-level cache as Linux states it or not at all, a buffer that exceeds it, a note where weights fit it; and a new process's start."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny

from qforge.runtime import read_speed
from qforge.runtime.bench import beside_bandwidth
from qforge.runtime.new_process import start_to_first_token

MIB = 1 << 20


def _caches(folder: Path, *caches: tuple[str, str]) -> Path:
    for i, (level, size) in enumerate(caches):
        (folder / f"index{i}").mkdir()
        (folder / f"index{i}" / "level").write_text(level + "\n")
        (folder / f"index{i}" / "size").write_text(size + "\n")
    return folder


def test_the_highest_level_counts(tmp_path: Path) -> None:
    assert read_speed.last_level_cache(_caches(tmp_path, ("1", "48K"), ("1", "32K"), ("3", "307200K"), ("2", "2048K"))) == 300 * MIB


@pytest.mark.parametrize("caches", [(), (("", ""),), (("3", "none"),), (("3", ""),)])
def test_a_machine_that_does_not_say_has_none(tmp_path: Path, caches: tuple[tuple[str, str], ...]) -> None:
    assert read_speed.last_level_cache(_caches(tmp_path, *caches)) is None
    assert read_speed.last_level_cache(tmp_path / "missing") is None


def test_one_level_that_cannot_be_read_leaves_the_others(tmp_path: Path) -> None:
    assert read_speed.last_level_cache(_caches(tmp_path, ("3", ""), ("2", "2M"))) == 2 * MIB


@pytest.mark.parametrize(("cache", "far"), [(None, 128), (32 * MIB, 128), (300 * MIB, 600), (2048 * MIB, 1024)])
def test_what_is_read_from_memory_exceeds_the_cache_up_to_a_gib(monkeypatch: pytest.MonkeyPatch, cache: int | None, far: int) -> None:
    monkeypatch.setattr(read_speed, "last_level_cache", lambda: cache)
    assert read_speed.far_bytes(128 * MIB) == far * MIB


def test_a_fraction_is_noted_where_weights_fit_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"batch": 2, "tokens_per_second": 200.0, "weight_bytes": 80 * MIB, "cache_bytes": 20 * MIB}
    monkeypatch.setattr(read_speed, "last_level_cache", lambda: 300 * MIB)
    found = beside_bandwidth(row, 20_000.0 * MIB)
    assert found["read_bandwidth_fraction"] == pytest.approx(0.5)
    assert found["read_bandwidth_note"] == "weights may lie in the 300 MiB last-level cache"
    assert beside_bandwidth(row | {"weight_bytes": 301 * MIB}, 1e9)["read_bandwidth_note"] is None
    assert beside_bandwidth(row, None)["read_bandwidth_fraction"] is None
    monkeypatch.setattr(read_speed, "last_level_cache", lambda: None)
    assert beside_bandwidth(row, 1e9)["read_bandwidth_note"] is None


def test_a_new_process_is_timed_to_its_first_token(tmp_path: Path) -> None:
    found = start_to_first_token(str(tiny.make(tmp_path / "m")), {"activations": "int8"})
    assert found["first_token_ms"] > 10
    assert found["prompt_tokens"] > 0


def test_a_new_process_that_fails_says_why(tmp_path: Path) -> None:
    found = start_to_first_token(str(tmp_path), {})
    assert found["first_token_ms"] is None
    assert "Error" in found["failed"]
