"""Which kernel runs a linear here, and why not a faster one."""

from __future__ import annotations

import re
from dataclasses import dataclass

from qforge.ops.kernel import Kernel
from qforge.ops.native import NativeBf16, NativeDense, NativeInt8, NativeKernel, NativeRounded
from qforge.ops.native_module import missing
from qforge.ops.reference import ReferenceKernel
from qforge.ops.triton.linear import TritonW4, TritonW8
from qforge.scheme import ACTIVATIONS, Scheme

# What --activations to ask for
_ROUNDS = "it rounds activations, for --activations"
_ASKED_BY = {"native-a16": "int16", "native-a8": "int8", "native-bf16": "bf16"}

# Kernels that round activations as the runtime was asked to, for each kind of activations
_ROUNDED_BY = {"fp": set(), "int16": {"native-a16"}, "int8": {"native-a8"}, "bf16": {"native-bf16", "native-a16"}}
_ROUNDING = set().union(*_ROUNDED_BY.values())


@dataclass(frozen=True, slots=True)
class Choice:
    """A kernel, and for each faster one the reason why it was passed over."""

    kernel: Kernel
    passed_over: tuple[tuple[str, str], ...] = ()

    def explain(self) -> str:
        """One line: the kernel's name, and why not a faster one."""
        return self.kernel.name + "".join(f" (not {name}: {reason})" for name, reason in self.passed_over)


def explained(scheme: Scheme, shape: tuple[int, int], device: str = "cpu") -> dict[str, str]:
    """For each kind of activations: the kernel that such a weight runs on, the instruction set of its code here, and why not a faster one."""
    return {a: _explained(choose(scheme, shape, device, activations=a), scheme, shape, device) for a in ACTIVATIONS}


def short(explanation: str) -> str:
    """An explanation without the kernels that other --activations would take."""
    return re.sub(rf" \(not [\w-]+: {_ROUNDS} \w+\)", "", explanation)


def dense_kernel() -> str:
    """What runs weights that are not quantized here, whatever the activations."""
    return f"{NativeDense.name} [{NativeDense().code}]" if missing() is None else "torch"


def _explained(choice: Choice, scheme: Scheme, shape: tuple[int, int], device: str) -> str:
    code, left = choice.kernel.code, dict(choice.passed_over)
    for kernel in kernels(device):
        if kernel.name == choice.kernel.name:
            break
        if kernel.name in _ASKED_BY and kernel.supports(scheme, shape, device) is None:
            left[kernel.name] = f"{_ROUNDS} {_ASKED_BY[kernel.name]}"
    return choice.kernel.name + (f" [{code}]" if code else "") + "".join(f" (not {name}: {reason})" for name, reason in left.items())


def kernels(device: str = "cpu", threads: int | None = None) -> list[Kernel]:
    """Every kernel for a kind of device, fastest first; the last one runs everything."""
    if device.startswith("cuda"):
        return [TritonW8(), TritonW4(), ReferenceKernel()]
    return [NativeBf16(threads), NativeRounded(8, threads), NativeRounded(16, threads), NativeInt8(threads), NativeKernel(threads), ReferenceKernel()]


def choose(scheme: Scheme, shape: tuple[int, int], device: str = "cpu", threads: int | None = None, activations: str = "fp") -> Choice:
    """The fastest kernel for a weight `[O, I]` of this scheme on this device. Needs no weights, so that `inspect` can ask before loading.

    Args:
        activations: `fp`: as they are; `int16`, `int8`: rounded to so many bits on the fly where a kernel does that; `bf16`: weights, too, where that
            gains, else as `int16`. A scheme that rounds activations always runs as it says.
    """
    passed_over: list[tuple[str, str]] = []
    for kernel in kernels(device, threads):
        # What rounds as the scheme says is for such schemes alone, what rounds as the runtime was asked to for the others.
        if kernel.name in _ROUNDING and (scheme.activations is not None or kernel.name not in _ROUNDED_BY[activations]):
            continue
        if isinstance(kernel, NativeInt8) and scheme.activations is None:
            continue
        reason = kernel.supports(scheme, shape, device)
        if reason is None:
            return Choice(kernel, tuple(passed_over))
        passed_over.append((kernel.name, reason))
    raise AssertionError("the reference kernel supports everything")
