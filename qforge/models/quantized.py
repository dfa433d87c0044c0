"""A quantized checkpoint of any layout that we read as a source of weights: codes as stored for who wants them, dequantized fp32 weights for everybody else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from qforge import numerics
from qforge.errors import ModelError
from qforge.layouts import ascend, autoawq, autogptq, bitsandbytes, kv_cache, mlx, trtllm
from qforge.layouts.ascend import Ascend
from qforge.layouts.autoawq import AutoAwq
from qforge.layouts.autogptq import AutoGptq
from qforge.layouts.base import Layout
from qforge.layouts.bitsandbytes import BitsAndBytes
from qforge.layouts.compressed_tensors import CompressedTensors
from qforge.layouts.compressed_tensors_config import read_config
from qforge.layouts.mlx import Mlx
from qforge.layouts.trtllm import TrtLlm
from qforge.models.names import HEAD
from qforge.models.skeleton import Skeleton
from qforge.models.weights import TensorInfo, WeightSource, listed
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Scheme
from qforge.types import KvScales

_MARKS = {
    "gptq": "qweight",
    "awq": "qweight",
    "bitsandbytes": bitsandbytes.STATE,
    "mlx": "scales",
    "trtllm": "weight_scale",
    "ascend": "weight_scale",
}  # what a quantized linear has
_READABLE = ("compressed-tensors", *_MARKS)


class QuantizedSource:
    """Tensors of a quantized checkpoint; `schemes` says which linears are quantized, and how; `table` names the embedding that holds the codes of a tied head, if one does;
    `kv_scales` are those of keys and values that are kept as FP8."""

    def __init__(self, source: WeightSource, config: Mapping[str, Any], skeleton: Skeleton, origin: str) -> None:
        """Find the quantized linears.

        Args:
            source: the files' tensors.
            config: `quantization_config` of config.json.
            origin: the checkpoint's name for messages.

        Raises:
            ModelError: a method that is not read, a malformed config, or linears without the tensors that it tells of.
        """
        self._source = source
        self._origin = origin
        self._shapes = skeleton.shapes
        self._layout, self.schemes = _described(source, config, skeleton, origin)
        self.kv_scales, cached = _kv_scales(source, config, origin)
        self._parts: dict[str, list[str]] = {name: [] for name in self.schemes}
        self._plain: list[str] = []
        self.table = _table(skeleton, set(source.names()))
        for name in source.names():
            module, local = _parts(name)
            if name in cached:
                continue
            if module == self.table is not None:
                self._parts[HEAD].append(local)
            elif self.table is not None and module == HEAD and local != "bias":
                continue
            elif module in self.schemes and local != "bias":
                self._parts[module].append(local)
            else:
                self._plain.append(name)

    def names(self) -> list[str]:
        """Names as in the unquantized model: each quantized linear has one `.weight`."""
        return [*self._plain, *(f"{self._place(module)}.weight" for module in self.schemes)]

    def _place(self, module: str) -> str:
        return self.table if module == HEAD and self.table is not None else module

    def _quantized(self, name: str) -> str | None:
        """The quantized linear that a name of `names` belongs to, if any."""
        module = name.removesuffix(".weight")
        found = HEAD if module == self.table is not None else module
        return found if name != module and found in self.schemes else None

    def info(self, name: str) -> TensorInfo:
        """Shape and dtype; fp32 for a quantized weight."""
        if self._quantized(name) is not None:
            return TensorInfo(self._shapes[name], torch.float32)
        return self._source.info(name)

    def read(self, name: str) -> torch.Tensor:
        """A stored tensor, or a quantized weight dequantized in fp32.

        Raises:
            ModelError: the tensors of a quantized linear do not fit its scheme.
        """
        module = self._quantized(name)
        return self._source.read(name) if module is None else numerics.dequantize(self.linear(module))

    def linear(self, name: str) -> QuantizedLinear:
        """The quantized linear of a module, codes as stored.

        Raises:
            ModelError: its tensors do not fit its scheme.
        """
        tensors = {local: self._source.read(f"{self._place(name)}.{local}") for local in self._parts[name]}
        if name == HEAD and self.table is not None and not torch.equal(tensors["weight_scale"], self._source.read(f"{HEAD}.weight_scale")):
            raise ModelError(f"{self._origin}: '{HEAD}' and '{self.table}' share their codes, but their scales differ")
        bias = f"{name}.bias"
        if bias in self._plain:
            tensors["bias"] = self._source.read(bias)
        try:
            found = self._layout.unpack(tensors, self.schemes[name])
        except ModelError as e:
            raise ModelError(f"{self._origin}: '{name}': {e}") from e
        if tuple(found.codes.shape) != self._shapes[f"{name}.weight"]:
            raise ModelError(f"{self._origin}: '{name}' holds codes {list(found.codes.shape)}, config.json tells of {list(self._shapes[f'{name}.weight'])}")
        return found

    def fingerprint(self) -> str:
        """Of the files; schemes and config follow from config.json, which the model's own fingerprint covers through `schemes`."""
        from qforge.models.weights import digest

        return digest("quantized", self._source.fingerprint(), *(f"{name}={scheme}" for name, scheme in self.schemes.items()))


def _table(skeleton: Skeleton, held: set[str]) -> str | None:
    """The embedding's module where it holds the codes of the output head that is tied to it (of which only scales are stored, the same ones)."""
    table = skeleton.tied.get(f"{HEAD}.weight", "").removesuffix(".weight")
    return table if f"{table}.weight_scale" in held and f"{HEAD}.weight" not in held else None


def _kv_scales(source: WeightSource, config: Mapping[str, Any], origin: str) -> tuple[KvScales, set[str]]:
    """Scales of keys and values, and the names of their tensors."""
    method = str(config["quant_method"]).lower()
    try:
        if not kv_cache.described(method, config):
            return {}, set()
        scales = kv_cache.unpacked(method, source.names(), source.read)
    except ModelError as e:
        raise ModelError(f"{origin}: {e}") from e
    return scales, set(kv_cache.names(method, scales))


def _parts(name: str) -> tuple[str, str]:
    """Module and local name of a stored tensor; bitsandbytes' local names have dots (`weight.absmax`)."""
    module, inside, local = name.partition(".weight.")
    if inside:
        return module, f"weight.{local}"
    module, _, local = name.rpartition(".")
    return module, local


def _described(source: WeightSource, config: Mapping[str, Any], skeleton: Skeleton, origin: str) -> tuple[Layout, dict[str, Scheme]]:
    method = str(config.get("quant_method", "unknown")).lower()
    if method not in _READABLE:
        raise ModelError(f"{origin}: a checkpoint quantized with {method} is not readable yet; {', '.join(_READABLE)} are (or start from the unquantized model)")
    held = set(source.names())
    if method == "compressed-tensors":
        return CompressedTensors(), _compressed(config, held, skeleton, origin)
    mark = _MARKS[method]
    quantized = [name for name in skeleton.linears if held & {f"{name}.{mark}", f"{name}.{mark}_inv"}]
    try:
        layout, schemes = _by_method(method, config, quantized, source)
    except ModelError as e:
        raise ModelError(f"{origin}: {e}") from e
    if not schemes:
        raise ModelError(f"{origin}: quantization_config says {method}, but the files hold no {mark} of this model's linears")
    return layout, schemes


def _by_method(method: str, config: Mapping[str, Any], quantized: list[str], source: WeightSource) -> tuple[Layout, dict[str, Scheme]]:
    if method == "gptq":
        return AutoGptq(autogptq.version(config)), autogptq.read_config(config, quantized)
    if method == "awq":
        held = set(source.names())
        bare = [name for name in quantized if f"{name}.qzeros" not in held]
        if bare:
            raise ModelError(f"the files hold no qzeros for {listed(bare)}")
        return AutoAwq(), autoawq.read_config(config, quantized, source.read)
    if method == "mlx":
        return Mlx(), mlx.read_config(config, quantized, source.read)
    if method == "trtllm":
        return TrtLlm(), trtllm.read_config(config, quantized, source.read)
    if method == "ascend":
        return Ascend(), ascend.read_config(config, quantized, source.read)
    return BitsAndBytes(), bitsandbytes.read_config(config, quantized, source.read)


def _compressed(config: Mapping[str, Any], held: set[str], skeleton: Skeleton, origin: str) -> dict[str, Scheme]:
    for key in ("sparsity_config", "transform_config"):
        if config.get(key) and config[key] != {"format": "dense"}:
            raise ModelError(f"{origin}: quantization_config has a {key}, which qforge does not read yet")
    if not config.get("config_groups") and kv_cache.described("compressed-tensors", config):
        return {}
    tied_away = {name.removesuffix(".weight") for name in skeleton.tied} - {name.rpartition(".")[0] for name in held if not name.endswith(".bias")}
    schemes = read_config(config, [name for name in skeleton.linears if name not in tied_away])
    bare = [name for name in schemes if f"{name}.weight_scale" not in held]
    if bare or not schemes:
        what = f"describes {listed(bare)} as quantized, but the files hold no weight_scale for them" if bare else "describes no linear of this model"
        raise ModelError(f"{origin}: quantization_config {what}")
    return schemes
