"""What the runtime needs of a model: from the cache of packed weights, where it imports neither torch nor transformers, or from the model's files, and then into the cache."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from qforge.errors import MissingCapabilityError
from qforge.models.locate import locate, model_folder
from qforge.ops.native_module import missing
from qforge.ops.pages import return_free_heap
from qforge.runtime import packed_cache
from qforge.runtime.native_model import NativeModel
from qforge.runtime.packed_file import PackedModel
from qforge.runtime.tokenizer import PlainTokenizer, Tokenizer, plain
from qforge.types import ModelSpec

if TYPE_CHECKING:
    from qforge.models.model import Model
    from qforge.runtime.places import Gpu
    from qforge.runtime.shares import Share
    from qforge.runtime.weights import Weights


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """A model to be run.

    Attributes:
        source: as the user wrote it.
        weights: for the native decoder; for the reference where there is no native module; for a GPU's.
        end_ids: tokens that end a continuation.
        tokenizer: makes it, or gives the one that was made.
        place: the GPU that holds the weights, or None.
    """

    source: str
    weights: NativeModel | Weights
    end_ids: frozenset[int]
    tokenizer: Callable[[], Tokenizer]
    place: Gpu | None = None

    @property
    def spec(self) -> ModelSpec:
        """The model as data."""
        return self.weights.spec


def open_source(source: str, activations: str = "fp", threads: int | None = None, device: str = "cpu") -> Opened:
    """What a source names (see `open_model`), packed for a device.

    Raises:
        ModelError: it cannot be read.
        UnsupportedError: the runtime does not list its family.
    """
    entry = None if device != "cpu" else packed_cache.entry(model_folder(locate(source, Path("."))), activations)
    kept = None if entry is None else entry.read(threads)
    if kept is not None:
        tokenizer = functools.partial(PlainTokenizer, kept.tokenizer.tobytes(), kept.chat_template, kept.special_tokens)
        return Opened(source, kept.model, kept.end_ids, functools.cache(tokenizer))
    from qforge.models.model import open_model

    opened = of_model(open_model(source), activations, threads, device)
    packed = None if entry is None else _packed(entry.key, opened)
    if entry is not None and packed is not None:
        entry.write(packed, threads)
    return opened


def of_model(model: Model, activations: str = "fp", threads: int | None = None, device: str = "cpu", share: Share | None = None) -> Opened:
    """The same of an opened model, or of a process's share of it; it is not kept, since nothing says what its tensors were made of."""
    import torch

    from qforge.models.assets import end_ids
    from qforge.runtime import loader, places
    from qforge.runtime.lowering import lowered
    from qforge.runtime.shared_loader import read_share

    place = None if device == "cpu" else places.gpu(model, device)
    where = place or places.Host(threads, activations)
    try:
        weights = loader.read(model, where) if share is None else read_share(model, where, share)
    except torch.OutOfMemoryError as e:
        raise MissingCapabilityError(f"the weights of '{model.source}' do not fit on {device}; use fewer bits, or share the model among several GPUs (tensor_parallel)") from e
    kept = lowered(weights) if place is None and missing() is None else weights
    return_free_heap()  # half a gigabyte that packing a billion weights leaves there
    tokenizer = functools.cache(model.tokenizer)
    return Opened(model.source, kept, frozenset(end_ids(model.assets, model.config, tokenizer())), tokenizer, place)


def _packed(key: str, opened: Opened) -> PackedModel | None:
    """None where a start without torch and transformers could not do the same."""
    model = opened.weights
    if not isinstance(model, NativeModel) or any(part.weight is None or part.elsewhere is not None for product in model.products() for part in product.parts):
        return None
    tokenizer = plain(opened.tokenizer())
    if tokenizer is None:
        return None
    return PackedModel(key, model, opened.end_ids, np.frombuffer(tokenizer.serialized, np.uint8), tokenizer.chat_template, tokenizer.special_tokens)
