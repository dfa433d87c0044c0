"""The artifact: quantized blocks from the journal, written as one Hugging Face directory."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from qforge import __version__
from qforge.calibration import endtoend, fisher, kv_cache
from qforge.calibration.linear import relative_error
from qforge.calibration.room import Room
from qforge.calibration.sequential import Job, quantize_blocks
from qforge.clock import Clock
from qforge.export.hf import write_artifact
from qforge.files import sha256_tree, size_of
from qforge.methods import find_tuner
from qforge.methods.device import computing_on, device_of, name_of
from qforge.models.blocks import BlockModel
from qforge.models.model import Model
from qforge.plan import KV_CACHE, Plan
from qforge.progress import Progress
from qforge.recipe import Recipe
from qforge.stages import workers
from qforge.stages.journal import Journal, key
from qforge.stages.meter import reusing_freed_memory
from qforge.stages.pieces import BlockPieces
from qforge.stages.texts import Texts


def root_key(recipe: Recipe, model_sha256: str, plan: Plan, texts: Texts) -> str:
    """The key of everything that decides the quantized weights."""
    return key(
        "quantize",
        model=model_sha256,
        method=list(recipe.quantize.method),
        budget=recipe.quantize.budget,
        options=recipe.quantize.options.model_dump(),
        schemes={name: str(scheme) for name, scheme in plan.schemes.items()},
        calibration=texts.calibration.sha256 if texts.calibration is not None else None,
        **({} if plan.workers == 1 else {"workers": plan.workers}),
        **({} if (card := name_of(device_of(recipe.run.device))) is None else {"card": card}),
    )


def clear_others(out: Path, recipe: Recipe, model: Model, model_sha256: str, plan: Plan, texts: Texts, journal: Journal) -> None:
    """Remove an artifact and exports that another recipe left: they must not be taken for this one's, neither while it runs nor after."""
    if not journal.has(_artifact_key(root_key(recipe, model_sha256, plan, texts), _origin(recipe, model, model_sha256, plan, texts))):
        for name in ("model", "exports"):
            shutil.rmtree(out / name, ignore_errors=True)


def _artifact_key(root: str, origin: Mapping[str, Any]) -> str:
    """Covers what the artifact says of itself beside what decides its weights: two recipes may give equal integers."""
    return key("artifact", quantized=root, origin=origin)


def quantize(recipe: Recipe, model_sha256: str, blocks: BlockModel, plan: Plan, texts: Texts, budget: int, journal: Journal, clock: Clock, progress: Progress) -> BlockPieces:
    """Quantize every planned linear, with `budget` bytes of activations in memory; finished blocks are taken up from the journal. `clock` is told what its parts take."""
    calibration = texts.calibration
    root = root_key(recipe, model_sha256, plan, texts)
    stages = 0 if plan.quantizer is None else blocks.num_blocks + (blocks.head_name in plan.schemes)
    pieces = BlockPieces(journal, root, stages)
    room, sparing = Room(journal.folder, budget, clock), recipe.run.memory_limit is not None
    if plan.quantizer is not None:
        tuner = find_tuner(recipe.quantize.method)
        weighing = calibration is not None and "outputs" in plan.needs
        if calibration is not None and weighing and not pieces.weighed(blocks.num_blocks):
            wanted = [*plan.schemes, *(blocks.block_names if tuner is not None else ())]
            with clock.part("gradients"), reusing_freed_memory(sparing=sparing):
                fisher.gather(blocks, wanted, calibration.ids, room, pieces.save_outputs, progress)
        sharing = None if plan.workers == 1 else functools.partial(workers.hired, recipe, plan.workers, budget, journal, root)
        job = Job(blocks, plan.quantizer, plan.schemes, plan.options, room, plan.transforms, tuner, pieces.outputs if weighing else lambda index: {}, sharing)
        with computing_on(device_of(recipe.run.device)):
            quantize_blocks(job, None if calibration is None or not plan.needs - {KV_CACHE} else calibration.ids, pieces.store(), progress)
        if plan.options.tune and calibration is not None:
            with clock.part("tune"):
                pieces.tune(lambda: _tuned(blocks, plan, pieces, calibration.ids, room, progress))
        pieces.drop_states()
    if KV_CACHE in plan.needs and calibration is not None:
        with clock.part("key/value scales"), computing_on(device_of(recipe.run.device)):
            pieces.calibrate_cache(lambda: kv_cache.measure(blocks, pieces.piece, calibration.ids, room, progress))
    return pieces


def _tuned(
    blocks: BlockModel, plan: Plan, pieces: BlockPieces, windows: torch.Tensor, room: Room, progress: Progress
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:  # fmt: skip
    """Scales, and the errors of the weights with them; not where weights were folded before they were rounded, which are gone."""
    linears = {name: pieces.linear(index, name) for name, index in pieces.names().items() if index < blocks.num_blocks}
    scales = endtoend.tune(blocks, linears, pieces.changed() if plan.transforms else {}, windows, plan.options.tune, room, progress)
    errors: dict[str, float] = {}
    for index in () if plan.transforms else range(blocks.num_blocks):
        with blocks.block(index):
            tuned = {name: linear for name, linear in blocks.linears(index).items() if name in scales}
            errors |= {name: relative_error(replace(linears[name], scales=scales[name]), linear.weight.detach()) for name, linear in tuned.items()}
    return scales, errors


def write(folder: Path, recipe: Recipe, model: Model, model_sha256: str, plan: Plan, texts: Texts, pieces: BlockPieces, journal: Journal) -> dict[str, Any]:
    """Write OUT/model unless it is there already, whole and unchanged; returns its hash and size."""
    origin = _origin(recipe, model, model_sha256, plan, texts)
    name = _artifact_key(pieces.root, origin)
    found = journal.load(name)
    if found is not None and folder.is_dir() and sha256_tree(folder) == found[1]["sha256"]:
        return dict(found[1])
    owner = pieces.names()
    changed = pieces.changed() if plan.transforms else {}
    provenance = {**origin, "layers": [asdict(layer) for layer in pieces.layers()], "changed": sorted(changed)}
    write_artifact(folder, model, plan.schemes, lambda n: pieces.linear(owner[n], n), provenance, changed=changed, kv_scales=pieces.kv_scales)
    weights = sum(size_of(p) for p in folder.glob("*.safetensors"))
    described = {"sha256": sha256_tree(folder), "size_bytes": size_of(folder), "weights_bytes": weights, "model_sha256": model_sha256}
    journal.save(name, {"done": torch.ones(1)}, described)
    return described


def _origin(recipe: Recipe, model: Model, model_sha256: str, plan: Plan, texts: Texts) -> dict[str, Any]:
    """What qforge.json says, but for what was measured of the layers: everything that decided the artifact's bytes, without times, paths and what is only compared with it."""
    section = recipe.to_dict()
    return {
        "qforge_version": __version__,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "model": {"source": Path(model.source).name, "sha256": model_sha256, "dtype": str(model.dtype).removeprefix("torch."), "parameters": plan.parameters},
        "adapters": [{**asdict(a), "source": Path(a.source).name} for a in model.adapters],
        "quantize": section["quantize"],
        "calibration": texts.described and {k: v for k, v in texts.described.items() if k not in ("source", "overlap", "likeness")},
        "bits_per_weight": plan.bits_per_weight,
    }
