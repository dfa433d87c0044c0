"""The triangular factor that GPTQ solves with, made in the memory of one matrix.

Letters: I input features.
"""

from __future__ import annotations

import torch

PANEL = 256  # columns inverted together: products of such blocks run at full speed, what is computed of their zeros is little, and the copy of a panel is small beside the matrix
_CHUNK = 1 << 20  # elements converted at once


def inverse_factor(hessian: torch.Tensor, order: torch.Tensor, diagonal: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor | None:
    """U^T `[I, I]` fp32 for the upper U with U^T U = H^-1, or None when H is not positive definite.

    U is the inverse of the upper R with R R^T = H, and R is the Cholesky factor L of H with rows and columns reversed, reversed itself. So U^T is L^-1 turned by
    half a turn and transposed: column by column, the elements of L^-1 from the last to the first.

    Args:
        hessian: `[I, I]` fp32, symmetric.
        order: `[I]`, the order in which H takes rows and columns.
        diagonal: `[I]` fp32, which takes the place of the Hessian's, in the Hessian's own order.
        dtype: in which it is computed.
    """
    lower = _permuted(hessian, order.flip(0), diagonal, dtype).mT  # symmetric: transposing makes its columns contiguous, as LAPACK works
    failed = torch.empty((), dtype=torch.int32)
    torch.linalg.cholesky_ex(lower, out=(lower, failed))
    if failed:
        return None
    _invert(lower)
    turned = _reversed(lower.mT.reshape(-1)).view(hessian.shape)
    return turned if torch.isfinite(turned.sum()) else None  # one value that is not finite makes the sum so


def _permuted(matrix: torch.Tensor, order: torch.Tensor, diagonal: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The matrix in a type, rows and columns in another order, with another diagonal."""
    taken = torch.empty(matrix.shape, dtype=dtype)
    for rows, to in zip(order.split(PANEL), taken.split(PANEL), strict=True):
        to.copy_(matrix[rows][:, order])
    taken.diagonal().copy_(diagonal[order])
    return taken


def _invert(lower: torch.Tensor) -> None:
    """Invert a lower triangular matrix in place, panel by panel of rows; its upper triangle is zero."""
    n = len(lower)
    for start in range(0, n, PANEL):
        end = min(start + PANEL, n)
        corner = torch.linalg.solve_triangular(lower[start:end, start:end], torch.eye(end - start, dtype=lower.dtype), upper=False)
        product = torch.empty(end - start, start, dtype=lower.dtype)
        for column in range(0, start, PANEL):  # rows above `column` are zero there
            torch.mm(lower[start:end, column:start], lower[column:start, column : column + PANEL], out=product[:, column : column + PANEL])
        torch.mm(corner, product, out=lower[start:end, :start]).neg_()
        lower[start:end, start:end] = corner


def _reversed(values: torch.Tensor) -> torch.Tensor:
    """The same values in fp32, the last one first."""
    turned = torch.empty(values.shape, dtype=torch.float32)
    end = len(values)
    for start in range(0, end, _CHUNK):
        part = turned[start : start + _CHUNK]
        part.copy_(values[end - start - len(part) : end - start].flip(0))
    return turned
