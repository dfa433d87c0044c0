"""Flat arrays of a step, and scheduling by hand-written cases."""

from __future__ import annotations

import pytest

from qforge.errors import DataError
from qforge.runtime.blocks import BlockPool
from qforge.runtime.scheduler import Piece, Scheduler
from qforge.runtime.sequence import SamplingParams, Sequence
from qforge.runtime.step import build_step


def _sequence(number: int, prompt: int, new: int = 4) -> Sequence:
    return Sequence(number, list(range(100, 100 + prompt)), prompt, SamplingParams(), 0, prompt + new, frozenset())


def test_a_step_is_flat() -> None:
    a, b = _sequence(0, 20), _sequence(1, 3)
    a.block_table, b.block_table = [5, 2], [7]
    step = build_step([Piece(a, 14, 18), Piece(b, 0, 3)], 16)
    assert step.tokens.tolist() == [114, 115, 116, 117, 100, 101, 102]
    assert step.positions.tolist() == [14, 15, 16, 17, 0, 1, 2]
    assert step.slot_mapping.tolist() == [94, 95, 32, 33, 112, 113, 114]
    assert step.block_tables.tolist() == [[5, 2], [7, 0]]
    assert step.query_starts.tolist() == [0, 4, 7]
    assert step.context_lens.tolist() == [18, 3]
    assert step.logit_indices.tolist() == [6]
    assert build_step([Piece(b, 0, 2)], 16, all_logits=True).logit_indices.tolist() == [0, 1]


def test_prompts_are_cut_and_others_join_in_the_same_step() -> None:
    scheduler = Scheduler(BlockPool(10), 16, 4, 8)
    a, b = _sequence(0, 12), _sequence(1, 3)
    scheduler.add(a)
    scheduler.add(b)
    first = scheduler.schedule()
    assert [(p.sequence.id, p.start, p.stop, p.wants_logits) for p in first] == [(0, 0, 8, False)]
    scheduler.advance(first)
    assert [(p.sequence.id, p.start, p.stop, p.wants_logits) for p in scheduler.schedule()] == [(0, 8, 12, True), (1, 0, 3, True)]


def test_the_youngest_gives_way_and_comes_back_first() -> None:
    scheduler = Scheduler(BlockPool(2), 16, 4, 64)
    a, b, c = _sequence(0, 16, 10), _sequence(1, 16, 10), _sequence(2, 1)
    for s in (a, b, c):
        scheduler.add(s)
    scheduler.advance(scheduler.schedule())
    a.tokens.append(1)
    b.tokens.append(1)
    pieces = scheduler.schedule()
    assert [p.sequence.id for p in pieces] == [0]
    assert (b.preemptions, b.computed, b.block_table) == (1, 0, [])
    assert [s.id for s in scheduler.waiting] == [1, 2]


def test_what_can_never_fit_is_refused() -> None:
    with pytest.raises(DataError, match="needs 3 cache blocks"):
        Scheduler(BlockPool(2), 16, 4, 64).add(_sequence(0, 30, 3))
