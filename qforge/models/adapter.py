"""One adapter's folder: its tensors, sorted by the module that they change and held against the base model's shapes.

Letters: R rank, I input features, O output features, V vocabulary, D hidden width.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from qforge.errors import ModelError
from qforge.models import language_model
from qforge.models.adapter_config import AdapterConfig, read_adapter_config
from qforge.models.names import HEAD
from qforge.models.shards import Shards
from qforge.models.skeleton import Skeleton
from qforge.models.weights import listed

WEIGHTS_FILE = "adapter_model.safetensors"
_ROLES = {
    "lora_A.weight": "a", "lora_B.weight": "b", "lora_B.bias": "bias_delta", "lora_embedding_A": "a", "lora_embedding_B": "b", "lora_magnitude_vector": "magnitude",
    "lora_magnitude_vector.weight": "magnitude",
}  # fmt: skip
_LORA_KEY = re.compile(
    r"(?P<module>.+)\.(?P<role>lora_[AB](?P<n1>\.default)?\.(?:weight|bias)|lora_embedding_[AB](?P<n2>\.default)?|lora_magnitude_vector(?P<n3>\.default)?(?:\.weight)?)"
)


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """What one adapter changed.

    Attributes:
        source: as the user wrote it.
        method: LoRA, rsLoRA or DoRA.
        tensors: weights that a low-rank product was merged into.
        replaced: tensors that the adapter brings in full (`modules_to_save`, trained biases, resized embeddings).
        relative_delta_mean, relative_delta_max: over those weights, Frobenius norm of the change divided by that of the base's weight; without those that are all zero in the base,
            and None where no others are.
        sha256: of adapter_config.json and adapter_model.safetensors.
        notes: what a reader should know (made for another base, embeddings untied, vocabulary grown).
    """

    source: str
    weight: float
    method: str
    rank: int
    alpha: float
    tensors: int
    replaced: tuple[str, ...]
    relative_delta_mean: float | None
    relative_delta_max: float | None
    sha256: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """The low-rank part for one module, fp32. `a` [R, I], `b` [O, R]; for an embedding `a` [R, V], `b` [D, R], and the product is transposed."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float
    embedding: bool
    magnitude: torch.Tensor | None = None
    bias_delta: torch.Tensor | None = None

    def delta(self) -> torch.Tensor:
        """What is added to the weight (before DoRA's rescaling), `[O, I]` or `[V, D]`, fp32."""
        product = self.b @ self.a
        return (product.T if self.embedding else product) * self.scaling

    def delta_norm(self) -> float:
        """Frobenius norm of `delta()`, from the two small Gram matrices: |B A|^2 = sum((B'B) * (A A'))."""
        squared = ((self.b.double().T @ self.b.double()) * (self.a.double() @ self.a.double().T)).sum()
        return abs(self.scaling) * float(squared.clamp(min=0).sqrt())


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter as read.

    Attributes:
        products: by module name.
        replaced: by tensor name.
        resaved: those of `replaced` that are a low-rank module's own base weight.
        left_out: tensors of parts that the base does not have.
    """

    source: str
    weight: float
    config: AdapterConfig
    products: Mapping[str, Product]
    replaced: Mapping[str, torch.Tensor]
    resaved: frozenset[str]
    sha256: str
    left_out: tuple[str, ...] = ()


def read_adapter(source: str, folder: Path, weight: float, skeleton: Skeleton, whole: str | None = None) -> Adapter:
    """Read an adapter and hold it against its base. `whole`: see `Model`; what the adapter has for other parts of it is left out.

    Raises:
        ModelError: files are missing or damaged, or names or shapes do not fit the base; the message names tensor and shapes.
    """
    config = read_adapter_config(folder)
    path = folder / WEIGHTS_FILE
    if not path.exists():
        pickled = "; it holds adapter_model.bin, a pickle, which qforge never loads: save it again with a current peft" if (folder / "adapter_model.bin").exists() else ""
        raise ModelError(f"{folder} has no {WEIGHTS_FILE}{pickled}")
    shards = Shards([path])
    left_out = [key for key in shards.names() if whole is not None and language_model.is_other(_plain(key))]
    parts, named, replaced, resaved = _sorted_by_module(source, shards, [key for key in shards.names() if key not in left_out], skeleton)
    products = {module: _product(source, config, (module, named[module]), found, skeleton, replaced) for module, found in parts.items()}
    if not products and not replaced:
        raise ModelError(f"adapter '{source}' holds no tensors" + (f" for the language model of the '{whole}'" if left_out else ""))
    _check_replaced(source, replaced, skeleton)
    return Adapter(source, weight, config, products, replaced, frozenset(resaved), _sha256(folder), tuple(left_out))


def _sha256(folder: Path) -> str:
    from qforge.files import sha256_file
    from qforge.models.weights import digest

    return digest("adapter", sha256_file(folder / "adapter_config.json"), sha256_file(folder / WEIGHTS_FILE))


def _plain(key: str) -> str:
    return key.removeprefix("base_model.model.")


def _sorted_by_module(
    source: str, shards: Shards, keys: Sequence[str], skeleton: Skeleton
) -> tuple[dict[str, dict[str, torch.Tensor]], dict[str, str], dict[str, torch.Tensor], set[str]]:
    """Low-rank parts by module and role, what the adapter calls those modules (of a multimodal model, where the base is its language model), tensors given in full by name,
    and those of the latter that are a low-rank module's base."""
    modules = {name.rpartition(".")[0] for name in skeleton.shapes}
    parts: dict[str, dict[str, torch.Tensor]] = {}
    named: dict[str, str] = {}
    replaced: dict[str, torch.Tensor] = {}
    resaved, strangers = set(), []
    for key in keys:
        stored = _plain(key)
        name = language_model.alone(stored)
        if not shards.info(key).dtype.is_floating_point:
            raise ModelError(f"adapter '{source}': tensor '{key}' is {shards.info(key).dtype}, where floats are needed; the file is damaged")
        tensor = shards.read(key).float()
        if not torch.isfinite(tensor).all():
            raise ModelError(f"adapter '{source}': tensor '{key}' holds values that are not finite; its training diverged or the file is damaged")
        match = _LORA_KEY.fullmatch(name)
        if match is not None and match["module"] in modules:
            parts.setdefault(match["module"], {})[_ROLES[match["role"].replace(".default", "")]] = tensor
            called = stored.removesuffix(name.removeprefix(match["module"]))
            if named.setdefault(match["module"], called) != called:
                raise ModelError(f"adapter '{source}' calls one module '{named[match['module']]}' and '{called}'; the file is mixed up")
            continue
        plain = name.replace(".base_layer.", ".").replace(".modules_to_save.default.", ".").replace(".modules_to_save.", ".")
        if match is None and plain in skeleton.shapes:
            if plain in replaced:
                raise ModelError(f"adapter '{source}' holds '{plain}' twice, under two names; the file is mixed up")
            replaced[plain] = tensor
            if ".base_layer." in name:
                resaved.add(plain)
        else:
            strangers.append(f"{key} {list(tensor.shape)}")
    if strangers:
        known = sorted({m.rpartition(".")[2] for m in modules if m})
        raise ModelError(f"adapter '{source}' does not fit its base: the base has no module for {listed(strangers)}; its modules end in {listed(known, 12)}")
    return parts, named, replaced, resaved


def _product(
    source: str, config: AdapterConfig, module_named: tuple[str, str], parts: Mapping[str, torch.Tensor], skeleton: Skeleton, replaced: Mapping[str, torch.Tensor]
) -> Product:
    """`module_named`: a module, and what the adapter calls it, which its config's patterns are for."""
    module, named = module_named
    embedding = skeleton.kinds.get(module, "").endswith("Embedding")
    if not embedding and module not in skeleton.linears:
        raise ModelError(f"adapter '{source}' changes '{module}', a {skeleton.kinds.get(module)}; qforge merges into linear and embedding layers")
    for role, what in (("a", "A"), ("b", "B")):
        if role not in parts:
            raise ModelError(f"adapter '{source}' has no {what} matrix for '{module}'; the file is incomplete")
    name = f"{module}.weight"
    shape = tuple(replaced[name].shape) if name in replaced else skeleton.shapes[name]
    rows, columns = shape[::-1] if embedding else shape
    rank = config.rank_of(named)
    _check_shapes(source, module, parts, {"a": (rank, columns), "b": (rows, rank)}, shape, rank)
    _check_extras(source, config, module, parts, rows, f"{module}.bias" in skeleton.shapes)
    return Product(parts["a"], parts["b"], config.scaling_of(named), embedding, parts.get("magnitude"), parts.get("bias_delta"))


def _check_shapes(source: str, module: str, parts: Mapping[str, torch.Tensor], expected: Mapping[str, tuple[int, int]], base: tuple[int, ...], rank: int) -> None:
    for role, shape in expected.items():
        if tuple(parts[role].shape) != shape:
            raise ModelError(
                f"adapter '{source}' does not fit its base: {role.upper()} of '{module}' is {list(parts[role].shape)}, but the base's weight {list(base)} "
                f"and the rank {rank} of its config need {list(shape)}"
            )


def _check_extras(source: str, config: AdapterConfig, module: str, parts: Mapping[str, torch.Tensor], rows: int, has_bias: bool) -> None:
    magnitude, bias = parts.get("magnitude"), parts.get("bias_delta")
    if (magnitude is not None) != config.dora:
        raise ModelError(f"adapter '{source}': its config says use_dora: {str(config.dora).lower()}, but '{module}' has {'no' if magnitude is None else 'a'} magnitude vector")
    if magnitude is not None and magnitude.numel() != rows:
        raise ModelError(f"adapter '{source}' does not fit its base: the magnitude vector of '{module}' is {list(magnitude.shape)}, but its weight needs [{rows}]")
    if bias is not None and (not has_bias or tuple(bias.shape) != (rows,) or config.dora):
        raise ModelError(f"adapter '{source}' has a bias {list(bias.shape)} for '{module}', which the base cannot take" + (" together with DoRA" if config.dora else ""))


def _check_replaced(source: str, replaced: Mapping[str, torch.Tensor], skeleton: Skeleton) -> None:
    """A tensor given in full has the base's shape; only the vocabulary (the first dimension of embedding and head) may differ."""
    for name, tensor in replaced.items():
        shape, base = tuple(tensor.shape), skeleton.shapes[name]
        if shape != base and (shape[1:] != base[1:] or not _is_vocabulary(name, skeleton)):
            raise ModelError(f"adapter '{source}' does not fit its base: it brings '{name}' as {list(shape)}, the base has {list(base)}")


def _is_vocabulary(name: str, skeleton: Skeleton) -> bool:
    module = name.removesuffix(".weight")
    return skeleton.kinds.get(module, "").endswith("Embedding") or module == HEAD
