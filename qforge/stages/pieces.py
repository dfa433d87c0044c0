"""Finished blocks as journal pieces: what the calibration loop keeps, and what the artifact is written from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch

from qforge.calibration.store import Hidden, Piece, Store
from qforge.errors import OutputError
from qforge.qlinear import QuantizedLinear
from qforge.scheme import parse
from qforge.stages.journal import Journal, key
from qforge.types import KvScales, LayerResult

_FIELDS = ("codes", "scales", "zeros", "group_index", "super_scales", "input_scale", "bias")


class BlockPieces:
    """The journal's pieces of one quantization: one for each decoder block, one for the output head.

    A block's key covers everything before it: the run's own key and, through it, model, calibration and recipe.
    """

    def __init__(self, journal: Journal, root: str, count: int) -> None:
        self._journal = journal
        self.root = root
        self._last: tuple[int, Piece] | None = None
        self._names = [key("block", root=root, index=i) for i in range(count)]
        self._hidden = [key("hidden", root=root, index=i) for i in range(count)]
        self._tuned = key("tuned", root=root)
        self._scales: dict[str, torch.Tensor] = {}
        self._errors: dict[str, float] = {}
        self._kv_scales = key("kv_scales", root=root)
        self.kv_scales: KvScales = {}
        self._outputs = [key("outputs", root=root, index=i) for i in range(count)]

    def store(self) -> Store:
        """The calibration loop's view."""
        return Store(self._load, self._save, self._load_hidden, self._save_hidden)

    def drop_states(self) -> None:
        """Remove what was kept for unfinished blocks: all are finished."""
        for name in (*self._hidden, *self._outputs):
            self._journal.forget(name)

    def tune(self, compute: Callable[[], tuple[dict[str, torch.Tensor], dict[str, float]]]) -> None:
        """From here on linears have the scales, and the relative errors of their weights, that are computed here, or were before; those that are not named keep theirs."""
        found = self._journal.load(self._tuned)
        if found is None:
            self._journal.save(self._tuned, *compute())
            found = self._journal.load(self._tuned, count=False)
        assert found is not None
        self._scales, self._errors, self._last = found[0], found[1] or {}, None

    def calibrate_cache(self, compute: Callable[[], KvScales]) -> None:
        """From here on `kv_scales` are those that are computed here, or were before."""
        found = self._journal.load(self._kv_scales)
        if found is None:
            self._journal.save(self._kv_scales, {"done": torch.ones(1)}, dict(compute()))
            found = self._journal.load(self._kv_scales, count=False)
        assert found is not None
        self.kv_scales = {name: (key, value) for name, (key, value) in found[1].items()}

    def save_outputs(self, index: int, outputs: dict[str, torch.Tensor]) -> None:
        """Keep how the outputs of a block's linears weigh against each other, until all blocks are finished."""
        self._journal.save(self._outputs[index], outputs, None, count=False)

    def outputs(self, index: int) -> Hidden:
        """That, read when it is wanted.

        Raises:
            OutputError: it was damaged meanwhile, or taken away.
        """
        found = self._journal.stored(self._outputs[index])
        if found is None:
            raise OutputError(f"how the outputs of block {index} weigh was kept in {self._journal.folder}, and is damaged or gone; run the same command again to measure it anew")
        return found

    def weighed(self, count: int) -> bool:
        """Whether it is known for every one of so many blocks that is not finished, and can be read."""
        return all(any(self._journal.stored(name) is not None for name in names) for names in zip(self._outputs[:count], self._names[:count], strict=True))

    def layers(self) -> list[LayerResult]:
        """What was measured of every quantized linear, in order. Of scales that were tuned afterwards the output's error is not known."""
        return [self._as_tuned(LayerResult(**layer)) for name in self._names for layer in self._journal.value(name)["layers"]]

    def linear(self, index: int, name: str) -> QuantizedLinear:
        """One quantized linear of a finished block."""
        return self.piece(index).linears[name]

    def names(self) -> dict[str, int]:
        """Block index of every quantized linear."""
        return {linear: i for i, name in enumerate(self._names) for linear in self._journal.value(name)["schemes"]}

    def changed(self) -> dict[str, torch.Tensor]:
        """Tensors beside the quantized linears that transforms changed, by name."""
        return {name: tensor for i in range(len(self._names)) for name, tensor in self.piece(i).tensors.items()}

    def piece(self, index: int) -> Piece:
        """What was made of a block: nothing where nothing was quantized."""
        if not self._names:
            return Piece({}, [])
        if self._last is not None and self._last[0] == index:
            return self._last[1]
        found = self._journal.load(self._names[index], count=False)
        assert found is not None, f"block {index} was finished and its piece is gone"
        whole = _piece(*found)
        tuned = {name: replace(q, scales=self._scales[name]) for name, q in whole.linears.items() if name in self._scales}
        self._last = (index, replace(whole, linears=whole.linears | tuned))
        return self._last[1]

    def _as_tuned(self, layer: LayerResult) -> LayerResult:
        return replace(layer, relative_error=self._errors.get(layer.name), output_error=None) if layer.name in self._scales else layer

    def _load(self, index: int) -> Piece | None:
        found = self._journal.load(self._names[index])
        return None if found is None else _piece(*found)

    def _save(self, index: int, piece: Piece) -> None:
        tensors = {f"{n}:{field}": t for n, q in piece.linears.items() for field in _FIELDS if (t := getattr(q, field)) is not None}
        tensors |= {f"{n}:tensor": t for n, t in piece.tensors.items()}
        value = {"schemes": {n: str(q.scheme) for n, q in piece.linears.items()}, "layers": [asdict(layer) for layer in piece.layers]}
        self._journal.save(self._names[index], tensors, value)

    def _load_hidden(self, index: int) -> Hidden | None:
        return self._journal.stored(self._hidden[index])

    def _save_hidden(self, index: int, hidden: Hidden) -> None:
        self._journal.save(self._hidden[index], hidden, None, count=False)
        for earlier in self._hidden[:index]:
            self._journal.forget(earlier)


def _piece(tensors: dict[str, torch.Tensor], value: Any) -> Piece:
    linears = {}
    for name, scheme in value["schemes"].items():
        fields = {field: tensors.get(f"{name}:{field}") for field in _FIELDS}
        codes, scales = fields.pop("codes"), fields.pop("scales")
        assert codes is not None
        assert scales is not None
        linears[name] = QuantizedLinear(parse(scheme), codes, scales, **fields)
    changed = {name.removesuffix(":tensor"): tensor for name, tensor in tensors.items() if name.endswith(":tensor")}
    return Piece(linears, [LayerResult(**layer) for layer in value["layers"]], changed)
