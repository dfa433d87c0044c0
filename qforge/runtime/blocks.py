"""The pool of fixed-size cache blocks: reference counted, handed out lowest number first. Standard library only."""

from __future__ import annotations

import heapq


class BlockPool:
    """`total` blocks; a block is free or held by one or more owners. `num_free + num_used == total` always.

    The order of allocation is a function of the calls made, never of addresses or time.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total))
        self._owners = [0] * total

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that somebody holds."""
        return sum(1 for n in self._owners if n)

    def allocate(self, count: int) -> list[int] | None:
        """The `count` lowest free blocks, each with one owner; None (and nothing taken) if there are fewer."""
        if count > len(self._free):
            return None
        blocks = [heapq.heappop(self._free) for _ in range(count)]
        for b in blocks:
            self._owners[b] = 1
        return blocks

    def share(self, block: int) -> None:
        """One more owner of a block that somebody holds."""
        assert self._owners[block] > 0, f"block {block} is free"
        self._owners[block] += 1

    def release(self, blocks: list[int]) -> None:
        """One owner fewer of each block; without owners it is free again."""
        for b in blocks:
            assert self._owners[b] > 0, f"block {b} is free already"
            self._owners[b] -= 1
            if self._owners[b] == 0:
                heapq.heappush(self._free, b)

    def owners(self, block: int) -> int:
        """How many hold a block. A block may be written only while this is 1."""
        return self._owners[block]
