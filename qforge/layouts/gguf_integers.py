"""Which of GGUF's block types hold integer codes unchanged, and the smallest that holds a scheme."""

from __future__ import annotations

from qforge.layouts.gguf_blocks import BITS, GgufBlocks
from qforge.layouts.gguf_q4_k import GgufQ4K
from qforge.scheme import Scheme

INTEGER_TYPES = ("Q4_0", "Q4_K", "Q5_0", "Q8_0")  # smallest first; Q4_K is no larger than Q4_0, but slower to unpack


def layout_of(kind: str) -> GgufBlocks | GgufQ4K:
    """The layout of a block type of INTEGER_TYPES."""
    return GgufBlocks(kind) if kind in BITS else GgufQ4K()


def lossless_type(scheme: Scheme, out_features: int, in_features: int) -> str | None:
    """The smallest block type that holds a weight of this scheme and shape losslessly; None if there is none."""
    held = [t for t in INTEGER_TYPES if layout_of(t).supports(scheme) is None]
    return next((t for t in held if layout_of(t).problem_with(out_features, in_features) is None), held[-1] if held else None)
