"""Hugging Face directories: config, weights, tokenizer and provenance; the artifact of a run is one in compressed-tensors layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from transformers import PretrainedConfig

from qforge.errors import NumericalError, UnsupportedError
from qforge.export.card import write_card
from qforge.export.provenance import PROVENANCE
from qforge.export.writer import SHARD_BYTES, Piece, write_safetensors
from qforge.files import atomic_folder, write_text
from qforge.layouts import checkpoint, kv_cache
from qforge.layouts.base import Shaped
from qforge.models import assets as asset_files
from qforge.models import skeleton
from qforge.models.config import read_json
from qforge.models.model import Model
from qforge.models.names import HEAD
from qforge.models.skeleton import Skeleton
from qforge.models.tying import shared_table, tied_head
from qforge.models.weights import TensorInfo
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Scheme
from qforge.types import KvScales

_T = TypeVar("_T")
_CHECKED = 1 << 18  # values looked at together: looking at a whole embedding takes several times its memory
_ENVIRONMENT_KEYS = ("_name_or_path", "name_or_path", "transformers_version", "_commit_hash", "_attn_implementation_autoset", "local_files_only", "tokenizer_file")


def write_artifact(
    folder: Path,
    model: Model,
    schemes: Mapping[str, Scheme],
    linear: Callable[[str], QuantizedLinear],
    provenance: Mapping[str, Any],
    *,
    changed: Mapping[str, torch.Tensor] | None = None,
    kv_scales: KvScales = MappingProxyType({}),
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the artifact: `model` with the linears of `schemes` quantized, loadable by transformers as it is. It replaces `folder` when complete.

    Args:
        folder: where to.
        model: the merged, unquantized model.
        schemes: the scheme of each quantized linear by module name; empty for a plain checkpoint.
        linear: gives a quantized linear by module name; called once for each, in the order of the weights.
        provenance: what qforge.json says; no times and no paths, so that equal runs give equal bytes.
        changed: values of tensors that take the place of the model's own, exact in their type (what a transform folded factors into), by name.
        kv_scales: of keys and values that are to be kept as FP8.

    Raises:
        UnsupportedError: the layout cannot hold a scheme.
        OutputError: the folder cannot be written.
    """
    reason = checkpoint.problem(schemes.values(), model.dtype)
    if reason is not None:
        raise UnsupportedError(reason)
    table = shared_table(model, schemes)
    config = config_json(model.config, model.dtype, tied=False if tied_head(model, schemes) is not None and table is None else None)
    if schemes or kv_scales:
        tied = None if table is None else (HEAD, table)
        built = skeleton.build(model.config, trust_remote_code=model.trust_remote_code)
        plain = all(built.kinds.get(name, "Linear") == "Linear" for name in schemes)
        config["quantization_config"] = checkpoint.quantization_config(schemes, _unquantized(built, schemes), model.dtype, tied, kv_cache=bool(kv_scales), plain=plain)
    pieces = checkpoint_pieces(model, schemes, lambda n: _packed(model, schemes, linear, n, table), changed or {}, table)
    with atomic_folder(folder) as temporary:
        write_safetensors(temporary, [*pieces, *cache_pieces("compressed-tensors", kv_scales, model.dtype)], shard_bytes=shard_bytes)
        write_json(temporary / "config.json", config)
        copy_assets(model.assets, temporary)
        write_json(temporary / PROVENANCE, dict(provenance))
        write_card(temporary, str(config["quantization_config"]["quant_method"]) if schemes else "plain", provenance)


def write_checkpoint(
    folder: Path,
    model: Model,
    layout: Shaped,
    told: Callable[[], Mapping[str, Mapping[str, Any]]],
    *,
    shard_bytes: int,
    pack: Callable[[QuantizedLinear], Mapping[str, torch.Tensor]] | None = None,
    stem: str = "model",
    more: Sequence[Piece] = (),
) -> list[Path]:
    """Write a quantized model as a checkpoint in another program's layout; it replaces `folder` when complete.

    An embedding that shares the head's codes is dequantized in fp32, since only our own layout holds codes for it.

    Args:
        folder: where to.
        model: with `schemes`.
        layout: of a quantized linear.
        told: content of JSON files by name, what `config.json` says of the quantization among them; asked for when all weights are written.
        shard_bytes: the largest file of weights.
        pack: what calls the layout's, where more is to be seen of a linear.
        stem: of the files of weights.
        more: beside weights.

    Returns:
        All files.
    """

    def packed(module: str) -> Piece:
        shapes = layout.shapes(model.schemes[module], *weight_shape(model, module))
        infos = {f"{module}.{part}": TensorInfo(shape, dtype) for part, (shape, dtype) in shapes.items()}
        return Piece(infos, lambda: {f"{module}.{part}": tensor for part, tensor in (pack or layout.pack)(model.linear(module)).items()})

    with atomic_folder(folder) as temporary:
        write_safetensors(temporary, [*checkpoint_pieces(model, model.schemes, packed), *more], stem=stem, shard_bytes=shard_bytes)
        files = dict(told())
        untied = None if tied_head(model, model.schemes) is None else False
        write_json(temporary / "config.json", config_json(model.config, model.dtype, tied=untied) | dict(files.pop("config.json", {})))
        for name, content in files.items():
            write_json(temporary / name, content)
        copy_assets(model.assets, temporary)
    return sorted(p for p in folder.rglob("*") if p.is_file())


def config_json(config: PretrainedConfig, dtype: torch.dtype, *, tied: bool | None = None) -> dict[str, Any]:
    """What config.json says of a model: transformers' config without what belongs to a machine, rotary settings in both of its forms; `tied` overrides `tie_word_embeddings`."""
    content = {k: v for k, v in config.to_diff_dict().items() if k not in (*_ENVIRONMENT_KEYS, "torch_dtype", "quantization_config")} | _older_rope(config)
    content |= {"architectures": architectures(config), "dtype": str(dtype).removeprefix("torch.")}
    content["tie_word_embeddings"] = bool(config.tie_word_embeddings) if tied is None else tied
    return dict(sorted(content.items()))


def _older_rope(config: PretrainedConfig) -> dict[str, Any]:
    """Rotary settings under the names of transformers before 5 (`rope_theta`, `rope_scaling`), for readers that do not look into `rope_parameters` and take a default instead."""
    parameters = getattr(config, "rope_parameters", None) or {}
    full = parameters.get("full_attention", parameters)
    if "rope_theta" not in full:
        return {}
    local = {"rope_local_base_freq": parameters["sliding_attention"]["rope_theta"]} if "sliding_attention" in parameters else {}
    scaling = {} if full.get("rope_type", "default") == "default" else {"rope_scaling": {k: v for k, v in full.items() if k != "rope_theta"}}
    return {"rope_theta": full["rope_theta"], **local, **scaling}


def architectures(config: PretrainedConfig) -> list[str]:
    """The class that transformers loads the model with; as the config says, or by its family."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return list(config.architectures or [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]])


def unquantized_linears(model: Model, schemes: Mapping[str, Scheme]) -> list[str]:
    """Module names of all linears that are not quantized, the (perhaps tied) output head and the routers of experts (linears in other programs) included."""
    return _unquantized(skeleton.build(model.config, trust_remote_code=model.trust_remote_code), schemes)


def _unquantized(built: Skeleton, schemes: Mapping[str, Scheme]) -> list[str]:
    return sorted({*built.linears, *built.routers} - set(schemes))


def checkpoint_pieces(
    model: Model, schemes: Mapping[str, Scheme], packed: Callable[[str], Piece], changed: Mapping[str, torch.Tensor] = MappingProxyType({}), table: str | None = None
) -> list[Piece]:
    """Pieces of a checkpoint in the order of the model's weights: quantized linears through `packed`, everything else as it is or as `changed` has it, a tied head not at all.
    `table`: the embedding whose place a head takes that is tied to it."""
    head = tied_head(model, schemes)
    left_out = model.tied if model.config.tie_word_embeddings else ()
    pieces = []
    for name in model.weights.names():
        module = name.removesuffix(".weight")
        if name.endswith(".weight") and (module in schemes or module == table):
            pieces.append(packed(HEAD if module == table else module))
        elif name not in left_out:
            pieces.append(_plain(model, name, changed.get(name)))
    if head is not None and table is None and f"{head}.weight" not in model.weights.names():
        pieces.append(packed(head))
    return pieces


def cache_pieces(method: str, kv_scales: KvScales, dtype: torch.dtype) -> list[Piece]:
    """Scales of keys and values, as `layouts.kv_cache` has them."""
    tensors = kv_cache.packed(method, kv_scales, dtype)
    return [Piece({name: TensorInfo(tuple(t.shape), t.dtype) for name, t in tensors.items()}, lambda: tensors)] if tensors else []


def weight_shape(model: Model, module: str) -> tuple[int, int]:
    """`[O, I]` of a linear; the embedding's for a tied head."""
    name = f"{module}.weight"
    if name in model.tied and name not in model.weights.names():
        name = model.tied[name]
    rows, columns = model.weights.info(name).shape
    return rows, columns


def _plain(model: Model, name: str, changed: torch.Tensor | None) -> Piece:
    def read() -> dict[str, torch.Tensor]:
        tensor = model.weights.read(name) if changed is None else changed.to(model.weights.info(name).dtype)
        if tensor.is_floating_point() and not all(torch.isfinite(part).all() for part in tensor.flatten().split(_CHECKED)):
            raise NumericalError(f"{name} of the model holds NaN or infinite values; the model is damaged, or its dtype does not hold them (model.dtype: float32 or bfloat16 may)")
        return {name: tensor}

    return Piece({name: model.weights.info(name)}, read)


def _packed(model: Model, schemes: Mapping[str, Scheme], linear: Callable[[str], QuantizedLinear], module: str, table: str | None) -> Piece:
    scheme = schemes[module]
    layout = checkpoint.layout_for(scheme, schemes, model.dtype)
    shape = weight_shape(model, module)

    def read() -> dict[str, torch.Tensor]:
        q = linear(module)
        assert q.scheme == scheme, (module, str(q.scheme), str(scheme))
        if q.group_index is not None:
            raise UnsupportedError(f"{module}: groups in activation order (g_idx) are no longer loaded by compressed-tensors; use act_order with contiguous groups, or export gptq")
        if table is not None and module == HEAD:
            return _twice(q.codes, layout.pack(q)["weight_scale"], table)
        return {f"{module}.{name}": tensor for name, tensor in layout.pack(q).items()}

    infos = {name: TensorInfo(shape, dtype) for name, (shape, dtype) in layout.infos(scheme, *shape).items()}
    if table is not None and module == HEAD:
        return Piece(_twice(TensorInfo(shape, torch.int8), infos["weight_scale"], table), read)
    return Piece({f"{module}.{name}": info for name, info in infos.items()}, read)


def _twice(codes: _T, scales: _T, table: str) -> dict[str, _T]:
    """What a head and the embedding that it is tied to are stored as: codes once, scales for each, since transformers ties weights alone."""
    return {f"{table}.weight": codes, f"{table}.weight_scale": scales, f"{HEAD}.weight_scale": scales}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON as all our files have it: indented, newline at the end, keys as given."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def copy_assets(source: Path, folder: Path) -> None:
    """Copy tokenizer, chat template and generation config; paths and versions that other programs left in them are dropped."""
    for path in asset_files.files_in(source):
        if path.name == "config.json":
            continue
        if path.name in ("tokenizer_config.json", "generation_config.json"):
            content = read_json(path)
            if any(k in content for k in _ENVIRONMENT_KEYS):
                write_json(folder / path.name, {k: v for k, v in content.items() if k not in _ENVIRONMENT_KEYS})
                continue
        target = folder / path.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)
