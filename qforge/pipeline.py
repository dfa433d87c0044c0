"""The flow, as straight code: recipe -> model -> calibrate -> quantize -> artifact -> export -> run -> evaluate -> gates -> report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from qforge import report
from qforge.errors import RecipeError, UnsupportedError
from qforge.evaluate import power
from qforge.files import expanded, lock
from qforge.machine_limits import default_threads, threads_limited
from qforge.models.blocks import BlockModel
from qforge.models.locate import model_folder
from qforge.models.model import Model, open_model
from qforge.plan import Plan, make_plan
from qforge.progress import SILENT, Progress
from qforge.recipe import Recipe, load_recipe
from qforge.stages import artifact as artifacts
from qforge.stages import auto, evidence, exported, exports, importance, outcome, output_folder, tasks, workers
from qforge.stages.auto import Choice
from qforge.stages.candidates import DEFAULT, Candidates, candidates
from qforge.stages.estimates import Estimate, activation_budget, estimate
from qforge.stages.journal import Journal
from qforge.stages.meter import Meter, return_freed_memory
from qforge.stages.opening import open_models
from qforge.stages.texts import Texts, gather_texts
from qforge.text.documents import documents
from qforge.text.windows import EvaluationWindows, evaluation_windows, read_otherwise
from qforge.types import Evaluation, ExportResult, Results


def plan(recipe: Recipe | str | Path, *, out: str | Path | None = None, overrides: Sequence[str] = ()) -> tuple[Recipe, Plan, Estimate]:
    """What `quantize` would do, and what it is expected to take; nothing is written.

    Args:
        recipe: as for `quantize`.
        out: the output folder, if it is to be checked; what an earlier run measured for method auto is taken from there.
        overrides: as for `quantize`.

    Raises:
        QforgeError: what `quantize` would refuse before it starts.
    """
    recipe = _loaded(recipe, overrides)
    torch.set_num_threads(recipe.run.threads or default_threads())
    if out is not None:
        output_folder.check(Path(out), recipe)
    _, merged, model = open_models(recipe)
    blocks = BlockModel(model)
    choices = candidates(recipe, model, blocks)
    planned = _planned(recipe, merged, model, blocks, choices)
    exports.check(recipe, _expected(recipe, model, planned, blocks))
    texts = gather_texts(recipe, model, planned, None)
    workers.check(planned, texts.calibration)
    planned = replace(planned, notes=(*planned.notes, *texts.notes, *_promised(texts.evaluation)))
    _budget(recipe, planned, blocks, texts)
    if choices is not None:
        work = _out(recipe, out) / "work"
        known = auto.recalled(model.fingerprint(), planned, choices, texts, Journal(work)) if work.is_dir() else None
        choice = None if known is None else auto.choose(recipe, choices, known)
        planned = replace(_planned(recipe, merged, model, blocks, choices, choice), notes=(*planned.notes, auto.said(choice)))
    return recipe, planned, _estimate(recipe, planned, blocks, texts)


def quantize(
    recipe: Recipe | str | Path, *, out: str | Path | None = None, overrides: Sequence[str] = (), fresh: bool = False, progress: Progress = SILENT, shared: Path | None = None
) -> Results:  # fmt: skip
    """Run a recipe.

    Args:
        recipe: a `Recipe`, or the path of its YAML file.
        out: output folder, `runs/<recipe name>` unless given. Finished work that lies there is taken up.
        overrides: `key.path=value`, as `--set`.
        fresh: forget finished work first.
        progress: told what is going on.
        shared: a folder of finished pieces that several runs use, each of which finds there what another computed (a sweep's); the run's own unless given.

    Returns:
        What results.json says; `Results.passed` is False when a gate failed.

    Raises:
        QforgeError: see `qforge.errors` for the kinds.
    """
    recipe = _loaded(recipe, overrides)
    return_freed_memory(sparing=recipe.run.memory_limit is not None)
    meter = Meter()
    out = _out(recipe, out)
    torch.set_num_threads(recipe.run.threads or default_threads())
    with meter.stage("open"):
        base, merged, model = open_models(recipe)
        blocks = BlockModel(model)
        choices = candidates(recipe, model, blocks)
        planned = _planned(recipe, merged, model, blocks, choices)
        skipped = exports.check(recipe, _expected(recipe, model, planned, blocks))
        texts = gather_texts(recipe, model, planned, None)
        workers.check(planned, texts.calibration)
        budget = _budget(recipe, planned, blocks, texts)
        model_sha256 = model.fingerprint()
        output_folder.check(out, recipe)
    with lock(out), threads_limited(recipe.run.threads):
        output_folder.start(out, planned.disk_bytes, fresh)
        journal = Journal(shared or out / "work")
        with meter.stage("texts"):
            texts = gather_texts(recipe, model, planned, journal)
            workers.check(planned, texts.calibration)
        meter.follow(out / "work" / f"meter-{artifacts.root_key(recipe, model_sha256, planned, texts)}.json", journal)
        for note in (*planned.notes, *texts.notes, *_promised(texts.evaluation)):
            progress.note(note)
        chooser = choice = None
        if choices is not None:
            with meter.stage("choose"):
                chooser = auto.chooser(recipe, model_sha256, planned, blocks, choices, texts, budget, journal, progress)
                choice = chooser.choice()
        while True:
            if choice is not None:
                planned = _planned(recipe, merged, model, blocks, choices, choice)
                skipped = exports.check(recipe, _expected(recipe, model, planned, blocks))
            artifacts.clear_others(out, recipe, model, model_sha256, planned, texts, journal)
            meter.mark("before quantize")
            with meter.stage("quantize"):
                pieces = artifacts.quantize(recipe, model_sha256, blocks, planned, texts, budget, journal, meter.clock, progress)
            with meter.stage("write"):
                written = artifacts.write(out / "model", recipe, model, model_sha256, planned, texts, pieces, journal)
                artifact = open_model(str(out / "model"), trust_remote_code=recipe.model.trust_remote_code)
            evaluation = None
            if recipe.evaluate is not None and texts.evaluation is not None:
                with meter.stage("evaluate"):
                    hashes = {"merged": model_sha256, "artifact": written["sha256"]}
                    evaluation = evidence.measure_artifact(
                        recipe.evaluate.engine, recipe.run.activations, base, merged, artifact, hashes, texts.evaluation, journal, progress, shared=shared is not None
                    )  # fmt: skip
            second = None if chooser is None or choice is None else chooser.second(choice, evaluation)
            if second is None:
                break
            choice = second
        if recipe.evaluate is not None and evaluation is not None and recipe.evaluate.tasks:
            with meter.stage("tasks"):
                evaluation = tasks.scored(recipe, merged, artifact, evaluation, journal, progress)
        with meter.stage("export"):
            made = exports.make(recipe, artifact, written["sha256"], skipped, evaluation, texts, out, journal, progress)
        with meter.stage("verify"):
            engine = "auto" if recipe.evaluate is None else recipe.evaluate.engine
            made = exports.verify_all(recipe, made, artifact, written["sha256"], engine, texts.evaluation, out, journal, progress)
            if recipe.evaluate is not None and recipe.evaluate.exports and texts.evaluation is not None:
                made = exported.scored(made, merged, texts.evaluation, out, journal, progress)
        meter.conclude()
        results = outcome.assemble(recipe, model, planned, texts, written, evaluation, made, pieces, journal, meter, _estimate(recipe, planned, blocks, texts), choice)
        report.write(results.to_json(), out, list(recipe.report.formats))
    return results


def evaluate(
    model: str | Path, *, against: str | Path | None = None, text: str = "builtin", window: int = 2048, engine: str = "auto", activations: str = "fp", device: str = "cpu",
    tensor_parallel: int = 1, progress: Progress = SILENT,
) -> Evaluation:  # fmt: skip
    """Perplexity of a model on a text and, with `against`, its divergence from another model.

    Args:
        model: anything that `open_model` reads.
        against: the reference, likewise.
        text: `builtin`, a `.txt` or `.jsonl` file, or a hub data set.
        window: tokens in a window; capped at the model's context.
        engine: for `model`: `auto`, `runtime` or `transformers`; or `llama.cpp` for a .gguf file, `onnxruntime` for the folder of an ONNX export and `tensorrt` for that of a
            TensorRT export, which then is scored on the token ids of `against`, where that is given. The reference runs on transformers' code in fp32.
        activations: one of `ACTIVATIONS` (qforge/scheme.py), of the runtime.
        device: `cpu`, `cuda` or `cuda:N`: where the runtime runs `model`.
        tensor_parallel: processes that share it there.
        progress: told what is going on.
    """
    return_freed_memory()
    reference = None if against is None else _open_exactly(against)
    scorer = None
    if engine in exported.FOREIGN:
        evidence.only_runtime(f"{engine} was asked for", activations, device, tensor_parallel)
        if reference is None and engine != "llama.cpp":  # whose files are models for us, too
            raise UnsupportedError(f"engine: {engine} needs a model to be compared with (--against), which also cuts the text: the folder of its export has no config of a model")
        scorer = exported.foreign(engine, Path(model))
    candidate = _open_exactly(model) if scorer is None or reference is None else reference
    tokenizer = candidate.tokenizer()
    read = documents(text, role="evaluation", folder=Path(), tokenizer=tokenizer)
    windows = evaluation_windows(read, tokenizer, window, context=getattr(candidate.config, "max_position_embeddings", None))
    notes = () if reference is None or reference is candidate else read_otherwise(read, tokenizer, reference.tokenizer())
    for note in (*windows.notes, *notes, *_promised(windows)):
        progress.note(note)
    return evidence.measure(candidate, scorer or evidence.engine_for(candidate, engine, activations, device, tensor_parallel), reference, windows, progress)


def _open_exactly(model: str | Path) -> Model:
    """Open a model to be measured: a GGUF file in fp32, so that its integers mean what its own engine takes them for (16 bits would round them)."""
    return open_model(str(model), dtype="float32" if model_folder(expanded(str(model))).suffix == ".gguf" else "auto")


def export(artifact: str | Path, format: str, *, type: str | None = None, out: str | Path | None = None, progress: Progress = SILENT) -> ExportResult:
    """Write an artifact in another format, read it back, and run it where an engine for it is at hand.

    Args:
        artifact: a quantized model that qforge reads (or an output folder of a run).
        format: as in a recipe's `export` list.
        type: the format's own type; None lets the scheme decide.
        out: folder to write; None is `<artifact>/exports/<format>` of a run (`<format>-<type>` beside its own of another type), else `<format>` beside the artifact.
        progress: told what is going on.
    """
    return exports.export_one(open_model(str(artifact)), Path(artifact), format, type, None if out is None else Path(out), progress)


def _planned(recipe: Recipe, merged: Model, model: Model, blocks: BlockModel, choices: Candidates | None, choice: Choice | None = None) -> Plan:
    """The plan; with method auto for what was chosen, or before that for a draft of about the budget's size."""
    chosen = () if choices is None else (choices.draft() if choice is None else choice.schemes,)
    planned = make_plan(recipe, model, blocks, merged, *chosen)
    adapted = dict.fromkeys(note for adapter in merged.adapters for note in adapter.notes)
    return replace(planned, notes=(*adapted, *(() if choices is None else choices.notes), *planned.notes, *exports.said(recipe), *importance.said(recipe, planned)))


def _expected(recipe: Recipe, model: Model, planned: Plan, blocks: BlockModel) -> Model:
    """What an export will be given, as far as it is known: its schemes, and which modules will have scales of keys and values (what these are is not)."""
    scaled = () if recipe.quantize.kv_cache is None else blocks.caching()
    return replace(model, schemes=planned.schemes, kv_scales=dict.fromkeys(scaled, (1.0, 1.0)))


def _promised(windows: EvaluationWindows | None) -> tuple[str, ...]:
    return () if windows is None else (power.promise(windows.tokens),)


def _out(recipe: Recipe, out: str | Path | None) -> Path:
    return Path(out) if out is not None else Path("runs") / recipe.name


def _estimate(recipe: Recipe, planned: Plan, blocks: BlockModel, texts: Texts) -> Estimate:
    return estimate(planned, blocks, *_tokens(recipe, planned, texts), adapters=bool(recipe.adapters), candidates=_tried(recipe))


def _tried(recipe: Recipe) -> int:
    return len(recipe.quantize.candidates or DEFAULT) if recipe.quantize.method[-1] == "auto" else 0


def _budget(recipe: Recipe, planned: Plan, blocks: BlockModel, texts: Texts) -> int:
    return activation_budget(planned, blocks, *_tokens(recipe, planned, texts), recipe.run.memory_limit, candidates=_tried(recipe))


def _tokens(recipe: Recipe, planned: Plan, texts: Texts) -> tuple[int, int]:
    """Of calibration and of evaluation, for the texts that were gathered; `generated` calibration text counts as asked for."""
    asked = recipe.calibration.tokens if planned.needs else 0
    return asked if texts.calibration is None else texts.calibration.tokens, 0 if texts.evaluation is None else texts.evaluation.tokens


def _loaded(recipe: Recipe | str | Path, overrides: Sequence[str]) -> Recipe:
    recipe = recipe if isinstance(recipe, Recipe) else load_recipe(Path(recipe), overrides)
    if recipe.sweep is not None:
        raise RecipeError("this recipe has a sweep, which is several runs: qforge.sweep(recipe) makes them all; --set sweep=null makes the recipe itself one run")
    return recipe
