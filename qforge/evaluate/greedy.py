"""After how many tokens of a greedy continuation the quantized model leaves the original's.

The quantized model writes; the original says where its own first choice would have been another. Up to there both would have written the same, so that the original need not
write: one pass over prompts and continuations finds the place, by whatever scores windows. The original of a model that hardly fits into memory cannot write at all.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from qforge.engines.base import Scorer, chunks
from qforge.evaluate import statistics
from qforge.evaluate.divergence import Windows, cluster_owners
from qforge.types import Greedy

PROMPTS = 24
PROMPT = 32  # tokens before a continuation, at most
TOKENS = 48  # of a continuation


class Writer(Protocol):
    """What continues prompts."""

    def write(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        """Greedy continuations, end tokens or not, of `count` tokens each; of fewer where the context ends, all of one length."""


def departures(writer: Writer, original: Scorer, windows: Windows) -> Greedy | None:
    """Where greedy continuations of the text part.

    Prompts are evenly spread pieces of the text; in conversations what stands before the assistant's first answer of a window.

    Args:
        writer: the quantized model.
        original: what its own first choices are held against.
        windows: the evaluation text.

    Returns:
        None where the context leaves no room to continue.
    """
    places = _places(windows)
    prompts = [_prompt(windows, index, stop) for index, stop in places]
    written = writer.write(prompts, TOKENS)
    if not written or not written[0]:
        return None
    kept = _kept(original, prompts, written)
    owners, by_document = cluster_owners([windows.documents[index] for index, _ in places])
    mean = statistics.mean(np.bincount(owners, weights=kept), np.bincount(owners))
    limit = len(written[0])
    ends = mean.interval and (max(0.0, mean.interval[0]), min(float(limit), mean.interval[1]))
    return Greedy(limit, "document" if by_document else "prompt", kept, mean.value, ends, sum(k == limit for k in kept) / len(kept))


def _places(windows: Windows) -> list[tuple[int, int]]:
    """Window and end of each prompt: every 64 tokens one could end, as many of these as are wanted are taken."""
    if windows.scored is None:
        found = [(i, stop) for i, ids in enumerate(windows.ids) for stop in range(min(PROMPT, max(1, len(ids) // 2)), len(ids), 2 * PROMPT)]
    else:
        found = [(i, scored[0]) for i, scored in enumerate(windows.scored)]
    count = min(PROMPTS, len(found))
    return [found[i * len(found) // count] for i in range(count)]


def _prompt(windows: Windows, index: int, stop: int) -> list[int]:
    """What stands before a place of a window; a BOS stays."""
    ids, bos = windows.ids[index], int(bool(windows.protocol.get("bos")))
    return ids[:bos] + ids[max(bos, stop - PROMPT) : stop]


def _kept(original: Scorer, prompts: list[list[int]], written: list[list[int]]) -> list[int]:
    """Of each continuation, how many tokens are the original's first choices before one is not."""
    whole = [p + w for p, w in zip(prompts, written, strict=True)]
    pieces = original.score(whole)
    found = []
    for prompt, ids in zip(prompts, whole, strict=True):
        choices = torch.cat([next(pieces).argmax(-1).cpu() for _ in chunks(len(ids))])[len(prompt) - 1 :]
        same = choices == torch.tensor(ids[len(prompt) :])
        found.append(int(same.long().cumprod(0).sum()))
    return found
