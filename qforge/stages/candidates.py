"""The schemes that `method: auto` may choose from, layer by layer: what fits a layer's width and what the artifact and every requested export can hold."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from qforge.errors import MissingCapabilityError, RecipeError, UnsupportedError
from qforge.export import exporter
from qforge.layouts import checkpoint
from qforge.layouts.compressed_tensors import packs_zeros
from qforge.methods import find
from qforge.models.blocks import BlockModel
from qforge.models.model import Model
from qforge.plan import by_hand, linear_shapes, unquantized_bytes
from qforge.recipe import Recipe, parse_budget
from qforge.scheme import Per, Scheme, parse

# stories15M, log4 of the KL divergence plus bits per weight: groups of 96 2.01 to 2.05, groups of 32 2.18 to 2.30. int4-g32 is here because most engines run it.
DEFAULT = tuple(map(parse, ("int2-g128-sym", "int3-g128-sym", "int4-g128-sym", "int4-g32-sym", "int5-g128-sym", "int6-g128-sym", "int8-channel-sym")))
BLOCK = 32  # group sizes are multiples of it where they are adjusted: GGUF's block


@dataclass(frozen=True, slots=True)
class Candidates:
    """What can be chosen.

    Attributes:
        shapes: `(out, in)` of every linear that will be quantized, by name.
        listed: the schemes as they were listed.
        fitted: for each of these linears, what each listed scheme is there; None where it does not fit. An override's scheme stands in every place.
        capacity_bits: stored bits that these linears may take; None where the budget is a KL divergence.
        rest_bytes: of the artifact's other tensors.
        notes: what was left out, and why.
    """

    shapes: dict[str, tuple[int, int]]
    listed: tuple[Scheme, ...]
    fitted: dict[str, tuple[Scheme | None, ...]]
    capacity_bits: int | None
    rest_bytes: int
    notes: tuple[str, ...]

    @property
    def weights(self) -> int:
        """How many weights will be quantized."""
        return sum(o * i for o, i in self.shapes.values())

    def options(self, name: str) -> tuple[Scheme, ...]:
        """What a linear can have, the smallest first."""
        return tuple(sorted({s for s in self.fitted[name] if s is not None}, key=lambda s: (s.storage_bits(*self.shapes[name]), str(s))))

    def uniform(self, place: int) -> dict[str, Scheme] | None:
        """All linears with the listed scheme of a place; None where it does not fit everywhere."""
        schemes = {name: scheme for name, fitted in self.fitted.items() if (scheme := fitted[place]) is not None}
        return schemes if len(schemes) == len(self.fitted) else None

    def bits(self, schemes: Mapping[str, Scheme]) -> int:
        """Stored bits of linears with these schemes."""
        return sum(scheme.storage_bits(*self.shapes[name]) for name, scheme in schemes.items())

    def smallest(self) -> dict[str, Scheme]:
        """Every linear as small as can be."""
        return {name: self.options(name)[0] for name in self.shapes}

    def draft(self) -> dict[str, Scheme]:
        """Schemes to plan with before anything is measured: for each linear the largest whose bits per weight are within the budget's average."""
        schemes = self.smallest()
        for name, (o, i) in self.shapes.items():
            for scheme in self.options(name):
                if self.capacity_bits is None or scheme.storage_bits(o, i) * self.weights <= self.capacity_bits * o * i:
                    schemes[name] = scheme
        return schemes


def candidates(recipe: Recipe, model: Model, blocks: BlockModel) -> Candidates | None:
    """What `method: auto` can choose from; None for another method.

    Raises:
        RecipeError: a layer that nothing fits, a candidate that fits nowhere, a budget that even the smallest candidates exceed.
        UnsupportedError: a listed candidate that cannot be made, or that the artifact or an export cannot hold.
    """
    if recipe.quantize.method[-1] != "auto":
        return None
    by_name = {name: (shape, *by_hand(recipe, name)) for name, shape in linear_shapes(blocks).items() if name not in blocks.routers}
    free = {name: shape for name, (shape, scheme, reason) in by_name.items() if scheme is None and reason is None}
    if not free:
        raise RecipeError("quantize: every linear layer is ignored or overridden, so that nothing is left to choose; use method: gptq")
    wanted = recipe.quantize.candidates or DEFAULT
    _check_made(wanted, model)
    adjust = not recipe.quantize.candidates or recipe.quantize.options.group_fallback == "adjust"
    widths = {i: tuple(_fitted(scheme, i, adjust) for scheme in wanted) for _, i in free.values()}
    held, notes = _held(recipe, model, {name: widths[i] for name, (_, i) in free.items()})
    listed = tuple(wanted[place] for place in held)
    fitted = {name: tuple(widths[i][place] for place in held) for name, (_, i) in free.items()}
    _check_fit(listed, fitted, free)
    _check_together(recipe, model, fitted)
    fixed = {name: (scheme,) * len(listed) for name, (_, scheme, _) in by_name.items() if scheme is not None}
    shapes = {name: shape for name, (shape, _, reason) in by_name.items() if reason is None}
    options = {name: fitted.get(name) or fixed[name] for name in shapes}
    beside = unquantized_bytes(model, {name: schemes[0] for name, schemes in options.items() if schemes[0] is not None})
    found = Candidates(shapes, listed, options, None, beside, (*notes, *_padding(listed)))
    return _within_budget(recipe, found)


def _check_made(wanted: Collection[Scheme], model: Model) -> None:
    quantizer = find("auto")
    assert quantizer is not None
    for scheme in wanted:
        problem = quantizer.supports(scheme) or checkpoint.problem([scheme], model.dtype)
        if scheme.activations is not None:
            problem = "it rounds activations, and auto weighs the errors of weights only; use overrides for such layers"
        if problem is not None:
            raise UnsupportedError(f"quantize.candidates: {scheme}: {problem}")
    problem = checkpoint.problem(wanted, model.dtype)
    if problem is not None:
        raise UnsupportedError(f"quantize.candidates: {problem}")


def _fitted(scheme: Scheme, in_features: int, adjust: bool) -> Scheme | None:
    """The scheme for an input width, with the next smaller group size that divides it if that is allowed; None where there is none."""
    if scheme.problem_with(1, in_features) is None:
        return scheme
    if not adjust or scheme.granularity.per is not Per.GROUP:
        return None
    dividing = [n for n in range(min(scheme.granularity.columns, in_features), 15, -1) if in_features % n == 0]
    size = next((n for n in dividing if n % BLOCK == 0), next(iter(dividing), None))
    return None if size is None else scheme.with_group_size(size)


def _held(recipe: Recipe, model: Model, fitted: Mapping[str, tuple[Scheme | None, ...]]) -> tuple[list[int], tuple[str, ...]]:
    """Places of the candidates that every export holds, and notes on the others. An export that holds none is left to `exports.check`, which refuses or skips it."""
    wanted = recipe.quantize.candidates or DEFAULT
    kept, notes = list(range(len(wanted))), []
    for section in recipe.export:
        problems = {place: _export_problem(section.format, section.type, model, {n: s for n, f in fitted.items() if (s := f[place]) is not None}) for place in kept}
        if all(problem is not None for problem in problems.values()) or (recipe.quantize.candidates and section.optional):
            continue
        for place, problem in problems.items():
            if problem is not None and recipe.quantize.candidates:
                raise UnsupportedError(f"quantize.candidates: {wanted[place]}: export {section.format} cannot hold it: {problem}; remove one of the two")
            if problem is not None:
                notes.append(f"{wanted[place]} is no candidate: export {section.format} cannot hold it ({problem})")
                kept.remove(place)
    return kept, tuple(notes)


def _export_problem(format_name: str, type_name: str | None, model: Model, schemes: dict[str, Scheme]) -> str | None:
    try:
        return exporter(format_name, type_name).check(replace(model, schemes=schemes))
    except UnsupportedError as e:
        return str(e)
    except MissingCapabilityError:  # no reason against a scheme; `exports.check` says it
        return None


def _check_fit(listed: tuple[Scheme, ...], fitted: Mapping[str, tuple[Scheme | None, ...]], shapes: Mapping[str, tuple[int, int]]) -> None:
    for place, scheme in enumerate(listed):
        if all(f[place] is None for f in fitted.values()):
            raise RecipeError(f"quantize.candidates: {scheme}: {scheme.problem_with(*next(iter(shapes.values())))}; or set quantize.options.group_fallback: adjust")
    for name, found in fitted.items():
        if not any(found):
            problem = listed[0].problem_with(*shapes[name])
            raise RecipeError(f"quantize.candidates: none fits {name}: {listed[0]}: {problem}; add one that does, override or ignore the layer, or set group_fallback: adjust")


def _check_together(recipe: Recipe, model: Model, fitted: Mapping[str, tuple[Scheme | None, ...]]) -> None:
    """Refuse candidates that an export holds one by one, but not in one model."""
    options = {name: [s for s in found if s is not None] for name, found in fitted.items()}
    mixture = {name: found[i % len(found)] for i, (name, found) in enumerate(options.items())}
    for section in recipe.export:
        problem = None if section.optional else _export_problem(section.format, section.type, model, mixture)
        if problem is not None:
            raise UnsupportedError(problem if problem.startswith("export ") else f"export {section.format}: {problem}")


def _padding(listed: Collection[Scheme]) -> list[str]:
    padded = [scheme for scheme in listed if packs_zeros(scheme)] if len(listed) > 1 else []
    said = "beside other schemes, transformers loads zero points only in 32 bits each: files are larger than the bits per weight say, which count what a zero point needs"
    return [f"{padded[0]}: {said}"] if padded else []


def _within_budget(recipe: Recipe, found: Candidates) -> Candidates:
    """The same with its capacity."""
    assert recipe.quantize.budget is not None
    budget = parse_budget(recipe.quantize.budget)
    if budget.divergence is not None:
        return found
    capacity = int(budget.bits * found.weights + 1e-3) if budget.bits is not None else 8 * ((budget.size_bytes or 0) - found.rest_bytes)
    least = found.bits(found.smallest())
    if least > capacity:
        total = f"{least / found.weights:.3f} bits per weight, {(found.rest_bytes + least // 8) / 1e6:.1f} MB with what stays unquantized"
        raise RecipeError(f"quantize.budget: {recipe.quantize.budget}: the smallest candidates take {total}; raise the budget or add smaller candidates")
    return replace(found, capacity_bits=capacity)
