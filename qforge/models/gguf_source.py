"""A GGUF file as a source of weights: one tensor at a time, under Hugging Face's name and in its row order; integers as stored, or dequantized by the gguf package."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from transformers import PretrainedConfig

from qforge.errors import ModelError
from qforge.files import sha256_file
from qforge.layouts import gguf_schemes
from qforge.layouts.gguf_integers import INTEGER_TYPES, layout_of
from qforge.models.gguf_header import GgufHeader, GgufTensor
from qforge.models.names import EMBEDDING, HEAD, gguf_names, gguf_norm_offset, gguf_permutes, is_rotary, one_of, permuted_heads, unpermute_rows
from qforge.models.weights import TensorInfo, digest
from qforge.qlinear import QuantizedLinear

_FLOATS = {GGMLQuantizationType.F32: torch.float32, GGMLQuantizationType.F16: torch.float16, GGMLQuantizationType.BF16: torch.bfloat16}


class GgufSource:
    """Tensors of one GGUF file: quantized ones dequantized in fp32, floats as stored. `schemes`: the linears whose blocks hold integers."""

    def __init__(self, header: GgufHeader, config: PretrainedConfig, linears: Iterable[str]) -> None:
        """Map the file's names; a tensor without a Hugging Face name keeps its own, and is for the caller to refuse.

        Args:
            header: of the file.
            config: of its model.
            linears: module names of the model's linears.
        """
        self._header = header
        self._family = config.model_type
        self._heads = (config.num_attention_heads, config.num_key_value_heads)
        self._fingerprint = ""
        ours = {theirs: hf for hf, theirs in gguf_names(config).items()}
        self._tensors = {ours.get(t.name, t.name): t for stored in header.tensors.values() if not is_rotary(self._family, stored.name) for t in _apart(stored, ours)}
        integers = {name: t for name in linears if (t := self._tensors.get(self.stored(name))) is not None and t.type.name in INTEGER_TYPES and len(t.shape) == 2}
        told = gguf_schemes.schemes(header.metadata, {t.name: (t.type.name, t.shape) for t in integers.values()})
        self.schemes = {name: told[t.name] for name, t in integers.items() if t.name in told}

    def stored(self, linear: str) -> str:
        """Name of the tensor that holds a linear's weight: a head that the file has none for is the embedding."""
        own = f"{linear}.weight"
        return f"{EMBEDDING}.weight" if linear == HEAD and own not in self._tensors else own

    def names(self) -> list[str]:
        """Hugging Face names, in the order of the file."""
        return list(self._tensors)

    def info(self, name: str) -> TensorInfo:
        """Shape, and the dtype that `read` gives."""
        tensor = self._tensors[name]
        return TensorInfo(tensor.shape, _FLOATS.get(tensor.type, torch.float32))

    def read(self, name: str) -> torch.Tensor:
        """The tensor as transformers' modules take it: q and k rows in their order, Gemma's norms without the added one."""
        value = _read(self._header, self._tensors[name])
        heads = permuted_heads(name, *self._heads) if gguf_permutes(self._family) else None
        if heads is not None:
            value = unpermute_rows(value, heads).contiguous()
        offset = gguf_norm_offset(self._family, name)
        return (value.float() - offset).to(value.dtype) if offset else value

    def linear(self, name: str) -> QuantizedLinear:
        """The quantized linear of a module in `schemes`, codes as stored, rows in the order of transformers' modules.

        Raises:
            ModelError: its blocks do not hold what the metadata say.
        """
        tensor, scheme = self._tensors[self.stored(name)], self.schemes[name]
        rows, inputs = tensor.shape
        stored = {"weight": torch.from_numpy(_raw(self._header, tensor)).view(rows, -1)}
        try:
            above = None if scheme.symmetric else gguf_schemes.zeros_above(self._header.metadata, tensor.name, scheme.scale_shape(rows, inputs))
            q = layout_of(tensor.type.name).unpack(stored if above is None else {**stored, "zeros_above": above}, scheme)
        except ModelError as e:
            raise ModelError(f"{self._header.path}: '{tensor.name}': {e}") from e
        heads = permuted_heads(f"{name}.weight", *self._heads) if gguf_permutes(self._family) else None
        bias = self.read(f"{name}.bias") if f"{name}.bias" in self._tensors else None
        if heads is None:
            return replace(q, bias=bias)
        by_row = [None if t is None else unpermute_rows(t, heads).contiguous() if t.shape[0] == rows else t for t in (q.codes, q.scales, q.zeros)]
        assert by_row[0] is not None
        assert by_row[1] is not None
        return replace(q, codes=by_row[0], scales=by_row[1], zeros=by_row[2], bias=bias)

    def fingerprint(self) -> str:
        """Over the whole file."""
        if not self._fingerprint:
            self._fingerprint = digest("gguf", sha256_file(self._header.path))
        return self._fingerprint


def _apart(tensor: GgufTensor, known: Collection[str]) -> Iterator[GgufTensor]:
    """The matrices of a stack, each as a tensor, where there is a name for the last one and none for another; everything else as it is."""
    count = tensor.shape[0]
    if len(tensor.shape) != 3 or one_of(tensor.name, count - 1) not in known or one_of(tensor.name, count) in known:
        yield tensor
        return
    size = tensor.nbytes // count
    for i in range(count):
        yield replace(tensor, name=one_of(tensor.name, i), shape=tensor.shape[1:], start=tensor.start + i * size, nbytes=size)


def _raw(header: GgufHeader, tensor: GgufTensor) -> np.ndarray:
    """A tensor's bytes."""
    try:
        raw = np.fromfile(header.path, dtype=np.uint8, count=tensor.nbytes, offset=tensor.start)
    except OSError as e:
        raise ModelError(f"cannot read {header.path}: {e.strerror}") from e
    if raw.size != tensor.nbytes:
        raise ModelError(f"{header.path} ended early at tensor '{tensor.name}'; was it changed while qforge ran?")
    return raw


def _read(header: GgufHeader, tensor: GgufTensor) -> torch.Tensor:
    raw = _raw(header, tensor)
    if tensor.type in _FLOATS:
        return torch.from_numpy(raw).view(_FLOATS[tensor.type]).reshape(tensor.shape)
    try:
        with np.errstate(over="ignore", invalid="ignore"):  # scales that are not finite are found by who reads the values
            values = dequantize(raw.reshape(*tensor.shape[:-1], -1), tensor.type)
    except NotImplementedError as e:
        raise ModelError(f"{header.path}: tensor '{tensor.name}' is of type {tensor.type.name}, which the gguf package cannot dequantize") from e
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).reshape(tensor.shape)
