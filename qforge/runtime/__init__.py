"""The built-in runtime: paged key/value blocks, continuous batching, one decoder whose families are data.

`LLM` and `SamplingParams` are imported on first use, so that `import qforge.runtime` stays cheap.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOME = {"LLM": "qforge.runtime.llm", "Output": "qforge.runtime.sequence", "SamplingParams": "qforge.runtime.sequence"}
__all__ = ["LLM", "Output", "SamplingParams"]

if TYPE_CHECKING:
    from qforge.runtime.llm import LLM
    from qforge.runtime.sequence import Output, SamplingParams


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'qforge.runtime' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name]), name)
