"""compressed-tensors' own code beside ours: how it rounds activations while a model runs, and the bytes of its FP4 packers."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme, QuantizationStatus
from compressed_tensors.quantization.lifecycle.forward import forward_quantize
from compressed_tensors.quantization.utils import calculate_qparams

from qforge import numerics
from qforge.layouts import checkpoint
from qforge.layouts.compressed_tensors import CompressedTensors
from qforge.layouts.compressed_tensors_config import quantization_config
from qforge.methods import Options, find
from qforge.models.key_values import rounded_cache
from qforge.scheme import Scheme, parse

ROUNDED = ["int8-channel-sym+int8-token", "int8-g32-sym+int8-g32", "int8-channel-sym+int8-tensor-static", "fp8-e4m3-channel+fp8-e4m3-token", "fp8-e4m3-block128+fp8-e4m3-g128",
           "fp8-e4m3-tensor+fp8-e4m3-tensor-static"]  # fmt: skip


@pytest.mark.parametrize("text", ROUNDED)
@pytest.mark.parametrize("seed", range(4))
def test_activations_are_rounded_to_the_same_bits(text: str, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 50, 256, generator=g) * 10 ** (2 * torch.randn(2, 50, 1, generator=g))  # compressed-tensors takes the second dimension for tokens
    x[0, 3] = 0
    scheme = parse(text)
    args = QuantizationArgs.model_validate(quantization_config({"a": scheme}, [])["config_groups"]["group_0"]["input_activations"])
    linear = torch.nn.Linear(1, 1)
    linear.quantization_status = QuantizationStatus.FROZEN
    scale = torch.tensor(0.0311) if scheme.activations is not None and scheme.activations.static else None
    if scale is not None:
        linear.register_buffer("input_scale", scale.reshape(1))
    theirs = forward_quantize(linear, x, "input", args)
    assert torch.equal(numerics.quantize_activations(x, scheme, scale), theirs)


def test_mxfp4_scales_are_the_same() -> None:
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)) * 10 ** torch.randn(64, 1, generator=torch.Generator().manual_seed(1))
    largest = weight.view(64, 3, 32).abs().amax(-1)
    args = QuantizationArgs.model_validate(quantization_config({"a": parse("mxfp4")}, [])["config_groups"]["group_0"]["weights"])
    assert torch.equal(numerics.minmax_parameters(weight, parse("mxfp4"))[0], calculate_qparams(-largest, largest, args)[0])


@pytest.mark.parametrize("text", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("seed", range(4))
def test_fp4_weights_are_packed_to_the_same_bytes(text: str, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(24, 96, generator=g) * 10 ** torch.randn(24, 1, generator=g)
    weight[2, :32] = 0
    scheme, quantizer = parse(text), find("rtn")
    assert quantizer is not None
    q, _ = quantizer.quantize(weight, scheme, None, Options())
    group = QuantizationScheme.model_validate(quantization_config({"a": scheme}, [])["config_groups"]["group_0"])
    state = {"weight": weight, "weight_scale": q.scales if q.super_scales is None else q.scales / q.super_scales}
    if q.super_scales is not None:
        state["weight_global_scale"] = 1 / q.super_scales
    theirs = BaseCompressor.get_value_from_registry(group.format).compress(state, group)
    ours = CompressedTensors().pack(q)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name].view(torch.uint8), tensor.view(torch.uint8)), name
    back = BaseCompressor.get_value_from_registry(group.format).decompress(theirs, group)["weight"]
    assert torch.equal(back.float(), numerics.dequantize(q))


@pytest.mark.parametrize("schemes", [{}, {"a": parse("int4-g32-sym")}])
def test_the_scheme_of_keys_and_values_is_what_their_classes_say(schemes: dict[str, Scheme]) -> None:
    config = QuantizationConfig.model_validate(checkpoint.quantization_config(schemes, ["b"], torch.bfloat16, kv_cache=True))
    assert config.kv_cache_scheme == QuantizationArgs(num_bits=8, type="float", strategy="tensor", dynamic=False, symmetric=True)
    assert checkpoint.quantization_config({"a": parse("int4-g32-sym")}, [], torch.bfloat16)["kv_cache_scheme"] is None


@pytest.mark.parametrize("seed", range(4))
def test_keys_and_values_are_rounded_to_the_same_bits(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, 50, 16, generator=g) * 10 ** (2 * torch.randn(2, 3, 50, 1, generator=g))
    args = QuantizationArgs.model_validate(checkpoint.quantization_config({}, [], torch.bfloat16, kv_cache=True)["kv_cache_scheme"])
    attention = torch.nn.Linear(1, 1)
    attention.quantization_status = QuantizationStatus.FROZEN
    attention.register_buffer("k_scale", torch.tensor([0.0311]))
    attention.register_buffer("v_scale", torch.tensor([0.25]))
    keys, values = rounded_cache((float(torch.tensor(0.0311)), 0.25)).update(x, x * 2, 0)
    assert torch.equal(keys, forward_quantize(attention, x, "k", args))
    assert torch.equal(values, forward_quantize(attention, x * 2, "v", args))
