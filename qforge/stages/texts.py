"""The texts of a run: calibration sequences, evaluation windows, and the proof that they do not overlap."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from qforge.errors import DataError, UnsupportedError
from qforge.models.model import Model
from qforge.plan import Plan
from qforge.recipe import Recipe
from qforge.runtime import LLM, SamplingParams
from qforge.runtime.decoder import supports
from qforge.stages import importance
from qforge.stages.journal import Journal, key
from qforge.text.calibration import CalibrationSet, calibration_set, generated
from qforge.text.documents import Documents, documents, from_texts
from qforge.text.overlap import overlap
from qforge.text.windows import EvaluationWindows, evaluation_windows


@dataclass(frozen=True, slots=True)
class Texts:
    """What a run reads.

    Attributes:
        calibration: None for a method that needs none.
        evaluation: None when the recipe skips evaluation.
        described: what results.json says of the calibration.
        notes: what the user should know.
    """

    calibration: CalibrationSet | None
    evaluation: EvaluationWindows | None
    described: dict[str, Any] | None
    notes: tuple[str, ...]


def gather_texts(recipe: Recipe, model: Model, plan: Plan, journal: Journal | None) -> Texts:
    """Read both texts; refuse them when they overlap.

    Args:
        recipe: names the texts.
        model: gives tokenizer and context, and writes the `generated` text.
        plan: says whether calibration is needed.
        journal: keeps what the model wrote; None only checks (and then leaves `generated` out).

    Raises:
        DataError: a text is missing, empty, malformed, or both are the same.
    """
    tokenizer = model.tokenizer()
    context = getattr(model.config, "max_position_embeddings", None)
    read = evaluation = None
    notes: tuple[str, ...] = ()
    if recipe.evaluate is not None:
        read = documents(recipe.evaluate.text, role="evaluation", folder=recipe.folder, tokenizer=tokenizer)
        evaluation = evaluation_windows(read, tokenizer, recipe.evaluate.window, context=context)
        notes += evaluation.notes
    section = recipe.calibration
    calibrated = bool(plan.needs) or importance.wanted(recipe)
    reason = supports(model.spec) if calibrated and section.source == "generated" else None
    if reason is not None:
        raise UnsupportedError(f"calibration.source: generated needs the built-in runtime, which cannot run this model: {reason}; name a text file, or builtin")
    if not calibrated or (section.source == "generated" and journal is None):
        return Texts(None, evaluation, None, notes)
    if section.source == "generated":
        assert journal is not None
        source = _generated(recipe, model, journal)
    else:
        source = documents(section.source, role="calibration", folder=recipe.folder, tokenizer=tokenizer)
    chosen = calibration_set(source, tokenizer, samples=section.samples, sequence_length=section.sequence_length, seed=section.seed, context=context)
    described: dict[str, Any] = {
        "source": section.source,
        "text_sha256": chosen.text_sha256,
        "sha256": chosen.sha256,
        "sequences": int(chosen.ids.shape[0]),
        "sequence_length": int(chosen.ids.shape[1]),
        "tokens": chosen.tokens,
        "kept": chosen.kept,
        "dropped": chosen.dropped,
        "seed": section.seed,
    }
    notes += chosen.notes
    if read is not None:
        shared = overlap(source, read)
        refusal = shared.refusal()
        if refusal is not None:
            raise DataError(refusal)
        warning = shared.warning()
        notes += (warning,) if warning else ()
        described["overlap"] = asdict(shared)
    return Texts(chosen, evaluation, described, notes)


def _generated(recipe: Recipe, model: Model, journal: Journal) -> Documents:
    """Text that the model writes itself, by its own runtime, sampled at temperature 1."""
    section = recipe.calibration
    name = key("generated", model=model.fingerprint(), samples=section.samples, length=section.sequence_length, seed=section.seed)
    found = journal.load(name)
    if found is not None:
        return from_texts("generated", found[1])

    def write(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        outputs = LLM(model).generate(prompts, [SamplingParams(max_tokens=num_tokens, temperature=1.0, seed=section.seed + i) for i in range(len(prompts))])
        return [o.token_ids for o in outputs]

    written = generated(write, model.tokenizer(), samples=section.samples, sequence_length=section.sequence_length, seed=section.seed)
    journal.save(name, {"count": torch.tensor(len(written.texts))}, list(written.texts))
    return written
