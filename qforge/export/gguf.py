"""GGUF files: the integers of an artifact in the block type that holds them unchanged, everything else as it is stored, and the metadata that llama.cpp needs."""

from __future__ import annotations

import contextlib
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, LlamaFileType

from qforge import numerics
from qforge.errors import UnsupportedError
from qforge.export.gguf_metadata import add_metadata, metadata_problem, rope_factors
from qforge.export.gguf_types import MIXES
from qforge.export.gguf_vocabulary import add_vocabulary, vocabulary_problem
from qforge.export.hf import weight_shape
from qforge.export.refusal import refuse
from qforge.files import atomic
from qforge.layouts import gguf_schemes
from qforge.layouts.gguf_blocks import BLOCK, GgufBlocks
from qforge.layouts.gguf_integers import INTEGER_TYPES, layout_of, lossless_type
from qforge.models.assets import end_ids
from qforge.models.model import Model
from qforge.models.names import GGUF_ARCHITECTURES, HEAD, gguf_names, gguf_norm_offset, gguf_permutes, is_router, permute_rows, permuted_heads, stack_of
from qforge.models.tying import shared_table
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Scheme

_FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
TYPES = ("auto", *(t.lower() for t in INTEGER_TYPES), *_FLOATS)
_FILE_TYPES = {
    "F32": LlamaFileType.ALL_F32, "F16": LlamaFileType.MOSTLY_F16, "BF16": LlamaFileType.MOSTLY_BF16,
    "Q4_0": LlamaFileType.MOSTLY_Q4_0, "Q5_0": LlamaFileType.MOSTLY_Q5_0, "Q8_0": LlamaFileType.MOSTLY_Q8_0,
    "Q4_K": LlamaFileType.MOSTLY_Q4_K_S,
}  # fmt: skip
_COST = "about half a microsecond of one core a weight, and a rounding error of its own"


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of the file: GGUF's name, the type it is stored in, its shape `[rows, columns]` or `[size]`, and how to get its bytes."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]

    @property
    def row_bytes(self) -> int:
        """Bytes of the last dimension."""
        block, size = GGML_QUANT_SIZES[self.type]
        return self.shape[-1] // int(block) * int(size)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return int(np.prod(self.shape[:-1], dtype=np.int64)) * self.row_bytes


@dataclass(frozen=True, slots=True)
class GgufExporter:
    """The exporter (see docs/architecture.md).

    Attributes:
        type: `auto` (for each linear the smallest type that holds its scheme), a block type that must hold all of them (`q4_0`, `q4_k`, `q5_0`, `q8_0`),
            or `f32`, `f16`, `bf16`: the dequantized weights; `f32` holds them exactly.
    """

    type: str = "auto"
    name: str = "gguf"
    holds_kv_scales: ClassVar[bool] = False

    def check(self, model: Model) -> str | None:
        """Why the model cannot be written; None if it can."""
        if self.type not in TYPES:
            return f"GGUF type '{self.type}' is not available; use one of {', '.join((*TYPES, *MIXES))}"
        family = model.config.model_type
        if family not in GGUF_ARCHITECTURES:
            return f"a '{family}' model is of a family that has no GGUF form here; the families {', '.join(GGUF_ARCHITECTURES)} have"
        if model.spec is None:
            return f"this '{family}' model has settings without a GGUF form here (of its rotary embedding, activation or attention)"
        if not model.schemes and self.type not in ("auto", *_FLOATS):
            others = ", ".join(("auto", *_FLOATS))
            return f"the model is not quantized, and type {self.type} holds quantized weights; use {others}, a mix that quantizes ({', '.join(MIXES)}), or quantize it first"
        for name, scheme in model.schemes.items():
            reason = self._scheme_problem(scheme, *weight_shape(model, name))
            if reason:
                return f"{name}: {reason}"
        names = gguf_names(model.config)
        if (unnamed := next((name for name, _ in stored_tensors(model) if name not in names), None)) is not None:
            return f"llama.cpp's {GGUF_ARCHITECTURES[family]} has no tensor for {unnamed}"
        return metadata_problem(model.spec) or _stack_problem(self.tensors(model)) or vocabulary_problem(model.tokenizer(), model.config.vocab_size)

    def _scheme_problem(self, scheme: Scheme, out_features: int, in_features: int) -> str | None:
        if self.type in _FLOATS:
            return None
        other = lossless_type(scheme, out_features, in_features)
        kind = self.type.upper() if self.type != "auto" else other
        if kind is None:
            why = GgufBlocks("Q8_0").supports(scheme)
            return f"no GGUF type holds {scheme} losslessly ({why}); use a group size that is a multiple of {BLOCK}, type f32, or a mix that quantizes anew (q4_k_m, q6_k; {_COST})"
        reason = layout_of(kind).supports(scheme)
        if reason:
            return reason + (f"; type {other.lower()} does" if other else "")
        return layout_of(kind).problem_with(out_features, in_features)

    def write(self, model: Model, folder: Path) -> list[Path]:
        """Write `model-<type>.gguf` into `folder`, one tensor in memory at a time.

        Raises:
            UnsupportedError: `check` says why not, or a value does not fit (a scale that is not exact in fp16, groups in activation order).
            OutputError: the folder cannot be written.
        """
        refuse("GGUF", self.check(model))
        tensors = list(self.tensors(model))
        label = self._label(tensors)
        path = folder / f"model-{label.lower()}.gguf"
        write_file(path, model, tensors, int(_FILE_TYPES[label]), lambda writer: self._add_schemes(writer, model))
        return [path]

    def _add_schemes(self, writer: GGUFWriter, model: Model) -> None:
        names = gguf_names(model.config)
        modules = {} if self.type in _FLOATS else {names[name]: module for name, module in stored_tensors(model) if module is not None}
        stored = {name: (self._kind(model, module), model.schemes[module]) for name, module in modules.items()}
        told = gguf_schemes.to_metadata(stored, lambda name: layout_of(stored[name][0]).pack(permuted(model, modules[name])).get("zeros_above"))
        for key, value in told.items():
            writer.add_string(key, value) if isinstance(value, str) else writer.add_array(key, value)

    def _kind(self, model: Model, module: str) -> str:
        """The block type for a linear that `check` has passed."""
        kind = self.type.upper() if self.type != "auto" else lossless_type(model.schemes[module], *weight_shape(model, module))
        assert kind is not None
        return kind

    def _label(self, tensors: list[Tensor]) -> str:
        """The type that names the file: that of most weights in matrices."""
        counts: Counter[str] = Counter()
        for t in tensors:
            if len(t.shape) == 2 and t.name.startswith("blk."):
                counts[t.type.name] += int(np.prod(t.shape))
        return counts.most_common(1)[0][0]

    def tensors(self, model: Model) -> Iterator[Tensor]:
        """All tensors of the file in the order of the model's weights, a tied head left out."""
        assert model.spec is not None
        names = gguf_names(model.config)
        for name, factors in rope_factors(model.spec, model.config.rope_parameters).items():
            yield Tensor(name, GGMLQuantizationType.F32, factors.shape, partial(_bytes, torch.from_numpy(factors)))
        for name, module in stored_tensors(model):
            yield self._plain(model, name, names[name]) if module is None else self._quantized(model, module, names[name])

    def _quantized(self, model: Model, module: str, name: str) -> Tensor:
        shape = weight_shape(model, module)
        if self.type in _FLOATS:
            dtype = _FLOATS[self.type]
            return Tensor(name, GGMLQuantizationType[self.type.upper()], shape, lambda: _bytes(dequantized(model, module).to(dtype)))
        kind = self._kind(model, module)
        return Tensor(name, GGMLQuantizationType[kind], shape, lambda: layout_of(kind).pack(permuted(model, module))["weight"].numpy())

    def _plain(self, model: Model, name: str, gguf_name: str) -> Tensor:
        """An unquantized tensor: vectors and routers in fp32, as llama.cpp wants them; other matrices as they are stored, or in the float type that was asked for."""
        info = model.weights.info(name)
        dtype = torch.float32 if len(info.shape) < 2 or is_router(model.config.model_type, name) else _FLOATS.get(self.type, info.dtype)
        kind = GGMLQuantizationType[next(k for k, d in _FLOATS.items() if d is dtype).upper()]
        return Tensor(gguf_name, kind, info.shape, lambda: _bytes(plain(model, name).to(dtype)))


def stored_tensors(model: Model) -> Iterator[tuple[str, str | None]]:
    """Name of each tensor that an export holds, and the quantized linear that it is (None: unquantized). A tied head is left out; codes that it shares with the embedding are the
    embedding's."""
    stored, table = model.weights.names(), shared_table(model, model.schemes)
    heads = [f"{HEAD}.weight"] if HEAD in model.schemes and table is None and f"{HEAD}.weight" not in stored else []
    for name in [*stored, *heads]:
        module = name.removesuffix(".weight")
        if name.startswith(f"{HEAD}.") and model.config.tie_word_embeddings and HEAD not in model.schemes:
            continue
        quantized = HEAD if module == table else module
        yield name, quantized if name.endswith(".weight") and quantized in model.schemes else None


def write_file(path: Path, model: Model, tensors: list[Tensor], file_type: int, add_more: Callable[[GGUFWriter], None]) -> None:
    """Write a whole file, or nothing.

    Args:
        path: of the file.
        model: gives metadata and vocabulary.
        tensors: in their order.
        file_type: llama.cpp's number for it.
        add_more: adds further metadata.

    Raises:
        UnsupportedError: a number of its metadata does not fit.
        OutputError: it cannot be written.
    """
    assert model.spec is not None
    with atomic(path) as temporary, contextlib.closing(GGUFWriter(temporary, GGUF_ARCHITECTURES[model.config.model_type])) as writer:
        writer.add_type("model")
        writer.add_file_type(file_type)
        writer.add_quantization_version(2)
        add_metadata(writer, model.spec)
        add_vocabulary(writer, model.tokenizer(), model.config.vocab_size, end_ids(model.assets, model.config))
        add_more(writer)
        _write_tensors(writer, list(_stacked(tensors)))


def _stacks(tensors: Iterable[Tensor]) -> dict[str, list[Tensor]]:
    """Tensors of the file, each with the matrices that it is made of, in the order of the first ones."""
    stacks: dict[str, list[Tensor]] = {}
    for t in tensors:
        stacks.setdefault(stack_of(t.name), []).append(t)
    return stacks


def _stack_problem(tensors: Iterable[Tensor]) -> str | None:
    for name, parts in _stacks(tensors).items():
        if len({t.type for t in parts}) > 1:
            kinds = sorted({t.type.name for t in parts})
            return f"GGUF keeps the experts of a layer in one tensor ({name}) of one type, and these would have {' and '.join(kinds)}; give all of them one scheme"
    return None


def _stacked(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    for name, parts in _stacks(tensors).items():
        yield parts[0] if name == parts[0].name else _stack(name, parts)


def _stack(name: str, parts: list[Tensor]) -> Tensor:
    return Tensor(name, parts[0].type, (len(parts), *parts[0].shape), lambda: np.stack([t.read() for t in parts]))


def _write_tensors(writer: GGUFWriter, tensors: list[Tensor]) -> None:
    for t in tensors:
        writer.add_tensor_info(t.name, (*t.shape[:-1], t.row_bytes), np.dtype(np.uint8), t.nbytes, raw_dtype=t.type)
    writer.write_header_to_file()
    try:
        writer.write_kv_data_to_file()
    except (struct.error, OverflowError, UnicodeEncodeError) as e:
        raise UnsupportedError(f"GGUF cannot hold a number or a text of config.json, generation_config.json or the tokenizer: {e}") from e
    writer.write_ti_data_to_file()
    for t in tensors:
        data = t.read()
        assert data.nbytes == t.nbytes, (t.name, data.nbytes, t.nbytes)
        writer.write_tensor_data(data)


def permuted(model: Model, module: str) -> QuantizedLinear:
    """A quantized linear with its rows in GGUF's order."""
    q = model.linear(module)
    heads = permuted_heads(f"{module}.weight", model.config.num_attention_heads, model.config.num_key_value_heads)
    if heads is None or not gguf_permutes(model.config.model_type):
        return q
    per_row = q.scales.shape[0] == q.out_features
    return replace(
        q,
        codes=permute_rows(q.codes, heads),
        scales=permute_rows(q.scales, heads) if per_row else q.scales,
        zeros=permute_rows(q.zeros, heads) if per_row and q.zeros is not None else q.zeros,
    )


def dequantized(model: Model, module: str) -> torch.Tensor:
    """fp32 weight `[O, I]` of a quantized linear with its rows in GGUF's order; of any scheme, for scales of several rows (blocks) have no such order."""
    return _in_order(model, f"{module}.weight", numerics.dequantize(model.linear(module)))


def plain(model: Model, name: str) -> torch.Tensor:
    """An unquantized tensor with its rows in GGUF's order, and with what GGUF adds to it."""
    tensor = model.weights.read(name)
    offset = gguf_norm_offset(model.config.model_type, name)
    if offset:
        tensor = tensor.float() + offset
    return _in_order(model, name, tensor)


def _in_order(model: Model, name: str, tensor: torch.Tensor) -> torch.Tensor:
    heads = permuted_heads(name, model.config.num_attention_heads, model.config.num_key_value_heads)
    return permute_rows(tensor, heads) if heads is not None and gguf_permutes(model.config.model_type) else tensor


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.contiguous()
    return tensor.view(torch.int16).numpy() if tensor.dtype is torch.bfloat16 else tensor.numpy()
