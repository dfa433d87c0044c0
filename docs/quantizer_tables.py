"""Tables of quantizers, from what `benchmarks/vs_quantizers.py --save` and `benchmarks/vs_eight_bits.py --save` left in benchmarks/results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

HEAD = "| | scheme | bits | KL divergence, 95 % | perplexity | same first token | seconds | peak MB |\n|---|---|---|---|---|---|---|---|"
EIGHT_HEAD = "| | scheme | KL divergence, 95 % | perplexity, ratio | same first token | seconds |\n|---|---|---|---|---|---|"
TOOLS = {"llmcompressor": "llm-compressor", "gptqmodel": "GPTQModel", "autoround": "AutoRound"}
METHODS = {
    "rtn": "plain rounding",
    "hqq": "HQQ",
    "nf4": "NF4",
    "gptq": "GPTQ",
    "gptq_static": "GPTQ, static act-order",
    "gptq_act": "GPTQ, act-order",
    "gptq_gar": "GPTQ, group-aware order",
    "awq": "AWQ",
    "smoothquant": "SmoothQuant",
    "smoothquant+gptq": "SmoothQuant, GPTQ",
}


def quantizers(results: dict[str, dict[str, Any]]) -> str:
    """Four bits and fewer: a table for each result."""
    return "\n\n".join(_section(found, HEAD, _line) for found in results.values())


def eight_bits(results: dict[str, dict[str, Any]]) -> str:
    """Both sides rounded to eight bits: a table for each result."""
    return "\n\n".join(_section(found, EIGHT_HEAD, _eight_bits_line) for found in results.values())


def _section(found: dict[str, Any], head: str, line: Callable[[dict[str, Any]], str]) -> str:
    model, seen, held_out, machine = found["model"], found["calibration"], found["evaluation"], found["environment"]
    name = " with ".join(filter(None, [model["name"], model["adapter"]]))
    tokens = f"{seen['samples']} x {seen['length']} calibration tokens, {held_out['tokens']:,} evaluated"
    said = f"**{name}** (perplexity {found['rows'][0]['original']:.3f}; {tokens}; {found['date']}, "
    lines = [line(row) for row in sorted(found["rows"], key=lambda row: float(row["kl"]))]
    return "\n".join([f"{said}{machine['cores']} cores of an {machine['cpu']}):", "", head, *lines])


def _line(row: dict[str, Any]) -> str:
    low, high = row["kl_ci95"]
    figures = f"{row['scheme']} | {row['bits']:.2f} | {row['kl']:.4f} ({low:.4f} to {high:.4f}) | {row['perplexity']:.3f} | {100 * row['top1']:.1f} %"
    return f"| {_name(row)} | {figures} | {row['seconds']:.1f} | {row['mb_peak']} |"


def _eight_bits_line(row: dict[str, Any]) -> str:
    (low, high), ratio = row["kl_ci95"], row["perplexity"] / row["original"]
    figures = f"{row['scheme']} | {row['kl']:.4f} ({low:.4f} to {high:.4f}) | {row['perplexity']:.3f}, {ratio:.4f} | {100 * row['top1']:.1f} %"
    return f"| {_name(row)} | {figures} | {row['seconds']:.1f} |"


def _option(name: str, value: str) -> str:
    return f"{name.replace('_', ' ')}={value.lower() if value in ('True', 'False') else value}"


def _name(row: dict[str, Any]) -> str:
    tool, method = row["tool"], row["method"]
    if tool == "ours":
        _, *options = row.get("name", "").split(" ")
        chain = f"[{method.replace('+', ', ')}]" if "+" in method else method
        return ", ".join([f"**qforge** `{chain}`", *(_option(*option.split("=")) for option in options)])
    if tool == "autoround":
        return f"AutoRound, {method} iterations"
    return METHODS[method] if tool == "simple" else f"{TOOLS[tool]} {METHODS[method]}"
