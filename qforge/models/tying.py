"""An output head that is tied to the embedding, and quantized: whether both share one table of codes."""

from __future__ import annotations

from collections.abc import Mapping

from qforge.layouts.compressed_tensors import table_problem
from qforge.models.model import Model
from qforge.models.names import HEAD
from qforge.scheme import Scheme


def shared_table(model: Model, schemes: Mapping[str, Scheme]) -> str | None:
    """Module name of the embedding that holds the codes of the quantized head, too; None where the head is unquantized, not tied, or gets its own codes (`untied_because`)."""
    head = tied_head(model, schemes)
    return None if head is None or _problem(head, schemes) is not None else model.tied[f"{head}.weight"].removesuffix(".weight")


def untied_because(model: Model, schemes: Mapping[str, Scheme]) -> str | None:
    """Why quantizing a tied head unties it, so that the embedding stays beside it as it is; None where it does not."""
    head = tied_head(model, schemes)
    return None if head is None else _problem(head, schemes)


def tied_head(model: Model, schemes: Mapping[str, Scheme]) -> str | None:
    """Module name of a quantized head that is tied to the embedding; None where it is unquantized or not tied."""
    if not model.config.tie_word_embeddings:
        return None
    return next((name for tied in model.tied if (name := tied.removesuffix(".weight")) in schemes), None)


def _problem(head: str, schemes: Mapping[str, Scheme]) -> str | None:
    return f"it is called {head}, and only {HEAD} is known to share codes" if head != HEAD else table_problem(schemes[head])
