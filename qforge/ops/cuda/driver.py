"""Load and launch machine code, by CUDA's driver."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Any

import torch

from qforge.errors import QforgeError

_SHARED_LIMIT, _CLUSTER = 8, 4  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_TYPES = {torch.float16: 6, torch.bfloat16: 9}  # CUtensorMapDataType
_MAP_BYTES, _MAP_ALIGNED = 128, 64


class _Cluster(ctypes.Structure):
    """CUlaunchAttribute with a cluster's dimensions."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint), ("rest", ctypes.c_ubyte * 52))


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p), ("attributes", ctypes.c_void_p), ("count", ctypes.c_uint),
    )  # fmt: skip


class _Map(ctypes.Structure):
    """CUtensorMap."""

    _fields_ = (("opaque", ctypes.c_uint64 * (_MAP_BYTES // 8)),)


@dataclass(frozen=True, slots=True, eq=False)
class Function:
    """A kernel that is on a device. Keeps its module loaded for as long as the process runs."""

    handle: ctypes.c_void_p


def load(code: bytes, name: str, shared: int) -> Function:
    """A kernel of a cubin, on the current device, which may use so many bytes of dynamic shared memory."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _check(_driver().cuModuleLoadData(ctypes.byref(module), code), "cuModuleLoadData")
    _check(_driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()), "cuModuleGetFunction")
    _check(_driver().cuFuncSetAttribute(function, _SHARED_LIMIT, shared), "cuFuncSetAttribute")
    return Function(function)


def launch(
    function: Function, device: torch.device, grid: tuple[int, int, int], threads: int, shared: int, *arguments: torch.Tensor | int | _Map | None, cluster: int = 1
) -> None:  # fmt: skip
    """Launch on torch's current stream of the function's device. Tensors are passed by address, None as a null pointer.

    Args:
        cluster: blocks along the grid's last dimension that run together.
    """
    values = [_value(a) for a in arguments]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
    attribute = _Cluster(_CLUSTER, b"", 1, 1, cluster)
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream()
        _enter(stream)
        config = _Config(*grid, threads, 1, 1, shared, stream.cuda_stream, ctypes.addressof(attribute), int(cluster > 1))
        _check(_driver().cuLaunchKernelEx(ctypes.byref(config), function.handle, pointers, None), "cuLaunchKernelEx")


def _enter(stream: torch.cuda.Stream) -> None:
    """A thread that has not called the runtime yet has no context, which the driver wants: a question to the runtime gives it one."""
    context = ctypes.c_void_p()
    _check(_driver().cuCtxGetCurrent(ctypes.byref(context)), "cuCtxGetCurrent")
    if not context:
        stream.query()


def tensor_map(x: torch.Tensor, rows: int, columns: int) -> _Map:
    """How the copy engine finds boxes `[rows, columns]` of a contiguous `x [M, K]` of 16 bits, whose rows of 128 bytes it swizzles; beyond x's end it reads zeros."""
    room = (ctypes.c_char * (_MAP_BYTES + _MAP_ALIGNED))()
    at = -(-ctypes.addressof(room) // _MAP_ALIGNED) * _MAP_ALIGNED
    sizes, strides = (ctypes.c_uint64 * 2)(x.shape[1], x.shape[0]), (ctypes.c_uint64 * 1)(x.shape[1] * 2)
    box, steps = (ctypes.c_uint32 * 2)(columns, rows), (ctypes.c_uint32 * 2)(1, 1)
    not_interleaved, swizzled, lines_of_256, zeros = 0, 3, 3, 0
    _check(
        _driver().cuTensorMapEncodeTiled(
            ctypes.c_void_p(at), _TYPES[x.dtype], 2, ctypes.c_void_p(x.data_ptr()), sizes, strides, box, steps, not_interleaved, swizzled, lines_of_256, zeros
        ),
        "cuTensorMapEncodeTiled",
    )
    return _Map.from_buffer_copy((ctypes.c_char * _MAP_BYTES).from_address(at))


def _value(argument: torch.Tensor | int | _Map | None) -> Any:
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if argument is None:
        return ctypes.c_void_p(0)
    return ctypes.c_int(argument) if isinstance(argument, int) else argument


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(result: int, call: str) -> None:
    if result:
        raise QforgeError(f"{call} fails with CUDA error {result}")
