"""To what a block's linears are added: found by running the block, for no family and no module name is known here.

Letters: B windows, T tokens, D hidden width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

BLOCK = ""  # the block itself, as a submodule's name
_ADDS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)


@torch.no_grad()
def find_residuals(module: nn.Module, run: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor) -> dict[str, str]:
    """Where the residual stream can be seen that a linear's output is added to, as it is, elsewhere in the block: the submodule that takes it (`BLOCK`: the block).

    Args:
        module: the block, materialised.
        run: its forward, `[B, T, D] -> [B, T, D]`.
        hidden: some hidden states.

    Returns:
        By name of the linear in the block. One whose output passes a norm or a factor first, or is added to what no submodule takes before, is left out.
    """
    sums = _Sums()
    taken: dict[int, str] = {}
    called: list[str] = []
    kept: list[Any] = []  # nothing may be freed, or its place is taken by another tensor

    def comes_in(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(m: nn.Module, args: tuple[Any, ...]) -> None:
            called.append(name)
            if args and isinstance(args[0], torch.Tensor) and args[0].shape == hidden.shape and not isinstance(m, nn.Linear):
                kept.append(args[0])
                taken.setdefault(_place(args[0]), name)

        return hook

    def comes_out(name: str) -> Callable[[nn.Module, tuple[Any, ...], torch.Tensor], None]:
        def hook(m: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
            kept.append(output)
            sums.outputs[_place(output)] = name

        return hook

    with contextlib.ExitStack() as hooks:
        for name, child in module.named_modules():
            hooks.callback(child.register_forward_pre_hook(comes_in(name)).remove)
            if isinstance(child, nn.Linear):
                hooks.callback(child.register_forward_hook(comes_out(name)).remove)
        with sums:
            run(hidden)
    found = {linear: taken[place] for linear, place in sums.added.items() if place in taken}
    return {linear: name for linear, name in found.items() if called.count(linear) == called.count(name) == 1 and called.index(name) < called.index(linear)}


class _Sums(TorchDispatchMode):
    """Notes to what some tensors are added.

    Attributes:
        outputs: their names, by place.
        added: the place of the other summand, by name.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.outputs: dict[int, str] = {}
        self.added: dict[str, int] = {}
        self._kept: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in _ADDS and not kwargs and all(isinstance(a, torch.Tensor) for a in args) and args[0].shape == args[1].shape:
            self._kept.append(args)
            for summand, other in (args, args[::-1]):
                if _place(summand) in self.outputs:
                    self.added[self.outputs[_place(summand)]] = _place(other)
        return func(*args, **(kwargs or {}))


def _place(tensor: torch.Tensor) -> int:
    return tensor.data_ptr()
