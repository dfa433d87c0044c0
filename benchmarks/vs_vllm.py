"""qforge's runtime beside vLLM's CPU build: the load of vs_llama_cpp.py, both in turn, in processes of their own.

    make vllm ENGINES=DIR
    python benchmarks/vs_vllm.py ARTIFACT --other CHECKPOINT --python DIR/vllm/bin/python [--rounds 3] [--save NAME]

CHECKPOINT is a Hugging Face model of the same shape, as it was or quantized to what vLLM's CPU kernels take: whichever it is faster with. Activations, keys, values and
weights that are not quantized are bf16 there. Only speed is compared.
"""

from __future__ import annotations

from vs_openvino import Other, main

VLLM = Other("vLLM (CPU)", "vs_vllm", "vllm_speed.py", "chunked prefill of 512 tokens, 32 sequences; keys and values in 8 bits by ours")

if __name__ == "__main__":
    raise SystemExit(main(VLLM, __doc__))
