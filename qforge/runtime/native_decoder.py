"""The decoder as one native call a step (kernels/include/qforge/decoder.h): hands over addresses once, and flat arrays at each step.

Bits do not depend on the batch, the cut of a prompt, the place of blocks, or threads, if native kernels run all products. Needs no torch but for logits.
"""

from __future__ import annotations

import atexit
import math
import threading
import weakref
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qforge.errors import UnsupportedError
from qforge.ops.native_cache import NativeCache, bytes_per_token
from qforge.ops.native_module import context, module
from qforge.ops.native_weight import address
from qforge.runtime.native_model import NativeLayer, NativeModel, NativePart, NativeProduct
from qforge.runtime.rope_table import RopeTable
from qforge.runtime.sequence import Draw
from qforge.runtime.step import StepInput

if TYPE_CHECKING:
    import torch


def _far_ns() -> float:
    """Threads that take longer to see what each other wrote have no cache in common (a Zen 4: 60 to 90 in one, 240 to 330): each has sequences of its own (decoder.cpp, apart).

    Not on Intel's processors, whose cores share one whatever that takes: on a Xeon, with 240 ns, a load took 11 to 19 % longer (docs/log.md, 2026-11-28).
    """
    try:
        with Path("/proc/cpuinfo").open("rb") as about:
            return math.inf if b"GenuineIntel" in about.read(128) else 190.0
    except OSError:
        return 190.0


FAR_NS = _far_ns()
_LONGEST_STEP_S = 10.0
# `Sampling` of kernels/include/qforge/sampler.h
_SAMPLING = np.dtype([("temperature", "f8"), ("top_k", "i8"), ("top_p", "f8"), ("min_p", "f8"), ("seed", "u8"), ("position", "i8")])


class NativeDecoder:
    """A `Runner`.

    Args:
        kv_cache: how keys and values are stored: `fp32`, `fp16`, `bf16`, `int8` (a scale for each key and each value) or `fp8` (the model's scales; else as int8).
    """

    def __init__(self, model: NativeModel, *, num_blocks: int, block_size: int, threads: int | None = None, kv_cache: str = "fp32") -> None:
        native: Any = module()
        spec = model.spec
        self.spec, self._model, self._native = spec, model, native
        self._at_work = threading.Lock()
        self.batch_invariant = all(part.elsewhere is None for product in model.products() for part in product.parts)
        self._tables = [RopeTable(f.view(np.float32), rope) for f, rope in zip(model.frequencies, dict.fromkeys(spec.layer_ropes), strict=True)]
        try:
            scales = spec.kv_scales or [None] * len(model.layers)
            self._cache = NativeCache(kv_cache, num_blocks, block_size, spec.num_kv_heads, spec.head_dim, scales)
        except (OSError, OverflowError, ValueError) as e:
            need = num_blocks * block_size * len(model.layers) * bytes_per_token(kv_cache, spec.num_kv_heads, spec.head_dim, calibrated=bool(spec.kv_scales))
            raise UnsupportedError(
                f"a key/value cache of {num_blocks * block_size} tokens takes {need / 2**30:,.1f} GiB, more than there is here; free memory, or give LLM a smaller num_blocks"
            ) from e
        layers = [self._layer(i, layer) for i, layer in enumerate(model.layers)]
        activation = {"silu": native.Activation.SILU, "gelu_pytorch_tanh": native.Activation.GELU_TANH}[spec.hidden_act]
        self._decoder = native.Decoder(
            context(threads), spec.hidden_size, spec.vocab_size, spec.norm_eps, activation, spec.experts.active if spec.experts else 0,
            bool(spec.experts and spec.experts.normalized), self._embedding(), address(model.norm), layers, self._product(model.head), FAR_NS,
        )  # fmt: skip
        self._reach = 0
        _DECODERS.add(self)

    def step(self, step: StepInput) -> torch.Tensor:
        """See `Runner.step`."""
        import torch

        logits = torch.empty(len(step.logit_indices), self.spec.vocab_size)
        with self._at_work:
            self._decoder.logits(*self._arguments(step), logits.data_ptr())
        return logits

    def choose(self, step: StepInput, draws: list[Draw]) -> list[int]:
        """See `Runner.choose`."""
        sampling = None
        if any(d.params.temperature for d in draws):
            rows = [(p.temperature, p.top_k, p.top_p, p.min_p, seed, position) for p, seed, position in draws]
            sampling = np.array(rows, _SAMPLING)
        with self._at_work:
            tokens: list[int] = self._decoder.choose(*self._arguments(step), 0 if sampling is None else sampling.ctypes.data)
        return tokens

    def end(self) -> None:
        """Wait for the step that is being computed, but no longer than a step should take; there will be no other one."""
        self._at_work.acquire(timeout=_LONGEST_STEP_S)

    def kernels(self) -> dict[str, int]:
        """See `Runner.kernels`."""
        return self._model.kernels()

    def weight_bytes(self) -> int:
        """See `Runner.weight_bytes`."""
        return self._model.nbytes()

    def _arguments(self, step: StepInput) -> tuple[array[int], ...]:
        reach = max(step.context_lens)
        if reach > self._reach:
            tables = [table.upto(reach) for table in self._tables]
            self._decoder.set_ropes([(cosines.ctypes.data, sines.ctypes.data) for cosines, sines in tables])
            self._reach = min(len(cosines) for cosines, _ in tables)
        return step.tokens, step.positions, step.slot_mapping, step.block_tables, step.query_starts, step.logit_indices

    def _layer(self, index: int, layer: NativeLayer) -> Any:
        spec = self.spec
        rope = list(dict.fromkeys(spec.layer_ropes)).index(spec.layer_ropes[index])
        router = [] if layer.router is None else self._product(layer.router)
        mlps = [(self._product(mlp.gate_up), self._product(mlp.down)) for mlp in layer.mlps]
        norms = [address(n) for n in layer.norms]
        return self._native.Layer(
            norms, self._product(layer.qkv), self._product(layer.output), router, mlps,
            self._cache.layers[index], spec.num_heads, spec.layer_windows[index], rope, spec.score_scale(index), spec.whole_qk_norm,
        )  # fmt: skip

    def _product(self, product: NativeProduct) -> list[Any]:
        return [self._part(part) for part in product.parts]

    def _part(self, part: NativePart) -> Any:
        if part.elsewhere is not None or part.weight is None:
            return self._native.Part(part.out_features, part.in_features, part.elsewhere)
        arithmetic = getattr(self._native.Arithmetic, part.arithmetic)
        return self._native.Part(part.weight.view(), arithmetic, part.static_scale, part.in_features, address(part.weight.gather))

    def _embedding(self) -> Any:
        e, head = self._model.embedding, self._model.head.parts[0].weight
        if e.table is not None:
            return self._native.Embedding(getattr(self._native.Format, e.format), address(e.table), self.spec.embedding_scale)
        assert head is not None
        return self._native.Embedding(head.view(), address(head.gather), self.spec.embedding_scale)


_DECODERS: weakref.WeakSet[NativeDecoder] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """A daemon thread that came back from a native call into an interpreter that is gone would take the process down (std::terminate)."""
    for decoder in list(_DECODERS):
        decoder.end()
