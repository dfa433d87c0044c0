"""Recipe + model -> what will be done: each linear's scheme, size, bits per weight, and room on disk. Refuses before work starts."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase

from torch import nn

from qforge.engines import tasks
from qforge.errors import MissingCapabilityError, RecipeError, UnsupportedError
from qforge.layouts import checkpoint
from qforge.layouts.compressed_tensors_config import class_problem, experts_problem
from qforge.methods import Options, Quantizer, Transform, find, find_transforms, find_tuner, refine, statistics_needed
from qforge.methods.device import check_runs_there, device_of
from qforge.methods.reads import unread
from qforge.models.blocks import BlockModel
from qforge.models.model import Model
from qforge.models.names import HEAD, JOINT
from qforge.models.tying import shared_table, untied_because
from qforge.recipe import Recipe
from qforge.recipe.model import IGNORED, OptionsSection
from qforge.runtime.decoder import supports
from qforge.runtime.running import check_device
from qforge.scheme import Number, Per, ScaleType, Scheme

KV_CACHE = "kv_cache"  # among what calibration gathers: scales of keys and values
MAKES = {"fp8": (Number.FP8_E4M3, Number.FP8_E5M2), "nf4": (Number.NF4,)}  # methods that are named after what they make
ROUTER = "decides over experts: a choice that changes costs more than its few weights"


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One linear: its shape, and its scheme or the reason for having none."""

    name: str
    out_features: int
    in_features: int
    scheme: Scheme | None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run will do.

    Attributes:
        layers: every linear of the decoder blocks, then the output head.
        quantizer: the method, None for `none`.
        transforms: what is folded into the weights before.
        options: of the method.
        needs: statistics that calibration gathers; empty where it is not needed.
        workers: processes that share the calibration text.
        parameters: of the merged model, tied tensors counted once.
        size_bytes: of the artifact's tensors.
        bits_per_weight: stored bits (scales and zero points included) per weight of the quantized linears.
        size_ratio: of the artifact to the merged model at 16 bits.
        disk_bytes: what the output folder may come to hold: artifact, exports, journal.
        notes: what a user should know beforehand.
    """

    layers: tuple[LayerPlan, ...]
    quantizer: Quantizer | None
    transforms: tuple[Transform, ...]
    options: Options
    needs: frozenset[str]
    workers: int
    parameters: int
    size_bytes: int
    bits_per_weight: float
    size_ratio: float
    disk_bytes: int
    notes: tuple[str, ...]

    @property
    def schemes(self) -> dict[str, Scheme]:
        """Scheme by module name, of the linears that are quantized."""
        return {p.name: p.scheme for p in self.layers if p.scheme is not None}


def make_plan(recipe: Recipe, model: Model, blocks: BlockModel, merged: Model, chosen: Mapping[str, Scheme] | None = None) -> Plan:
    """Decide everything that can be decided without reading a weight.

    Args:
        recipe: what is wanted.
        model: what is quantized: the merged model, or that rotated.
        blocks: the same.
        merged: the merged model, which sizes are compared with.
        chosen: for method auto: the scheme of every linear that the recipe leaves to it.

    Raises:
        RecipeError: a pattern that matches nothing, a group size that does not divide.
        UnsupportedError: a method, scheme or option that is not available.
        MissingCapabilityError: a requested export or device that this machine cannot make.
    """
    _refuse_unavailable(recipe, model)
    quantizer, transforms = find(recipe.quantize.method), find_transforms(recipe.quantize.method)
    layers, notes = _layers(recipe, model, blocks, quantizer, chosen or {})
    schemes = list(dict.fromkeys(p.scheme for p in layers if p.scheme is not None))
    options = _options(recipe.quantize.options, schemes)
    check_runs_there(device_of(recipe.run.device), options)
    if merged.whole is not None:
        notes.append(f"the model is the language model of a '{merged.whole}' checkpoint; what that has for other than text is left out, and what is written is a text model")
    unread = experts_problem(p.scheme for p in layers if p.name in blocks.experts) if schemes else None
    if unread is not None:
        notes.append(f"transformers 5.23 {unread}, so that it does not run this artifact as it is meant; qforge does, and other programs that follow its quantization_config")
    notes += _unloaded(model, blocks, {p.name: p.scheme for p in layers if p.scheme is not None})
    _check_transforms(transforms, schemes)
    _check_tuning(options, schemes, quantizer)
    notes += _unread(recipe, schemes)
    needed = frozenset() if quantizer is None else statistics_needed(quantizer, schemes, options).union(*(t.needs(options) for t in transforms))
    if recipe.quantize.kv_cache is not None:
        needed |= {KV_CACHE}
        _check_cache(blocks, schemes)
    elif merged.kv_scales:
        notes.append("the source keeps keys and values as FP8, and is compared so; what is written does not, unless quantize.kv_cache: fp8 calibrates scales anew")
    parameters = _parameters(merged)
    notes += _head_and_vllm(model, blocks, layers)
    more = (_parameters(model) - parameters) * model.dtype.itemsize
    if more:
        notes.append(f"rotate unties embedding and output head, since only the head takes the last norm's weight: {more / 1e6:,.1f} MB more, unless the head is quantized, too")
    stored, weights, total = _sizes(model, layers)
    workers = _workers(recipe, needed, options, notes)
    total += 2 * blocks.num_blocks * model.dtype.itemsize if KV_CACHE in needed else 0
    bits_per_weight = stored / weights if weights else 8.0 * model.dtype.itemsize
    tokens = recipe.calibration.tokens if needed else 0
    widest = max((p.in_features for p in layers if p.scheme is not None), default=0)
    # both streams, in the journal and on their way (16 D); the unquantized block's inputs in half precision; what a block's code has left behind where it waits (12 D, two widest)
    # a tuned block's inputs are kept once more (4 D)
    spilled = tokens * ((38 if "targets" in needed else 34) * blocks.hidden_size + 10 * widest)
    disk = total + sum(export_bytes(e.type, parameters, total) for e in recipe.export) + 2 * weights + spilled
    return Plan(layers, quantizer, transforms, options, needed, workers, parameters, total, bits_per_weight, total / (2 * parameters), disk, tuple(notes))


def _head_and_vllm(model: Model, blocks: BlockModel, layers: Sequence[LayerPlan]) -> list[str]:
    """What quantizing the output head costs, and what vLLM does not load."""
    notes = []
    untied = untied_because(model, {p.name: p.scheme for p in layers if p.scheme is not None})
    if untied is not None:
        size = blocks.vocab_size * blocks.hidden_size * model.dtype.itemsize
        notes.append(f"the quantized output head no longer shares the embedding's table, which stays beside it ({size / 1e6:,.1f} MB): {untied}")
    head = next((p.scheme for p in layers if p.name == HEAD), None)
    if head is not None and head.number is not Number.NF4:
        notes.append(
            f"vLLM 0.32 does not load an artifact whose output head is quantized, tied or not: where it is to run there, leave the head as it is (quantize.ignore: [{HEAD}])"
        )
    apart = _apart({p.name: p.scheme for p in layers})
    if apart:
        where = f"{apart[0]}{f' and {len(apart) - 1} more' if len(apart) > 1 else ''}"
        notes.append(
            f"vLLM 0.32 multiplies these as one linear and does not load an artifact in which they have different schemes: {where}; where it is to run there, give them one"
        )
    return notes


def _refuse_unavailable(recipe: Recipe, model: Model) -> None:
    run = recipe.run
    device_of(run.device)
    engine = None if recipe.evaluate is None else recipe.evaluate.engine
    unrun = "evaluate.engine is transformers" if engine == "transformers" else supports(model.spec)
    if run.activations != "fp" and unrun is not None:
        raise UnsupportedError(f"run.activations: {run.activations} is for the built-in runtime, but {unrun}; use activations: fp")
    if unrun is None:
        check_device("cpu", run.activations, None)
    if engine == "runtime" and unrun is not None:
        raise UnsupportedError(f"evaluate.engine: runtime, but {unrun}; use engine: auto or transformers")
    tasks.check(() if recipe.evaluate is None else recipe.evaluate.tasks)
    method, scheme = recipe.quantize.method, recipe.quantize.scheme
    if scheme is not None and scheme.number not in MAKES.get(method[-1], (scheme.number,)):
        instead = "leave scheme out" if len(method) == 1 else f"give an {method[-1]} scheme"
        raise UnsupportedError(f"method {method[-1]} makes {method[-1]}, not {scheme}; {instead}, or use method: rtn")


def _layers(recipe: Recipe, model: Model, blocks: BlockModel, quantizer: Quantizer | None, chosen: Mapping[str, Scheme]) -> tuple[tuple[LayerPlan, ...], list[str]]:
    shapes = linear_shapes(blocks)
    section = recipe.quantize
    for field, patterns in (("ignore", section.ignore), ("overrides", [o.match for o in section.overrides])):
        for pattern in patterns:
            if pattern != HEAD and not any(_matches(name, pattern) for name in shapes):
                raise RecipeError(f"quantize.{field}: '{pattern}' matches no linear layer of this model; names look like {_examples(shapes)}")
    layers: list[LayerPlan] = []
    changed: dict[str, list[str]] = {}
    for name, (out_features, in_features) in shapes.items():
        scheme, reason = (None, ROUTER) if name in blocks.routers else by_hand(recipe, name) if quantizer is not None else (None, "method none")
        if scheme is None and reason is None:
            scheme = chosen.get(name, section.scheme)
        if scheme is not None and quantizer is not None:
            scheme, reason = _fitted(scheme, name, out_features, in_features, section.options.group_fallback)
            if reason is not None:
                changed.setdefault(reason, []).append(name)
        _, ignoring, beaten = _singled_out(recipe, name)
        if beaten is not None and quantizer is not None and name not in blocks.routers:
            changed.setdefault(f"quantize.ignore '{ignoring}' goes before the override '{beaten}'; name a layer in full to quantize it", []).append(name)
        layers.append(LayerPlan(name, out_features, in_features, scheme, reason))
    if quantizer is not None and not any(p.scheme for p in layers):
        raise RecipeError("quantize: every linear layer is ignored; remove patterns from quantize.ignore, or use method: none")
    for scheme in dict.fromkeys(p.scheme for p in layers if p.scheme is not None):
        problem = quantizer.supports(scheme) if quantizer is not None else None
        if problem is not None and quantizer is not None:
            raise UnsupportedError(f"method {quantizer.name}: {scheme}: {problem}")
    unheld = checkpoint.problem((p.scheme for p in layers if p.scheme is not None), model.dtype)
    if unheld is not None:
        raise UnsupportedError(unheld)
    notes = [f"{names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "") + f": {reason}" for reason, names in changed.items()]
    return tuple(layers), notes


def _options(asked: OptionsSection, schemes: Sequence[Scheme]) -> Options:
    """Errors of rounded activations differ from token to token: no weight makes up for them, and one that is fitted to them is worse than none (docs/log.md)."""
    given = {f.name: getattr(asked, f.name) for f in fields(Options)}
    if asked.error_correction is None:
        given["error_correction"] = all(s.activations is None for s in schemes)
    return Options(**given)


def _check_tuning(options: Options, schemes: Sequence[Scheme], quantizer: Quantizer | None) -> None:
    """Refuse to tune scales where there is nothing to tune, or no way to."""
    if not options.tune or quantizer is None:
        return
    if not quantizer.needs(options):
        raise UnsupportedError(f"quantize.options.tune learns from calibration text, and method {quantizer.name} takes none; use method: gptq")
    if not any(refine.applies(s) and s.scale.type is not ScaleType.E8M0 for s in schemes):
        raise UnsupportedError(f"quantize.options.tune is for one scale (no power of two) for each output channel or group, not {schemes[0]}")


def _unread(recipe: Recipe, schemes: Sequence[Scheme]) -> list[str]:
    """Refuse options that nothing reads; of a sweep, which may cross methods with options, they are said."""
    section = recipe.quantize
    found = unread(section.method, schemes, section.options.model_dump(), OptionsSection().model_dump())
    if found and not recipe.variant:
        raise UnsupportedError("; ".join(found))
    return [f"{sentence} (this variant goes without)" for sentence in found]


def _check_cache(blocks: BlockModel, schemes: Sequence[Scheme]) -> None:
    """Refuse keys and values in FP8 where they cannot be."""
    if any(s.number is Number.NF4 for s in schemes):
        raise UnsupportedError(
            "quantize.kv_cache: a bitsandbytes checkpoint, the only kind with nf4, does not hold scales of keys and values; use another scheme, or kv_cache: null"
        )
    if not blocks.caches():
        raise UnsupportedError(
            "quantize.kv_cache: transformers' code of this family takes no cache of keys and values for its blocks, so that they cannot be seen; use kv_cache: null"
        )


def _check_transforms(transforms: Sequence[Transform], schemes: Sequence[Scheme]) -> None:
    """Refuse a transform that can do nothing for any of the schemes."""
    for transform in transforms:
        problems = [transform.supports(scheme) for scheme in schemes]
        if all(p is not None for p in problems):
            raise UnsupportedError(f"method {transform.name}: {schemes[0]}: {problems[0]}")


def _workers(recipe: Recipe, needed: frozenset[str], options: Options, notes: list[str]) -> int:
    """How many processes share the calibration text; refuses what they cannot do."""
    asked, tuner = recipe.run.workers, find_tuner(recipe.quantize.method)
    if asked == 1 or not needed - {KV_CACHE}:
        if asked > 1:
            notes.append(f"run.workers: {asked} would share the calibration text on its way through the blocks, and this recipe needs none: one process does the work")
        return 1
    if recipe.run.device.startswith("cuda"):
        raise UnsupportedError(f"run.workers: {asked} share the cores of processors, not cards; use run.device: cpu, or workers: 1")
    if tuner is not None:
        raise UnsupportedError(f"run.workers: {asked} share sums over the calibration text, but method {tuner.name} takes gradients step by step; use method: gptq, or workers: 1")
    if importlib.util.find_spec("ray") is None:
        raise MissingCapabilityError(f"run.workers: {asked} needs Ray, which is not installed here: pip install 'qforge[ray]', or use workers: 1")
    undivided = [
        what
        for what, used in (
            ("method auto's choice", "auto" in recipe.quantize.method),
            ("fisher", "outputs" in needed),
            ("tune", bool(options.tune)),
            (KV_CACHE, KV_CACHE in needed),
        )
        if used
    ]
    if undivided:
        notes.append(f"run.workers: {asked} share the way through the blocks; for {' and '.join(undivided)} one process works alone")
    return asked


def linear_shapes(blocks: BlockModel) -> dict[str, tuple[int, int]]:
    """`(out, in)` of every linear by module name: blocks first (in each the routers of experts, which are not always linears), the output head last."""
    shapes: dict[str, tuple[int, int]] = {}
    for index in range(blocks.num_blocks):
        shapes |= {name: shape for name, shape in blocks.routers.items() if name.startswith(f"{blocks.block_names[index]}.")}
        for name, module in blocks.linears(index).items():
            shapes[name] = (module.out_features, module.in_features)
    if blocks.head_name is not None:
        shapes[blocks.head_name] = (blocks.vocab_size, blocks.hidden_size)
    return shapes


def by_hand(recipe: Recipe, name: str) -> tuple[Scheme | None, str | None]:
    """The scheme that the recipe's overrides give to a linear, or the reason why it stays as it is; neither where the recipe does not single it out."""
    scheme, pattern, _ = _singled_out(recipe, name)
    return scheme, None if pattern is None else f"ignored by '{pattern}'"


def _singled_out(recipe: Recipe, name: str) -> tuple[Scheme | None, str | None, str | None]:
    """A linear's scheme by an override, or the pattern that ignores it and that of an override which it goes before.

    Of the two a name in full wins, then `ignore` over other patterns, as in llm-compressor; but what is ignored by default was not asked for.
    """
    section = recipe.quantize
    matching = [o for o in reversed(section.overrides) if _matches(name, o.match)]
    asked = next((p for p in section.ignore if p not in IGNORED and _matches(name, p)), None)
    override = next((o for o in matching if asked is None or o.match == name), None)
    if override is not None:
        return override.scheme, None, None
    return None, asked or next((p for p in section.ignore if _matches(name, p)), None), matching[0].match if matching else None


def _matches(name: str, pattern: str) -> bool:
    """`lm_head` is the output head also where the modelling code calls it otherwise (`output_projection`): the only linear outside all parts of the model."""
    return fnmatchcase(name, pattern) or (pattern == HEAD and "." not in name)


def _fitted(scheme: Scheme, name: str, out_features: int, in_features: int, fallback: str) -> tuple[Scheme | None, str | None]:
    problem = scheme.problem_with(out_features, in_features)
    if problem is None:
        return scheme, None
    if fallback == "ignore":
        return None, f"left unquantized: {problem}"
    size = next(n for n in range(scheme.granularity.columns, 0, -1) if in_features % n == 0) if scheme.granularity.per is Per.GROUP else 0
    adjustable = size >= 16 and scheme.with_group_size(size).problem_with(out_features, in_features) is None
    if fallback == "adjust" and adjustable:
        return scheme.with_group_size(size), f"group size {scheme.granularity.columns} adjusted to {size}, which divides {in_features}"
    raise RecipeError(f"quantize.scheme {scheme}: {name}: {problem}; or set quantize.options.group_fallback: {'adjust or ' if adjustable else ''}ignore")


def _sizes(model: Model, layers: Sequence[LayerPlan]) -> tuple[int, int, int]:
    """(bits of quantized linears, their weights, bytes of all tensors of the artifact)."""
    quantized = [p for p in layers if p.scheme is not None]
    bits = sum(p.scheme.storage_bits(p.out_features, p.in_features) for p in quantized if p.scheme is not None)
    weights = sum(p.out_features * p.in_features for p in quantized)
    return bits, weights, unquantized_bytes(model, {p.name: p.scheme for p in quantized if p.scheme is not None}) + bits // 8


def unquantized_bytes(model: Model, quantized: Mapping[str, Scheme]) -> int:
    """Bytes of the artifact's tensors beside these linears. Of an embedding that shares the head's codes these are its scales."""
    table = shared_table(model, quantized)
    left_out = {f"{name}.weight" for name in (*quantized, table)}
    shape = () if table is None else model.weights.info(f"{table}.weight").shape
    scales = 0 if table is None else (quantized[HEAD].storage_bits(*shape) - quantized[HEAD].bits * _count(shape)) // 8
    return scales + sum(_count(model.weights.info(n).shape) * model.dtype.itemsize for n in model.weights.names() if n not in left_out)


def export_bytes(type_name: str | None, parameters: int, artifact_bytes: int) -> int:
    """About how large an export gets: as many bytes as its type of floats takes, or as the artifact's integers take."""
    return {"f32": 4, "f16": 2, "bf16": 2}.get(type_name or "", 0) * parameters or artifact_bytes


def _unloaded(model: Model, blocks: BlockModel, schemes: Mapping[str, Scheme]) -> list[str]:
    """A note where linears are of a class of their family's own, with which transformers does not load the artifact."""
    own = {type(m).__name__ for i in range(blocks.num_blocks) for n, m in blocks.linears(i).items() if n in schemes and type(m) is not nn.Linear}
    problem = class_problem(schemes.values(), tied=shared_table(model, schemes) is not None) if own else None
    if problem is None:
        return []
    return [f"transformers 5.23 does not load this artifact: the linears are of a class of their own ({', '.join(sorted(own))}), and it {problem}; qforge does"]


def _apart(schemes: Mapping[str, Scheme | None]) -> list[str]:
    """Linears that vLLM multiplies as one and that have different schemes, unquantized ones among them: `model.layers.0.self_attn.q_proj, k_proj, v_proj`."""
    found = []
    for name in schemes:
        for first, *others in JOINT.values():
            block = name.removesuffix(first)
            if block != name and any(schemes.get(f"{block}{part}", schemes[name]) != schemes[name] for part in others):
                found.append(", ".join([name, *others]))
    return found


def _parameters(model: Model) -> int:
    return sum(_count(model.weights.info(n).shape) for n in model.weights.names())


def _count(shape: Iterable[int]) -> int:
    n = 1
    for size in shape:
        n *= size
    return n


def _examples(shapes: dict[str, tuple[int, int]]) -> str:
    names = list(shapes)
    return ", ".join(dict.fromkeys([names[0], names[min(len(names) - 1, 6)], names[-1]]))
