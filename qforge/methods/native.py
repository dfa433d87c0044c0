"""The methods' compiled loops (kernels/quantize): checked tensors in, tensors out. Where they were not built, the same loops run in PyTorch, slower.

Letters: O output features, I input features, R x C shape of the scales, K candidates.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import logging
import threading
from collections.abc import Iterator
from typing import Any

import torch

from qforge.qlinear import code_dtype
from qforge.scheme import Per, Scheme, Symmetry

_log = logging.getLogger(__name__)
_ONE_AT_A_TIME = threading.Lock()
_STRIP, _LEAST = 256, 32  # columns of a product with the lower half of a symmetric one, and what tiles are worth their setup for


def module() -> Any | None:
    """The compiled module; None without one, and while tensors come into being on a card: its loops read a processor's memory."""
    return _loaded() if torch.get_default_device().type == "cpu" else None


@functools.cache
def _loaded() -> Any | None:
    """The module, or None (said once in the log)."""
    try:
        return importlib.import_module("qforge.methods._solver")
    except ImportError as e:
        _log.warning("the native quantization loops are not available (%s); the same loops run in PyTorch, many times slower", e)
        return None


def runs(scheme: Scheme) -> bool:
    """Whether the compiled loops handle a scheme: integer grids without offsets, with scales by row (per channel or group) or one for all."""
    return module() is not None and scheme.number.is_int and scheme.symmetry is not Symmetry.OFFSET and scheme.granularity.per is not Per.BLOCK


def has_bf16_products() -> bool:
    """Whether `add_products` runs here: compiled, and on a CPU with AVX512-BF16."""
    native = module()
    return native is not None and bool(native.has_bf16_products())


def has_bf16_tiles() -> bool:
    """Whether these products go through torch (oneDNN) to the CPU's tiles of bf16 (AMX), at six times the rate of the loops here."""
    native = module()
    return native is not None and bool(native.has_bf16_tiles())


def tile() -> int:
    """Columns of the tiles in which `add_products` computes."""
    native = module()
    assert native is not None
    return _STRIP if has_bf16_tiles() else int(native.TILE)


@contextlib.contextmanager
def _bf16_in_torch() -> Iterator[None]:
    """While open, torch rounds the factors of fp32 products to bf16, and keeps their sums in fp32."""
    onednn: Any = torch.backends.mkldnn  # its attributes are made at run time
    matmul = onednn.matmul
    with _ONE_AT_A_TIME:  # it is the whole process's
        before = matmul.fp32_precision
        try:
            matmul.fp32_precision = "bf16"
            yield
        finally:
            matmul.fp32_precision = before


def _fills_tiles(*sizes: int) -> bool:
    """Whether a product is large enough: torch multiplies small ones in fp32."""
    return has_bf16_tiles() and min(sizes) >= _LEAST


@functools.lru_cache(maxsize=1)
def _pool(threads: int) -> Any:
    native = module()
    assert native is not None
    return native.Pool(threads)


atexit.register(_pool.cache_clear)  # as in ops.native


def gptq_solve(lower: torch.Tensor, weight_IO: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, group: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """GPTQ's column loop (kernels/include/qforge/solver.h).

    Args:
        lower: `[I, I]` fp32, transposed upper Cholesky factor of the inverse Hessian, columns in the order of solving.
        weight_IO: `[I, O]` fp32, in that order.
        scales: `[R, C]` fp32.
        zeros: `[R, C]` uint8 or None.
        group: `[I]` int32, each column's group, in that order.
        scheme: an integer grid.

    Returns:
        codes `[I, O]`, in that order.
    """
    native = module()
    assert native is not None
    in_features, out_features = weight_IO.shape
    by_group = scales.expand(out_features, -1).T.contiguous()
    zeros_by_group = None if zeros is None else zeros.expand(out_features, -1).T.contiguous()
    for tensor, dtype in ((lower, torch.float32), (weight_IO, torch.float32), (by_group, torch.float32), (group, torch.int32)):
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()
    assert lower.shape == (in_features, in_features)
    assert group.shape == (in_features,)
    codes = torch.empty(in_features, out_features, dtype=code_dtype(scheme))
    low, high = scheme.code_range
    native.gptq_solve(
        _pool(torch.get_num_threads()), lower.data_ptr(), weight_IO.data_ptr(), by_group.data_ptr(), 0 if zeros_by_group is None else zeros_by_group.data_ptr(),
        group.data_ptr(), low, high, in_features, out_features, codes.data_ptr(),
    )  # fmt: skip
    return codes


def refine_codes(hessian: torch.Tensor, gradient: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, group: torch.Tensor, scheme: Scheme, sweeps: int) -> None:
    """Coordinate descent over codes, in place (kernels/include/qforge/solver.h).

    Args:
        hessian: `[I, I]` fp32, symmetric.
        gradient: `[O, I]` fp32, (W - Q) H; kept up to date.
        codes: `[O, I]` int8 or uint8.
        scales: `[R, C]` fp32.
        group: `[I]` int32, each column's group.
        scheme: an integer grid.
        sweeps: at most so many.
    """
    native = module()
    assert native is not None
    out_features, in_features = codes.shape
    by_group = scales.expand(out_features, -1).T.contiguous()
    for tensor, dtype in ((hessian, torch.float32), (gradient, torch.float32), (codes, code_dtype(scheme)), (group, torch.int32)):
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()
    assert hessian.shape == (in_features, in_features)
    assert gradient.shape == codes.shape
    assert group.shape == (in_features,)
    low, high = scheme.code_range
    native.refine_codes(
        _pool(torch.get_num_threads()), hessian.data_ptr(), by_group.data_ptr(), group.data_ptr(), low, high, in_features, out_features, sweeps, gradient.data_ptr(),
        codes.data_ptr(),
    )  # fmt: skip


def refine_columns(outputs: torch.Tensor, hessian: torch.Tensor, gradient: torch.Tensor, codes: torch.Tensor, by_group: torch.Tensor, group: torch.Tensor, scheme: Scheme) -> None:
    """Coordinate descent over the codes of `n` inputs with outputs weighed against each other, in place (kernels/include/qforge/solver.h).

    Args:
        outputs: `[O, O]` fp32, symmetric, with a positive diagonal.
        hessian: `[n, n]` fp32, of these inputs.
        gradient: `[n, O]` fp32, their columns of G (W - Q) H; used up.
        codes: `[n, O]` int8 or uint8.
        by_group: `[C, O]` fp32, scales.
        group: `[n]` int32, each input's group.
        scheme: an integer grid.
    """
    native = module()
    assert native is not None
    inputs, out_features = codes.shape
    for tensor, shape, dtype in (
        (outputs, (out_features, out_features), torch.float32),
        (hessian, (inputs, inputs), torch.float32),
        (gradient, (inputs, out_features), torch.float32),
        (codes, (inputs, out_features), code_dtype(scheme)),
        (by_group, (by_group.shape[0], out_features), torch.float32),
        (group, (inputs,), torch.int32),
    ):
        assert tensor.shape == shape
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()
    low, high = scheme.code_range
    native.refine_columns(outputs.data_ptr(), hessian.data_ptr(), by_group.data_ptr(), group.data_ptr(), low, high, inputs, out_features, gradient.data_ptr(), codes.data_ptr())


def refine_group_scales(outputs: torch.Tensor, hessian: torch.Tensor, steps: torch.Tensor, gradient: torch.Tensor, scales: torch.Tensor) -> None:
    """Coordinate descent over the scales of one group of `n` inputs with outputs weighed against each other, in place (kernels/include/qforge/solver.h).

    Args:
        outputs: `[O, O]` fp32, symmetric, with a positive diagonal.
        hessian: `[n, n]` fp32, of these inputs.
        steps: `[O, n]` fp32, codes less zero points.
        gradient: `[O, n]` fp32, their columns of G (W - Q) H; used up.
        scales: `[O]` fp32.
    """
    native = module()
    assert native is not None
    out_features, inputs = steps.shape
    for tensor, shape in ((outputs, (out_features, out_features)), (hessian, (inputs, inputs)), (steps, steps.shape), (gradient, steps.shape), (scales, (out_features,))):
        assert tensor.shape == shape
        assert tensor.dtype == torch.float32
        assert tensor.is_contiguous()
    native.refine_group_scales(outputs.data_ptr(), hessian.data_ptr(), steps.data_ptr(), inputs, out_features, gradient.data_ptr(), scales.data_ptr())


def best_scale(weight: torch.Tensor, importance: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, scheme: Scheme) -> torch.Tensor:
    """Index `[O, C]` of the candidate with the smallest weighted squared error.

    Args:
        weight: `[O, I]` fp32.
        importance: `[I]` fp32.
        scales: `[K, O, C]` fp32 candidates.
        zeros: `[K, O, C]` uint8 or None.
        scheme: an integer grid.
    """
    native = module()
    assert native is not None
    candidates, rows, groups = scales.shape
    weight, importance, scales = weight.contiguous(), importance.contiguous(), scales.contiguous()
    zeros = None if zeros is None else zeros.contiguous()
    assert weight.shape == (rows, importance.numel())
    assert weight.dtype == importance.dtype == scales.dtype == torch.float32
    best = torch.empty(rows, groups, dtype=torch.int32)
    low, high = scheme.code_range
    native.best_scale(
        _pool(torch.get_num_threads()), weight.data_ptr(), importance.data_ptr(), scales.data_ptr(), 0 if zeros is None else zeros.data_ptr(), low, high, candidates,
        rows, groups, weight.shape[1] // groups, best.data_ptr(),
    )  # fmt: skip
    return best


def add_products(left: torch.Tensor, right: torch.Tensor, into: torch.Tensor, *, lower: bool = False) -> None:
    """Add `left^T right` in bf16 with fp32 sums (kernels/include/qforge/products.h).

    Args:
        left: `[N, O]` fp32.
        right: `[N, I]` fp32.
        into: `[O, I]` fp32.
        lower: only on and below the diagonal; what lies above may be added to as well, and is within a tile of `tile()` columns.
    """
    native = module()
    assert native is not None
    for x, shape in ((left, (left.shape[0], into.shape[0])), (right, (left.shape[0], into.shape[1])), (into, into.shape)):
        assert x.dtype == torch.float32
        assert x.is_contiguous()
        assert x.shape == shape
    if _fills_tiles(*left.shape, right.shape[1]):
        with _bf16_in_torch():
            for first in range(0, into.shape[1], _STRIP) if lower else ():
                into[first:, first : first + _STRIP].addmm_(left[:, first:].T, right[:, first : first + _STRIP])
            if not lower:
                into.addmm_(left.T, right)
        return
    whole = has_bf16_tiles() or not lower  # what is within a tile() of the diagonal is whole
    native.add_products(_pool(torch.get_num_threads()), left.data_ptr(), right.data_ptr(), left.shape[0], *into.shape, not whole, into.data_ptr())


def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x @ weight.T` in bf16 with fp32 sums, `[N, O]` fp32, of inputs `[N, I]` and a weight `[O, I]`, both fp32."""
    native = module()
    assert native is not None
    for factor in (x, weight):
        assert factor.dtype == torch.float32
        assert factor.is_contiguous()
    assert x.shape[1] == weight.shape[1]
    if _fills_tiles(*x.shape, weight.shape[0]):
        with _bf16_in_torch():
            return x @ weight.T
    y = torch.empty(x.shape[0], weight.shape[0])
    native.multiply(_pool(torch.get_num_threads()), x.data_ptr(), *x.shape, weight.data_ptr(), weight.shape[0], y.data_ptr())
    return y
