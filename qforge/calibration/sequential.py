"""Block after block: statistics at the block's inputs, quantize its linears, and run the *quantized* block to get the next one's inputs.

A finished block is a piece in the journal, and so are the hidden states after the last finished one, so that a killed run goes on where
it was, with the same bytes.

Letters: B windows, T tokens, D hidden width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from qforge import numerics
from qforge.calibration.statistics import Gatherer
from qforge.errors import NumericalError
from qforge.methods import Options, Quantizer, Stats
from qforge.models.blocks import BlockModel
from qforge.progress import Progress
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Scheme
from qforge.types import LayerResult

BATCH_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Piece:
    """One finished block: its quantized linears by module name, and what the report says of each."""

    linears: dict[str, QuantizedLinear]
    layers: list[LayerResult]


@dataclass(frozen=True, slots=True)
class Store:
    """How finished work is kept; index `num_blocks` stands for the output head.

    Attributes:
        load: a finished block's piece, or None.
        save: keep a block's piece.
        load_hidden: hidden states after block `index`, or None.
        save_hidden: keep them (and forget those of earlier blocks).
    """

    load: Callable[[int], Piece | None]
    save: Callable[[int, Piece], None]
    load_hidden: Callable[[int], list[torch.Tensor] | None]
    save_hidden: Callable[[int, list[torch.Tensor]], None]


def quantize_blocks(
    blocks: BlockModel, quantizer: Quantizer, schemes: Mapping[str, Scheme], options: Options, windows: torch.Tensor | None, store: Store, progress: Progress
) -> None:
    """Quantize every linear named in `schemes`; results go to `store`.

    Args:
        blocks: the merged model.
        quantizer: the method.
        schemes: target scheme by module name.
        options: of the method.
        windows: calibration token ids `[B, T]`, None for a method that needs no statistics.
        store: finished work.
        progress: told of every block.
    """
    stages = blocks.num_blocks + (blocks.head_name in schemes)
    finished = 0
    while finished < stages and store.load(finished) is not None:
        finished += 1
    if finished == stages:
        return
    hidden = _inputs_of(blocks, finished, windows, store) if windows is not None else None
    for index in progress.track(range(finished, stages), "quantize", stages - finished):
        if index == blocks.num_blocks:
            store.save(index, _head(blocks, quantizer, schemes, options, hidden))
            continue
        piece = _quantize_block(blocks, index, quantizer, schemes, options, hidden)
        store.save(index, piece)
        if hidden is not None and index + 1 < stages:
            _advance(blocks, index, piece, hidden)
            store.save_hidden(index, hidden)


def _inputs_of(blocks: BlockModel, index: int, windows: torch.Tensor, store: Store) -> list[torch.Tensor]:
    """Hidden states that block `index` takes: the newest kept ones, replayed through the finished blocks after them."""
    batches = windows.split(max(1, BATCH_TOKENS // windows.shape[1]))
    embedded = blocks.embed(batches)  # also records what blocks are called with
    start, hidden = 0, embedded
    for done in range(index - 1, -1, -1):
        kept = store.load_hidden(done)
        if kept is not None:
            start, hidden = done + 1, kept
            break
    for done in range(start, index):
        piece = store.load(done)
        assert piece is not None
        _advance(blocks, done, piece, hidden)
    return hidden


def _advance(blocks: BlockModel, index: int, piece: Piece, hidden: list[torch.Tensor]) -> None:
    """Run a quantized block on all batches, in place."""
    with blocks.block(index, lambda name: _dequantized(piece, name)) as module:
        for i, batch in enumerate(hidden):
            hidden[i] = blocks.run(index, module, batch)


def _dequantized(piece: Piece, tensor_name: str) -> torch.Tensor | None:
    q = piece.linears.get(tensor_name.removesuffix(".weight")) if tensor_name.endswith(".weight") else None
    return None if q is None else numerics.dequantize(q)


def _quantize_block(blocks: BlockModel, index: int, quantizer: Quantizer, schemes: Mapping[str, Scheme], options: Options, hidden: list[torch.Tensor] | None) -> Piece:
    gatherer = Gatherer(quantizer.needs)
    with blocks.block(index) as module:
        targets = {n: m for n, m in blocks.linears(index).items() if n in schemes}
        if hidden is not None:
            with gatherer.watching(targets):
                for batch in hidden:
                    blocks.run(index, module, batch)
        linears, layers = {}, []
        for name, linear in targets.items():
            q, layer = quantize_linear(name, linear.weight.detach(), schemes[name], quantizer, gatherer.stats(name), options)
            linears[name] = q
            layers.append(layer)
    return Piece(linears, layers)


def _head(blocks: BlockModel, quantizer: Quantizer, schemes: Mapping[str, Scheme], options: Options, hidden: list[torch.Tensor] | None) -> Piece:
    name = blocks.head_name
    assert name is not None
    weight = blocks.head_weight()
    stats = None
    if hidden is not None:
        stats = Stats(0, torch.zeros(weight.shape[1], weight.shape[1]) if "hessian" in quantizer.needs else None)
        for x in blocks.head_inputs(hidden):
            stats.tokens += x.shape[0]
            if stats.hessian is not None:
                stats.hessian.addmm_(x.T, x)
    q, layer = quantize_linear(name, weight, schemes[name], quantizer, stats, options)
    return Piece({name: q}, [layer])


def quantize_linear(name: str, weight: torch.Tensor, scheme: Scheme, quantizer: Quantizer, stats: Stats | None, options: Options) -> tuple[QuantizedLinear, LayerResult]:
    """Quantize one weight `[O, I]` and measure what that did: relative Frobenius error of the weight and, with a Hessian, of the output."""
    try:
        q, note = quantizer.quantize(weight, scheme, stats, options)
    except NumericalError as e:
        raise NumericalError(f"{name}: {e}") from e
    error = numerics.dequantize(q) - weight
    relative = float(error.norm() / weight.norm().clamp(min=1e-30))
    output = None
    if stats is not None and stats.hessian is not None:
        wrong, right = ((m @ stats.hessian * m).sum().clamp(min=0) for m in (error, weight))
        output = float((wrong / right.clamp(min=1e-30)).sqrt())
    bits = scheme.storage_bits(*weight.shape) / weight.numel()
    return q, LayerResult(name, str(scheme), relative, output, bits, note)
