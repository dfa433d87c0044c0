"""A recipe's model, opened in the three forms that a run knows."""

from __future__ import annotations

from pathlib import Path

from qforge.errors import RecipeError
from qforge.models.lora import with_adapters
from qforge.models.model import Model, open_model
from qforge.models.rotation import rotated
from qforge.recipe import Recipe


def open_models(recipe: Recipe) -> tuple[Model, Model, Model]:
    """The base model, the same with its adapters merged, and the form of that which is quantized: rotated, if the recipe says so.

    Raises:
        RecipeError: a revision of what has none.
        QforgeError: a model or an adapter cannot be read.
    """
    section = recipe.model
    if section.revision is not None and (section.source == "demo" or (recipe.folder / Path(section.source).expanduser()).exists()):
        what = "the demo comes with a package" if section.source == "demo" else f"{section.source} is a path on this machine"
        raise RecipeError(f"model.revision: {section.revision} is of a model of the hub, but {what}; remove it")
    base = open_model(section.source, folder=recipe.folder, revision=section.revision, dtype=section.dtype, trust_remote_code=section.trust_remote_code)
    merged = with_adapters(base, [(a.source, a.weight) for a in recipe.adapters], folder=recipe.folder)
    return base, merged, rotated(merged) if "rotate" in recipe.quantize.method else merged
