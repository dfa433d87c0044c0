"""Statistics of a linear's inputs, gathered by hooks while a block runs. Linears that are fed the same tensor share one `Stats`.

Letters: I input features, N rows (tokens).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from qforge.methods import Stats


class Gatherer:
    """Sums x^T x of every wanted linear's inputs, in fp32, in the order in which windows come."""

    def __init__(self, needs: frozenset[str]) -> None:
        self._needs = needs
        self._of: dict[str, Stats] = {}
        self._last: tuple[torch.Tensor, Stats] | None = None

    @contextlib.contextmanager
    def watching(self, linears: Mapping[str, nn.Linear]) -> Iterator[None]:
        """While open, inputs of these linears are summed."""
        handles = [module.register_forward_pre_hook(self._hook(name)) for name, module in linears.items()]
        try:
            yield
        finally:
            self._last = None
            for handle in handles:
                handle.remove()

    def stats(self, name: str) -> Stats | None:
        """What was gathered for a linear, the same object for linears with the same input; None if it never ran."""
        return self._of.get(name)

    def release(self) -> None:
        """Forget everything."""
        self._of.clear()

    def _hook(self, name: str):  # type: ignore[no-untyped-def]  # torch's hook type
        def gather(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            x = args[0]
            if self._last is not None and self._last[0] is x:
                shared = self._last[1]
                assert self._of.setdefault(name, shared) is shared, f"{name} shares its input in one window and not in another"
                return
            stats = self._of.get(name)
            if stats is None:
                stats = self._of[name] = Stats(0, torch.zeros(x.shape[-1], x.shape[-1]) if "hessian" in self._needs else None)
            rows = x.detach().reshape(-1, x.shape[-1]).float()
            stats.tokens += rows.shape[0]
            if stats.hessian is not None:
                stats.hessian.addmm_(rows.T, rows)
            self._last = (x, stats)

        return gather
