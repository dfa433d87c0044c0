"""Limits of computing time."""

from __future__ import annotations

import gc
import time

import pytest

from qforge.deadline import computing


class SpinsAtItsEnd:
    """Computes until it is interrupted, where Python drops what is raised."""

    def __del__(self) -> None:
        _spin(5)


def _spin(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def _leave_one_and_spin() -> None:
    SpinsAtItsEnd()
    _spin(5)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_timeout_that_a_finalizer_swallows_comes_again() -> None:
    start = time.process_time()
    with pytest.raises(TimeoutError), computing(0.05):
        _leave_one_and_spin()
    assert time.process_time() - start < 5


def test_no_garbage_is_collected_meanwhile() -> None:
    assert gc.isenabled()
    with computing(1):
        assert not gc.isenabled()
    assert gc.isenabled()


def test_nothing_comes_after_the_block() -> None:
    with computing(0.05):
        pass
    _spin(0.2)
