"""Threads get the lock in turn, one at a time, and a thread that has it gets it again."""

from __future__ import annotations

import threading
import time

import pytest

from qforge.runtime.fair_lock import FairLock


def test_a_loop_that_gives_it_back_and_takes_it_again_keeps_nobody_out() -> None:
    lock, got, stop = FairLock(), threading.Event(), time.monotonic() + 30

    def other() -> None:
        with lock:
            got.set()

    waiting = threading.Thread(target=other)
    with lock:
        waiting.start()
        while not lock._given > 1:
            time.sleep(0.001)
    turns = 0
    while not got.is_set() and time.monotonic() < stop:
        with lock:
            turns += 1
    waiting.join(10)
    assert turns <= 1


def test_one_thread_at_a_time_has_it_and_may_have_it_twice() -> None:
    lock, inside, most = FairLock(), 0, 0

    def work() -> None:
        nonlocal inside, most
        for _ in range(200):
            with lock, lock:
                inside += 1
                time.sleep(0)
                most = max(most, inside)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (most, inside, lock._owner) == (1, 0, None)
    assert lock._served == lock._given


def test_whoever_is_interrupted_while_waiting_leaves_the_turn_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = FairLock()

    def interrupted() -> None:
        raise KeyboardInterrupt

    taken = threading.Event()
    with lock:
        with monkeypatch.context() as patch:
            patch.setattr(lock._changed, "wait", interrupted)
            lock._owner, owner = None, lock._owner  # as another thread sees it
            with pytest.raises(KeyboardInterrupt):
                lock.__enter__()
            lock._owner = owner
        waiting = threading.Thread(target=lambda: (lock.__enter__(), taken.set(), lock.__exit__(None, None, None)))
        waiting.start()
    assert taken.wait(10)
    waiting.join(10)
