"""transformers and GPTQModel as foreign engines: each loads a checkpoint in a process of its own, and gives log-probabilities and the weights it made of the codes."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from qforge.engines import foreign
from qforge.errors import MissingCapabilityError, ModelError

_ADAPTER = Path(__file__).with_name("checkpoint_adapter.py")
_BASE_S, _PER_PROMPT_S = 300.0, 5.0
# layout -> the engine that runs it, and the package that it needs there
_ENGINES = {
    "gptq": ("GPTQModel", "gptqmodel"),
    "awq": ("GPTQModel", "gptqmodel"),
    "compressed-tensors": ("transformers", "compressed_tensors"),
    "bitsandbytes": ("transformers", "bitsandbytes"),
}


@dataclass(frozen=True, slots=True, eq=False)
class Executed:
    """What an engine made of a checkpoint.

    Attributes:
        logprobs: fp32 `[len(prompts), V]`, normalised.
        weights: per module, dtype and SHA-256 of the dequantized weight `[O, I]` as the engine's own code gives it.
        linears: how many modules of which class of the engine's hold them.
    """

    engine: str
    version: str
    logprobs: torch.Tensor
    weights: Mapping[str, tuple[str, str]]
    linears: Mapping[str, int]


def missing(layout: str) -> str | None:
    """Why no engine can run checkpoints of a layout here, and what to do; None if one can."""
    engine, package = _ENGINES[layout]
    if _python(package) is not None:
        return None
    return f"{engine} runs {layout} checkpoints with the package {package}, which is not installed here: " + (
        "make engines" if package == "gptqmodel" else f"pip install {package}"
    )


def run(layout: str, folder: Path, prompts: Sequence[Sequence[int]], modules: Sequence[str], vocab_size: int, parameters: int, *, engine: str | None = None) -> Executed:
    """Load and run a checkpoint.

    Args:
        layout: `gptq`, `awq`, `compressed-tensors` or `bitsandbytes`.
        folder: the checkpoint.
        prompts: token ids, each prompt at least one.
        modules: names of quantized linears, whose weights are hashed.
        vocab_size: V.
        parameters: of the model; the engine holds all of them in fp32.
        engine: `transformers` instead of the layout's own engine, in the same interpreter.

    Raises:
        MissingCapabilityError: the engine is not installed, did not answer in time, or needs more memory than is free.
        ModelError: it refuses the checkpoint.
    """
    reason = missing(layout)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if reason is None and 6 * parameters > free:  # fp32, and codes beside them
        reason = f"running it would take about {6 * parameters / 2**30:.1f} GiB, and {free / 2**30:.1f} are free"
    if reason is not None:
        raise MissingCapabilityError(reason)
    usual, package = _ENGINES[layout]
    engine = engine or usual
    python = _python(package)
    assert python is not None
    request = {"engine": engine.lower(), "prompts": [list(map(int, p)) for p in prompts], "modules": list(modules)}
    answer, data = foreign.ask(python, _ADAPTER, request, engine=engine, model=folder, timeout_s=_BASE_S + _PER_PROMPT_S * len(prompts))
    if data.size != len(prompts) * vocab_size:
        raise ModelError(f"{engine} gave {data.size} log-probabilities for {folder.name} where {len(prompts)} x {vocab_size} were asked for")
    weights = {name: (str(dtype), str(digest)) for name, (dtype, digest) in answer["weights"].items()}
    return Executed(engine, str(answer["version"]), torch.from_numpy(data).view(len(prompts), vocab_size), weights, answer["linears"])


def _python(package: str) -> Path | None:
    if package == "gptqmodel":
        return foreign.interpreter(package, "gptqmodel")
    return Path(sys.executable) if importlib.util.find_spec(package) is not None else None
