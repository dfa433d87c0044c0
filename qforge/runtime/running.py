"""What runs an opened model on a device, and how large its cache is there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qforge.errors import MissingCapabilityError, UnsupportedError
from qforge.machine_limits import available_memory
from qforge.ops.native_cache import CACHE_TYPES, LONGEST_INTEGER_HEAD, bytes_per_token
from qforge.ops.native_module import missing
from qforge.runtime.native_decoder import NativeDecoder
from qforge.runtime.native_model import NativeModel
from qforge.runtime.opening import Opened, of_model, open_source
from qforge.runtime.step import Runner

if TYPE_CHECKING:
    from qforge.models.model import Model
    from qforge.runtime.places import Gpu

_CACHE_BYTES = 2 << 30  # of the key/value cache by default; pages that are never written take no memory
_DEFAULTS = {"cpu": (32, 384), "cuda": (128, 2048)}  # most sequences, most tokens of a step


@dataclass(frozen=True, slots=True)
class Limits:
    """How much runs at once. `num_blocks`: None for as many as there is room for."""

    device: str
    block_size: int
    num_blocks: int | None
    max_num_seqs: int
    max_step_tokens: int


@dataclass(frozen=True, slots=True)
class How:
    """How it runs; attributes as `LLM` has them."""

    activations: str
    threads: int | None
    kv_cache: str | None
    graphs: bool


@dataclass(frozen=True, slots=True, eq=False)
class Running:
    """A runner, and what it came to.

    Attributes:
        token_bytes: of the cache, for one token in all layers.
        kv_cache: how keys and values are stored.
        recorded: of decode steps recorded at the start: their sizes, and the seconds that it took; None without.
    """

    runner: Runner
    num_blocks: int
    token_bytes: int
    kv_cache: str
    recorded: dict[str, Any] | None = None


def most_sequences(device: str) -> int:
    """How many run at once on a device where nothing is given."""
    return _DEFAULTS[device.partition(":")[0]][0]


def limits(device: str, block_size: int, num_blocks: int | None, max_num_seqs: int | None, max_step_tokens: int | None) -> Limits:
    """With what is usual on a device where nothing is given."""
    tokens = max_step_tokens or _DEFAULTS[device.partition(":")[0]][1]
    return Limits(device, block_size, num_blocks, max_num_seqs or most_sequences(device), tokens)


def check_device(device: str, activations: str, kv_cache: str | None) -> None:
    """Refuse a device that is not here, and what does not run there; reads no weights.

    Raises:
        UnsupportedError: not known, or not on this kind of device.
        MissingCapabilityError: this machine lacks it.
    """
    if device == "cpu":
        if kv_cache is not None and kv_cache not in CACHE_TYPES:
            raise UnsupportedError(f"a key/value cache of '{kv_cache}' is not known on a processor; use one of {', '.join(CACHE_TYPES)}")
        if activations != "fp" and missing() is not None:
            raise UnsupportedError(f"activations '{activations}' are rounded by the native kernels, and {missing()}; use fp")
        return
    kind, _, number = device.partition(":")
    if kind != "cuda" or (number and not number.isdigit()):
        raise UnsupportedError(f"device '{device}' is not known; use cpu, cuda or cuda:N")
    if activations != "fp":
        raise UnsupportedError(f"activations '{activations}' are rounded by the processor's kernels only; on a GPU they have 16 bits: use fp (a scheme's own rounding always runs)")
    import torch

    from qforge.ops.triton import present

    if not torch.cuda.is_available():
        raise MissingCapabilityError(f"device '{device}' was asked for, but torch finds no NVIDIA GPU here; use cpu")
    if int(number or 0) >= torch.cuda.device_count():
        raise MissingCapabilityError(f"device '{device}' was asked for, but this machine has {torch.cuda.device_count()} NVIDIA GPUs, counted from 0")
    lacking = present.missing(device)
    if lacking is not None:
        raise MissingCapabilityError(f"device '{device}' cannot be used: {lacking}")
    from qforge.runtime import gpu_cache

    gpu_cache.stored(kv_cache, torch.float16, torch.device(device))


def cache_kind(opened: Opened, kv_cache: str | None) -> str:
    """How keys and values are stored: as asked for; else as FP8 where the checkpoint has scales for it (and the GPU the type), as activations where not."""
    if opened.place is None:
        return kv_cache or ("fp8" if opened.spec.kv_scales else "fp32")
    from qforge.runtime import gpu_cache

    return kv_cache or ("fp8" if opened.spec.kv_scales and gpu_cache.has_float8(opened.place.device) else "fp16")


def token_bytes(opened: Opened, kv_cache: str | None) -> int:
    """Bytes of the cache for one token in all layers."""
    spec, place, kind = opened.spec, opened.place, cache_kind(opened, kv_cache)
    if place is None:
        return spec.num_layers * bytes_per_token(kind, spec.num_kv_heads, spec.head_dim, calibrated=bool(spec.kv_scales))
    from qforge.runtime import gpu_cache

    return spec.num_layers * gpu_cache.bytes_per_token(gpu_cache.stored(kind, place.dtype, place.device), spec.num_kv_heads, spec.head_dim)


def blocks_for(opened: Opened, where: Limits, kv_cache: str | None) -> int:
    """How many blocks the cache is to have.

    Raises:
        MissingCapabilityError: a GPU has no room for one.
    """
    if where.num_blocks is not None:
        return where.num_blocks
    context, block = -(-opened.spec.max_positions // where.block_size), where.block_size * token_bytes(opened, kv_cache)
    if opened.place is None:
        room = min(max(_CACHE_BYTES, context * block), available_memory() // 2)
        return max(1, min(where.max_num_seqs * context, room // block))
    from qforge.runtime import gpu_cache

    blocks = min(where.max_num_seqs * context, gpu_cache.room(opened.place.device) // block)
    if blocks < 1:
        raise MissingCapabilityError(f"the weights leave no room for a key/value cache on {opened.place.device}; use a smaller model, or fewer bits")
    return blocks


def open_whole(model: str | Path | Model, where: Limits, how: How) -> tuple[Opened, Running]:
    """A model, and what runs it in this process. Raises as `LLM` does."""
    settings = (how.activations, how.threads, where.device)
    opened = open_source(str(model), *settings) if isinstance(model, str | Path) else of_model(model, *settings)
    return opened, running(opened, where, blocks_for(opened, where, how.kv_cache), how)


def running(opened: Opened, where: Limits, blocks: int, how: How) -> Running:
    """The runner of a model, with a cache of so many blocks.

    Raises:
        UnsupportedError: this kind of cache needs the native module, or is not for heads of this size.
    """
    if opened.place is not None:
        return _on_gpu(opened, opened.place, where, blocks, how)
    kind, each = cache_kind(opened, how.kv_cache), token_bytes(opened, how.kv_cache)
    if kind == "int8" and opened.spec.head_dim > LONGEST_INTEGER_HEAD:
        raise UnsupportedError(f"a key/value cache in int8 is for heads of up to {LONGEST_INTEGER_HEAD} dimensions, and this model's have {opened.spec.head_dim}; use fp8 or fp16")
    if isinstance(opened.weights, NativeModel):
        return Running(NativeDecoder(opened.weights, threads=how.threads, num_blocks=blocks, block_size=where.block_size, kv_cache=kind), blocks, each, kind)
    if kind != "fp32" and not (kind == "fp8" and opened.spec.kv_scales):
        raise UnsupportedError(f"a key/value cache of '{kind}' needs the native kernels, and {missing()}; use fp32")
    from qforge.runtime.decoder import Decoder

    return Running(Decoder(opened.weights, num_blocks=blocks, block_size=where.block_size, kv_cache=kind), blocks, each, kind)


def _on_gpu(opened: Opened, place: Gpu, where: Limits, blocks: int, how: How) -> Running:
    from qforge.runtime import gpu_cache
    from qforge.runtime.decode_graphs import cuda_capture
    from qforge.runtime.gpu_decoder import GpuDecoder

    assert not isinstance(opened.weights, NativeModel)
    kind = cache_kind(opened, how.kv_cache)
    capture, stored = cuda_capture() if how.graphs else None, gpu_cache.stored(kind, place.dtype, place.device)
    runner = GpuDecoder(opened.weights, place, num_blocks=blocks, block_size=where.block_size, stored=stored, max_num_seqs=where.max_num_seqs, capture=capture)
    recorded = None if runner.graphs is None else {"sizes": list(runner.graphs.sizes), "seconds": runner.graphs.seconds}
    return Running(runner, blocks, token_bytes(opened, how.kv_cache), kind, recorded)
