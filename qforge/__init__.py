"""qforge: quantize a language model by recipe, export it everywhere, and prove that it is still good.

The public API is the names in `__all__`; they are imported on first use, so that `import qforge` stays cheap.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "LLM": "qforge.runtime",
    "QforgeError": "qforge.errors",
    "Results": "qforge.types",
    "SamplingParams": "qforge.runtime",
    "evaluate": "qforge.pipeline",
    "export": "qforge.pipeline",
    "load_recipe": "qforge.recipe",
    "quantize": "qforge.pipeline",
    "sweep": "qforge.search.sweep",
}
__all__ = ["LLM", "QforgeError", "Results", "SamplingParams", "evaluate", "export", "load_recipe", "quantize", "sweep"]

if TYPE_CHECKING:
    from qforge.errors import QforgeError
    from qforge.pipeline import evaluate, export, quantize
    from qforge.recipe import load_recipe
    from qforge.runtime import LLM, SamplingParams
    from qforge.search.sweep import sweep
    from qforge.types import Results


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'qforge' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


class _Api(ModuleType):
    """This package: `qforge.export` and `qforge.evaluate` are the functions, also after the rooms of the same names were imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):  # the import system binds a room to its parent
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Api
