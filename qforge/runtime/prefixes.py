"""Which cache blocks hold the beginning of a sequence already: a full block is named by its tokens and all before them. Standard library only.

Keys and values of a position depend on the tokens up to it alone, so a block with the name can stand for one that would be computed: with the same bits, where these do not depend
on what else a step computes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from hashlib import blake2b

from qforge.runtime.blocks import BlockPool
from qforge.runtime.sequence import Sequence


def find(sequence: Sequence, pool: BlockPool, block_size: int) -> list[int]:
    """Blocks with the first tokens of a sequence, but never with its last one, whose logits are wanted."""
    found: list[int] = []
    for name in _names(sequence, (len(sequence.tokens) - 1) // block_size, block_size):
        block = pool.named(name)
        if block is None:
            break
        found.append(block)
    return found


def coming(sequence: Sequence, found: int, others: Iterable[Sequence]) -> bool:
    """Whether one of the others is about to compute the block behind so many that were found."""
    names = sequence.block_names[found : found + 1]
    return bool(names) and any(o.named_blocks <= found and o.block_names[found : found + 1] == names for o in others)


def note(sequence: Sequence, pool: BlockPool, block_size: int) -> None:
    """Name those of a sequence's blocks that have become full of computed tokens."""
    full = min(sequence.computed // block_size, len(sequence.block_table))
    if full == sequence.named_blocks:
        return  # as after most steps
    names = _names(sequence, full, block_size)
    for i in range(sequence.named_blocks, full):
        pool.name(sequence.block_table[i], names[i])
    sequence.named_blocks = full


def _names(sequence: Sequence, count: int, block_size: int) -> list[bytes]:
    """Of the first blocks."""
    names = sequence.block_names
    for i in range(len(names), count):
        tokens = array("q", sequence.tokens[i * block_size : (i + 1) * block_size])
        names.append(blake2b((names[-1] if names else b"") + tokens.tobytes(), digest_size=32).digest())
    return names[:count]
