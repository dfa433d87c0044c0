"""The recipe: one YAML file that says what to quantize, how, into which formats, and what counts as good."""

from __future__ import annotations

from qforge.recipe.limits import FIGURES, Budget, Limit, parse_budget, parse_gate, parse_limit
from qforge.recipe.load import load_members, load_recipe
from qforge.recipe.model import FORMATS, METHODS, TRANSFORMS, Recipe, json_schema

__all__ = ["FIGURES", "FORMATS", "METHODS", "TRANSFORMS", "Budget", "Limit", "Recipe", "json_schema", "load_members", "load_recipe", "parse_budget", "parse_gate", "parse_limit"]
