"""Scales of keys and values: names, round trips, and what is refused."""

from __future__ import annotations

import pytest
import torch

from qforge.errors import ModelError
from qforge.layouts import kv_cache

SCALES = {"model.layers.0.self_attn": (0.5, 0.01239013671875), "model.layers.1.self_attn": (2.0, 1.0)}


@pytest.mark.parametrize("method", ["compressed-tensors", "trtllm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_scales_come_back(method: str, dtype: torch.dtype) -> None:
    tensors = kv_cache.packed(method, SCALES, dtype)
    assert {t.dtype for t in tensors.values()} == {dtype}
    assert list(tensors) == kv_cache.names(method, SCALES)
    assert kv_cache.unpacked(method, [*tensors, "model.norm.weight"], tensors.__getitem__) == SCALES


def test_names_are_those_of_other_programs() -> None:
    module = "model.layers.0.self_attn"
    assert kv_cache.names("compressed-tensors", [module]) == [f"{module}.k_scale", f"{module}.v_scale"]
    assert kv_cache.names("trtllm", [module]) == [f"{module}.k_proj.k_scale", f"{module}.v_proj.v_scale"]


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (torch.tensor([1.0, 1.0]), "one floating-point number"),
        (torch.tensor([1]), "one floating-point number"),
        (torch.tensor([0.0]), "greater than 0"),
        (torch.tensor(-1.0), "greater than 0"),
        (torch.tensor([float("nan")]), "finite"),
        (torch.tensor([float("inf")]), "finite"),
        (None, r"hold no a\.v_scale"),
    ],
)
def test_what_is_no_scale_is_refused(tensor: torch.Tensor | None, says: str) -> None:
    tensors = {"a.k_scale": torch.tensor(1.0)} | ({} if tensor is None else {"a.v_scale": tensor})
    with pytest.raises(ModelError, match=says):
        kv_cache.unpacked("compressed-tensors", tensors, tensors.__getitem__)


@pytest.mark.parametrize(
    "change", [{"num_bits": 4}, {"type": "int"}, {"type": None}, {"strategy": "attn_head"}, {"strategy": "token", "dynamic": True}, {"dynamic": True}, {"symmetric": False}]
)
def test_another_cache_is_refused(change: dict[str, object]) -> None:
    assert kv_cache.described("compressed-tensors", {"kv_cache_scheme": kv_cache.SCHEME})
    assert kv_cache.described("compressed-tensors", {"kv_cache_scheme": kv_cache.SCHEME | {"strategy": None, "observer": "minmax"}})
    with pytest.raises(ModelError, match="keeps keys and values as"):
        kv_cache.described("compressed-tensors", {"kv_cache_scheme": kv_cache.SCHEME | change})
    with pytest.raises(ModelError, match="keeps keys and values as 'NVFP4'"):
        kv_cache.described("trtllm", {"kv_cache_quant_algo": "NVFP4"})


@pytest.mark.parametrize("method", ["compressed-tensors", "trtllm", "gptq"])
def test_nothing_is_told_of_it(method: str) -> None:
    assert not kv_cache.described(method, {})
    assert not kv_cache.described(method, {"kv_cache_scheme": None, "kv_cache_quant_algo": None})
