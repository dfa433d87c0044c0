"""Which layout the linears of a checkpoint have: compressed-tensors wherever it holds their schemes; bitsandbytes for NF4, which only it holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from qforge.layouts import bitsandbytes, compressed_tensors_config
from qforge.layouts.bitsandbytes import BitsAndBytes
from qforge.layouts.compressed_tensors import CompressedTensors, scale_dtype_for
from qforge.layouts.compressed_tensors_config import dequantized_on_loading
from qforge.layouts.kv_cache import SCHEME
from qforge.scheme import Number, Scheme


def problem(schemes: Iterable[Scheme], model_dtype: torch.dtype) -> str | None:
    """None when one checkpoint of a model of this dtype can hold linears of all these schemes, or the reason why not."""
    distinct = list(dict.fromkeys(schemes))
    for scheme in distinct:
        layout: CompressedTensors | BitsAndBytes = BitsAndBytes() if scheme.number is Number.NF4 else CompressedTensors()
        reason = layout.supports(scheme)
        if reason is not None:
            return f"the artifact cannot hold {scheme}: {reason}"
    if len(distinct) > 1 and any(s.number is Number.NF4 for s in distinct):
        return f"the artifact cannot hold {' and '.join(map(str, distinct))} together: a bitsandbytes checkpoint, the only kind with nf4, has one scheme for all"
    if any(s.number is Number.FP4_E2M1 for s in distinct) and not dequantized_on_loading(distinct) and model_dtype is not torch.bfloat16:
        return (
            "transformers dequantizes fp4-e2m1 beside other schemes, or with rounded activations, to bfloat16 only, and then cannot multiply in "
            f"{str(model_dtype).removeprefix('torch.')}; use one weight-only scheme for all layers, or model.dtype: bfloat16"
        )
    return None


def layout_for(scheme: Scheme, schemes: Mapping[str, Scheme], model_dtype: torch.dtype) -> CompressedTensors | BitsAndBytes:
    """The layout of a linear with `scheme` in a checkpoint that holds `schemes`."""
    if scheme.number is Number.NF4:
        return BitsAndBytes(model_dtype)
    return CompressedTensors(scale_dtype_for(scheme, model_dtype), padded_zeros=not dequantized_on_loading(schemes.values()))


def quantization_config(
    schemes: Mapping[str, Scheme], ignored: Sequence[str], model_dtype: torch.dtype, tied: tuple[str, str] | None = None, *, kv_cache: bool = False, plain: bool = True
) -> dict[str, Any]:
    """The `quantization_config` of config.json; see the layouts.

    Args:
        tied: the output head and the embedding with which it shares its codes.
        kv_cache: whether keys and values have scales.
        plain: whether the quantized linears are of torch's own class.
    """
    if any(s.number is Number.NF4 for s in schemes.values()):
        return bitsandbytes.quantization_config(schemes, ignored, model_dtype)
    config = compressed_tensors_config.quantization_config(schemes, ignored, tied, plain=plain)
    return config | ({"kv_cache_scheme": SCHEME} if kv_cache else {})
