"""The compiled module: whether it is there, what this CPU runs of it, and the threads it runs with. Needs neither torch nor numpy."""

from __future__ import annotations

import atexit
import functools
import importlib
import logging
import os
from typing import Any

from qforge.errors import MissingCapabilityError
from qforge.machine_limits import default_threads

_log = logging.getLogger(__name__)


@functools.cache
def module() -> Any | None:
    """The compiled module, or None (said once in the log) where it was not built."""
    try:
        return importlib.import_module("qforge.ops._native")
    except ImportError as e:
        _log.warning("the native kernels are not available (%s): products run on the plain reference, many times slower; reinstall qforge where a C++ compiler is at hand", e)
        return None


def missing() -> str | None:
    """Why no native kernel runs here; None if they do."""
    return None if module() is not None else "the native module qforge.ops._native was not built"


def instruction_sets() -> list[str]:
    """The instruction sets with kernels that this CPU runs, fastest first and from `$QFORGE_ISA` on where that is set; empty without the native module.

    Raises:
        MissingCapabilityError: QFORGE_ISA names none of them.
    """
    native = module()
    found: list[str] = [] if native is None else list(native.instruction_sets())
    first = os.environ.get("QFORGE_ISA")
    if not first or not found:
        return found
    if first not in found:
        raise MissingCapabilityError(f"QFORGE_ISA is '{first}', which is no instruction set that this CPU runs kernels of; unset it, or use one of {', '.join(found)}")
    return found[found.index(first) :]


def code_for(products: str) -> str | None:
    """The instruction set of the code that multiplies `floats`, `bytes`, `bf16`, or `blocks` of integers here; None without the native module."""
    sets = instruction_sets()
    return context(1, sets[0]).code(products) if sets else None


@functools.lru_cache(maxsize=8)
def context(threads: int | None = None, isa: str | None = None) -> Any:
    """The thread pool and instruction set that products run with; made once for each pair. Needs the native module."""
    native = module()
    assert native is not None, missing()
    return native.Context(threads or default_threads(), isa or instruction_sets()[0])


atexit.register(context.cache_clear)  # threads end while there is an interpreter: what holds this module until after its end (pytest's plugins do) would hold them, too
