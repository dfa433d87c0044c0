"""What does rounding of activations, or of keys and values, cost? Perplexity, divergence and the largest difference of logits against fp32.

Against the fp32 product over the same integers, and a cache in fp32, on the runtime. Both are scored in step, 128 positions of logits of each at a time.

python benchmarks/activations.py MODEL --text FILE [--window N] [--windows N] [--kv-cache KIND] [--save NAME]
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from saved import machine, place, save, told
from vs_llama_cpp import weights_of

from qforge import __version__
from qforge.evaluate.divergence import evaluate
from qforge.runtime import LLM
from qforge.text.windows import EvaluationWindows


class Candidate:
    """A `Scorer` over an `LLM` that keeps its last piece of logits."""

    version = __version__

    def __init__(self, model: str, activations: str, kv_cache: str) -> None:
        self.llm = LLM(model, activations=activations, kv_cache=kv_cache, max_num_seqs=1)
        self.name = f"{activations}, keys and values in {kv_cache}"
        self.last = torch.empty(0)

    def score(self, windows: list[list[int]]) -> Iterator[torch.Tensor]:
        """See `Scorer.score`."""
        for logits in self.llm.score(windows):
            self.last = logits
            yield logits


class Reference:
    """The same model in fp32, which notes how far a candidate's logits are from its own: each piece comes after the candidate's."""

    name, version = "fp32", __version__

    def __init__(self, llm: LLM, candidate: Candidate) -> None:
        self._llm, self._candidate = llm, candidate
        self.off = self._sum = self._squares = 0.0
        self._count = 0

    def score(self, windows: list[list[int]]) -> Iterator[torch.Tensor]:
        """See `Scorer.score`."""
        for logits in self._llm.score(windows):
            self.off = max(self.off, float((logits - self._candidate.last).abs().max()))
            self._sum += float(logits.sum(dtype=torch.float64))
            self._squares += float(logits.square().sum(dtype=torch.float64))
            self._count += logits.numel()
            yield logits

    @property
    def deviation(self) -> float:
        """Standard deviation of all logits."""
        return float((self._squares / self._count - (self._sum / self._count) ** 2) ** 0.5)


def cut(llm: LLM, text: str, window: int, windows: int) -> EvaluationWindows:
    """The first whole windows of a text; each counts as a document, so that intervals are over windows."""
    ids = llm.tokenizer.encode(text)
    found = [ids[i * window : (i + 1) * window] for i in range(min(windows, len(ids) // window))]
    return EvaluationWindows(found, list(range(len(found))), len(found) * (window - 1), hashlib.sha256(text.encode()).hexdigest(), {"window": window}, None)


def row(model: str, exact: LLM, windows: EvaluationWindows, activations: str, kv_cache: str) -> dict[str, Any]:
    """One line of the table."""
    candidate = Candidate(model, activations, kv_cache)
    reference = Reference(exact, candidate)
    found = evaluate(candidate, reference, windows)
    figures = ("perplexity_ratio", "perplexity_ratio_ci95", "kl_mean", "kl_mean_ci95", "top1_agreement", "top1_agreement_ci95")
    return {
        "activations": activations, "kv_cache": kv_cache, "kernels": candidate.llm.kernels(), **{name: getattr(found, name) for name in figures},
        "perplexity": found.candidate["perplexity"], "perplexity_reference": found.reference and found.reference["perplexity"],
        "logits_off": reference.off, "logits_deviation": reference.deviation,
    }  # fmt: skip


def page(content: dict[str, Any]) -> str:
    """The table."""
    where, rows = content["environment"], content["rows"]
    head = [
        "# What rounding activations, keys and values costs", "", f"`{content['command']}`", "",
        f"{place(where)}; qforge {where['qforge']}, torch {where['torch']}. {content['weights']}; "
        f"{content['tokens']:,} tokens of {content['text']} in {content['windows']} windows of {content['window']}. Beside fp32 activations and an fp32 cache "
        f"(perplexity {rows[0]['perplexity_reference']:.3f}, logits deviate by {rows[0]['logits_deviation']:.1f}); intervals: 95 %, differences paired, over windows.", "",
        "| activations | keys and values | perplexity | KL divergence, nats | same first token | logits off by |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    return "\n".join(head + [line(r) for r in rows])


def line(row: dict[str, Any]) -> str:
    """One row; an interval is there from two windows on."""
    ratio, kl, same = (row[f"{name}_ci95"] for name in ("perplexity_ratio", "kl_mean", "top1_agreement"))
    cells = (
        f"{row['perplexity_ratio'] - 1:+.1e}" + (f" ({ratio[0] - 1:+.1e} to {ratio[1] - 1:+.1e})" if ratio else ""),
        f"{row['kl_mean']:.1e}" + (f" ({kl[0]:.1e} to {kl[1]:.1e})" if kl else ""),
        f"{row['top1_agreement']:.4f}" + (f" ({same[0]:.4f} to {same[1]:.4f})" if same else ""),
    )
    return f"| {row['activations']} | {row['kv_cache']} | {' | '.join(cells)} | {row['logits_off']:.1e} |"


def main() -> None:
    """Measure all kinds, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--kv-cache", default="fp32", help="but for what is compared with, which has fp32")
    parser.add_argument("--save", metavar="NAME", help="also write benchmarks/results/activations-NAME.json and .md")
    args = parser.parse_args()
    exact = LLM(args.model, activations="fp", kv_cache="fp32", max_num_seqs=1)
    windows = cut(exact, args.text.read_text()[: args.window * args.windows * 8], args.window, args.windows)
    kinds = ("int16", "bf16", "int8") if args.kv_cache == "fp32" else ("fp", "int8")
    content = {
        "command": told("activations"), "environment": machine(), "weights": weights_of(Path(args.model)), "text": args.text.name, "text_sha256": windows.sha256,
        "window": args.window, "windows": len(windows.ids), "tokens": windows.tokens, "rows": [row(args.model, exact, windows, kind, args.kv_cache) for kind in kinds],
    }  # fmt: skip
    text = page(content)
    print(text)
    if args.save:
        save("activations", args.save, content, text)


if __name__ == "__main__":
    main()
