"""Law 9: free + used = total after any sequence of operations, and no block is shared for writing."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from qforge.runtime.blocks import BlockPool
from qforge.runtime.scheduler import Scheduler
from qforge.runtime.sequence import FinishReason, SamplingParams, Sequence


class Pool(RuleBasedStateMachine):
    holdings = Bundle("holdings")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12)
        self.held: list[int] = []

    @rule(target=holdings, count=st.integers(0, 14))
    def allocate(self, count: int) -> list[int]:
        before = self.pool.num_free
        free = sorted(set(range(12)) - set(self.held))
        blocks = self.pool.allocate(count)
        assert (blocks is None) == (count > before)
        if blocks is None:
            assert self.pool.num_free == before
            return []
        assert blocks == free[:count]
        self.held += blocks
        return blocks

    @rule(target=holdings, blocks=holdings)
    def share(self, blocks: list[int]) -> list[int]:
        mine = [b for b in blocks if b in self.held]
        for b in mine:
            self.pool.share(b)
        self.held += mine
        return mine

    @rule(blocks=consumes(holdings))
    def release(self, blocks: list[int]) -> None:
        mine = [b for b in blocks if b in self.held]
        self.pool.release(mine)
        for b in mine:
            self.held.remove(b)

    @invariant()
    def adds_up(self) -> None:
        assert self.pool.num_free + self.pool.num_used == self.pool.total
        assert self.pool.num_used == len(set(self.held))
        assert all(self.pool.owners(b) == self.held.count(b) for b in range(12))


Pool.TestCase.settings = settings(max_examples=60, deadline=None)
test_pool = Pool.TestCase


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=12),
    blocks=st.integers(1, 14), budget=st.integers(1, 50), most=st.integers(1, 6), cancel=st.sets(st.integers(0, 11)),
    guesses=st.integers(0, 30), right=st.integers(0, 3),
)  # fmt: skip
def test_a_schedule_never_shares_a_block_and_always_ends(requests: list[tuple[int, int]], blocks: int, budget: int, most: int, cancel: set[int], guesses: int, right: int) -> None:
    scheduler = Scheduler(BlockPool(blocks), 16, most, budget)
    params = SamplingParams()
    sequences = [Sequence(i, [0] * prompt, prompt, params, 0, prompt + new, frozenset()) for i, (prompt, new) in enumerate(requests) if -(-(prompt + new) // 16) <= blocks]
    for s in sequences:
        scheduler.add(s)

    def guess(_: Sequence, most: int, rows: int) -> list[int]:
        assert rows + most <= budget
        return [0] * min(most, guesses)

    for turn in range(10_000):
        pieces = scheduler.schedule(guess if guesses else None)
        if not pieces:
            break
        assert sum(p.end - p.start for p in pieces) <= budget
        assert len(scheduler.running) <= most
        held = [b for s in scheduler.running for b in s.block_table]
        assert len(held) == len(set(held)) == scheduler.pool.num_used
        assert scheduler.pool.num_free + scheduler.pool.num_used == blocks
        for p in pieces:
            assert p.start == p.sequence.computed < p.stop <= p.end <= 16 * len(p.sequence.block_table)
            assert not p.draft or (p.wants_logits and p.end < p.sequence.limit)
        scheduler.advance(pieces)
        for p in pieces:
            if p.wants_logits:
                kept = min(right, len(p.draft))
                p.sequence.tokens += [0] * (kept + 1)
                scheduler.keep(p, kept)
                assert len(p.sequence.block_table) <= -(-len(p.sequence.tokens) // 16)
                if len(p.sequence.tokens) >= p.sequence.limit:
                    scheduler.finish(p.sequence, FinishReason.LENGTH)
        for s in sequences:
            if s.id in cancel and s.id == turn and s.finish_reason is None:
                scheduler.cancel(s)
    assert not scheduler.running
    assert not scheduler.waiting
    assert scheduler.pool.num_used == 0
    for s in sequences:
        assert s.finish_reason is not None
        assert s.finish_reason is FinishReason.CANCELLED or len(s.tokens) == s.limit
