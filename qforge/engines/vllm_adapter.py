"""Runs a checkpoint in vLLM on the CPU, by itself: a request file in, log-probabilities and a JSON answer out. Imports nothing of ours.

usage: python vllm_adapter.py REQUEST.json      (request and answer as in checkpoint_adapter.py)

`weights` stays empty, because vLLM packs them for its kernels when it loads them. Instead each of its linears is given 32 rows of standard normal values, alone. What it makes of
them follows the log-probabilities in the output, and `products` in the answer says for each whose weights it has (vLLM fuses some), and its size: [[module], rows, I, O].
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from importlib.metadata import version
from typing import IO, Any

if __name__ == "__main__":
    os.environ.update({"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"})

import numpy as np
import torch

ROWS = 32  # of a linear's probe


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Run the request."""
    from vllm import LLM, SamplingParams

    longest = max(map(len, request["prompts"])) + 1
    engine = LLM(request["model"], dtype="float32", enforce_eager=True, max_model_len=longest, max_num_seqs=1, max_logprobs=-1, skip_tokenizer_init=True, disable_log_stats=True)
    settings = SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1, detokenize=False)
    with open(request["output"], "wb") as out:
        for found in engine.generate([{"prompt_token_ids": p} for p in request["prompts"]], settings, use_tqdm=False):
            given = found.outputs[0].logprobs[0]
            row = np.full(len(given), -np.inf, dtype=np.float32)
            for token, value in given.items():
                row[token] = value.logprob
            row.tofile(out)
        products = [[names, *probed(linear, out)] for names, linear in fused(engine, request["modules"])]
    kinds = Counter(type(linear).__name__ for _, linear in fused(engine, request["modules"]))
    return {"version": version("vllm-cpu"), "weights": {}, "linears": kinds, "products": products}


def fused(engine: Any, modules: list[str]) -> list[tuple[list[str], Any]]:
    """vLLM's linears, each with the names of those that it holds, in the order of its outputs."""
    model = engine.llm_engine.model_executor.driver_worker.worker.model_runner.model
    parts = {part: whole for whole, held in model.packed_modules_mapping.items() for part in held}
    found: dict[str, list[str]] = {}
    for name in modules:
        parent, _, leaf = name.rpartition(".")
        found.setdefault(f"{parent}.{parts.get(leaf, leaf)}", []).append(name)
    order = {part: place for held in model.packed_modules_mapping.values() for place, part in enumerate(held)}
    return [(sorted(names, key=lambda n: order.get(n.rpartition(".")[2], 0)), model.get_submodule(whole)) for whole, names in found.items()]


def probed(linear: Any, out: IO[bytes]) -> tuple[int, int, int]:
    """Write what a linear makes of its probe; rows, inputs and outputs."""
    rows = np.random.default_rng(0).standard_normal((ROWS, linear.input_size), dtype=np.float32)
    product = linear.quant_method.apply(linear, torch.from_numpy(rows), None)
    product.float().numpy().tofile(out)
    return ROWS, linear.input_size, product.shape[1]


def main() -> None:
    """Answer one request."""
    with open(sys.argv[1], encoding="utf-8") as f:
        request = json.load(f)
    try:
        given = answer(request)
    except Exception as e:
        given = {"error": f"{type(e).__name__}: {e}"}
    print("\n" + json.dumps(given), flush=True)


if __name__ == "__main__":
    main()
