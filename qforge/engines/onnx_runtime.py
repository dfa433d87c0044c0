"""ONNX Runtime as a foreign engine: scores token windows with an exported decoder, through its key-value cache; and onnxruntime-genai, which generates from it.

Letters: B batch, S new tokens, P tokens in the cache, V vocabulary.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from qforge.engines.base import chunks
from qforge.errors import MissingCapabilityError, ModelError, first_line
from qforge.machine_limits import default_threads

NAME, GENAI = "onnxruntime", "onnxruntime-genai"
MODEL = "model.onnx"
# DequantizeLinear before MatMul becomes MatMulNBits, which rounds activations to 8 bits unless it is told to compute in fp32.
EXACT = {"session.qdq_matmulnbits_accuracy_level": "1"}
# With it on, 1.31 fuses FP8 codes into an operator for integers and then refuses its own graph.
UNFUSED = {"session.disable_quant_qdq": "1"}


def missing() -> str | None:
    """Why ONNX Runtime cannot run here, and what to do; None if it can."""
    return None if importlib.util.find_spec("onnxruntime") is not None else "onnxruntime is not installed here: pip install 'qforge[onnx]'"


def genai_missing() -> str | None:
    """Why onnxruntime-genai cannot run here, and what to do; None if it can."""
    return None if importlib.util.find_spec("onnxruntime_genai") is not None else f"{GENAI} is not installed here: pip install 'qforge[genai]'"


def session(model: str | bytes, entries: Mapping[str, str] = MappingProxyType({}), threads: int | None = None, *, optimized: bool = True) -> Any:
    """A session on the CPU, of a file or of a model's bytes.

    Raises:
        MissingCapabilityError: onnxruntime is not installed.
        ModelError: it refuses the model.
    """
    reason = missing()
    if reason is not None:
        raise MissingCapabilityError(reason)
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if not optimized:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = threads or default_threads()
    for key, value in {"session.intra_op.allow_spinning": "0", **entries}.items():
        options.add_session_config_entry(key, value)
    try:
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as e:  # its errors have no common base but Exception
        raise ModelError(f"onnxruntime refuses {model if isinstance(model, str) else 'a part of the model'}: {first_line(e)}") from e


class OnnxRuntimeEngine:
    """A `Scorer` over the folder of an ONNX export.

    Raises:
        MissingCapabilityError: onnxruntime is not installed.
        ModelError: it refuses the file.
    """

    name = NAME

    def __init__(self, folder: Path, *, threads: int | None = None) -> None:
        self._session = session(str(folder / MODEL), EXACT, threads) if not _rounds_to_fp8(folder) else session(str(folder / MODEL), EXACT | UNFUSED, threads)
        self.version = version(NAME)
        self.inputs: dict[str, Any] = {i.name: i for i in self._session.get_inputs()}

    def score(self, windows: list[list[int]]) -> Iterator[torch.Tensor]:
        """See `Scorer.score`."""
        for window in windows:
            cache: Sequence[np.ndarray] = ()
            for start, stop in chunks(len(window)):
                logits, cache = self.step(np.array([window[start:stop]]), np.ones((1, stop), np.int64), cache)
                yield torch.from_numpy(logits[0])

    def step(self, tokens: np.ndarray, mask: np.ndarray, cache: Sequence[np.ndarray] = (), positions: np.ndarray | None = None) -> tuple[np.ndarray, list[np.ndarray]]:
        """One call of the graph.

        Args:
            tokens: `[B, S]` int64.
            mask: `[B, P + S]` int64.
            cache: what the call before returned; empty at first.
            positions: `[B, S]` of the new tokens; None counts on. A graph without this input ignores them.

        Returns:
            fp32 logits `[B, S, V]` and the cache, two arrays a layer.
        """
        past = mask.shape[1] - tokens.shape[1]
        feeds = {"input_ids": tokens.astype(np.int64), "attention_mask": mask}
        if "position_ids" in self.inputs:
            feeds["position_ids"] = np.tile(np.arange(past, mask.shape[1]), (len(tokens), 1)) if positions is None else positions
        names = [n for n in self.inputs if n.startswith("past_key_values.")]
        feeds |= dict(zip(names, cache or (self._empty(n, len(tokens)) for n in names), strict=True))
        logits, *present = self._session.run(None, feeds)
        return logits, present

    def _empty(self, name: str, batch: int) -> np.ndarray:
        _, heads, _, size = self.inputs[name].shape
        return np.zeros((batch, heads, 0, size), np.float16 if "float16" in self.inputs[name].type else np.float32)


def _rounds_to_fp8(folder: Path) -> bool:
    import onnx

    try:
        model = onnx.load(str(folder / MODEL), load_external_data=False)
    except Exception as e:  # protobuf's own kinds
        raise ModelError(f"{folder / MODEL} is no ONNX model, or damaged: {' '.join(str(e).split())[:200]}") from e
    kinds = {p.key: p.value for p in model.metadata_props}
    return "+fp8" in kinds.get("qforge.schemes", "")


def greedy(folder: Path, prompt: Sequence[int], count: int) -> list[int]:
    """Up to `count` tokens that onnxruntime-genai generates greedily after a prompt; fewer where the model ends its text.

    Raises:
        MissingCapabilityError: onnxruntime-genai is not installed.
        ModelError: it refuses the folder.
    """
    with _readable_genai(folder) as model:
        generator = _generator(model, prompt, count)
        while not generator.is_done():
            generator.generate_next_token()
        return [int(t) for t in generator.get_sequence(0)][len(prompt) :]


def genai_logprobs(folder: Path, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    """fp32 log-probabilities `[len(prompts), V]` of the token after each prompt, by onnxruntime-genai.

    Raises:
        MissingCapabilityError: onnxruntime-genai is not installed.
        ModelError: it refuses the folder.
    """
    with _readable_genai(folder) as model:
        rows = [torch.from_numpy(np.array(_generator(model, p, 1).get_logits(), dtype=np.float32)).reshape(-1) for p in prompts]
    return torch.log_softmax(torch.stack(rows), -1)


def _generator(model: Any, prompt: Sequence[int], count: int) -> Any:
    import onnxruntime_genai

    params = onnxruntime_genai.GeneratorParams(model)
    params.set_search_options(max_length=len(prompt) + count, do_sample=False, batch_size=1)
    generator = onnxruntime_genai.Generator(model, params)
    generator.append_tokens(np.array(prompt, dtype=np.int32))
    return generator


@contextlib.contextmanager
def _readable_genai(folder: Path) -> Iterator[Any]:
    reason = genai_missing()
    if reason is not None:
        raise MissingCapabilityError(reason)
    import onnxruntime_genai

    try:
        yield onnxruntime_genai.Model(str(folder))
    except Exception as e:  # its errors are plain RuntimeErrors and Exceptions
        raise ModelError(f"onnxruntime-genai cannot run {folder.name}: {first_line(e)}") from e
