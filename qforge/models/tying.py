"""An output head that is tied to the embedding, and quantized: whether both share one table of codes."""

from __future__ import annotations

from collections.abc import Mapping

from qforge.layouts.compressed_tensors import table_problem
from qforge.models.model import Model
from qforge.scheme import Scheme

HEAD = "lm_head"


def shared_table(model: Model, schemes: Mapping[str, Scheme]) -> str | None:
    """Module name of the embedding that holds the codes of the quantized head, too; None where the head is unquantized, not tied, or gets its own codes (`untied_because`)."""
    name = _table(model, schemes)
    return None if name is None or table_problem(schemes[HEAD]) is not None else name


def untied_because(model: Model, schemes: Mapping[str, Scheme]) -> str | None:
    """Why quantizing a tied head unties it, so that the embedding stays beside it as it is; None where it does not."""
    return None if _table(model, schemes) is None else table_problem(schemes[HEAD])


def _table(model: Model, schemes: Mapping[str, Scheme]) -> str | None:
    if HEAD not in schemes or not model.config.tie_word_embeddings:
        return None
    return next((n.removesuffix(".weight") for n in model.weights.names() if n.endswith("embed_tokens.weight")), None)
