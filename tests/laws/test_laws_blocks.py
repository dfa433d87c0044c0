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
        self.names: dict[int, bytes] = {}
        self.kept: list[int] = []  # named and held by nobody, in the order in which they were left

    @rule(target=holdings, count=st.integers(0, 14))
    def allocate(self, count: int) -> list[int]:
        before = self.pool.num_free
        free = sorted(set(range(12)) - set(self.held) - set(self.kept)) + self.kept
        blocks = self.pool.allocate(count)
        assert (blocks is None) == (count > before)
        if blocks is None:
            assert self.pool.num_free == before
            return []
        assert blocks == free[:count]
        self.held += blocks
        self.kept = [b for b in self.kept if b not in blocks]
        self.names = {b: name for b, name in self.names.items() if b not in blocks}
        return blocks

    @rule(target=holdings, blocks=holdings)
    def share(self, blocks: list[int]) -> list[int]:
        mine = [b for b in blocks if b in self.held]
        for b in mine:
            self.pool.share(b)
        self.held += mine
        return mine

    @rule(blocks=holdings, name=st.binary(min_size=1, max_size=1))
    def name(self, blocks: list[int], name: bytes) -> None:
        for b in [b for b in blocks if b in self.held and b not in self.names][:1]:
            self.pool.name(b, name)
            if name not in self.names.values():
                self.names[b] = name

    @rule(target=holdings)
    def share_what_is_kept(self) -> list[int]:
        if not self.kept:
            return []
        block = self.kept.pop(0)
        assert self.pool.named(self.names[block]) == block
        self.pool.share(block)
        self.held.append(block)
        return [block]

    @rule(blocks=consumes(holdings))
    def release(self, blocks: list[int]) -> None:
        mine = [b for b in blocks if b in self.held]
        self.pool.release(mine)
        for b in reversed(mine):
            self.held.remove(b)
            if b in self.names and b not in self.held:
                self.kept.append(b)

    @rule()
    def reclaim(self) -> None:
        self.pool.reclaim()
        self.kept += [b for b in sorted(set(self.held)) if b in self.names]
        self.held = []

    @invariant()
    def adds_up(self) -> None:
        assert self.pool.num_free + self.pool.num_used == self.pool.total
        assert self.pool.num_used == len(set(self.held))
        assert all(self.pool.owners(b) == self.held.count(b) for b in range(12))
        assert all(self.pool.named(name) == b for b, name in self.names.items())
        assert sum(self.pool.named(bytes([n])) is not None for n in range(256)) == len(self.names)


Pool.TestCase.settings = settings(max_examples=60, deadline=None)
test_pool = Pool.TestCase


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=12),
    blocks=st.integers(1, 14), budget=st.integers(1, 50), most=st.integers(1, 6), cancel=st.sets(st.integers(0, 11)),
    guesses=st.integers(0, 30), right=st.integers(0, 3), kinds=st.integers(1, 3), prefix_cache=st.booleans(),
)  # fmt: skip
def test_a_schedule_never_writes_a_shared_block_and_always_ends(
    requests: list[tuple[int, int]], blocks: int, budget: int, most: int, cancel: set[int], guesses: int, right: int, kinds: int, prefix_cache: bool
) -> None:
    """Sequences are of a few kinds, whose tokens are the same; `content` is what was written where."""
    scheduler = Scheduler(BlockPool(blocks), 16, most, budget, prefix_cache=prefix_cache)
    params = SamplingParams()
    sequences = [Sequence(i, [i % kinds] * prompt, prompt, params, 0, prompt + new, frozenset()) for i, (prompt, new) in enumerate(requests) if -(-(prompt + new) // 16) <= blocks]
    content: dict[tuple[int, int], list[int]] = {}  # by block and place
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
        assert len(set(held)) == scheduler.pool.num_used
        assert all(scheduler.pool.owners(b) == held.count(b) for b in held)
        assert prefix_cache or len(held) == len(set(held))
        assert scheduler.pool.num_free + scheduler.pool.num_used == blocks
        for p in pieces:
            assert p.start == p.sequence.computed < p.stop <= p.end <= 16 * len(p.sequence.block_table)
            assert not p.draft or (p.wants_logits and p.end < p.sequence.limit)
            for place in range(p.start, p.end):
                block = p.sequence.block_table[place // 16]
                assert scheduler.pool.owners(block) == 1
                content[block, place % 16] = [*p.sequence.tokens[: p.stop], *(-1 for _ in p.draft)][: place + 1]
            for place in range(p.start):
                assert content[p.sequence.block_table[place // 16], place % 16] == p.sequence.tokens[: place + 1]
        scheduler.advance(pieces)
        for p in pieces:
            if p.wants_logits:
                kept = min(right, len(p.draft))
                p.sequence.tokens += [p.sequence.id % kinds] * (kept + 1)
                for place in range(p.stop, p.stop + kept):
                    content[p.sequence.block_table[place // 16], place % 16] = p.sequence.tokens[: place + 1]
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
