"""Damaged copies of files, by seed: what a broken disk, a cut download or an enemy makes of a header or a config."""

from __future__ import annotations

import copy
import json
import random
import struct
from typing import Any

import onnx

NUMBERS = (0, 1, -1, 2, 7, 255, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 10**30)
VALUES: tuple[Any, ...] = (None, True, "", "gptq", [], [[]], {}, {"": None}, 0.5, -1, 0, 1, 2**31, 2**63, 10**30, "Infinity", "../../etc", "\u0000", [1, 2, 3], [-1, 4])


def header_end(content: bytes) -> int:
    """Where the header of a safetensors file ends."""
    return 8 + int.from_bytes(content[:8], "little")


def bytes_changed(content: bytes, rng: random.Random, end: int) -> bytes:
    """Some bytes, or a whole number, before `end` set to something else; or the file cut, or grown."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at = rng.randrange(end)
        match rng.randrange(5):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                data[at] ^= 1 << rng.randrange(8)
            case 2:
                at = min(at, len(data) - 8)
                data[at : at + 8] = struct.pack("<Q", rng.choice(NUMBERS) % 2**64)
            case 3:
                at = min(at, len(data) - 4)
                data[at : at + 4] = struct.pack("<I", rng.choice(NUMBERS) % 2**32)
            case 4:
                digit = rng.choice(b'0123456789,:[]{}"-.eE')
                data[at] = digit
    if rng.random() < 0.1:
        return bytes(data[: rng.randrange(len(data))])
    return bytes(data) + bytes(rng.randrange(1, 64)) if rng.random() < 0.05 else bytes(data)


def json_changed(content: bytes, rng: random.Random) -> bytes:
    """One or two values anywhere in a JSON document replaced, removed or doubled."""
    tree = json.loads(content)
    for _ in range(rng.choice((1, 1, 2))):
        places = list(_places(tree))
        holder, key = rng.choice(places)
        match rng.randrange(4):
            case 0:
                holder[key] = copy.deepcopy(rng.choice(VALUES))
            case 1:
                value = holder[key]
                holder[key] = rng.choice(NUMBERS) if isinstance(value, int) else [value] if rng.random() < 0.5 else str(value)
            case 2:
                del holder[key]
            case 3:
                other, name = rng.choice(places)
                holder[key] = json.loads(json.dumps(other[name])) if name in other or (isinstance(other, list) and name < len(other)) else None
        if not isinstance(tree, dict) or not list(_places(tree)):
            break
    return json.dumps(tree).encode()


def header_changed(content: bytes, rng: random.Random) -> bytes:
    """The JSON header of a safetensors file changed as JSON, its length put right: what a check of bytes alone does not find."""
    end = header_end(content)
    header = json_changed(content[8:end], rng)
    return len(header).to_bytes(8, "little") + header + content[end:]


def external_changed(content: bytes, rng: random.Random) -> bytes:
    """An ONNX model that says something else of where a weight's data lie, or of its shape or type."""
    model = onnx.ModelProto.FromString(content)
    outside = [t for t in model.graph.initializer if t.external_data]
    for _ in range(rng.choice((1, 1, 2))):
        tensor = rng.choice(outside)
        match rng.randrange(4):
            case 0:
                rng.choice(tensor.external_data).value = rng.choice(("", "/etc/passwd", "../model.onnx", "model.onnx", "nothing", ".", "-1", "1e9", *map(str, NUMBERS)))
            case 1:
                tensor.external_data.pop(rng.randrange(len(tensor.external_data)))
            case 2:
                tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice([n for n in NUMBERS if -(2**63) <= n < 2**63])
            case 3:
                tensor.data_type = rng.randrange(-1, 40)
    return model.SerializeToString()


def _places(tree: Any) -> Any:
    """Every (holder, key) of a JSON tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(items):
        yield tree, key
        yield from _places(value)
