"""The texts of a run: calibration sequences, evaluation windows, and the proof that they do not overlap."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from qforge.errors import DataError, UnsupportedError
from qforge.models.model import Model
from qforge.plan import Plan
from qforge.recipe import Recipe
from qforge.runtime import LLM, SamplingParams
from qforge.runtime.decoder import supports
from qforge.stages import importance
from qforge.stages.journal import Journal, key
from qforge.text.calibration import CalibrationSet, Writer, calibration_set, generated, with_generated
from qforge.text.documents import Documents, check_named, documents, from_texts
from qforge.text.likeness import likeness
from qforge.text.overlap import overlap
from qforge.text.windows import EvaluationWindows, evaluation_windows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOGETHER = 128  # sequences that are written at once: every step reads all weights


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
        _check_reach(recipe.evaluate.engine, model, evaluation)
        _check_bytes(recipe, evaluation)
        notes += evaluation.notes
    section = recipe.calibration
    calibrated = bool(plan.needs) or importance.wanted(recipe)
    writes = section.source == "generated" or section.generated > 0
    if section.source != "generated":
        check_named(section.source, recipe.folder)  # also where nothing reads it: a name that is wrong is a mistake
    reason = supports(model.spec) if calibrated and writes else None
    if reason is not None:
        raise UnsupportedError(f"calibration text that the model generates needs the built-in runtime, which cannot run this model: {reason}; name a text file, or builtin")
    if not calibrated or (section.source == "generated" and journal is None):
        return Texts(None, evaluation, None, notes)
    if section.source == "generated":
        assert journal is not None
        source = _generated(recipe, model, journal)
    else:
        source = documents(section.source, role="calibration", folder=recipe.folder, tokenizer=tokenizer)
    chosen = calibration_set(source, tokenizer, samples=section.samples, sequence_length=section.sequence_length, seed=section.seed, context=context)
    sampled = chosen.sha256
    if section.generated and journal is not None:
        chosen = _lengthened(recipe, model, journal, chosen)
    described: dict[str, Any] = {
        "source": section.source,
        "text_sha256": chosen.text_sha256,
        "sampled_sha256": sampled,
        "sha256": chosen.sha256,
        "sequences": int(chosen.ids.shape[0]),
        "sequence_length": int(chosen.ids.shape[1]),
        "tokens": chosen.tokens,
        "kept": chosen.kept,
        "dropped": chosen.dropped,
        "seed": section.seed,
    }
    notes += chosen.notes
    if read is not None and evaluation is not None:
        compared, warnings = _compared(source, chosen, read, evaluation, tokenizer)
        described |= compared
        notes += warnings
    return Texts(chosen, evaluation, described, notes)


def _compared(
    source: Documents, chosen: CalibrationSet, read: Documents, evaluation: EvaluationWindows, tokenizer: PreTrainedTokenizerBase
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What calibration and evaluation share, and how much they are alike, with warnings.

    Raises:
        DataError: they share too much.
    """
    shared = overlap(source, read)
    refusal = shared.refusal()
    if refusal is not None:
        raise DataError(refusal)
    like = likeness(source.source, *(_read_back(ids, tokenizer) for ids in (chosen.ids.tolist(), evaluation.ids)))
    return {"overlap": asdict(shared), "likeness": asdict(like)}, tuple(warning for warning in (shared.warning(), like.warning) if warning)


def _read_back(windows: list[list[int]], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """What of a text is really read, as text."""
    return [str(t) for t in tokenizer.batch_decode(windows, skip_special_tokens=True)]


def _check_reach(engine: str, model: Model, windows: EvaluationWindows) -> None:
    """Before any work: the runtime may compute shorter sequences than a model's context says."""
    longest, spec = max(map(len, windows.ids), default=0), model.spec
    if engine != "transformers" and spec is not None and supports(spec) is None and longest > spec.max_positions:
        raise DataError(f"evaluate.window: windows have {longest} tokens, and the built-in runtime computes {spec.max_positions}{spec.beyond}: use engine: transformers")


def _check_bytes(recipe: Recipe, windows: EvaluationWindows) -> None:
    """Before any work: bits per byte are measured where the tokenizer tells which text each token stands for."""
    gate = recipe.gates.get("bits_per_byte")
    if gate is not None and gate.on != "off" and windows.bytes is None:
        raise DataError("gates.bits_per_byte: this model's tokenizer does not tell which bytes of the text its tokens stand for, so that it cannot be measured; use perplexity")


def _generated(recipe: Recipe, model: Model, journal: Journal) -> Documents:
    """Text that the model writes itself."""
    section = recipe.calibration
    name = key("generated", model=model.fingerprint(), samples=section.samples, length=section.sequence_length, seed=section.seed)
    found = journal.load(name)
    if found is not None:
        return from_texts("generated", found[1])

    written = generated(_writer(model, section.seed), model.tokenizer(), samples=section.samples, sequence_length=section.sequence_length, seed=section.seed)
    journal.save(name, {"count": torch.tensor(len(written.texts))}, list(written.texts))
    return written


def _lengthened(recipe: Recipe, model: Model, journal: Journal, chosen: CalibrationSet) -> CalibrationSet:
    """`calibration.generated` sequences more."""
    section = recipe.calibration
    name = key("lengthened", model=model.fingerprint(), calibration=chosen.sha256, more=section.generated, seed=section.seed)
    found = journal.load(name)
    if found is not None:
        return replace(chosen, ids=found[0]["ids"], tokens=found[0]["ids"].numel(), sha256=found[1])
    longer = with_generated(chosen, _writer(model, section.seed, ignore_eos=True), more=section.generated)
    journal.save(name, {"ids": longer.ids}, longer.sha256)
    return longer


def _writer(model: Model, seed: int, *, ignore_eos: bool = False) -> Writer:
    """The model's own continuations, by its own runtime, sampled at temperature 1."""

    def write(prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        chosen = [SamplingParams(max_tokens=num_tokens, temperature=1.0, seed=seed + i, ignore_eos=ignore_eos) for i in range(len(prompts))]
        return [o.token_ids for o in LLM(model, max_num_seqs=TOGETHER, prefix_cache=False).generate(prompts, chosen)]

    return write
