"""The pool of fixed-size cache blocks: reference counted, handed out lowest number first. Standard library only.

A block that is named keeps what is in it when nobody holds it any more, until the pool has no other to hand out (prefix cache).
"""

from __future__ import annotations

import heapq


class BlockPool:
    """`total` blocks; a block is free or held by one or more owners. `num_free + num_used == total` always.

    The order of allocation is a function of the calls made, never of addresses or time.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._empty = list(range(total))
        self._kept: dict[int, None] = {}  # named blocks that nobody holds; who was released first comes first
        self._owners = [0] * total
        self._names: dict[int, bytes] = {}
        self._named: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._empty) + len(self._kept)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return sum(1 for n in self._owners if n)

    def allocate(self, count: int) -> list[int] | None:
        """`count` free blocks, each with one owner: the lowest without a name, then those whose name was of no use for longest. None (and nothing taken) if there are fewer."""
        if count > self.num_free:
            return None
        blocks = [heapq.heappop(self._empty) if self._empty else self._forget(next(iter(self._kept))) for _ in range(count)]
        for b in blocks:
            self._owners[b] = 1
        return blocks

    def share(self, block: int) -> None:
        """One more owner of a block that somebody holds, or that has a name."""
        assert self._owners[block] > 0 or block in self._kept, f"block {block} is free"
        self._kept.pop(block, None)
        self._owners[block] += 1

    def release(self, blocks: list[int]) -> None:
        """One owner fewer of each block; without owners it is free again. Of those with names, the last of them goes first."""
        for b in reversed(blocks):
            assert self._owners[b] > 0, f"block {b} is free already"
            self._owners[b] -= 1
            if self._owners[b] == 0:
                self._free(b)

    def reclaim(self) -> None:
        """All blocks are free, whoever held them."""
        for b, owners in enumerate(self._owners):
            if owners:
                self._owners[b] = 0
                self._free(b)

    def owners(self, block: int) -> int:
        """How many hold a block. A block may be written only while this is 1."""
        return self._owners[block]

    def name(self, block: int, name: bytes) -> None:
        """Say what is in a block that somebody holds and nobody will write any more; nothing where another block has the name."""
        if self._named.setdefault(name, block) == block:
            self._names[block] = name

    def named(self, name: bytes) -> int | None:
        """The block of a name."""
        return self._named.get(name)

    def _free(self, block: int) -> None:
        if block in self._names:
            self._kept[block] = None
        else:
            heapq.heappush(self._empty, block)

    def _forget(self, block: int) -> int:
        del self._kept[block], self._named[self._names.pop(block)]
        return block
