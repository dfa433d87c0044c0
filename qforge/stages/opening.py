"""A recipe's model, opened in the three forms that a run knows."""

from __future__ import annotations

from qforge.models.lora import with_adapters
from qforge.models.model import Model, open_model
from qforge.models.rotation import rotated
from qforge.recipe import Recipe


def open_models(recipe: Recipe) -> tuple[Model, Model, Model]:
    """The base model, the same with its adapters merged, and the form of that which is quantized: rotated, if the recipe says so."""
    section = recipe.model
    base = open_model(section.source, folder=recipe.folder, revision=section.revision, dtype=section.dtype, trust_remote_code=section.trust_remote_code)
    merged = with_adapters(base, [(a.source, a.weight) for a in recipe.adapters], folder=recipe.folder)
    return base, merged, rotated(merged) if "rotate" in recipe.quantize.method else merged
