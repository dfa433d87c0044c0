"""TensorRT as a foreign engine: scores token windows with the engine of a `tensorrt` export, on the GPU that it was built for, through its key-value cache.

Letters: B batch, S new tokens, P tokens in the cache, V vocabulary.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from qforge.engines.base import chunks
from qforge.engines.tensorrt_build import ARCHITECTURES, ENGINE, FULL, RTX, logger
from qforge.errors import MissingCapabilityError, ModelError

DEVICE = "cuda"
NAMES = {RTX: "TensorRT-RTX", FULL: "TensorRT"}
_GET = {RTX: "pip install 'qforge[tensorrt]'", FULL: "pip install tensorrt"}
_MAGIC = {b"vtrt": RTX, b"ftrt": FULL}  # first bytes of an engine
_HEADER = 64  # bytes that TensorRT-RTX judges an engine by
_TYPES = {"FLOAT": torch.float32, "HALF": torch.float16, "BF16": torch.bfloat16, "INT32": torch.int32, "INT64": torch.int64}
_PAST = "past_key_values."


def missing(folder: Path) -> str | None:
    """Why the engine of an export cannot be executed here, and what to do; None if it can.

    Raises:
        ModelError: the folder holds no engine.
    """
    package = _builder(folder)
    if importlib.util.find_spec(package) is None:
        return f"{NAMES[package]}, which built {ENGINE}, is not installed here: {_GET[package]}"
    if not torch.cuda.is_available():
        return f"{ENGINE} needs an NVIDIA GPU, and torch finds none here; run this on the machine that will serve"
    if package == FULL:
        return None  # it says only on opening an engine whether it fits
    gpu, architecture = _gpu()
    if architecture not in ARCHITECTURES:
        return f"TensorRT-RTX does not support the GPU here, {gpu}; it supports {', '.join(ARCHITECTURES)}, and type auto builds with TensorRT for this one"
    with (folder / ENGINE).open("rb") as f:
        header = f.read(_HEADER)
    try:
        return _unfit(header, gpu, architecture)
    except MissingCapabilityError as e:
        return str(e)


def _builder(folder: Path) -> str:
    """The package that built an engine, which alone can open it."""
    try:
        with (folder / ENGINE).open("rb") as f:
            return _MAGIC[f.read(4)]
    except KeyError:
        raise ModelError(f"{folder / ENGINE} is no engine of TensorRT, or damaged; export again") from None
    except OSError as e:
        raise ModelError(f"cannot read {folder / ENGINE}: {e.strerror}; give the folder of a tensorrt export") from e


def _gpu() -> tuple[str, str]:
    """The GPU in words, and its architecture."""
    architecture = "sm{}{}".format(*torch.cuda.get_device_capability())
    return f"{torch.cuda.get_device_name()} ({architecture})", architecture


def _unfit(header: bytes, gpu: str, architecture: str) -> str | None:
    """What TensorRT-RTX has against running an engine here, by its header; None also for damage, which opening it tells."""
    trt, runtime, log = _opened(RTX)
    validity, found = runtime.get_engine_validity(header)
    kinds = trt.EngineInvalidityDiagnostics
    if int(found) & int(kinds.UNSUPPORTED_CC):
        return f"{ENGINE} was built for other GPUs than {gpu}; export with type {architecture}"
    if int(found) & int(kinds.VERSION_MISMATCH):
        return f"{ENGINE} was built by another version of TensorRT-RTX than {trt.__version__}, which is installed here; install that one, or export again"
    if validity != trt.EngineValidity.INVALID or int(found) & int(kinds.MALFORMED_ENGINE):
        return None
    others = [k for k in ("OLD_CUDA_DRIVER", "OLD_CUDA_RUNTIME", "INSUFFICIENT_GPU_MEMORY", "CUDA_ERROR") if int(found) & int(getattr(kinds, k))]
    return f"TensorRT-RTX {trt.__version__} cannot run {ENGINE} on {gpu}: {', '.join(others) or '; '.join(log.said) or 'it does not say why'}"


def _opened(package: str) -> tuple[Any, Any, Any]:
    """The package, a runtime of it, and the log that keeps what that says.

    Raises:
        MissingCapabilityError: it does not start here.
    """
    try:
        trt = importlib.import_module(package)
        log = logger(trt)
        runtime, said = trt.Runtime(log), log.said
    except (ImportError, OSError, RuntimeError, TypeError) as e:  # a library that it needs, or the driver
        raise MissingCapabilityError(f"{NAMES[package]} does not start here: {e}") from e
    if said:  # TensorRT then gives a runtime that crashes
        raise MissingCapabilityError(f"{NAMES[package]} does not start here: {said[0]}")
    return trt, runtime, log


class TensorrtEngine:
    """A `Scorer` over the folder of a `tensorrt` export.

    Attributes:
        gpu: what executes it, in words.

    Raises:
        MissingCapabilityError: this machine lacks the package, a GPU, the GPU that the engine was built for, or the version that built it.
        ModelError: the engine is damaged, or is no decoder of ours.
    """

    def __init__(self, folder: Path) -> None:
        reason = missing(folder)
        if reason is not None:
            raise MissingCapabilityError(reason)
        package = _builder(folder)
        trt, runtime, log = _opened(package)
        self._graph = _Graph(trt, runtime, log, folder / ENGINE, torch.device(DEVICE))
        past = {n for n in self._graph.inputs if n.startswith(_PAST)}
        if set(self._graph.inputs) - past - {"position_ids"} != {"input_ids", "attention_mask"} or set(self._graph.outputs) != {"logits", *map(_present, past)}:
            raise ModelError(f"{folder / ENGINE} is no decoder of ours: it takes {', '.join(self._graph.inputs)}; export again")
        self.name, self.version, self.gpu = package.replace("_", "-"), str(trt.__version__), _gpu()[0]

    def score(self, windows: list[list[int]]) -> Iterator[torch.Tensor]:
        """See `Scorer.score`."""
        for window in windows:
            computed = self._pieces(window[:-1])
            held = torch.empty(0)
            for start, stop in chunks(len(window)):
                while len(held) < stop - start:
                    piece = next(computed)
                    held = torch.cat([held, piece]) if len(held) else piece
                yield held[: stop - start].cpu()
                held = held[stop - start :]

    def _pieces(self, tokens: list[int]) -> Iterator[torch.Tensor]:
        """fp32 logits `[S, V]` of all tokens of a sequence, on the device, in pieces as large as the engine's profiles take them."""
        cache: Mapping[str, torch.Tensor] = {}
        start = 0
        while start < len(tokens):
            profile, most = self._profile(start)
            stop = min(start + most, len(tokens))
            logits, cache = self.step(torch.tensor([tokens[start:stop]]), cache, profile)
            yield logits[0]
            start = stop

    def _profile(self, past: int) -> tuple[int, int]:
        """The profile that takes the most new tokens after `past` in the cache, and how many.

        Raises:
            ModelError: the sequence is longer than all profiles.
        """
        room = [(min(new[1], total[1] - past), i) for i, (new, total, cached) in enumerate(self._limits()) if cached[0] <= past <= cached[1] and new[0] + past <= total[1]]
        most, profile = max(room, key=lambda r: (r[0], -r[1]), default=(0, 0))
        if most < 1:
            raise ModelError(f"{ENGINE} takes sequences of at most {max(total[1] for _, total, _ in self._limits()):,} tokens; use shorter windows")
        return profile, most

    def _limits(self) -> list[tuple[tuple[int, int], ...]]:
        """Of each profile the smallest and largest number of new tokens, of all tokens, and of tokens in the cache."""
        past = next((n for n in self._graph.inputs if n.startswith(_PAST)), None)
        places = [("input_ids", 1), ("attention_mask", 1), *([(past, 2)] if past else [])]
        return [tuple((low[axis], high[axis]) for low, high, axis in ((*p[name], axis) for name, axis in places)) for p in self._graph.profiles]

    def step(self, tokens: torch.Tensor, cache: Mapping[str, torch.Tensor], profile: int = 0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """One call of the graph.

        Args:
            tokens: `[B, S]`.
            cache: what the call before returned; empty at first.
            profile: the optimization profile that takes these sizes.

        Returns:
            fp32 logits `[B, S, V]` on the device, and the cache by the names of the inputs that take it.
        """
        batch, new = tokens.shape
        past = next(iter(cache.values())).shape[2] if cache else 0
        feeds = {"input_ids": tokens, "attention_mask": torch.ones(batch, past + new), "position_ids": torch.arange(past, past + new).expand(batch, -1)}
        for name in self._graph.inputs:
            if name.startswith(_PAST):
                _, heads, _, size = self._graph.shapes[name]
                feeds[name] = cache[name] if cache else torch.empty(batch, heads, 0, size)
        outputs = self._graph.run(profile, feeds)
        return outputs["logits"].float(), {n: outputs[_present(n)] for n in self._graph.inputs if n.startswith(_PAST)}


def _present(past: str) -> str:
    """The output that becomes an input of the next step."""
    return past.replace(_PAST, "present.", 1)


class _Graph:
    """An engine as a function of named tensors, computed on torch's current stream of a device.

    Attributes:
        inputs, outputs: types by name.
        shapes: by name; -1 for what changes.
        profiles: smallest and largest shape of each input.
    """

    def __init__(self, trt: Any, runtime: Any, log: Any, path: Path, device: torch.device) -> None:
        self._runtime, self._log, self._device = runtime, log, device
        self._engine = runtime.deserialize_cuda_engine(path.read_bytes())
        if self._engine is None:
            said = "; ".join(log.said) or "it does not say why"
            if "please rebuild" in said:  # TensorRT's words for another GPU or version
                raise MissingCapabilityError(f"{path.name} was built for another GPU or by another version than is here; export again ({said})")
            raise ModelError(f"{NAMES[trt.__name__]} refuses {path}: {said}")
        engine = self._engine
        names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
        try:
            types = {n: _TYPES[engine.get_tensor_dtype(n).name] for n in names}
        except KeyError as e:
            raise ModelError(f"{path} is no decoder of ours: it takes or gives {e.args[0]}; export again") from None
        self.shapes = {n: tuple(engine.get_tensor_shape(n)) for n in names}
        self.inputs = {n: types[n] for n in names if engine.get_tensor_mode(n) == trt.TensorIOMode.INPUT}
        self.outputs = {n: types[n] for n in names if n not in self.inputs}
        self.profiles = []
        for i in range(engine.num_optimization_profiles):
            ends = {n: engine.get_tensor_profile_shape(n, i) for n in self.inputs}
            self.profiles.append({n: (tuple(shapes[0]), tuple(shapes[2])) for n, shapes in ends.items()})
        # Memory for the largest shapes of a profile (8 prompts of 8,192 tokens) may not be there; what a step needs is.
        self._context = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if self._context is None:
            raise self._refused()
        self._memory = torch.empty(1, dtype=torch.uint8, device=device)

    def run(self, profile: int, feeds: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Outputs by name, for inputs by name that may be elsewhere and of other types; more than the engine takes are left out.

        Raises:
            ModelError: TensorRT refuses the sizes, or cannot compute.
        """
        context = self._context
        stream = torch.cuda.current_stream(self._device).cuda_stream if self._device.type == "cuda" else 0
        given = {n: feeds[n].to(self._device, kind).contiguous() for n, kind in self.inputs.items()}
        try:
            if context.active_optimization_profile != profile:
                self._accepted(context.set_optimization_profile_async(profile, stream))
            for name, tensor in given.items():
                self._accepted(context.set_input_shape(name, tuple(tensor.shape)))
            self._accepted(not context.infer_shapes())
            made = {n: torch.empty(tuple(context.get_tensor_shape(n)), dtype=kind, device=self._device) for n, kind in self.outputs.items()}
            needed = context.update_device_memory_size_for_shapes()
            if needed > self._memory.numel():
                self._memory = torch.empty(needed, dtype=torch.uint8, device=self._device)
            context.set_device_memory(self._memory.data_ptr(), self._memory.numel())
            for name, tensor in (given | made).items():
                self._accepted(context.set_tensor_address(name, tensor.data_ptr() or self._memory.data_ptr()))  # an empty tensor has no address, and has to have one
            self._accepted(context.execute_async_v3(stream))
        except RuntimeError as e:
            raise ModelError(f"TensorRT cannot run {ENGINE}: {e}") from e
        return made

    def _accepted(self, answer: bool) -> None:
        if not answer:
            raise self._refused()

    def _refused(self) -> ModelError:
        return ModelError(f"TensorRT cannot run {ENGINE}: {'; '.join(self._log.said[-3:]) or 'it does not say why'}")
