"""OpenVINO as a foreign engine: scores token windows with an exported decoder, which keeps its cache as state; and compiles parts of it.

Letters: S new tokens, T = cached + new, V vocabulary.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qforge.engines.base import chunks
from qforge.errors import MissingCapabilityError, ModelError, last_line
from qforge.machine_limits import default_threads

NAME = "openvino"
MODEL = "openvino_model.xml"
# Left alone the CPU plugin computes in bf16 where the CPU has it, rounds activations of compressed weights to 8 bits, and keeps the cache in 8 bits.
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0", "KV_CACHE_PRECISION": "f32"}


def missing() -> str | None:
    """Why OpenVINO cannot run here, and what to do; None if it can."""
    return None if importlib.util.find_spec("openvino") is not None else "openvino is not installed here: pip install 'qforge[openvino]'"


def installed() -> str:
    """The version that is installed."""
    return version(NAME)


def read(folder: Path) -> Any:
    """The IR of an export as openvino's Model.

    Raises:
        MissingCapabilityError: openvino is not installed.
        ModelError: it refuses the file.
    """
    reason = missing()
    if reason is not None:
        raise MissingCapabilityError(reason)
    import openvino

    try:
        return openvino.Core().read_model(folder / MODEL)
    except RuntimeError as e:
        raise ModelError(f"openvino refuses {folder / MODEL}: {last_line(e)}") from e


def compiled(model: Any, *, exact: bool = True, threads: int | None = None) -> Any:
    """A model compiled for the CPU, computing in fp32 or as OpenVINO chooses.

    Raises:
        ModelError: openvino refuses it.
    """
    import openvino

    settings = {"INFERENCE_NUM_THREADS": str(threads or default_threads()), **(EXACT if exact else {})}
    try:
        return openvino.Core().compile_model(model, "CPU", settings)
    except RuntimeError as e:
        raise ModelError(f"openvino cannot compile {model.get_friendly_name()}: {last_line(e)}") from e


class OpenvinoEngine:
    """A `Scorer` over the folder of an export; `exact` computes in fp32, otherwise OpenVINO chooses.

    Raises:
        MissingCapabilityError: openvino is not installed.
        ModelError: it refuses the file.
    """

    name = NAME

    def __init__(self, folder: Path, *, exact: bool = True, threads: int | None = None) -> None:
        self._request = compiled(read(folder), exact=exact, threads=threads).create_infer_request()
        self.version = installed()

    def score(self, windows: list[list[int]]) -> Iterator[torch.Tensor]:
        """See `Scorer.score`."""
        for window in windows:
            self._request.reset_state()
            for start, stop in chunks(len(window)):
                yield self._step(np.array([window[start:stop]]), start)

    def _step(self, tokens: np.ndarray, past: int) -> torch.Tensor:
        """fp32 logits `[S, V]` of the next tokens of one sequence."""
        total = past + tokens.shape[1]
        feeds = {"input_ids": tokens, "attention_mask": np.ones((1, total), np.int64), "position_ids": np.arange(past, total)[None], "beam_idx": np.zeros(1, np.int32)}
        return torch.from_numpy(self._request.infer(feeds)["logits"][0].copy())
