"""Transforms in the block loop: what the links of a block are fed is summed once, each link's factors are chosen, and folded when both streams allow it.

Letters: B windows, T tokens, I input features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from qforge import numerics
from qforge.calibration.statistics import Sums
from qforge.errors import NumericalError
from qforge.methods import Options, Stats, Transform
from qforge.methods.transform import Reader, scaled, spread
from qforge.models.blocks import BlockModel
from qforge.models.link_search import find_links
from qforge.models.links import Fold, Link, apply, settle
from qforge.scheme import Scheme


@dataclass(frozen=True, slots=True)
class Folds:
    """What will be folded into a block.

    Attributes:
        folds: link by link.
        inputs: what the input of a linear will be divided by, `[I]` fp32, by full name.
        sources: what the outputs of a linear will be divided by, `[O]` fp32, by full name.
        tensors: the values of tensors that stay unquantized and change, fp32, by full name.
    """

    folds: tuple[Fold, ...] = ()
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    sources: dict[str, torch.Tensor] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def apply(self, module: nn.Module) -> None:
        """Fold into the materialised block; its function stays what it is."""
        for fold in self.folds:
            apply(fold, module)

    def weighed(self, name: str, outputs: torch.Tensor) -> torch.Tensor:
        """How outputs weigh against each other, `[O, O]` fp32, once they are divided: each as many times more."""
        factors = self.sources.get(name)
        return outputs.float() if factors is None else outputs.float() * factors[:, None] * factors


def choose_folds(
    blocks: BlockModel,
    index: int,
    module: nn.Module,
    gather: Callable[[Sequence[Link], frozenset[str]], Sequence[Sums]],
    probe: torch.Tensor,
    transforms: Sequence[Transform],
    schemes: Mapping[str, Scheme],
    options: Options,
) -> Folds:
    """Find links and choose their factors; the block does not change.

    Args:
        blocks: the model.
        index: of the block.
        module: the block, materialised.
        gather: sums over what each link's readers are fed in the quantized stream.
        probe: some hidden states of `link_search.PROBE` tokens, `[1, T, D]`.
        transforms: in the order in which they are applied.
        schemes: target scheme by module name; a link with an unquantized linear in it is left alone, since what is folded there would be rounded.
        options: of the method.

    Raises:
        NumericalError: activations are NaN or infinite.
    """

    def full(name: str) -> str:
        return blocks.full_name(index, name)

    links = [link for link in find_links(module, lambda x: blocks.run(index, module, x), probe) if _quantized(link, module, full, schemes)]
    needs = frozenset[str]().union(*(t.needs(options) for t in transforms))
    stats = {link.source: sums.stats() for link, sums in zip(links, gather(links, needs), strict=True)}
    folds = []
    for link in links:
        readers = {n: schemes[full(n)] for n in link.readers}
        try:
            factors = _factors(link, module, stats[link.source], transforms, readers, options)
        except NumericalError as e:
            raise NumericalError(f"{full(_to_blame(module, readers))}: {e}") from e
        if (factors != 1).any():
            folds.append(settle(link, module, factors, lambda name: blocks.stored_dtype(full(name))))
    inputs = {full(name): fold.column_factors for fold in folds for name in fold.link.readers}
    sources: dict[str, torch.Tensor] = {}
    for fold in folds:
        if isinstance(module.get_submodule(fold.link.source), nn.Linear):
            sources[full(fold.link.source)] = fold.factors * sources.get(full(fold.link.source), torch.ones(()))
    return Folds(tuple(folds), inputs, sources, {full(name): value for fold in folds for name, value in fold.tensors.items()})


def _quantized(link: Link, module: nn.Module, full: Callable[[str], str], schemes: Mapping[str, Scheme]) -> bool:
    linears = [n for n in (link.source, *link.readers) if isinstance(module.get_submodule(n), nn.Linear)]
    return all(full(n) in schemes for n in linears)


def _to_blame(module: nn.Module, readers: Mapping[str, Scheme]) -> str:
    """Of linears that no factors can be chosen for, the first whose weight has no scales; the first of all where it is their input."""
    for name, scheme in readers.items():
        try:
            numerics.minmax_parameters(module.get_parameter(f"{name}.weight").detach(), scheme)
        except NumericalError:
            return name
    return next(iter(readers))


def _factors(link: Link, module: nn.Module, stats: Stats, transforms: Sequence[Transform], schemes: Mapping[str, Scheme], options: Options) -> torch.Tensor:
    """All transforms' factors of a link, `[C]`: each sees weights and inputs as those before it leave them."""
    readers = [Reader(module.get_parameter(f"{n}.weight").detach(), scheme) for n, scheme in schemes.items()]
    factors = torch.ones(link.channels)
    for transform in transforms:
        if any(transform.supports(scheme) is not None for scheme in schemes.values()):
            continue
        by_column = spread(factors, link.columns)
        so_far = [replace(r, weight=r.weight * by_column) for r in readers]
        factors = factors * transform.factors(so_far, scaled(stats, by_column), link.columns, link.channels, options)
    return factors
