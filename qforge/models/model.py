"""An opened model: config, weights on demand, tokenizer; from a Hugging Face directory, a hub id, a `.gguf` file, `demo`, or an artifact of ours."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from qforge.errors import ModelError
from qforge.files import sha256_file
from qforge.models import assets as asset_files
from qforge.models import language_model
from qforge.models import skeleton as skeletons
from qforge.models.config import read_config
from qforge.models.experts import MOST_EXPERTS
from qforge.models.locate import locate, model_folder
from qforge.models.shards import Shards, check_index, find
from qforge.models.spec import model_spec
from qforge.models.weights import Cast, Renamed, WeightSource, digest
from qforge.qlinear import QuantizedLinear
from qforge.scheme import Scheme
from qforge.types import KvScales, ModelSpec

if TYPE_CHECKING:
    from qforge.models.adapter import AdapterReport

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Model:
    """An opened model; nothing is read until asked for.

    Attributes:
        source: as the user wrote it.
        config: transformers' config, without a quantization_config.
        spec: the model as data for the runtime; None for a family that it does not list.
        weights: tensors in `dtype`. Of a quantized checkpoint, quantized weights come dequantized in fp32, and the others as they are stored.
        dtype: in which unquantized tensors are stored.
        assets: folder with tokenizer, chat template and generation config.
        schemes: quantized linears by module name (without `.weight`); empty for a plain model.
        tied: tensor -> the tensor that it is where the config ties word embeddings (`Skeleton.tied`).
        kv_scales: where a checkpoint says that keys and values are kept as FP8 E4M3; else empty.
        adapters: what `with_adapters` merged.
        whole: the multimodal family of which this is the language model, if it is.
    """

    source: str
    config: PretrainedConfig
    spec: ModelSpec | None
    weights: WeightSource
    dtype: torch.dtype
    assets: Path
    schemes: Mapping[str, Scheme] = field(default_factory=dict)
    kv_scales: KvScales = field(default_factory=dict)
    adapters: tuple[AdapterReport, ...] = ()
    tied: Mapping[str, str] = field(default_factory=lambda: {"lm_head.weight": "model.embed_tokens.weight"})
    trust_remote_code: bool = False
    whole: str | None = None

    def linear(self, name: str) -> QuantizedLinear:
        """The quantized linear of a module in `schemes`, codes as stored.

        Raises:
            ModelError: its tensors do not fit its scheme.
        """
        from qforge.models.gguf_source import GgufSource
        from qforge.models.quantized import QuantizedSource

        source = self.weights
        while isinstance(source, (Cast, Renamed)):
            source = source.source
        assert isinstance(source, (GgufSource, QuantizedSource)), name
        return source.linear(name)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer; ModelError if its files are damaged."""
        return asset_files.load_tokenizer(self.assets, trust_remote_code=self.trust_remote_code)

    def fingerprint(self) -> str:
        """Hex SHA-256 of all that decides what the model computes: weights, config, dtype, tokenizer files."""
        config = {k: v for k, v in self.config.to_dict().items() if k not in ("transformers_version", "_name_or_path")}
        files = [f"{p.relative_to(self.assets).as_posix()}:{sha256_file(p)}" for p in asset_files.files_in(self.assets) if p.name != "config.json"]
        return digest("model", self.weights.fingerprint(), json.dumps(config, sort_keys=True, default=str), str(self.dtype), *files)


def open_model(source: str, *, folder: Path = Path("."), revision: str | None = None, dtype: str = "auto", trust_remote_code: bool = False) -> Model:
    """Open a model; no tensor is read, but every header is checked.

    Args:
        source: a Hugging Face directory (or the output folder of a run), a `.gguf` file (or a folder of one and no other model), `demo`, or a hub id. A path that exists wins.
        folder: what a relative path is relative to.
        revision: branch, tag or commit of a hub id.
        dtype: `auto` (as the config says; float16 for a quantized GGUF), float32, float16 or bfloat16.

    Raises:
        ModelError: the source is missing, damaged, or no decoder-only text model.
        MissingCapabilityError: it must be downloaded, and that is not possible here.
    """
    if dtype != "auto" and dtype not in DTYPES:
        raise ModelError(f"dtype '{dtype}' is not available; use auto, {', '.join(DTYPES)}")
    path = model_folder(locate(source, folder, revision, trust_remote_code=trust_remote_code))
    if path.is_file():
        from qforge.models.gguf_model import open_gguf

        return open_gguf(source, path, dtype)
    return _open_directory(source, path, dtype, trust_remote_code)


def _open_directory(source: str, path: Path, dtype: str, trust_remote_code: bool) -> Model:
    config, quantization, whole = read_config(path, trust_remote_code=trust_remote_code)
    shards = Shards(find(path))
    check_index(path, shards)
    held: WeightSource = shards if whole is None else language_model.tensors_of(shards, str(path))
    if config.num_hidden_layers > len(held.names()):
        raise ModelError(f"{path}: config.json tells of {config.num_hidden_layers} layers, but the weights hold {len(held.names())} tensors in all")
    many = next((f"{key} = {n:,}" for key in _EXPERTS if isinstance(n := getattr(config, key, None), int) and n > MOST_EXPERTS), None)
    if many is not None:
        raise ModelError(f"{path}: config.json tells of {many}; no model has more than {MOST_EXPERTS:,} experts in a layer")
    skeleton = skeletons.build(config, trust_remote_code=trust_remote_code)
    schemes: Mapping[str, Scheme] = {}
    kv_scales: KvScales = {}
    stored = held
    exact: set[str] = set()
    if quantization is not None:
        from qforge.models.quantized import QuantizedSource

        stored = quantized = QuantizedSource(held, quantization, skeleton, str(path))
        schemes, kv_scales = quantized.schemes, quantized.kv_scales
        if kv_scales and len(kv_scales) != config.num_hidden_layers:
            raise ModelError(f"{path}: keys and values are kept as FP8, but {len(kv_scales)} of {config.num_hidden_layers} layers have scales for them")
        exact = {f"{name}.weight" for name in (*schemes, quantized.table)}
    stored = skeletons.fitted(stored, skeleton, config, str(path))
    asset_files.check_tokenizer(path)
    chosen = DTYPES[dtype] if dtype != "auto" else _own_dtype(config, held)
    config.dtype = chosen
    if dtype != "auto" or not schemes:
        stored = Cast(stored, chosen, keep=exact)
    return Model(source, config, model_spec(config), stored, chosen, path, schemes, kv_scales, tied=skeleton.tied, trust_remote_code=trust_remote_code, whole=whole)


def _own_dtype(config: PretrainedConfig, held: WeightSource) -> torch.dtype:
    """The config's dtype if it is one that we store, else that of most stored floats."""
    named: Any = getattr(config, "dtype", None)
    known: torch.dtype | None = next((d for d in DTYPES.values() if d is named), None)
    if known is not None:
        return known
    counts = dict.fromkeys(DTYPES.values(), 0)
    for name in held.names():
        found = held.info(name)
        if found.dtype in counts:
            counts[found.dtype] += int(torch.Size(found.shape).numel())
    return max(counts, key=lambda d: counts[d]) if any(counts.values()) else torch.float32
