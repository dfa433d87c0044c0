"""What a tool's libraries alone take: resident memory of its interpreter after it has imported what a run imports, with no model read."""

from __future__ import annotations

import subprocess

LLAMA = "import torch, transformers.models.llama.modeling_llama, transformers.models.llama.tokenization_llama"
IMPORTS = {
    "ours": "import qforge.pipeline, qforge.ops.native_module, greenlet",
    "llmcompressor": "import datasets, llmcompressor, llmcompressor.modifiers.quantization, llmcompressor.modifiers.transform.awq, compressed_tensors.quantization",
    "gptqmodel": "import gptqmodel",
    "autoround": "import auto_round",
    "simple": "pass",
}
RESIDENT = "print(next(int(line.split()[1]) for line in open('/proc/self/status') if line.startswith('VmRSS')) // 1024)"


def resident(python: str, tool: str) -> int:
    """MiB, of a process of its own.

    Raises:
        RuntimeError: an import failed.
    """
    done = subprocess.run([python, "-c", "\n".join([LLAMA, IMPORTS[tool], RESIDENT])], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"the libraries of {tool} cannot be imported: {done.stderr.strip()[-300:]}")
    return int(done.stdout.split()[-1])
