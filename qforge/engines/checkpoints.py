"""transformers, GPTQModel, vLLM and mlx-lm as foreign engines: each loads a checkpoint in a process of its own, and gives log-probabilities and weights."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from qforge.engines import foreign
from qforge.errors import MissingCapabilityError, ModelError
from qforge.machine_limits import free_memory

_ADAPTERS = {"mlx-lm": "mlx_adapter.py", "vLLM": "vllm_adapter.py"}  # engine -> its script, where it is not checkpoint_adapter.py
_INSTALL = {"gptqmodel": "make engines", "mlx_lm": "pip install 'qforge[mlx]'", "bitsandbytes": "pip install 'qforge[bitsandbytes]'"}
_BASE_S, _PER_PROMPT_S = 300.0, 5.0
# layout -> the engine that runs it, and the package that it needs there
_ENGINES = {
    "gptq": ("GPTQModel", "gptqmodel"),
    "awq": ("GPTQModel", "gptqmodel"),
    "compressed-tensors": ("transformers", "compressed_tensors"),
    "bitsandbytes": ("transformers", "bitsandbytes"),
    "mlx": ("mlx-lm", "mlx_lm"),
}


@dataclass(frozen=True, slots=True, eq=False)
class Executed:
    """What an engine made of a checkpoint.

    Attributes:
        logprobs: fp32 `[len(prompts), V]`, normalised.
        weights: per module, dtype and SHA-256 of the dequantized weight `[O, I]` as the engine's own code gives it; none from vLLM, which packs weights when it loads them.
        linears: how many modules of which class of the engine's hold them.
        products: of vLLM alone: the modules that one of its linears holds, its probe `[rows, I]`, and what it makes of that `[rows, O]`.
    """

    engine: str
    version: str
    logprobs: torch.Tensor
    weights: Mapping[str, tuple[str, str]]
    linears: Mapping[str, int]
    products: Sequence[tuple[list[str], torch.Tensor, torch.Tensor]] = ()


def missing(layout: str) -> str | None:
    """Why no engine can run checkpoints of a layout here, and what to do; None if one can."""
    engine, package = _ENGINES[layout]
    if interpreter(package) is not None:
        return None
    return f"{engine} runs {layout} checkpoints with the package {package}, which is not installed here: {_INSTALL.get(package, f'pip install {package}')}"


def run(layout: str, folder: Path, prompts: Sequence[Sequence[int]], modules: Sequence[str], vocab_size: int, parameters: int, *, engine: str | None = None) -> Executed:
    """Load and run a checkpoint.

    Args:
        layout: a name of `verify_checkpoint.FORMATS`.
        folder: the checkpoint.
        prompts: token ids, each prompt at least one.
        modules: names of quantized linears, whose weights are hashed.
        vocab_size: V.
        parameters: of the model; the engine holds all of them in fp32.
        engine: another than the layout's own: `transformers` or `portable` (see checkpoint_adapter.py) in the same interpreter, or `vLLM`.

    Raises:
        MissingCapabilityError: the engine is not installed, did not answer in time, or needs more memory than is free.
        ModelError: it refuses the checkpoint.
    """
    reason = missing(layout)
    free = free_memory()
    if reason is None and 6 * parameters > free:  # fp32, and codes beside them
        reason = f"running it would take about {6 * parameters / 2**30:.1f} GiB, and {free / 2**30:.1f} are free"
    if reason is not None:
        raise MissingCapabilityError(reason)
    usual, package = _ENGINES[layout]
    engine = engine or usual
    python = foreign.interpreter("vllm", "vllm") if engine == "vLLM" else interpreter(package)
    if python is None:
        raise MissingCapabilityError("vLLM is not installed here: make vllm")
    request = {"engine": engine.lower(), "prompts": [list(map(int, p)) for p in prompts], "modules": list(modules)}
    adapter = Path(__file__).with_name(_ADAPTERS.get(engine, "checkpoint_adapter.py"))
    answer, data = foreign.ask(python, adapter, request, engine=engine, model=folder, timeout_s=_BASE_S + _PER_PROMPT_S * len(prompts))
    products = answer.get("products", [])
    sizes = [len(prompts) * vocab_size, *(rows * outputs for _, rows, _, outputs in products)]
    if data.size != sum(sizes):
        raise ModelError(f"{engine} gave {data.size} values for {folder.name} where {sum(sizes)} were asked for")
    logprobs, *made = torch.from_numpy(data).split(sizes)
    weights = {name: (str(dtype), str(digest)) for name, (dtype, digest) in answer["weights"].items()}
    probes = [(names, _probe(rows, inputs), y.view(rows, outputs)) for (names, rows, inputs, outputs), y in zip(products, made, strict=True)]
    return Executed("transformers" if engine == "portable" else engine, str(answer["version"]), logprobs.view(len(prompts), vocab_size), weights, answer["linears"], probes)


def _probe(rows: int, inputs: int) -> torch.Tensor:
    """What vllm_adapter.py gives to a linear."""
    return torch.from_numpy(np.random.default_rng(0).standard_normal((rows, inputs), dtype=np.float32))


def interpreter(package: str) -> Path | None:
    """The Python that has an engine's package; None if there is none."""
    if package == "gptqmodel":
        return foreign.interpreter(package, "gptqmodel")
    return Path(sys.executable) if importlib.util.find_spec(package) is not None else None
