"""The model card (README.md) of a Hugging Face checkpoint: how it was made and what is known of its quality. No times and no paths, so that equal runs give equal bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from qforge.files import size_of, write_text
from qforge.types import Evaluation
from qforge.yaml_text import yaml_text

CARD = "README.md"
_WORST = 5


def write_card(folder: Path, layout: str, provenance: Mapping[str, Any], evaluation: Evaluation | None = None) -> None:
    """Write the card.

    Args:
        folder: of the checkpoint.
        layout: `compressed-tensors`, `gptq`, ...
        provenance: what qforge.json says; of another program's checkpoint it may be nearly empty.
        evaluation: of these integers, where it is known already.

    Raises:
        OutputError: it cannot be written.
    """
    write_text(folder / CARD, "\n".join([*_head(layout, provenance), *_recipe(folder, provenance), *_quality(provenance, evaluation)]) + "\n")


def _head(layout: str, provenance: Mapping[str, Any]) -> Iterator[str]:
    source = (provenance.get("model") or {}).get("source", "a model")
    yield yaml.safe_dump({"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["qforge", "quantized", layout]}, explicit_start=True, sort_keys=False) + "---"
    yield f"\n# {source}, quantized\n"
    yield f"Made by [qforge](https://pypi.org/project/qforge) {provenance.get('qforge_version', '')} from `{source}`; weights in {layout} layout."
    for adapter in provenance.get("adapters") or []:
        yield f"The LoRA adapter `{adapter.get('source')}` was merged into it first."


def _recipe(folder: Path, provenance: Mapping[str, Any]) -> Iterator[str]:
    if not provenance.get("quantize"):
        return
    yield "\n## Recipe\n\n```yaml"
    yield yaml_text({"quantize": provenance["quantize"]}).rstrip() + "\n```\n"
    calibration = provenance.get("calibration") or {}
    if calibration.get("tokens"):
        yield f"Calibrated on {calibration['tokens']:,} tokens; the text's SHA-256 is in qforge.json beside the artifact.\n"
    counts = Counter(layer["scheme"] or "as it was" for layer in provenance.get("layers") or [])
    quantized, parameters = any(layer["scheme"] for layer in provenance.get("layers") or []), (provenance.get("model") or {}).get("parameters")
    figures = [f"{provenance['bits_per_weight']:.3f} bits per weight in the quantized layers, scales counted"] if quantized and provenance.get("bits_per_weight") else []
    stored = sum(size_of(p) for p in folder.glob("*.safetensors"))
    figures += [f"{8 * stored / parameters:.3f} bits per parameter of the whole model"] if stored and parameters else []
    schemes = f"Linear layers by scheme: {', '.join(f'{n} {scheme}' for scheme, n in counts.most_common())}." if quantized else "No layer is quantized."
    yield " ".join([*([", ".join(figures) + "."] if figures else []), schemes])


def _quality(provenance: Mapping[str, Any], evaluation: Evaluation | None) -> Iterator[str]:
    layers = [layer for layer in provenance.get("layers") or [] if layer.get("relative_error") is not None]
    if not layers and evaluation is None:
        return
    yield "\n## Quality\n"
    if evaluation is not None:
        yield from _figures(evaluation)
    if layers:
        mean = sum(layer["relative_error"] for layer in layers) / len(layers)
        worst = sorted(layers, key=lambda layer: -layer["relative_error"])[:_WORST]
        named = ", ".join(f"`{layer['name']}` ({layer['relative_error']:.4f})" for layer in worst)
        yield f"Relative error of the weights: {mean:.4f} on average; largest in {named}."


def _figures(evaluation: Evaluation) -> Iterator[str]:
    yield f"Measured with qforge on {evaluation.tokens:,} tokens (SHA-256 of the text {evaluation.text_sha256[:16]}...), beside the unquantized model:\n"
    yield "| figure | value |\n|---|---|"
    yield f"| perplexity | {evaluation.candidate['perplexity']:.3f} |"
    if evaluation.reference is not None:
        yield f"| perplexity of the unquantized model | {evaluation.reference['perplexity']:.3f} |"
    for name, value in (("mean KL divergence, nats per token", evaluation.kl_mean), ("same most likely token", evaluation.top1_agreement)):
        if value is not None:
            yield f"| {name} | {value:.4f} |"
    yield ""
