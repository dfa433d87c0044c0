"""Rotation (QuaRot, arXiv 2404.00456; SpinQuant, 2405.16406): the same model in turned coordinates, in which no channel is much larger than the others.

With an orthogonal Q the residual stream becomes x Q: the embedding and what writes to the stream are turned, and what reads it is turned back, its norm's weight folded into it
first, since only a norm without weights commutes with Q. Between the value and the output projection each head's channels are turned by a second matrix. All of it
lies in the weights, so every export holds it and nothing is computed at run time. What an online rotation would be needed for (down_proj's inputs) stays as it is.

No family is known here: `link_search.py` finds what reads norms and values, everything else is taken to write to the stream, and a block of each kind, the embedding and the
head are then run in both forms on a few tokens. A model of which that is not true is refused.

Letters: T tokens, D hidden width, V vocabulary, O x I shape of a linear.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from qforge.errors import UnsupportedError
from qforge.models import skeleton as skeletons
from qforge.models.blocks import BlockModel
from qforge.models.link_search import PROBE, find_links
from qforge.models.links import Link
from qforge.models.model import Model
from qforge.models.orthogonal import Orthogonal, orthogonal
from qforge.models.spec import model_spec
from qforge.models.weights import Cast, TensorInfo, WeightSource, digest

TOLERANCE = 1e-4  # of what a block adds, of the embeddings and of the logits: true in nine families up to 1.6e-6, false from .6 on
_RESIDUAL_SEED, _HEADS_SEED = 0, 1


@dataclass(frozen=True, slots=True)
class Turn:
    """What becomes of one tensor `[O, I]` (or `[O]`).

    Attributes:
        start: the tensor of the model that it starts from.
        norm: name of the weight that multiplies its columns first, `[I]`, and what is added to that weight before.
        columns: turns the inputs.
        rows: turns the outputs in `span`.
        span: first row, and the one after the last.
        constant: instead of all that, a value for every element: a norm whose weight was folded.
    """

    start: str
    norm: tuple[str, float] | None = None
    columns: Orthogonal | None = None
    rows: Orthogonal | None = None
    span: tuple[int, int] = (0, 0)
    constant: float | None = None


class Turned:
    """A model's weights with some of them turned: fp32 (fp64 of fp64) where they change, as the model has them elsewhere."""

    def __init__(self, base: WeightSource, turns: Mapping[str, Turn]) -> None:
        self._base, self._turns = base, turns
        self._names = list(dict.fromkeys([*base.names(), *turns]))

    def names(self) -> list[str]:
        """The model's names, and that of a head that is no longer tied."""
        return list(self._names)

    def info(self, name: str) -> TensorInfo:
        """Shape, and fp32 for what is turned."""
        turn = self._turns.get(name)
        found = self._base.info(name if turn is None else turn.start)
        return found if turn is None else TensorInfo(found.shape, torch.promote_types(found.dtype, torch.float32))

    def read(self, name: str) -> torch.Tensor:
        """The turned tensor."""
        turn = self._turns.get(name)
        if turn is None:
            return self._base.read(name)
        value = self._base.read(turn.start).to(self.info(name).dtype)
        if turn.norm is not None:
            value *= self._base.read(turn.norm[0]).to(value.dtype) + turn.norm[1]
        return _turned(value, turn)

    def fingerprint(self) -> str:
        """Of the model, and of what is turned by what."""
        return digest("turned", self._base.fingerprint(), *sorted(f"{name}={_described(t)}" for name, t in self._turns.items()))


def _turned(value: torch.Tensor, turn: Turn) -> torch.Tensor:
    """A tensor after its norm was folded, turned; it may be changed in place."""
    if turn.constant is not None:
        return value.fill_(turn.constant)
    if turn.columns is not None:
        value = turn.columns.columns(value)
    if turn.rows is not None:
        first, last = turn.span
        value[first:last] = turn.rows.rows(value[first:last])
    return value


def _described(turn: Turn) -> str:
    signs = ["" if q is None else "".join("+" if s > 0 else "-" for s in q.signs) for q in (turn.columns, turn.rows)]
    return f"{turn.start} {turn.norm} {turn.span} {turn.constant} {signs}"


def rotated(model: Model) -> Model:
    """The model in turned coordinates: equal logits to fp32 accuracy, before its tensors are stored in its dtype again.

    Tied embeddings come untied, since only the head takes the last norm's weight.

    Raises:
        UnsupportedError: a rotation does not pass through some part of the model; the message names it.
    """
    blocks = BlockModel(model)
    turns = _turns(model, blocks)
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings = False
    weights = Turned(model.weights, turns)
    turned = replace(model, config=config, spec=model_spec(config), weights=weights, schemes={}, kv_scales={})
    _check(blocks, BlockModel(turned))
    return replace(turned, weights=Cast(weights, model.dtype))


def _turns(model: Model, blocks: BlockModel) -> dict[str, Turn]:
    """Every tensor that changes, by name."""
    residual, heads = orthogonal(blocks.hidden_size, _RESIDUAL_SEED), orthogonal(_head_size(model), _HEADS_SEED)
    next(iter(blocks.embed([_probe(blocks)])))  # records what blocks are called with
    turns: dict[str, Turn] = {}
    kinds: dict[object, tuple[list[Link], list[Link]]] = {}
    for index in range(blocks.num_blocks):
        kind = _kind(blocks, index)
        if kind not in kinds:
            kinds[kind] = _links(blocks, index, heads)
        turns |= _block_turns(blocks, index, *kinds[kind], residual, heads)
    offsets = {link.offset for norms, _ in kinds.values() for link in norms}
    if blocks.head_name is None or len(offsets) != 1:
        raise _refusal("the model", "it has no output head, or no norms of one kind that linears alone read")
    norm, offset, head = _final_norm(model, blocks), offsets.pop(), f"{blocks.head_name}.weight"
    turns[norm] = Turn(norm, constant=1.0 - offset)
    turns[head] = Turn(head if head in model.weights.names() else blocks.embedding_name, (norm, offset), residual)
    turns[blocks.embedding_name] = Turn(blocks.embedding_name, columns=residual)
    return turns


def _refusal(where: str, why: str) -> UnsupportedError:
    return UnsupportedError(f"method rotate: {where}: {why}; a rotation cannot be folded into this model's weights, so leave rotate out")


def _head_size(model: Model) -> int:
    return int(getattr(model.config, "head_dim", None) or model.config.hidden_size // model.config.num_attention_heads)


def _probe(blocks: BlockModel) -> torch.Tensor:
    return torch.randint(0, blocks.vocab_size, (1, PROBE), generator=torch.Generator().manual_seed(0))


def _noise(blocks: BlockModel) -> torch.Tensor:
    return torch.randn(1, PROBE, blocks.hidden_size, generator=torch.Generator().manual_seed(0))


def _kind(blocks: BlockModel, index: int) -> object:
    """What blocks that run the same code have in common: their modules, and the shapes of their tensors."""
    return tuple((n, type(m).__name__, *((p, tuple(t.shape)) for p, t in m.named_parameters(recurse=False))) for n, m in blocks.module(index).named_modules())


def _links(blocks: BlockModel, index: int, heads: Orthogonal) -> tuple[list[Link], list[Link]]:
    """Of a block, what reads the residual stream through a norm, and what reads heads of values."""
    hidden = _noise(blocks)
    with blocks.block(index) as module:
        links = find_links(module, lambda x: blocks.run(index, module, x), hidden)
        wanted = blocks.run(index, module, hidden)
        norms = [link for link in links if not isinstance(module.get_submodule(link.source), nn.Linear) and link.channels == blocks.hidden_size]
        values = [link for link in links if isinstance(module.get_submodule(link.source), nn.Linear) and _of_heads(link, heads.size)]
        return norms, [link for link in values if _same(_run_turned(blocks, index, module, link, hidden, heads), wanted, wanted - hidden)]


def _of_heads(link: Link, size: int) -> bool:
    """Whether each `size` columns in turn carry one whole head of the source's channels."""
    if len(link.columns) % size:
        return False
    first = link.columns.view(-1, size)[:, :1]
    return bool((first >= 0).all()) and bool((link.columns.view(-1, size) == first + torch.arange(size)).all()) and not ((first - first.min()) % size).any()


def _run_turned(blocks: BlockModel, index: int, module: nn.Module, link: Link, hidden: torch.Tensor, heads: Orthogonal) -> torch.Tensor:
    """The block's output with the heads of one link turned; its weights are put back."""
    held = {name: value for name, value in module.named_parameters() if name.rpartition(".")[0] in (link.source, *link.readers)}
    try:
        for name, turn in _head_turns(link, list(held), heads).items():
            part, _, key = name.rpartition(".")
            setattr(module.get_submodule(part), key, nn.Parameter(_turned(held[name].detach().clone(), turn), requires_grad=False))
        return blocks.run(index, module, hidden)
    finally:
        for name, value in held.items():
            part, _, key = name.rpartition(".")
            setattr(module.get_submodule(part), key, value)


def _head_turns(link: Link, names: list[str], heads: Orthogonal) -> dict[str, Turn]:
    """Turns of a value projection's tensors and of its readers' weights; `names` are those that there are."""
    span = (int(link.columns.min()), int(link.columns.max()) + 1)
    turns = {n: Turn(n, rows=heads, span=span) for n in (f"{link.source}.weight", f"{link.source}.bias") if n in names}
    return turns | {f"{n}.weight": Turn(f"{n}.weight", columns=heads) for n in link.readers}


def _block_turns(blocks: BlockModel, index: int, norms: list[Link], values: list[Link], residual: Orthogonal, heads: Orthogonal) -> dict[str, Turn]:
    """Turns of one block's tensors, by full name: what reads norms, everything else as a writer to the stream, and in both the heads of values."""

    def full(name: str) -> str:
        return blocks.full_name(index, name)

    module = blocks.module(index)
    names = [n for n, _ in module.named_parameters()]
    turns: dict[str, Turn] = {}
    for link in norms:
        norm = full(f"{link.source}.weight")
        turns[norm] = Turn(norm, constant=1.0 - link.offset)
        turns |= {full(f"{n}.weight"): Turn(full(f"{n}.weight"), (norm, link.offset), residual) for n in link.readers}
    for name, linear in module.named_modules():
        if isinstance(linear, nn.Linear) and full(f"{name}.weight") not in turns:
            if linear.out_features != blocks.hidden_size:
                raise _refusal(full(name), "it reads the residual stream otherwise than through a norm that linears alone read")
            turns |= {full(n): Turn(full(n), rows=residual, span=(0, linear.out_features)) for n in (f"{name}.weight", f"{name}.bias") if n in names}
    scaling = next((n for n, m in module.named_modules() for p in m._parameters.values() if p is not None and _scales(m, p, blocks) and full(f"{n}.weight") not in turns), None)
    if scaling is not None:
        raise _refusal(full(scaling), "it multiplies channels of the residual stream by a weight that cannot be folded into linears")
    for link in values:
        for name, turn in _head_turns(link, names, heads).items():
            before = turns.get(full(name), Turn(full(name)))
            both = replace(before, columns=turn.columns) if turn.columns is not None else replace(before, rows=turn.rows, span=turn.span)
            turns[full(name)] = both
    return turns


def _scales(module: nn.Module, parameter: nn.Parameter, blocks: BlockModel) -> bool:
    return not isinstance(module, nn.Linear) and parameter.shape == (blocks.hidden_size,)


def _final_norm(model: Model, blocks: BlockModel) -> str:
    """The name of the only weight vector outside the blocks."""
    inside = tuple(f"{name}." for name in blocks.block_names)
    shapes = skeletons.build(model.config, trust_remote_code=model.trust_remote_code).shapes
    outside = [n for n, shape in shapes.items() if shape == (blocks.hidden_size,) and not n.startswith(inside)]
    if len(outside) != 1:
        raise _refusal("the model", f"outside its blocks it has {len(outside)} vectors instead of one last norm's weight")
    return outside[0]


@torch.no_grad()
def _check(blocks: BlockModel, turned: BlockModel) -> None:
    """Run a block of each kind, the embedding and the head in both forms."""
    residual, hidden = orthogonal(blocks.hidden_size, _RESIDUAL_SEED), _noise(blocks)
    before, after = (next(iter(m.embed([_probe(m)]))) for m in (blocks, turned))
    if not _same(after, residual.columns(before), before):
        raise _refusal(blocks.embedding_name, "its output is changed before the first block takes it")
    for index in {_kind(blocks, i): i for i in reversed(range(blocks.num_blocks))}.values():
        with blocks.block(index) as module:
            wanted = blocks.run(index, module, hidden)
        with turned.block(index) as module:
            got = turned.run(index, module, residual.columns(hidden))
        if not _same(got, residual.columns(wanted), wanted - hidden):
            raise _refusal(blocks.block_names[index], "its norms do not commute with a rotation, or something in it does not pass one on")
    with blocks.head() as logits:
        wanted = logits(hidden[0])
    with turned.head() as logits:
        got = logits(residual.columns(hidden[0]))
    if not _same(got, wanted, wanted):
        raise _refusal("the output head", "its norm does not commute with a rotation")


def _same(got: torch.Tensor, wanted: torch.Tensor, amount: torch.Tensor) -> bool:
    return bool((got - wanted).abs().max() <= TOLERANCE * amount.abs().max())
