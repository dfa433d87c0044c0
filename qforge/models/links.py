"""Links of a decoder block: where a factor can move from what produces a channel into the columns that read it, and the block still computes the same.

A link's source is a norm (its weight, or 1 + weight as in Gemma) or an earlier linear (its rows); its readers are all linears that its output reaches.
Dividing the source's channel c by s_c and multiplying by s_c the columns that carry c changes nothing but fp32 rounding. `link_search.py` finds links.

Letters: C channels of the source, I input features of the readers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from qforge.methods.transform import spread

Run = Callable[[torch.Tensor], torch.Tensor]
TOLERANCE = 3e-5  # of what the block adds to the residual stream: true links of twelve families and of SmolLM2-135M stay below 1.3e-6, false ones are beyond .07


@dataclass(frozen=True, slots=True)
class Link:
    """One link; names are relative to the block.

    Attributes:
        source: module whose output is divided.
        readers: linears whose columns are multiplied; all that read it.
        columns: `[I]` int64, the source's channel that each input column carries; -1 for one that carries none of them.
        channels: C.
        offset: what a norm adds to its weight before it multiplies; 0 for a linear.
    """

    source: str
    readers: tuple[str, ...]
    columns: torch.Tensor
    channels: int
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Fold:
    """A link with its factors.

    Attributes:
        link: where.
        factors: `[C]` fp32, positive.
        tensors: what becomes of the source's tensors that stay unquantized (norm weights, biases), exact in the dtype in which they are stored; by name in the block.
    """

    link: Link
    factors: torch.Tensor
    tensors: dict[str, torch.Tensor]

    @property
    def column_factors(self) -> torch.Tensor:
        """`[I]` fp32: what each input column of the readers is multiplied by."""
        return spread(self.factors, self.link.columns)


def settle(link: Link, module: nn.Module, factors: torch.Tensor, dtype: Callable[[str], torch.dtype]) -> Fold:
    """Adjust factors so that nothing is lost when the source's unquantized tensors are stored in `dtype(name)`.

    The tensor is divided and rounded, and the factor becomes the true ratio; where a norm has a bias, too, factors become powers of two. A channel
    that would vanish or overflow keeps the factor 1, as does one that no reader has a column for.
    """
    source = module.get_submodule(link.source)
    stored = {n: p.detach() for n, p in source.named_parameters(recurse=False) if not (n == "weight" and isinstance(source, nn.Linear))}
    factors = torch.where(torch.isin(torch.arange(link.channels), link.columns), factors, torch.ones(()))  # of a fused projection, the other parts stay
    factors = torch.exp2(factors.log2().round()) if len(stored) > 1 else factors
    types = {name: dtype(f"{link.source}.{name}") for name in stored}
    tensors = {name: _divided(name, old, factors, types[name], link.offset) for name, old in stored.items()}
    for name, old in stored.items():
        new, amount = tensors[name], old + (link.offset if name == "weight" else 0.0)
        amount_after = new + (link.offset if name == "weight" else 0.0)
        lost = (amount != 0) & ((amount_after == 0) | ~torch.isfinite(amount_after) | (amount_after.abs() < torch.finfo(types[name]).tiny))
        exact = torch.where((amount == 0) | lost, factors, amount / amount_after)
        factors = torch.where(lost, torch.ones(()), exact)
    for name, old in stored.items():
        tensors[name] = torch.where(factors == 1, old, tensors[name])
    return Fold(link, factors, {f"{link.source}.{name}": tensor for name, tensor in tensors.items()})


def _divided(name: str, old: torch.Tensor, factors: torch.Tensor, dtype: torch.dtype, offset: float) -> torch.Tensor:
    if name != "weight":
        return (old / factors).to(dtype).float()
    return ((old + offset) / factors - offset).to(dtype).float()


def apply(fold: Fold, module: nn.Module) -> None:
    """Change the block's parameters in place of the old ones (which stay as they are, for whoever holds them)."""
    source = module.get_submodule(fold.link.source)
    if isinstance(source, nn.Linear):
        _assign(source, "weight", source.weight / fold.factors[:, None])
    for name, value in fold.tensors.items():
        _assign(source, name.rpartition(".")[2], value)
    for name in fold.link.readers:
        reader = module.get_submodule(name)
        assert isinstance(reader, nn.Linear)
        _assign(reader, "weight", reader.weight * fold.column_factors)


def _assign(module: nn.Module, name: str, value: torch.Tensor) -> None:
    setattr(module, name, nn.Parameter(value.detach(), requires_grad=False))


@torch.no_grad()
def hold(links: list[Link], module: nn.Module, run: Run, hidden: torch.Tensor) -> bool:
    """Whether folding random factors into all of these links leaves the block's output `[B, T, D]` as it is, to fp32 accuracy; the block is left as it was.

    Args:
        links: those in question.
        module: a materialised block.
        run: its forward.
        hidden: some hidden states `[B, T, D]`.
    """
    touched = {name: module.get_submodule(name) for link in links for name in (link.source, *link.readers)}
    before = {name: dict(m.named_parameters(recurse=False)) for name, m in touched.items()}
    wanted = run(hidden)
    generator = torch.Generator().manual_seed(0)
    try:
        for link in links:
            apply(settle(link, module, torch.exp2(torch.rand(link.channels, generator=generator, device="cpu").to(hidden.device) * 2 - 1), lambda _: torch.float32), module)
        changed = run(hidden)
    finally:
        for name, parameters in before.items():
            for key, parameter in parameters.items():
                setattr(touched[name], key, parameter)
    return bool((changed - wanted).abs().max() <= TOLERANCE * (wanted - hidden).abs().max())
