"""What tests of the block loop share: a store in memory, a quantizer that remembers, texts, schemes, and workers in this process."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch

from qforge.calibration.room import Room
from qforge.calibration.sequential import Job, quantize_blocks
from qforge.calibration.shared import Part
from qforge.calibration.store import Hidden, Piece, Store
from qforge.methods import Options, Stats, find, find_transforms
from qforge.models.blocks import BlockModel
from qforge.models.model import Model
from qforge.progress import SILENT
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Scheme, parse


class Memory:
    """A store in memory that can be told to fail after some pieces, as a kill would."""

    def __init__(self, die_after: int | None = None) -> None:
        self.pieces: dict[int, Piece] = {}
        self.hidden: dict[int, Hidden] = {}
        self.saves = 0
        self.die_after = die_after

    def store(self) -> Store:
        return Store(self.pieces.get, self._save, self.hidden.get, self._save_hidden, hidden_every=0)

    def _save(self, index: int, piece: Piece) -> None:
        self.saves += 1
        if self.die_after is not None and len(self.pieces) >= self.die_after:
            raise KeyboardInterrupt
        self.pieces[index] = piece

    def _save_hidden(self, index: int, hidden: Hidden) -> None:
        self.hidden = {index: {n: Room().keep(h.load().clone()) for n, h in hidden.items()}}

    def linears(self) -> dict[str, QuantizedLinear]:
        return {n: q for p in self.pieces.values() for n, q in p.linears.items()}


def windows(count: int = 6, length: int = 40) -> torch.Tensor:
    return torch.randint(3, 300, (count, length), generator=torch.Generator().manual_seed(1))


def schemes_of(blocks: BlockModel, text: str = "int4-g32-sym", head: bool = False) -> dict[str, Scheme]:
    schemes = {n: parse(text) for i in range(blocks.num_blocks) for n in blocks.linears(i)}
    return {**schemes, **({"lm_head": parse("int8-g32-sym")} if head else {})}


def inputs_of(model: torch.nn.Module, name: str, ids: torch.Tensor) -> torch.Tensor:
    """What a linear is fed, `[N, I]` fp64."""
    seen: list[torch.Tensor] = []
    handle = model.get_submodule(name).register_forward_pre_hook(lambda _, args: seen.append(args[0].reshape(-1, args[0].shape[-1])))
    with torch.no_grad():
        model(input_ids=ids)
    handle.remove()
    return torch.cat(seen).double()


class Spy:
    """GPTQ that remembers what it was given."""

    name = "spy"

    def __init__(self) -> None:
        self.seen: list[Stats] = []
        gptq = find("gptq")
        assert gptq is not None
        self.gptq = gptq

    def needs(self, options: Options) -> frozenset[str]:
        return self.gptq.needs(options)

    def supports(self, scheme: Scheme) -> str | None:
        return None

    def quantize(self, weight: torch.Tensor, scheme: Scheme, stats: Stats | None, options: Options, reach: float = 0.0) -> tuple[QuantizedLinear, str | None]:
        assert stats is not None
        self.seen.append(stats)
        return self.gptq.quantize(weight, scheme, stats, options, reach)


class Pretended:
    """A `Worker` in this process."""

    def __init__(self, model: Model) -> None:
        self.part = Part(BlockModel(model), Room())

    def start(self, task: str, *arguments: Any) -> Callable[[], Any]:
        found = pickle.dumps(getattr(self.part, task)(*pickle.loads(pickle.dumps(arguments))))
        return lambda: pickle.loads(found)


def run(model: Model, method: str, workers: int, memory: Memory, *, scheme: str = "int4-g32-asym", head: bool = False, count: int = 7) -> Memory:
    @contextlib.contextmanager
    def hired() -> Iterator[list[Pretended]]:
        yield [Pretended(model) for _ in range(workers)]

    blocks, quantizer, transforms = BlockModel(model), find(method.split()), find_transforms(method.split())
    assert quantizer is not None
    schemes = {n: s for n, s in schemes_of(blocks, scheme, head=head).items() if n not in blocks.routers}
    job = Job(blocks, quantizer, schemes, Options(), transforms=transforms, workers=None if workers == 1 else hired)
    quantize_blocks(job, windows(count), memory.store(), SILENT)
    return memory
