"""Which linears of a block take the same tensor: found by running the block, for no family and no module name is known here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping

import torch
from torch import nn


@torch.no_grad()
def find_followers(linears: Mapping[str, nn.Linear], run: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor) -> dict[str, list[str]]:
    """Linears that are called right after another one with the same input (key and value projections after the query's), by the name of that one.

    Args:
        linears: by name.
        run: the forward of the block that has them, `[B, T, D] -> [B, T, D]`.
        hidden: some hidden states.
    """
    calls: list[tuple[str, torch.Tensor]] = []
    with contextlib.ExitStack() as hooks:
        for name, linear in linears.items():
            hooks.callback(linear.register_forward_pre_hook(lambda _, args, name=name: calls.append((name, args[0]))).remove)
        run(hidden)
    found: dict[str, list[str]] = {}
    leader: tuple[str, torch.Tensor] | None = None
    for name, x in calls:
        if leader is not None and x is leader[1]:
            found.setdefault(leader[0], []).append(name)
        else:
            leader = name, x
    names = [name for name, _ in calls]
    return {first: after for first, after in found.items() if all(names.count(n) == 1 for n in (first, *after))}
