"""After a run whose gate on quality failed: measure where the divergence comes from (weights, settings, the engine), and put it into results.json and the reports."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from qforge import report
from qforge.engines.transformers_engine import TransformersEngine
from qforge.files import lock
from qforge.models.lora import with_adapters
from qforge.models.model import Model, open_model
from qforge.recipe import Recipe
from qforge.recipe.limits import COMPARED
from qforge.search.blame import SMALL, TOKENS, blame, divergence, spread
from qforge.stages.evidence import engine_for
from qforge.stages.journal import Journal, key
from qforge.text.documents import documents
from qforge.text.windows import evaluation_windows
from qforge.types import Blame, BlameResult, Results


def wanted(results: Results) -> bool:
    """Whether a gate on what is measured beside the original failed (as an error)."""
    return any(not g.passed and g.on == "error" and g.name in COMPARED for g in results.gates)


def explain(recipe: Recipe, results: Results, out: Path) -> Results:
    """The results with `blame`; results.json and the reports in `out` are written anew. What was measured is kept in the journal.

    Raises:
        QforgeError: the models or the text cannot be read any more.
    """
    assert recipe.evaluate is not None
    section = recipe.model
    original = open_model(section.source, folder=recipe.folder, revision=section.revision, dtype=section.dtype, trust_remote_code=section.trust_remote_code)
    if recipe.adapters:
        original = with_adapters(original, [(a.source, a.weight) for a in recipe.adapters], folder=recipe.folder)
    tokenizer = original.tokenizer()
    read = documents(recipe.evaluate.text, role="evaluation", folder=recipe.folder, tokenizer=tokenizer)
    windows = evaluation_windows(read, tokenizer, recipe.evaluate.window, context=getattr(original.config, "max_position_embeddings", None))
    with lock(out):
        journal = Journal(out / "work")
        engine = {"engine": recipe.evaluate.engine, "activations": recipe.run.activations}
        name = key("blame", form=3, model=results.model["sha256"], artifact=results.artifact["sha256"], text=windows.sha256, protocol=windows.protocol, **engine)
        found = journal.load(name, count=False)
        made = _measured(recipe, original, open_model(str(out / "model"), trust_remote_code=section.trust_remote_code), windows.ids) if found is None else blame_from(found[1])
        if found is None:
            journal.save(name, {"done": torch.ones(1)}, asdict(made), count=False)
        explained = replace(results, blame=made)
        report.write(explained.to_json(), out, list(recipe.report.formats))
    return explained


def _measured(recipe: Recipe, original: Model, quantized: Model, windows: list[list[int]]) -> Blame:
    """What the parts' weights are to blame for, and in front of that the engine, where it diverges further than transformers' code over the same files."""
    assert recipe.evaluate is not None
    made = blame(original, quantized, windows)
    engine = engine_for(quantized, recipe.evaluate.engine, recipe.run.activations)
    if isinstance(engine, TransformersEngine):
        return made
    whole = divergence(engine, TransformersEngine(original), spread(windows, TOKENS))
    returned = 1 - made.kl_mean / whole if whole > 0 else 0.0
    if returned < SMALL:
        return made
    title = f"the engine ({engine.name} {engine.version})"
    words = f"{title}: KL divergence {whole:.4g}, and {made.kl_mean:.4g} where transformers' code computes the same files ({returned:.0%} goes); of what is left: {made.words}"
    return replace(made, parts=[BlameResult(title, made.kl_mean, returned), *made.parts], words=words)


def blame_from(value: dict[str, Any]) -> Blame:
    """A Blame made of its JSON form in results.json."""
    return Blame(**{**value, **{name: [BlameResult(**p) for p in value[name]] for name in ("parts", "groups")}})
