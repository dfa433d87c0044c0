"""What tensors a model of a given config has: transformers' own modules on the meta device, and the comparison of a checkpoint with them."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, apply_renamings

from qforge.errors import ModelError, last_line
from qforge.models import experts
from qforge.models.weights import Renamed, WeightSource, listed

_BUFFERS = re.compile(r"(rotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)|attn\.(bias|masked_bias))$")


@dataclass(frozen=True, slots=True)
class Skeleton:
    """Names, shapes and kinds of a model's parts.

    Attributes:
        shapes: every tensor of the model, tied ones included, in the order of the modelling code, by the name that checkpoints give it.
        integers: those of `shapes` that hold no floats.
        tied: tensor -> the tensor that it is tied to by the config.
        linears: module names of all nn.Linear, the head and those of single experts included.
        routers: module names of what decides over experts (`experts.routers`).
        kinds: class name of each module that has tensors of its own.
        ignored: regular expressions of stored tensors that the modelling code says to ignore.
        prefix: name of the part below the head (`model`), without which some checkpoints are stored.
        renamings: transformers' own rules from names in checkpoints to names of its modules.
    """

    shapes: Mapping[str, tuple[int, ...]]
    integers: frozenset[str]
    tied: Mapping[str, str]
    linears: tuple[str, ...]
    routers: tuple[str, ...]
    kinds: Mapping[str, str]
    ignored: tuple[str, ...]
    prefix: str
    renamings: tuple[WeightRenaming, ...] = ()


def build(config: PretrainedConfig, *, trust_remote_code: bool = False) -> Skeleton:
    """The skeleton of a config; nothing is allocated.

    Raises:
        ModelError: transformers cannot build a model from this config.
        UnsupportedError: its experts are none that can be taken apart.
    """
    try:
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=trust_remote_code)
    except Exception as e:  # whatever transformers' modelling code raises
        raise ModelError(f"transformers cannot build a '{config.model_type}' model from this config: {last_line(e)}") from e
    empty = [name for name, tensor in module.state_dict().items() if not tensor.numel()]
    if empty:
        raise ModelError(f"this config tells of weights without values: {listed(empty)}; a size in it is 0")
    renamings = tuple(rule for rule in get_model_conversion_mapping(module) if isinstance(rule, WeightRenaming))
    stored = experts.split(module)
    return Skeleton(
        integers=frozenset(stored.get(name, name) for name, t in module.state_dict().items() if not t.is_floating_point()),
        shapes={stored.get(name, name): tuple(t.shape) for name, t in module.state_dict().items()},
        tied=dict(module.all_tied_weights_keys or {}),
        linears=tuple(experts.stored_module(stored, name) for name, m in module.named_modules() if isinstance(m, nn.Linear)),
        routers=tuple(experts.stored_module(stored, name) for name in experts.routers(module)),
        kinds={experts.stored_module(stored, name): type(m).__name__ for name, m in module.named_modules() if m._parameters or m._buffers},
        ignored=tuple(module._keys_to_ignore_on_load_unexpected or ()),
        prefix=module.base_model_prefix,
        renamings=renamings,
    )


def fitted(source: WeightSource, skeleton: Skeleton, config: PretrainedConfig, origin: str) -> WeightSource:
    """The tensors of `source` that the model has, under the model's names: each one there, each of its shape, and nothing left over.

    A tied tensor may be absent. Where both partners are stored and differ, transformers does not tie them, and neither do we: `config` is changed to say so.

    Raises:
        ModelError: names the first few tensors that are missing, of another shape, without floats, or unknown to the model.
    """
    held = set(source.names())
    found = _found(skeleton, held)
    for name, partner in skeleton.tied.items():
        if name in found and partner not in found:
            found[partner] = found.pop(name)  # only the head is stored: it is the embedding, too
        elif name in found and partner in found:
            if torch.equal(source.read(found[name]), source.read(found[partner])):
                held.discard(found.pop(name))
            else:
                config.tie_word_embeddings = False
    unknown = sorted(n for n in held - set(found.values()) if not _ignorable(n, skeleton))
    _refuse_missing([n for n in skeleton.shapes if n not in found and n not in skeleton.tied], unknown, origin)
    wrong = [f"{n} is {list(source.info(s).shape)} instead of {list(skeleton.shapes[n])}" for n, s in found.items() if source.info(s).shape != skeleton.shapes[n]]
    if wrong:
        raise ModelError(f"{origin}: tensors do not have the shapes that config.json tells of: {listed(wrong)}; weights and config belong to different models")
    typed = [f"{n} is {source.info(s).dtype}" for n, s in found.items() if not source.info(s).dtype.is_floating_point and n not in skeleton.integers]
    if typed:
        raise ModelError(
            f"{origin}: tensors hold integers where the model has floats: {listed(typed)}; the file is damaged, or of a quantization that config.json does not tell of"
        )
    if unknown:
        raise ModelError(f"{origin}: the weights hold tensors that the model of config.json does not have: {listed(unknown)}; weights and config belong to different models")
    return source if all(a == b for a, b in found.items()) and set(source.names()) == set(found) else Renamed(source, found)


def _found(skeleton: Skeleton, held: set[str]) -> dict[str, str]:
    """What each tensor of the model is called in the files: as in the model, without the prefix, or by a name that transformers renames."""
    found = {name: stored for name in skeleton.shapes if (stored := _stored(name, held, skeleton.prefix)) is not None}
    if skeleton.renamings and len(found) < len(skeleton.shapes):
        renamed = {apply_renamings(stored, list(skeleton.renamings)): stored for stored in sorted(held - set(found.values()))}
        found |= {name: renamed[to] for name in skeleton.shapes if name not in found and (to := _stored(name, renamed.keys(), skeleton.prefix)) is not None}
    return {name: found[name] for name in skeleton.shapes if name in found}


def _stored(name: str, held: Set[str], prefix: str) -> str | None:
    bare = name.removeprefix(prefix + ".")
    return name if name in held else bare if bare in held else None


def _refuse_missing(missing: list[str], unknown: list[str], origin: str) -> None:
    if missing:
        others = f"; of those that they hold, the model does not know {listed(unknown)}" if unknown else ""
        raise ModelError(f"{origin}: the weights lack {len(missing)} tensors of the model that config.json tells of: {listed(missing)}{others}")


def _ignorable(name: str, skeleton: Skeleton) -> bool:
    return bool(_BUFFERS.search(name)) or any(re.search(p, name) for p in skeleton.ignored)
