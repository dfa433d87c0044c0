"""LoRA merged into a model as a lazy overlay, with peft's semantics: a weight is read, the adapters' products are added in fp32, and nothing else is kept.

    LoRA    W + w s B A                                     (arXiv 2106.09685; s = alpha / r, or alpha / sqrt(r); w = the recipe's weight)
    DoRA    m (W + s B A) / |W + s B A| row by row          (arXiv 2402.09353)

Where only one of two tied embeddings is changed, they are untied: the merged model then computes what base and adapter compute together.
(peft's merge_and_unload changes the shared tensor for both uses there, and so computes something else than before merging.)
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PretrainedConfig

from qforge.errors import ModelError
from qforge.models import skeleton as skeletons
from qforge.models.adapter import Adapter, AdapterReport, Product, read_adapter
from qforge.models.adapter_assets import merged_assets
from qforge.models.adapter_base import other_base
from qforge.models.locate import locate
from qforge.models.model import Model
from qforge.models.names import HEAD
from qforge.models.skeleton import Skeleton
from qforge.models.spec import model_spec
from qforge.models.weights import Cast, TensorInfo, WeightSource, digest


@dataclass(frozen=True, slots=True, eq=False)
class _Change:
    """All that happens to one tensor: what it starts from, then what is merged in."""

    start: str | torch.Tensor  # a tensor of the base by name, or one that an adapter brings
    products: tuple[tuple[float, Product], ...] = ()
    bias_deltas: tuple[torch.Tensor, ...] = ()


class Merged:
    """A base's weights with adapters merged in, fp32 where they change something, as the base has them elsewhere."""

    def __init__(self, base: WeightSource, changes: Mapping[str, _Change], key: str) -> None:
        self._base = base
        self._changes = changes
        self._key = key
        self._names = [*base.names(), *(n for n in changes if n not in set(base.names()))]

    def names(self) -> list[str]:
        """The base's names, and that of a head that is no longer tied."""
        return list(self._names)

    def info(self, name: str) -> TensorInfo:
        """Shape, and fp32 for what is changed."""
        change = self._changes.get(name)
        if change is None:
            return self._base.info(name)
        start = change.start
        return TensorInfo(self._base.info(start).shape if isinstance(start, str) else tuple(start.shape), torch.float32)

    def read(self, name: str) -> torch.Tensor:
        """The merged tensor."""
        change = self._changes.get(name)
        return self._base.read(name) if change is None else _apply(change, self.start(name))

    def changes(self, name: str) -> bool:
        """Whether adapters change the tensor."""
        return name in self._changes

    def start(self, name: str) -> torch.Tensor:
        """A changed tensor before anything is merged into it, fp32, fresh."""
        start = self._changes[name].start
        return self._base.read(start).float() if isinstance(start, str) else start.clone()

    def fingerprint(self) -> str:
        """Of the base and of all adapters with their weights."""
        return digest("merged", self._base.fingerprint(), self._key)


def _apply(change: _Change, value: torch.Tensor) -> torch.Tensor:
    for weight, product in change.products:
        value += product.delta() * weight
        if product.magnitude is not None:
            dim = 0 if product.embedding else 1
            value *= (product.magnitude.flatten() / torch.linalg.vector_norm(value, dim=dim)).unsqueeze(dim)
    for delta in change.bias_deltas:
        value += delta
    return value


def with_adapters(model: Model, adapters: Sequence[tuple[str, float]], *, folder: Path = Path(".")) -> Model:
    """The model with adapters `(source, weight)` merged in, in order. The touched weights are read once, to say how far each adapter moves them.

    A quantized base is merged dequantized, in fp32, and is then a plain model. A tokenizer or chat template in an adapter's folder wins.

    Raises:
        ModelError: an adapter cannot be read, is of a kind that is not merged, does not fit the base, or does not go together with another one.
        MissingCapabilityError: an adapter must be downloaded, and that is not possible here.
    """
    if not adapters:
        return model
    skeleton = skeletons.build(model.config, trust_remote_code=model.trust_remote_code)
    folders = [locate(source, folder, what="adapter") for source, _ in adapters]
    read = [read_adapter(source, path, weight, skeleton, model.whole) for (source, weight), path in zip(adapters, folders, strict=True)]
    _refuse_unclear(read)
    base = model.weights.source if isinstance(model.weights, Cast) else model.weights
    config = copy.deepcopy(model.config)
    changes, notes = _changes(read, base, skeleton, config)
    merged = Merged(base, changes, digest(*(f"{a.sha256}*{a.weight!r}" for a in read)))
    assets = merged_assets(model, folders, config.vocab_size)
    reports = tuple(_report(a, merged, (*_about_base(a, model, folder), *notes)) for a in read)
    return replace(model, config=config, spec=model_spec(config), weights=Cast(merged, model.dtype), schemes={}, kv_scales={}, assets=assets, adapters=(*model.adapters, *reports))


def _about_base(adapter: Adapter, model: Model, folder: Path) -> tuple[str, ...]:
    note = other_base(adapter.source, adapter.config, model.source, folder)
    notes: tuple[str, ...] = () if note is None else (note,)
    if adapter.left_out:
        notes += (f"adapter '{adapter.source}' also changes what the '{model.whole}' has for other than text ({len(adapter.left_out)} tensors), which is left out",)
    return notes


def _refuse_unclear(adapters: Sequence[Adapter]) -> None:
    """Refuse what has no one meaning: weights on what is no sum, two adapters that both replace a tensor, DoRA beside another adapter on the same module."""
    for i, a in enumerate(adapters):
        if a.weight != 1.0 and (a.config.dora or a.replaced):
            what = "DoRA rescales whole rows" if a.config.dora else f"it brings whole tensors ({next(iter(a.replaced))}, ...)"
            raise ModelError(f"adapter '{a.source}' cannot have the weight {a.weight}: {what}, so only 1.0 has a meaning")
        for b in adapters[:i]:
            shared = [m for m in a.products if m in b.products]
            if shared and (a.config.dora or b.config.dora):
                raise ModelError(f"adapters '{b.source}' and '{a.source}' both change '{shared[0]}', and one is a DoRA: the result would depend on their order; merge one only")
            both = [n for n in a.replaced if n in b.replaced or n.rpartition(".")[0] in b.products] + [n for n in b.replaced if n.rpartition(".")[0] in a.products]
            if both:
                raise ModelError(f"adapters '{b.source}' and '{a.source}' both change '{both[0]}', and one brings the whole tensor; merge one only")


def _changes(adapters: Sequence[Adapter], base: WeightSource, skeleton: Skeleton, config: PretrainedConfig) -> tuple[dict[str, _Change], tuple[str, ...]]:
    starts: dict[str, torch.Tensor] = {name: t for a in adapters for name, t in a.replaced.items()}
    products: dict[str, list[tuple[float, Product]]] = {}
    bias_deltas: dict[str, list[torch.Tensor]] = {}
    for a in adapters:
        for module, product in a.products.items():
            products.setdefault(f"{module}.weight", []).append((a.weight, product))
            if product.bias_delta is not None:
                bias_deltas.setdefault(f"{module}.bias", []).append(product.bias_delta * (product.scaling * a.weight))
    touched = list(dict.fromkeys([*starts, *products, *bias_deltas]))
    held = set(base.names())
    changes = {}
    for name in touched:
        origin = name if name in held else skeleton.tied[name]
        changes[name] = _Change(starts.get(name, origin), tuple(products.get(name, ())), tuple(bias_deltas.get(name, ())))
    notes = _settle_ties(changes, adapters, skeleton, held, config)
    return changes, (*notes, *_settle_vocabulary(starts, skeleton, config))


def _settle_ties(changes: dict[str, _Change], adapters: Sequence[Adapter], skeleton: Skeleton, held: set[str], config: PretrainedConfig) -> tuple[str, ...]:
    """Keep tied tensors tied where both get the same value; untie them (in `config`, too) where they now differ."""
    notes: tuple[str, ...] = ()
    resaved = {name for a in adapters for name in a.resaved}
    for head, embedding in skeleton.tied.items():
        if head in held or (head not in changes and embedding not in changes):
            continue
        ours, theirs = changes.get(head), changes.get(embedding)
        if ours is not None and theirs is not None and (any(a.config.tied for a in adapters) or _same(ours, theirs)):
            del changes[head]
            continue
        shared = next((changes[n].start for n in (embedding, head) if n in resaved and n in changes), embedding)
        if embedding not in changes and not isinstance(shared, str):
            changes[embedding] = _Change(shared)
        changes.setdefault(head, _Change(shared))
        config.tie_word_embeddings = False
        notes = (*notes, f"{head} and {embedding} were one tensor in the base; the adapter changes them differently, so the merged model holds both")
    return notes


def _same(a: _Change, b: _Change) -> bool:
    if a.products or b.products:
        return False
    return isinstance(a.start, torch.Tensor) and isinstance(b.start, torch.Tensor) and torch.equal(a.start, b.start)


def _settle_vocabulary(starts: Mapping[str, torch.Tensor], skeleton: Skeleton, config: PretrainedConfig) -> tuple[str, ...]:
    """Take over another vocabulary size where embedding and head both have it."""
    pair = [n for n in skeleton.shapes if n == f"{HEAD}.weight" or skeleton.kinds.get(n.removesuffix(".weight"), "").endswith("Embedding")]
    sizes = {n: (starts[n].shape[0] if n in starts else skeleton.shapes[n][0]) for n in pair if skeleton.shapes[n][0] == config.vocab_size}
    if config.tie_word_embeddings:
        sizes = {n: s for n, s in sizes.items() if n not in skeleton.tied}
    if len(set(sizes.values())) > 1:
        told = ", ".join(f"{n} {s} rows" for n, s in sizes.items())
        raise ModelError(f"the adapter resizes the vocabulary in one place only: {told}; it must bring embedding and head (peft: save_embedding_layers=True)")
    size = next(iter(sizes.values()), config.vocab_size)
    if size == config.vocab_size:
        return ()
    note = f"the vocabulary has {size} tokens instead of the base's {config.vocab_size}"
    config.vocab_size = size
    return (note,)


def _report(adapter: Adapter, merged: Merged, notes: tuple[str, ...]) -> AdapterReport:
    relative = []
    tensors = 0
    for module, product in adapter.products.items():
        if not merged.changes(f"{module}.weight"):
            continue  # the head of a pair that stays tied: the embedding has the same product
        tensors += 1
        base = merged.start(f"{module}.weight")
        norm = float(torch.linalg.vector_norm(base))
        if norm > 0:
            relative.append(_change_norm(adapter.weight, product, base) / norm)
    config = adapter.config
    mean, largest = (sum(relative) / len(relative), max(relative)) if relative else (None, None) if tensors else (0.0, 0.0)
    return AdapterReport(adapter.source, adapter.weight, config.variant, config.rank, config.alpha, tensors, tuple(adapter.replaced), mean, largest, adapter.sha256, notes)


def _change_norm(weight: float, product: Product, base: torch.Tensor) -> float:
    if product.magnitude is None:
        return abs(weight) * product.delta_norm()
    return float(torch.linalg.vector_norm(_apply(_Change("", ((weight, product),)), base.clone()) - base))
