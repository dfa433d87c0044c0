"""What a calibrated run's time is held against: what GPTQ cannot do without, at the rate at which this machine multiplies, and a pass of the calibration text through the model.

The first is one pass through the blocks' linears, and X^T X of what they take. Counted as whole fp32 products by PyTorch; attention, solving, norms and writing are left out. (Half
of X^T X is the other half mirrored, and products in bf16 are faster: a tool can be below this.)
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from transformers import AutoModel
from transformers.utils.logging import disable_progress_bar

from qforge.models.blocks import BlockModel
from qforge.models.model import Model
from qforge.models.sharing import find_followers

WIDTH = 2048
ROUNDS = 5
SEQUENCES = 8  # that are passed through the model to tell how long all of them take


def multiplications(model: Model, tokens: int) -> float:
    """Multiply-adds of the floor, for so many tokens; all blocks are taken to be like the first."""
    blocks = BlockModel(model)
    (hidden,) = blocks.embed([torch.arange(1, 9)[None]])
    with blocks.block(0) as module:
        linears = blocks.linears(0)
        following = find_followers(linears, lambda x: blocks.run(0, module, x), hidden)
        shared = {name for names in following.values() for name in names}
        each = sum(m.in_features * m.out_features + (0 if name in shared else m.in_features**2) for name, m in linears.items())
    return float(tokens) * each * blocks.num_blocks


def rate() -> float:
    """Multiply-adds a second of an fp32 product, now: the median of a few."""
    a, b = torch.ones(WIDTH, WIDTH), torch.ones(WIDTH, WIDTH)
    torch.mm(a, b)
    seconds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - start)
    return float(WIDTH**3 / sorted(seconds)[ROUNDS // 2])


@torch.inference_mode()
def forward_seconds(folder: Path, ids: torch.Tensor) -> float:
    """Of one pass of transformers' fp32 model, without its head, over ids `[B, T]`, one sequence at a time, now: told from the first few."""
    disable_progress_bar()
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    model(input_ids=ids[:1], use_cache=False)
    start = time.perf_counter()
    for sequence in ids[:SEQUENCES]:
        model(input_ids=sequence[None], use_cache=False)
    return (time.perf_counter() - start) * len(ids) / len(ids[:SEQUENCES])
