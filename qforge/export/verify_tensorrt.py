"""A TensorRT export read back: the ONNX file that the engine was built from as any other, and, on the GPU that it was built for, the engine beside our runtime."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from qforge.engines.base import Scorer
from qforge.engines.tensorrt_build import ENGINE
from qforge.engines.tensorrt_runtime import TensorrtEngine
from qforge.errors import MissingCapabilityError
from qforge.export.agreement import agreement, next_token_logprobs
from qforge.export.verify_onnx import verify_onnx
from qforge.models.model import Model
from qforge.types import Verification


def verify_tensorrt(folder: Path, model: Model, scorer: Scorer, prompts: Sequence[Sequence[int]]) -> tuple[list[Verification], list[str]]:
    """Read an export back; arguments and answer as `verify.verify`."""
    done, left_out = verify_onnx(folder / "onnx", model, scorer, prompts)
    try:
        return [*done, verify_execution(folder, scorer, prompts)], left_out
    except MissingCapabilityError as e:
        return done, [*left_out, f"TensorRT built {ENGINE} from the ONNX file; {ENGINE} itself was not executed: {e}"]


def verify_execution(folder: Path, scorer: Scorer, prompts: Sequence[Sequence[int]]) -> Verification:
    """Divergence of the engine's next-token distributions from the scorer's.

    Raises:
        MissingCapabilityError: this machine cannot execute it.
        ModelError: TensorRT refuses the engine.
    """
    engine = TensorrtEngine(folder)
    kl, same_first, largest = agreement(next_token_logprobs(scorer, prompts), next_token_logprobs(engine, prompts))
    note = f"against {scorer.name}; {ENGINE} on {engine.gpu}; largest difference of a log-probability {largest:.2g}"
    return Verification(engine.name, engine.version, kl_mean=kl, top1_agreement=same_first, positions=len(prompts), note=note, executed=True)
