"""Fused experts taken apart: transformers keeps all experts of a block in 3-D tensors; here each has linears of its own, under the names that checkpoints give them.

Which checkpoint tensor holds which part of a stack is read off transformers' own conversion, by sending numbered tensors through it; that the parts compute
what the stack does is tried on noise. So no family is known here.

Letters: E experts, N tokens, K experts that a token is sent to, D hidden width, F inner width, R tokens that one expert is given.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from qforge.errors import UnsupportedError

_ROWS: ContextVar[torch.Tensor | None] = ContextVar("rows", default=None)
MOST_EXPERTS = 4096  # in a layer of any model
_TOLERANCE = 1e-5  # of the output: fp32 sums in another order
_DOWN, _UP = "down_proj", ("gate_up_proj", "up_proj")


class Expert(nn.Module):
    """One expert: linears that read the token (gate and up, or up alone), what combines them, and the linear back.

    Args:
        readers: name and shape `(F, D)` of each linear that reads the token, in the order in which the stack holds them.
        down: name and shape `(D, F)` of the linear back.
        combine: `[R, F or 2F] -> [R, F]`.
    """

    def __init__(self, readers: Mapping[str, tuple[int, int]], down: tuple[str, tuple[int, int]], combine: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        for name, (rows, columns) in (*readers.items(), down):
            self.add_module(name, nn.Linear(columns, rows, bias=False, device="meta"))
        self._readers, self._down, self._combine = tuple(readers), down[0], combine

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[R, D] -> [R, D]`."""
        inner = torch.cat([self.get_submodule(name)(x) for name in self._readers], -1)
        out: torch.Tensor = self.get_submodule(self._down)(self._combine(inner))
        return out


class Experts(nn.Module):
    """All experts of a block, called as transformers' modules are.

    Attributes:
        everywhere: send every token through every expert, by weights that still depend on the routing: for finding out what reaches what.
    """

    def __init__(self, experts: list[Expert]) -> None:
        super().__init__()
        for i, expert in enumerate(experts):
            self.add_module(str(i), expert)
        self.everywhere = False

    def forward(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Tokens `[N, D]`, their experts `[N, K]` and weights `[N, K]` -> `[N, D]`."""
        out = torch.zeros_like(hidden)
        count = len(self._modules)
        mixed = (top_k_weights * (1 + top_k_index / count)).sum(-1, keepdim=True) / count
        for i, expert in enumerate(self.children()):
            if self.everywhere:
                out += expert(hidden) * mixed
                continue
            rows, slots = torch.where(top_k_index == i)
            if len(rows):
                with _routed(rows):
                    out.index_add_(0, rows, expert(hidden[rows]) * top_k_weights[rows, slots, None])
        return out


def routed_rows() -> torch.Tensor | None:
    """Inside an expert: which of the batch's tokens it was given, `[R]` int64, rising. None elsewhere."""
    return _ROWS.get()


@contextlib.contextmanager
def _routed(rows: torch.Tensor) -> Iterator[None]:
    token = _ROWS.set(rows)
    try:
        yield
    finally:
        _ROWS.reset(token)


@contextlib.contextmanager
def every_expert(module: nn.Module) -> Iterator[None]:
    """While open, all tokens pass through all experts of a block (`Experts.everywhere`)."""
    found = [m for m in module.modules() if isinstance(m, Experts)]
    for experts in found:
        experts.everywhere = True
    try:
        yield
    finally:
        for experts in found:
            experts.everywhere = False


def routers(module: nn.Module) -> dict[str, tuple[int, int]]:
    """What decides over experts, by module name: beside them, a module whose one matrix is `[E, D]` (logits) or `[1, D]` (the share of an expert that all tokens take)."""
    found = {}
    for name, parent in module.named_modules():
        counts = {len(child._modules) for child in parent.children() if isinstance(child, Experts)}
        for beside, child in parent.named_children() if counts else ():
            matrices = [(n, w.shape) for n, m in child.named_modules() if (w := m._parameters.get("weight")) is not None and w.dim() == 2]
            if not isinstance(child, Experts) and len(matrices) == 1 and matrices[0][1][0] in {1, *counts}:
                inner, (rows, columns) = matrices[0]
                found[".".join(n for n in (name, beside, inner) if n)] = (int(rows), int(columns))
    return found


def linears(module: nn.Module) -> dict[str, int]:
    """Module names of all linears of experts, each with how many experts there are beside it."""
    found: dict[str, int] = {}
    for name, part in module.named_modules():
        if isinstance(part, Experts):
            found |= {f"{name}.{inner}": len(part._modules) for inner, m in part.named_modules() if isinstance(m, nn.Linear)}
    return found


def split(module: nn.Module) -> dict[str, str]:
    """Take the fused experts of a model apart, in place; its tensors are on the meta device and stay there.

    Returns:
        The checkpoint's name of every tensor, by its name in the changed module; empty for a model without fused experts.

    Raises:
        UnsupportedError: they are stored as stacks, or compute something that their parts do not.
    """
    fused = {name: m for name, m in module.named_modules() if m._parameters.keys() & {_DOWN} and m._parameters.keys() & {*_UP}}
    if not fused:
        return {}
    _refuse_others(fused)
    names, parts = _stored_names(module, fused)
    for name, stack in fused.items():
        experts = _taken_apart(stack, parts[name])
        module.set_submodule(name, experts)
        names |= {f"{name}.{e}.{_last(stored)}.weight": stored for (_, e, _), stored in parts[name].items()}
    return names


def stored_module(names: Mapping[str, str], module: str) -> str:
    """The name under which checkpoints know a module with a weight, from the names of its tensors (`split`)."""
    return names.get(f"{module}.weight", f"{module}.weight").removesuffix(".weight")


def _last(stored: str) -> str:
    return stored.removesuffix(".weight").rpartition(".")[2]


def _refuse_others(fused: Mapping[str, nn.Module]) -> None:
    """Stacks with biases, transposed or interleaved ones; and, once for each class, those whose forward is not that of its parts."""
    tried: set[type] = set()
    for name, stack in fused.items():
        (_, inner, width), back = _parameter(stack, _up(stack)).shape, _parameter(stack, _DOWN).shape
        straight = back[1:] == (width, inner // _pieces(stack)) and getattr(stack, "is_concatenated", True)
        if len(stack._parameters) != 2 or not straight or getattr(stack, "is_transposed", False):
            raise UnsupportedError(f"{name} ({type(stack).__name__}) keeps its experts transposed, interleaved or with biases; such mixtures of experts are not available yet")
        if type(stack) not in tried and not _agrees(stack):
            raise UnsupportedError(f"{name} ({type(stack).__name__}) computes something else than experts of a gate, an up and a down projection; it is not available yet")
        tried.add(type(stack))


def _parameter(stack: nn.Module, name: str) -> torch.Tensor:
    found = stack._parameters[name]
    assert found is not None
    return found


def _up(stack: nn.Module) -> str:
    return next(n for n in _UP if n in stack._parameters)


def _pieces(stack: nn.Module) -> int:
    return 2 if _up(stack) == "gate_up_proj" else 1


Parts = dict[tuple[str, int, int], str]  # stack ("gate_up_proj"), expert, part (0 gate, 1 up) -> tensor name in checkpoints


def _stored_names(module: nn.Module, fused: Mapping[str, nn.Module]) -> tuple[dict[str, str], dict[str, Parts]]:
    """Checkpoint names of all other tensors, and those of each stack's parts."""
    from transformers.core_model_loading import revert_weight_conversion

    state: dict[str, torch.Tensor] = dict(module.state_dict())
    tagged: list[tuple[str, str, int, int]] = []
    for name, stack in fused.items():
        for which in (_up(stack), _DOWN):
            experts, count = len(_parameter(stack, which)), 1 if which == _DOWN else _pieces(stack)
            state[f"{name}.{which}"] = (len(tagged) + torch.arange(experts * count)).view(experts, count, 1)
            tagged += [(name, which, e, part) for e in range(experts) for part in range(count)]
    stored = revert_weight_conversion(module, state)
    ours = {id(tensor): name for name, tensor in state.items() if name.rpartition(".")[0] not in fused}
    names: dict[str, str] = {}
    parts: dict[str, Parts] = {name: {} for name in fused}
    for name, tensor in stored.items():
        if id(tensor) in ours:
            names[ours[id(tensor)]] = name
        elif not tensor.is_meta and tensor.numel() == 1:
            owner, which, e, part = tagged[int(tensor)]
            parts[owner][which, e, part] = name
        else:
            raise UnsupportedError(f"checkpoints of this family keep {name} as a stack of experts, or converted; such mixtures of experts are not available yet")
    return names, parts


def _taken_apart(stack: nn.Module, parts: Parts) -> Experts:
    up, pieces, combine = _up(stack), _pieces(stack), _combination(stack)
    count, width, inner = _parameter(stack, _DOWN).shape
    return Experts([Expert({_last(parts[up, e, p]): (inner, width) for p in range(pieces)}, (_last(parts[_DOWN, e, 0]), (width, inner)), combine) for e in range(count)])


def _combination(stack: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    if "gate_up_proj" not in stack._parameters:
        return lambda up: stack.act_fn(up)
    if hasattr(stack, "_apply_gate"):
        return lambda both: stack._apply_gate(both)

    def gated(both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, -1)
        inner: torch.Tensor = stack.act_fn(gate) * up
        return inner

    return gated


@torch.no_grad()
def _agrees(stack: nn.Module) -> bool:
    """Whether taken apart, a stack of narrow experts of this class computes on noise what its own forward does."""
    small, generator = _narrowed(stack), torch.Generator().manual_seed(0)
    up, pieces = _up(small), _pieces(small)
    count, width, _ = _parameter(small, _DOWN).shape
    apart = _taken_apart(small, {(up, e, p): f"{e}.{p}.weight" for e in range(count) for p in range(pieces)} | {(_DOWN, e, 0): f"{e}.down.weight" for e in range(count)})
    for e, expert in enumerate(apart.children()):
        values = (*_parameter(small, up)[e].chunk(pieces), _parameter(small, _DOWN)[e])
        for linear, value in zip(expert.children(), values, strict=True):
            linear.weight = nn.Parameter(value.clone(), requires_grad=False)
    x, weights = torch.randn(7, width, generator=generator), torch.rand(7, min(2, count), generator=generator)
    index = torch.rand(7, count, generator=generator).argsort(-1)[:, :2]
    try:
        wanted = inspect.unwrap(type(stack).forward)(small, x, index, weights)
        return bool((apart(x, index, weights) - wanted).norm() <= _TOLERANCE * wanted.norm())
    except Exception:  # whatever transformers' modelling code raises when it is not called like this
        return False


def _narrowed(stack: nn.Module) -> nn.Module:
    """A copy with random weights whose widths are divided by what they have in common."""
    small, generator = copy.copy(stack), torch.Generator().manual_seed(1)
    _, width, inner = _parameter(stack, _DOWN).shape
    divisor = math.gcd(inner, width)
    sizes = {n: n // divisor for n in (width, inner, 2 * inner)}
    small.__dict__ |= {k: sizes[v] for k, v in vars(stack).items() if type(v) is int and v in sizes and not k.startswith("num_")}
    small._parameters = {
        n: nn.Parameter(torch.randn(len(p), *(sizes[s] for s in p.shape[1:]), generator=generator), requires_grad=False) for n, p in stack._parameters.items() if p is not None
    }
    return small
