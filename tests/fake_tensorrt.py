"""TensorRT's runtime without a GPU: its names and rules as in the real package, and ONNX Runtime computing the ONNX file that an engine names, from and to bare addresses."""

from __future__ import annotations

import ctypes
import enum
import json
import sys
import types
from pathlib import Path

import numpy as np

from qforge.engines import onnx_runtime
from qforge.engines.tensorrt_build import Profile

HEADER = 64
_KINDS = {"tensor(int64)": "INT64", "tensor(float16)": "HALF", "tensor(float)": "FLOAT"}
_NUMPY = {"INT64": np.int64, "HALF": np.float16, "FLOAT": np.float32}

NAMES = (
    "DataType",
    "TensorIOMode",
    "ExecutionContextAllocationStrategy",
    "EngineValidity",
    "EngineInvalidityDiagnostics",
    "ILogger",
    "Runtime",
    "ICudaEngine",
    "IExecutionContext",
)

DataType = enum.Enum("DataType", ["FLOAT", "HALF", "INT8", "INT32", "BOOL", "UINT8", "FP8", "BF16", "INT64", "INT4"])
TensorIOMode = enum.Enum("TensorIOMode", ["NONE", "INPUT", "OUTPUT"])
ExecutionContextAllocationStrategy = enum.Enum("ExecutionContextAllocationStrategy", ["STATIC", "ON_PROFILE_CHANGE", "USER_MANAGED"])
EngineValidity = enum.Enum("EngineValidity", ["VALID", "SUBOPTIMAL", "INVALID"])


class EngineInvalidityDiagnostics(enum.IntFlag):
    VERSION_MISMATCH = 1
    UNSUPPORTED_CC = 2
    OLD_CUDA_DRIVER = 4
    OLD_CUDA_RUNTIME = 8
    INSUFFICIENT_GPU_MEMORY = 16
    MALFORMED_ENGINE = 32
    CUDA_ERROR = 64


class ILogger:
    class Severity(enum.IntEnum):
        INTERNAL_ERROR = 0
        ERROR = 1
        WARNING = 2
        INFO = 3
        VERBOSE = 4

    def __init__(self) -> None: ...


def engine(onnx: Path, spec, profiles: list[Profile], *, magic: bytes = b"vtrt", diagnostics: int = 0, says: str = "") -> bytes:
    """An engine of `onnx` with these profiles; `says`: what it is refused with."""
    session = onnx_runtime.session(str(onnx / onnx_runtime.MODEL), optimized=False)
    limits = [{i.name: p.shapes(i.name, spec) for i in session.get_inputs()} for p in profiles]
    return magic + bytes([diagnostics]) * (HEADER - 4) + json.dumps({"onnx": str(onnx), "limits": limits, "says": says}).encode()


class Runtime:
    """`calls` of all contexts: (profile, shape of input_ids, tokens in the cache)."""

    engine_header_size = HEADER
    calls: list[tuple[int, tuple[int, ...], int]] = []  # noqa: RUF012
    starts: str = ""

    def __init__(self, log: ILogger) -> None:
        self._log = log
        if Runtime.starts:
            log.log(ILogger.Severity.ERROR, Runtime.starts)

    def get_engine_validity(self, header: bytes):
        assert len(header) >= HEADER
        found = EngineInvalidityDiagnostics(header[4]) if header[:4] == b"vtrt" else EngineInvalidityDiagnostics.MALFORMED_ENGINE
        return (EngineValidity.INVALID if found else EngineValidity.VALID), int(found)

    def deserialize_cuda_engine(self, plan: bytes):
        try:
            facts = json.loads(plan[HEADER:])
        except ValueError:
            facts = {"says": "Serialization assertion plan.header.size == blobSize failed."}
        if facts["says"]:
            self._log.log(ILogger.Severity.ERROR, facts["says"])
            return None
        return ICudaEngine(facts, self._log)


class ICudaEngine:
    def __init__(self, facts, log: ILogger) -> None:
        self._log, self._limits = log, facts["limits"]
        self._session = onnx_runtime.session(str(Path(facts["onnx"]) / onnx_runtime.MODEL), onnx_runtime.EXACT, 1)
        inputs, outputs = self._session.get_inputs(), self._session.get_outputs()
        self._modes = {e.name: mode for ends, mode in ((outputs[::-1], TensorIOMode.OUTPUT), (inputs, TensorIOMode.INPUT)) for e in ends}  # any order will do
        self._ends = {e.name: e for e in (*inputs, *outputs)}
        self.num_io_tensors, self.num_optimization_profiles = len(self._modes), len(self._limits)

    def get_tensor_name(self, index: int) -> str:
        return list(self._modes)[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return self._modes[name]

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType[_KINDS[self._ends[name].type]]

    def get_tensor_shape(self, name: str):
        return [d if isinstance(d, int) else -1 for d in self._ends[name].shape]

    def get_tensor_profile_shape(self, name: str, profile_index: int):
        assert self._modes[name] is TensorIOMode.INPUT
        return self._limits[profile_index][name]

    def create_execution_context(self, strategy=ExecutionContextAllocationStrategy.STATIC):
        return IExecutionContext(self, strategy)


class IExecutionContext:
    def __init__(self, engine: ICudaEngine, strategy) -> None:
        self._engine, self._managed = engine, strategy is ExecutionContextAllocationStrategy.USER_MANAGED
        self.active_optimization_profile = 0
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._memory = (0, 0)

    def _refuse(self, why: str) -> bool:
        self._engine._log.log(ILogger.Severity.ERROR, why)
        return False

    def _names(self, mode: TensorIOMode) -> list[str]:
        return [n for n, m in self._engine._modes.items() if m is mode]

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        if not 0 <= profile_index < self._engine.num_optimization_profiles:
            raise RuntimeError("Error in set optimization profile async.")
        self.active_optimization_profile, self._shapes, self._memory = profile_index, {}, (0, 0)
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        low, _, high = self._engine._limits[self.active_optimization_profile][name]
        if not all(a <= s <= b for a, s, b in zip(low, shape, high, strict=True)):
            return self._refuse(f"setInputShape: Error Code 3: {name} {shape} is outside of profile {self.active_optimization_profile}")
        self._shapes[name], self._memory = shape, (0, 0)
        return True

    def infer_shapes(self) -> list[str]:
        return [n for n in self._names(TensorIOMode.INPUT) if n not in self._shapes]

    def get_tensor_shape(self, name: str):
        if name in self._shapes:
            return self._shapes[name]
        sizes = {d: s for n, shape in self._shapes.items() for d, s in zip(self._engine._ends[n].shape, shape, strict=True) if isinstance(d, str)}
        return [sizes.get(d, -1) if isinstance(d, str) else d for d in self._engine._ends[name].shape]

    def update_device_memory_size_for_shapes(self) -> int:
        return 1000 * int(np.prod(self._shapes["attention_mask"]))

    def set_device_memory(self, memory: int, size: int) -> None:
        self._memory = (memory, size)

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self._addresses[name] = memory
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        if self.infer_shapes():
            return self._refuse(f"enqueueV3: Error Code 3: no shape of {self.infer_shapes()}")
        if not all(self._addresses.get(n) for n in self._engine._modes):  # empty tensors, too
            return self._refuse("enqueueV3: Error Code 3: a tensor has no address")
        if any(a % 64 for a in self._addresses.values()):  # 256 on a GPU
            return self._refuse("enqueueV3: Error Code 3: an address is not aligned")
        address, size = self._memory
        if self._managed and (not address or size < self.update_device_memory_size_for_shapes()):
            return self._refuse("enqueueV3: Error Code 3: no memory for activations")
        if self._managed:
            ctypes.memset(address, 0xFF, size)  # it may be written anywhere
        feeds = {n: self._read(n) for n in self._names(TensorIOMode.INPUT)}
        Runtime.calls.append((self.active_optimization_profile, feeds["input_ids"].shape, feeds["attention_mask"].shape[1] - feeds["input_ids"].shape[1]))
        names = self._names(TensorIOMode.OUTPUT)
        made = dict(zip(names, self._engine._session.run(names, feeds), strict=True))
        for name, value in made.items():
            assert value.shape == tuple(self.get_tensor_shape(name))
            ctypes.memmove(self._addresses[name], np.ascontiguousarray(value).ctypes.data, value.nbytes)
        return True

    def _read(self, name: str) -> np.ndarray:
        kind = np.dtype(_NUMPY[self._engine.get_tensor_dtype(name).name])
        count = int(np.prod(self._shapes[name]))
        held = (ctypes.c_uint8 * (count * kind.itemsize)).from_address(self._addresses[name])
        return np.frombuffer(held, kind, count).reshape(self._shapes[name]).copy()


def install(monkeypatch, package: str = "tensorrt_rtx", architecture: tuple[int, int] = (8, 9)) -> types.ModuleType:
    """Make this the package, and have torch find a GPU, whose tensors lie in the processor's memory."""
    import importlib.machinery

    import torch

    from qforge.engines import tensorrt_runtime

    module = types.ModuleType(package)
    module.__spec__ = importlib.machinery.ModuleSpec(package, None)
    module.__version__ = "1.7.1.116"
    for name in NAMES:
        setattr(module, name, globals()[name])
    monkeypatch.setitem(sys.modules, package, module)
    monkeypatch.setattr(tensorrt_runtime, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *a: "Fake RTX")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: architecture)
    monkeypatch.setattr(Runtime, "calls", [])
    monkeypatch.setattr(Runtime, "starts", "")
    return module
