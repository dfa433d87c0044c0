"""A card that is not there: tensors that say they are on `card:0` and are computed on the processor, where a GPU's rules are kept.

What would fail on a GPU fails here: an operation between its tensors and the processor's, and bytes read by their address. And what a GPU rounds otherwise is rounded so: torch's
division by a number multiplies by the reciprocal there (aten/src/ATen/native/cuda/BinaryDivTrueKernel.cu).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("card")  # for the whole process
DEVICE = torch.device("card", 0)
_aten = torch.ops.aten
_MOVES = {_aten._to_copy.default, _aten.copy_.default}
_INDEXES = {_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default}  # indices may lie on the processor


class OnCard(torch.Tensor):
    """A tensor of the card."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> OnCard:
        made: OnCard = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype, device=DEVICE, requires_grad=inner.requires_grad
        )
        made.inner = inner
        return made

    def __repr__(self, **how: Any) -> str:
        return f"OnCard({self.inner})"

    def tolist(self) -> Any:
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        return _run(func, args, kwargs or {})


class _FromValues(TorchFunctionMode):
    """torch makes these past every dispatch mode."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and kwargs.get("device") is not None and torch.device(kwargs["device"]).type == DEVICE.type:
            return func(*args, **{**kwargs, "device": "cpu"}).to(DEVICE)
        return func(*args, **kwargs)


class Card(TorchDispatchMode):
    """While open, tensors can be made on the card."""

    def __enter__(self) -> Card:
        self._from_values = _FromValues()
        self._from_values.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._from_values.__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    asked = None if kwargs.get("device") is None else torch.device(kwargs["device"])
    card = any(isinstance(t, OnCard) for t in given)
    if card and func not in _MOVES:
        _check_together(func, given)
    if func is _aten._fused_sdp_choice.default:
        return 0  # attention in plain operations
    if card and func in (_aten.div.Tensor, _aten.div_.Tensor) and not isinstance(args[1], OnCard):
        return _divided(func, *args)
    if card and func is _aten.copy_.default and not isinstance(args[0], OnCard):
        return args[0].copy_(args[1].inner)
    there = card if asked is None else asked.type == DEVICE.type
    if asked is not None and asked.type == DEVICE.type:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    wrappers = {id(t.inner): t for t in given if isinstance(t, OnCard)}
    bare = tree_map(lambda t: t.inner if isinstance(t, OnCard) else t, (args, kwargs))
    made = func(*bare[0], **bare[1])
    return tree_map(lambda t: (wrappers[id(t)] if id(t) in wrappers else OnCard(t)) if isinstance(t, torch.Tensor) and there else t, made)


def _check_together(func: Any, given: list[torch.Tensor]) -> None:
    """Numbers `[]` may come from the processor, and indices."""
    strangers = [t for t in given[1:] if not isinstance(t, OnCard) and t.dim()]
    first = not isinstance(given[0], OnCard) and given[0].dim() > 0
    if first or (strangers and func not in _INDEXES):
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, but found at least two devices, {DEVICE} and cpu")


def _divided(func: Any, x: OnCard, by: Any) -> Any:
    number = float(by)
    reciprocal = 1 / number if x.dtype == torch.float64 else float(torch.tensor(1.0) / torch.tensor(number))
    return x.mul_(reciprocal) if func is _aten.div_.Tensor else x * reciprocal
