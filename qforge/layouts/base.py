"""What a byte layout is, and what layouts share: refusals, codes without signs, and checks on tensors read from other people's files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from qforge.errors import ModelError, UnsupportedError
from qforge.qlinear import QuantizedLinear
from qforge.scheme import ScaleType, Scheme


class Layout(Protocol):
    """Tensors of one linear by local name (`qweight`, `weight_scale`, ...), as a file holds them."""

    @property
    def name(self) -> str:
        """For messages and tables."""

    def supports(self, scheme: Scheme) -> str | None:
        """None when the layout holds the scheme losslessly, or the reason why not."""

    def pack(self, q: QuantizedLinear) -> dict[str, torch.Tensor]:
        """The tensors as the file holds them, by local name. The bias is not part of a layout."""

    def unpack(self, tensors: Mapping[str, torch.Tensor], scheme: Scheme) -> QuantizedLinear:
        """The linear that the tensors describe; the inverse of `pack`.

        Raises:
            ModelError: a tensor is missing, or its shape or type does not fit the scheme.
        """


class Shaped(Layout, Protocol):
    """A layout of a safetensors file, whose header comes before any tensor."""

    def shapes(self, scheme: Scheme, out_features: int, in_features: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor that `pack` makes."""


def half_problem(scheme: Scheme, layout: str) -> str | None:
    """Why a layout that stores one level of scales in fp16 does not hold the scheme's exactly; None if it does."""
    held = scheme.scale.super_granularity is None and scheme.scale.type in (ScaleType.F16BF16, ScaleType.F16)
    return None if held else f"{layout} stores scales in fp16, which does not hold {scheme.scale} exactly"


def expect_contiguous(q: QuantizedLinear, layout: str, instead: str = "") -> None:
    """Refuse groups in activation order, for layouts that have a scale for neighbouring inputs.

    Raises:
        UnsupportedError: see above; the message ends with `instead`.
    """
    if q.group_index is not None:
        raise UnsupportedError(f"{layout} has one scale for neighbouring inputs; groups in activation order (g_idx) cannot be stored losslessly{instead}")


def half_scales(q: QuantizedLinear, layout: str) -> torch.Tensor:
    """The scales in fp16.

    Raises:
        UnsupportedError: one is not exact in it.
    """
    scales = q.scales.to(torch.float16)
    if not torch.equal(scales.float(), q.scales):
        raise UnsupportedError(f"a scale is not exact in fp16, in which {layout} stores scales")
    return scales


def unsigned(q: QuantizedLinear, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes `[O, I]` and zero points `[R, C]` of integers, uint8, in containers of so many bits; those of a symmetric weight are shifted by half of a container's range."""
    if q.zeros is not None:
        return q.codes, q.zeros
    middle = 1 << (bits - 1)
    return q.codes.view(torch.uint8) + middle, torch.full(q.scales.shape, middle, dtype=torch.uint8)


def signed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of a symmetric weight, int8, from those that `unsigned` makes."""
    return (codes - (1 << (bits - 1))).view(torch.int8)


def take(tensors: Mapping[str, torch.Tensor], name: str, layout: str) -> torch.Tensor:
    """The tensor `name`, or a ModelError that says what the layout needs."""
    if name not in tensors:
        raise ModelError(f"a {layout} linear needs a tensor '{name}'; found {', '.join(sorted(tensors)) or 'none'}")
    return tensors[name]


def take_matrix(tensors: Mapping[str, torch.Tensor], name: str, layout: str, *dtypes: torch.dtype) -> torch.Tensor:
    """The tensor `name` if it is a matrix of one of `dtypes`, or a ModelError."""
    tensor = take(tensors, name, layout)
    if tensor.dim() != 2 or tensor.dtype not in dtypes:
        raise ModelError(f"{layout} tensor '{name}' is {tensor.dtype} {list(tensor.shape)}; a matrix of {' or '.join(map(str, dtypes))} is readable")
    return tensor


def blocks_problem(in_features: int, smallest: int, layout: str) -> str | None:
    """Why a row of so many inputs has no whole blocks, of which the smallest has `smallest`; None if it has."""
    return f"an input width of {in_features} is not a multiple of {smallest}, the smallest block of {layout}" if in_features % smallest else None


def expect_shape(tensor: torch.Tensor, shape: tuple[int, ...], name: str, layout: str) -> torch.Tensor:
    """The tensor itself if it has `shape`, or a ModelError."""
    if tuple(tensor.shape) != shape:
        raise ModelError(f"{layout} tensor '{name}' has shape {list(tensor.shape)}, but its scheme needs {list(shape)}")
    return tensor


def expect_finite(scales: torch.Tensor, name: str, layout: str) -> torch.Tensor:
    """The scales in fp32 if they are floats and all are finite, or a ModelError."""
    if not scales.is_floating_point():
        raise ModelError(f"{layout} tensor '{name}' is {scales.dtype}, where floats are needed")
    scales = scales.float()
    if not torch.isfinite(scales).all():
        raise ModelError(f"{layout} tensor '{name}' holds values that are not finite; the file is damaged or was made from such weights")
    return scales


def expect_group_index(index: torch.Tensor, columns: int, layout: str) -> torch.Tensor:
    """The group index as int32 if each entry names one of `columns` groups, or a ModelError."""
    index = index.to(torch.int32)
    if index.numel() and (int(index.min()) < 0 or int(index.max()) >= columns):
        raise ModelError(f"{layout} group index names group {int(index.max())}, but there are {columns} groups")
    return index


def narrowest(scales: torch.Tensor) -> ScaleType:
    """The smallest type of scales that holds these, for files that store them in a wider one."""
    half, brain = (torch.equal(scales.to(kind).float(), scales.float()) for kind in (torch.float16, torch.bfloat16))
    if half:
        return ScaleType.F16BF16 if brain else ScaleType.F16
    return ScaleType.BF16 if brain else ScaleType.F32
