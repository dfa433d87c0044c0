"""The end of a matrix product: its tile of the result, or the sum of the parts into which its inputs were cut.

Letters: M rows, N outputs, S parts.
"""

import triton
import triton.language as tl


@triton.jit
def finish(total, rn, rm, bias, y, parts, turns, m_rows, n_rows, HAS_BIAS: tl.constexpr, SPLIT: tl.constexpr):
    """Write `total [BN, BM]` fp32 + bias `[N]` to y `[M, N]`; rn, rm: its outputs and rows.

    SPLIT: blocks of threads with the same tile and another `program_id(2)` have the other parts of the inputs. Each leaves its sum in parts `[S, M, N]` fp32; the one that comes
    last adds them, always in the same order. turns: a counter for each tile, int32, 0 before and after.
    """
    inside = (rn < n_rows)[:, None] & (rm < m_rows)[None, :]
    at = rm.to(tl.int64)[None, :] * n_rows + rn[:, None]
    part, last = tl.program_id(2), tl.num_programs(2) - 1
    turn = turns + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    before = last
    if SPLIT:
        tl.store(parts + part * m_rows * n_rows + at, total, mask=inside)
        tl.debug_barrier()  # all threads have written before one of them says so
        before = tl.atomic_add(turn, 1)
    if before == last:
        if SPLIT:
            total = tl.zeros(total.shape, tl.float32)
            for s in range(tl.num_programs(2)):
                total += tl.load(parts + s * m_rows * n_rows + at, mask=inside, other=0.0, cache_modifier=".cg")
            tl.store(turn, 0)
        if HAS_BIAS:
            total += tl.load(bias + rn, mask=rn < n_rows, other=0.0).to(tl.float32)[:, None]
        tl.store(y + at, total.to(y.dtype.element_ty), mask=inside)
