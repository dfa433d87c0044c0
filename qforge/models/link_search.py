"""Finding a block's links by running it: no family and no module name is known here.

For the search, the outputs of all linears and norms are replaced by noise, the same in every run, so that what a module's output reaches is seen at the
inputs of the linears right behind it and nowhere else, whatever the weights are. Then one source after the other has its channels multiplied by distinct
ratios: it is a candidate if every linear whose input changes has, at every column and for all tokens, one of these ratios (SiLU and softmax give none),
and the block's own output does not change. A candidate is a link if `links.hold` says so of the real weights.

Letters: B windows, T tokens, D hidden width, C channels of a source, I input features of a reader.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from qforge.models.experts import every_expert
from qforge.models.links import Link, Run, hold

Output = Callable[[str, torch.Size], torch.Tensor]
PROBE = 8  # tokens to find links with, and to compare with: enough to see what attention mixes
_RATIO_ERROR = 1e-5  # of a column: fp32 sums over few tokens


@dataclass(slots=True)
class _Seen:
    """One run: the inputs of linears `[.., I]` and the block's output."""

    inputs: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)
    output: torch.Tensor = field(default_factory=lambda: torch.empty(0))


@torch.no_grad()
def find_links(module: nn.Module, run: Run, hidden: torch.Tensor) -> list[Link]:
    """The links of a materialised block, in the order in which their sources run; a linear reads in one of them at most.

    Args:
        module: the block, fp32; left as it was.
        run: its forward, `[B, T, D] -> [B, T, D]`.
        hidden: some hidden states of several tokens.

    Returns:
        An empty list also where a linear is not reached by these tokens, since it might read what a link divides. (Experts all are: `every_expert`.)
    """
    with every_expert(module):
        return _links(module, run, hidden)


def _links(module: nn.Module, run: Run, hidden: torch.Tensor) -> list[Link]:
    base = _noisy(module, run, hidden, None, None)
    if any(len(base.inputs.get(n, ())) != 1 for n, m in module.named_modules() if isinstance(m, nn.Linear)):
        return []
    found: list[Link] = []
    for source in base.widths:
        candidate = _candidate(module, run, hidden, base, source)
        taken = {name for link in found for name in link.readers}
        if candidate is None or taken & set(candidate.readers):
            continue
        norm = not isinstance(module.get_submodule(source), nn.Linear)
        forms = [Link(source, candidate.readers, candidate.columns, candidate.channels, offset) for offset in ((0.0, 1.0) if norm else (0.0,))]
        verified = next((link for link in forms if hold([link], module, run, hidden)), None)
        if verified is not None:
            found.append(verified)
    return found


def _candidate(module: nn.Module, run: Run, hidden: torch.Tensor, base: _Seen, source: str) -> Link | None:
    """The link of a source with all its channels; of one with more channels than a reader has columns (fused projections), of those at its end or start."""
    count = base.widths[source]

    def probe(first: int, last: int) -> Link | None:
        ratios = torch.ones(count)
        ratios[first:last] = 1.25 * 2 ** ((torch.arange(last - first) + 0.5) / (last - first))
        return _read_off(base, _noisy(module, run, hidden, source, ratios), source, ratios)

    whole = probe(0, count)
    if whole is not None or not isinstance(module.get_submodule(source), nn.Linear) or count <= min(x[0].shape[-1] for x in base.inputs.values()):
        return whole
    return _longest(lambda size: probe(count - size, count), count) or _longest(lambda size: probe(0, size), count)


def _longest(probe: Callable[[int], Link | None], count: int) -> Link | None:
    """The link of the most channels, by bisection: fewer channels of a link make a link, too."""
    low, high, best = 0, count, None
    while high - low > 1:
        middle = (low + high) // 2
        link = probe(middle)
        low, high, best = (middle, high, link) if link is not None else (low, middle, best)
    return best


def _read_off(base: _Seen, seen: _Seen, source: str, ratios: torch.Tensor) -> Link | None:
    readers = [n for n, x in base.inputs.items() if not torch.equal(x[0], seen.inputs[n][0])]
    if not readers or not torch.equal(base.output, seen.output):
        return None
    maps = [_columns(base.inputs[n][0], seen.inputs[n][0], ratios) for n in readers]
    columns = maps[0]
    if columns is None or any(other is None or not torch.equal(columns, other) for other in maps[1:]):
        return None
    return Link(source, tuple(readers), columns, len(ratios))


def _columns(before: torch.Tensor, after: torch.Tensor, ratios: torch.Tensor) -> torch.Tensor | None:
    """Which channel each column carries, `[I]`, from its inputs with and without the ratios; None where a column is no multiple."""
    if before.shape != after.shape:
        return None
    x, y = (t.reshape(-1, t.shape[-1]).double() for t in (before, after))
    ratio = (x * y).sum(0) / (x * x).sum(0)
    if not bool(((y - ratio * x).norm(dim=0) < _RATIO_ERROR * y.norm(dim=0)).all()):
        return None
    rising, channel = torch.sort(ratios.double())
    middles = (rising[1:] + rising[:-1]) / 2
    nearest = torch.bucketize(ratio, middles)
    if not bool(((ratio / rising[nearest] - 1).abs() < _RATIO_ERROR).all()):
        return None
    return torch.where(rising[nearest] == 1, -1, channel[nearest])


def _noisy(module: nn.Module, run: Run, hidden: torch.Tensor, source: str | None, ratios: torch.Tensor | None) -> _Seen:
    """One run on noise; the source's output is multiplied by ratios `[C]`."""
    seen, generator = _Seen(), torch.Generator().manual_seed(0)

    def output(name: str, shape: torch.Size) -> torch.Tensor:
        noise = torch.randn(shape, generator=generator, device="cpu").to(hidden.device)
        seen.widths[name] = shape[-1]
        return noise * ratios if name == source and ratios is not None else noise

    with contextlib.ExitStack() as stack:
        for name, part in module.named_modules():
            if isinstance(part, nn.Linear):
                stack.enter_context(_linear_on_noise(name, part, output, seen))
            elif not any(part.children()) and _weight_size(part):
                handle = part.register_forward_hook(_norm_on_noise(name, part, output))
                stack.callback(handle.remove)
        seen.output = run(hidden)
    return seen


def _weight_size(part: nn.Module) -> int:
    """The length of a vector that is called weight, as norms have it; 0 without one."""
    weight = part._parameters.get("weight")
    return 0 if weight is None or weight.dim() != 1 else len(weight)


@contextlib.contextmanager
def _linear_on_noise(name: str, part: nn.Linear, output: Output, seen: _Seen) -> Iterator[None]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        seen.inputs.setdefault(name, []).append(x)
        return output(name, torch.Size((*x.shape[:-1], part.out_features)))

    vars(part)["forward"] = forward
    try:
        yield
    finally:
        del vars(part)["forward"]


def _norm_on_noise(name: str, part: nn.Module, output: Output) -> Callable[[nn.Module, Any, torch.Tensor], torch.Tensor | None]:
    def hook(_: nn.Module, __: Any, out: torch.Tensor) -> torch.Tensor | None:
        return output(name, out.shape) if out.shape[-1] == _weight_size(part) else None

    return hook
