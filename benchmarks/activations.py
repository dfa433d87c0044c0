"""What does rounding of activations, or of keys and values, cost? Perplexity, divergence and the largest difference of logits against fp32.

Against the fp32 product over the same integers, and a cache in fp32, on the runtime.

python benchmarks/activations.py MODEL --text FILE [--window N] [--windows N] [--kv-cache KIND]
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch

from qforge.runtime import LLM


def logits(model: str, text: str, window: int, windows: int, activations: str, kv_cache: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits `[T, V]` and the tokens that came `[T]`."""
    llm = LLM(model, activations=activations, kv_cache=kv_cache)
    ids = llm.tokenizer.encode(text)
    cut = [ids[i * window : (i + 1) * window] for i in range(min(windows, len(ids) // window))]
    print(f"{activations}: {llm.kernels()}, keys and values in {kv_cache}, {len(cut)} windows")
    return torch.cat(list(llm.score(cut))), torch.cat([torch.tensor(c[1:]) for c in cut])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--kv-cache", default="fp32", help="but for what is compared with, which has fp32")
    args = parser.parse_args()
    text = args.text.read_text()[: args.window * args.windows * 8]
    exact, came = logits(args.model, text, args.window, args.windows, "fp", "fp32")
    p = exact.log_softmax(-1)
    nll = torch.nn.functional.cross_entropy(exact, came)
    for activations in ("int16", "bf16", "int8") if args.kv_cache == "fp32" else ("fp", "int8"):
        ours, _ = logits(args.model, text, args.window, args.windows, activations, args.kv_cache)
        ratio = math.exp(torch.nn.functional.cross_entropy(ours, came) - nll)
        kl = (p.exp() * (p - ours.log_softmax(-1))).sum(-1).mean()
        same = (ours.argmax(-1) == exact.argmax(-1)).double().mean()
        print(f"{activations}: perplexity {ratio - 1:+.1e}, KL {kl:.1e}, top-1 agreement {same:.4f}, logits off by {(ours - exact).abs().max():.1e} (deviation {exact.std():.1f})")


if __name__ == "__main__":
    main()
