"""Flat arrays of a step, and scheduling by hand-written cases."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from runtime_models import model

from qforge.errors import DataError
from qforge.runtime import LLM
from qforge.runtime.blocks import BlockPool
from qforge.runtime.scheduler import Piece, Scheduler
from qforge.runtime.sequence import Draw, FinishReason, SamplingParams, Sequence
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
    assert step.block_tables.tolist() == [5, 2, 7, 0]
    assert step.query_starts.tolist() == [0, 4, 7]
    assert step.context_lens.tolist() == [18, 3]
    assert step.logit_indices.tolist() == [6]
    b.params = SamplingParams(prompt_logprobs=0)
    step = build_step([Piece(a, 17, 20, (7, 7)), Piece(b, 0, 2)], 16)
    assert step.logit_indices.tolist() == [2, 3, 4, 5, 6]
    assert build_step([Piece(b, 2, 3)], 16).logit_indices.tolist() == [0]


@pytest.mark.parametrize(
    "changed",
    [
        {"positions": array("q", [0, 1])},
        {"slot_mapping": array("q")},
        {"query_starts": array("i", [0])},
        {"query_starts": array("i", [0, 2, 3])},
        {"tokens": array("i", [1, 2, 3])},
        {"tokens": array("d", [1, 2, 3])},
    ],
    ids=["positions", "slots", "no sequence", "blocks of half a sequence", "words of 32 bits", "floats"],
)
def test_arrays_that_do_not_fit_each_other_are_refused(changed: dict[str, array[int]]) -> None:
    llm = LLM(model("llama"), num_blocks=4)
    sequence = _sequence(0, 3)
    sequence.block_table = [0]
    step = build_step([Piece(sequence, 0, 3)], 16)
    draws = [Draw(sequence.params, 0, 3)]
    assert len(llm.runner.choose(step, draws)) == 1
    with pytest.raises(ValueError, match="of a step"):
        llm.runner.choose(replace(step, **changed), draws)


def _places(pieces: list[Piece]) -> list[tuple[int, int, int]]:
    return [(p.sequence.id, p.start, p.stop) for p in pieces]


def test_prompts_are_cut_and_others_join_in_the_same_step() -> None:
    scheduler = Scheduler(BlockPool(10), 16, 4, 8)
    a, b = _sequence(0, 5), _sequence(1, 6)
    scheduler.add(a)
    scheduler.add(b)
    first = scheduler.schedule()
    assert _places(first) == [(0, 0, 5), (1, 0, 3)]
    assert [p.wants_logits for p in first] == [True, False]


def test_a_prompt_longer_than_a_step_leaves_some_to_who_came_later() -> None:
    scheduler = Scheduler(BlockPool(30), 16, 4, 16)
    for s in (_sequence(0, 60), _sequence(1, 60), _sequence(2, 3)):
        scheduler.add(s)
    steps = []
    while not steps or steps[-1][-1][0] != 1:
        pieces = scheduler.schedule()
        scheduler.advance(pieces)
        steps.append(_places(pieces))
        for p in pieces:
            if p.wants_logits:
                scheduler.finish(p.sequence, FinishReason.LENGTH)
    assert steps[0] == [(0, 0, 13), (2, 0, 3)], "12 of 16, and what nobody came for"
    assert steps[1:4] == [[(0, 13, 29)], [(0, 29, 45)], [(0, 45, 60), (1, 0, 1)]], "long ones go one after the other"


def test_few_logits_of_prompts_are_wanted_in_a_step() -> None:
    scheduler = Scheduler(BlockPool(60), 16, 4, 300, prefix_cache=True)
    a, b, c = _sequence(0, 200), _sequence(1, 200), _sequence(2, 20)
    a.params = b.params = SamplingParams(prompt_logprobs=0)
    for s in (a, b, c):
        scheduler.add(s)
    steps = []
    for _ in range(4):
        steps.append(scheduler.schedule())
        scheduler.advance(steps[-1])
        if len(steps) == 1:
            scheduler.cancel(c)
    assert [_places(step) for step in steps] == [[(0, 0, 128), (2, 0, 20)], [(0, 128, 200), (1, 0, 56)], [(1, 56, 184)], [(1, 184, 200)]]
    assert [[(p.wanted, p.end) for p in step] for step in steps[:2]] == [[(0, 128), (19, 20)], [(128, 200), (0, 56)]]
    again = _sequence(3, 200)
    again.params = SamplingParams(prompt_logprobs=0)
    scheduler.cancel(a)
    scheduler.cancel(b)
    _done(scheduler, again)
    assert again.cached == 0, "all of it is computed, though the cache has it"


def test_who_enters_leaves_room_for_what_others_were_promised() -> None:
    scheduler = Scheduler(BlockPool(6), 16, 4, 16)
    for s in (_sequence(0, 64), _sequence(1, 33), _sequence(2, 3)):
        scheduler.add(s)
    assert _places(scheduler.schedule()) == [(0, 0, 16)]
    assert [s.id for s in scheduler.waiting] == [1, 2], "three blocks are free, and the first is to have all of them"


def _done(scheduler: Scheduler, sequence: Sequence) -> None:
    """Compute a sequence that is to end with its first token."""
    scheduler.add(sequence)
    while sequence.finish_reason is None:
        pieces = scheduler.schedule()
        scheduler.advance(pieces)
        for p in pieces:
            if p.wants_logits:
                p.sequence.tokens.append(1)
                scheduler.finish(p.sequence, FinishReason.LENGTH)


def test_a_sequence_begins_behind_what_the_cache_has_of_it() -> None:
    scheduler = Scheduler(BlockPool(10), 16, 4, 64, prefix_cache=True)
    a = _sequence(0, 40)
    _done(scheduler, a)
    assert a.cached == 0
    b, c, d, e = _sequence(1, 40), _sequence(2, 32), _sequence(3, 40), _sequence(4, 40)
    d.tokens[20], e.tokens[3] = 7, 7
    for s in (b, c, d, e):
        scheduler.add(s)
    assert _places(scheduler.schedule()) == [(1, 32, 40), (2, 16, 32), (3, 16, 40), (4, 0, 16)]
    assert [s.cached for s in (b, c, d, e)] == [32, 16, 16, 0], "full blocks, never with the last token, up to the first that differs"
    assert b.block_table[:2] == [0, 1]
    assert c.block_table[0] == d.block_table[0] == 0
    assert scheduler.pool.owners(0) == 3
    for s in (b, c, d, e):
        scheduler.cancel(s)
    assert scheduler.pool.num_used == 0
    assert [s.cached for s in (_again(scheduler, 40), _again(scheduler, 40, plain=True))] == [32, 0]


def test_what_a_sequence_left_when_it_gave_way_does_not_count_as_cached() -> None:
    scheduler = Scheduler(BlockPool(6), 16, 4, 64, prefix_cache=True)
    a = _sequence(0, 40)
    scheduler.add(a)
    scheduler.advance(scheduler.schedule())
    scheduler._preempt(a)
    assert _places(scheduler.schedule()) == [(0, 32, 40)]
    assert (a.cached, a.preemptions) == (0, 1)


def test_who_begins_alike_waits_for_the_first() -> None:
    scheduler = Scheduler(BlockPool(20), 16, 4, 64, prefix_cache=True)
    for s in (_sequence(0, 20), _sequence(1, 20), _sequence(2, 20)):
        scheduler.add(s)
    first = scheduler.schedule()
    assert _places(first) == [(0, 0, 20)]
    scheduler.advance(first)
    scheduler.cancel(scheduler.running[0])
    second = scheduler.schedule()
    assert _places(second) == [(1, 16, 20), (2, 16, 20)]
    other = _sequence(3, 30)
    other.tokens[0] = 5
    scheduler.add(other)
    scheduler.advance(second)
    for s in scheduler.running:
        s.tokens.append(1)
    assert _places(scheduler.schedule()) == [(1, 20, 21), (2, 20, 21), (3, 0, 30)]


def _unlike(number: int, prompt: int) -> Sequence:
    return Sequence(number, [number] * prompt, prompt, SamplingParams(), 0, prompt + 4, frozenset())


def test_who_waits_for_anothers_blocks_lets_others_pass_and_keeps_its_place() -> None:
    scheduler = Scheduler(BlockPool(30), 16, 2, 16, prefix_cache=True)
    for s in (_sequence(0, 60), _sequence(1, 60), _sequence(2, 60), _unlike(3, 3), _unlike(4, 3), _unlike(5, 3)):
        scheduler.add(s)
    steps, waiting = [], []
    for number in range(6):
        if number == 4:
            scheduler.add(_unlike(6, 3))
        pieces = scheduler.schedule()
        scheduler.advance(pieces)
        steps.append(_places(pieces))
        waiting.append([s.id for s in scheduler.waiting])
        assert not any(s.block_table for s in scheduler.waiting)
        for p in pieces:
            if p.wants_logits:
                scheduler.finish(p.sequence, FinishReason.LENGTH)
    assert steps == [[(0, 0, 13), (3, 0, 3)], [(0, 13, 26), (4, 0, 3)], [(0, 26, 39), (5, 0, 3)], [(0, 39, 55)], [(0, 55, 60), (1, 48, 59)], [(1, 59, 60), (2, 48, 60)]]
    assert waiting == [[1, 2, 4, 5], [1, 2, 5], [1, 2], [1, 2], [2, 6], [6]]


def test_nobody_passes_who_lacks_room() -> None:
    scheduler = Scheduler(BlockPool(8), 16, 4, 16, prefix_cache=True)
    for s in (_sequence(0, 60), _sequence(1, 60), _unlike(2, 80), _unlike(3, 3)):
        scheduler.add(s)
    assert _places(scheduler.schedule()) == [(0, 0, 16)]
    assert [s.id for s in scheduler.waiting] == [1, 2, 3], "the second waits for the first, the third for a fifth block, and the fourth for its turn"


def _again(scheduler: Scheduler, prompt: int, *, plain: bool = False) -> Sequence:
    sequence = _sequence(9, prompt)
    _done(Scheduler(scheduler.pool, 16, 4, 64) if plain else scheduler, sequence)
    return sequence


def test_what_was_of_no_use_for_longest_is_overwritten_first_and_ends_before_beginnings() -> None:
    scheduler = Scheduler(BlockPool(8), 16, 4, 200, prefix_cache=True)
    old, new = _sequence(0, 64), _sequence(1, 33)
    new.tokens = [t + 50 for t in new.tokens]
    _done(scheduler, old)
    _done(scheduler, new)
    other = Sequence(2, [3] * 63, 63, SamplingParams(), 0, 64, frozenset())
    _done(scheduler, other)  # four blocks, of which two were empty
    again = _sequence(3, 64)
    _done(scheduler, again)
    assert again.cached == 32, "of four blocks the last two went"
    newer = _sequence(4, 33)
    newer.tokens = [t + 50 for t in newer.tokens]
    _done(scheduler, newer)
    assert newer.cached == 16, "of two, since one of the four was empty"


def test_answers_are_found_as_well_as_prompts() -> None:
    scheduler = Scheduler(BlockPool(8), 16, 4, 64, prefix_cache=True)
    first = _sequence(0, 10, 30)
    scheduler.add(first)
    while first.finish_reason is None:
        scheduler.advance(scheduler.schedule())
        first.tokens.append(5)
        if len(first.tokens) == first.limit:
            scheduler.finish(first, FinishReason.LENGTH)
    second = Sequence(1, [*first.tokens, 8], 41, SamplingParams(), 0, 50, frozenset())
    scheduler.add(second)
    assert _places(scheduler.schedule()) == [(1, 32, 41)]


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
