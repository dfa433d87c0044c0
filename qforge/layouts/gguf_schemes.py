"""What a GGUF file's blocks do not say of our integers, as metadata beside them: the schemes that they came from, and zero points. Other programs pass over these keys.

    qforge.schemes          JSON: scheme -> names of tensors, where it is more than the block type says (larger groups, fewer bits, zero points)
    qforge.zeros.<tensor>   uint8: zlib of the layout's `zeros_above`, left out where all of them are 0

With them a file that we wrote gives back the first codes, scales and zero points; a file of another program has the scheme of its block types.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from qforge.errors import ModelError, RecipeError
from qforge.layouts.gguf_blocks import BITS, BLOCK
from qforge.layouts.gguf_integers import layout_of
from qforge.scheme import Granularity, Number, Per, ScaleFormat, ScaleType, Scheme, Symmetry, parse

_SCHEMES = "qforge.schemes"
_ZEROS = "qforge.zeros."


def own_scheme(kind: str) -> Scheme | None:
    """What the blocks of a type are when nobody says more: symmetric integers, one fp16 scale for 32 inputs; None for Q4_K, whose scales usually have scales."""
    if kind not in BITS:
        return None
    return Scheme(Number(f"int{BITS[kind]}"), Granularity(Per.GROUP, BLOCK, 1), Symmetry.SYM, ScaleFormat(ScaleType.F16))


def to_metadata(stored: Mapping[str, tuple[str, Scheme]], zeros_above: Callable[[str], torch.Tensor | None]) -> dict[str, str | bytes]:
    """The keys of a file.

    Args:
        stored: block type and scheme of each quantized tensor, by GGUF's name.
        zeros_above: the layout's `zeros_above` of a tensor; asked for where there are zero points, None where the blocks hold them.
    """
    told: dict[str, list[str]] = {}
    found: dict[str, str | bytes] = {}
    for name, (kind, scheme) in stored.items():
        if scheme != own_scheme(kind):
            told.setdefault(str(scheme), []).append(name)
        above = zeros_above(name) if scheme.symmetry is Symmetry.ASYM else None
        if above is not None and above.any():
            found[_ZEROS + name] = zlib.compress(above.numpy().tobytes(), 9)
    return found if not told else {_SCHEMES: json.dumps(told, separators=(",", ":")), **found}


def schemes(metadata: Mapping[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> dict[str, Scheme]:
    """The scheme of each tensor that holds integers; what the metadata say counts only where the tensor's type can hold it (another program may have stored it anew).

    Args:
        metadata: of a file.
        tensors: type and shape `[O, I]` of each tensor whose type holds integers, by GGUF's name.
    """
    told = {name: scheme for text, names in _told(metadata).items() for name in names if (scheme := _parsed(text)) is not None}
    found = {}
    for name, (kind, shape) in tensors.items():
        scheme = told.get(name)
        fits = scheme is not None and layout_of(kind).supports(scheme) is None and scheme.problem_with(*shape) is None
        chosen = scheme if fits else own_scheme(kind)
        if chosen is not None:
            found[name] = chosen
    return found


def zeros_above(metadata: Mapping[str, Any], name: str, shape: tuple[int, int]) -> torch.Tensor | None:
    """The layout's `zeros_above` of a tensor whose scales have `shape`; None where the file holds none.

    Raises:
        ModelError: what it holds is damaged, or of another size.
    """
    raw = metadata.get(_ZEROS + name)
    if raw is None:
        return None
    count = shape[0] * shape[1]
    try:
        data = zlib.decompressobj().decompress(raw, count + 1)
    except (zlib.error, TypeError) as e:
        raise ModelError(f"the zero points of '{name}' in the metadata are damaged: {e}") from e
    if len(data) != count:
        raise ModelError(f"the metadata hold {len(data)} zero points of '{name}' or more, and its scheme has {count}")
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy()).view(shape)


def _told(metadata: Mapping[str, Any]) -> dict[str, list[str]]:
    """What `qforge.schemes` holds, or nothing where it is not what we write."""
    try:
        told = json.loads(metadata.get(_SCHEMES, "{}"))
    except (ValueError, TypeError, RecursionError):
        return {}
    return {k: [n for n in v if isinstance(n, str)] for k, v in told.items() if isinstance(v, list)} if isinstance(told, dict) else {}


def _parsed(text: str) -> Scheme | None:
    try:
        return parse(text)
    except RecipeError:
        return None
