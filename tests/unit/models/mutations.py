"""Damaged copies of files, by seed: what a broken disk, a cut download or an enemy makes of a header or a config."""

from __future__ import annotations

import copy
import json
import random
import struct
from typing import Any

import onnx

NUMBERS = (0, 1, -1, 2, 7, 255, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 10**30)
VALUES: tuple[Any, ...] = (
    None, True, "", "gptq", [], [[]], {}, {"": None}, 0.5, -1, 0, 1, 2**31, 2**63, 10**30, "Infinity", "../../etc", "\u0000", [1, 2, 3], [-1, 4],
    "two\nlines", "\x1b[2J", "a\0b", "\ud800", "x" * 5000, 10**400, 1e308, -1e308, float("nan"), float("inf"), "(.+)+!$", "re:(.+)+!$", "re:(", {"(.+)+!": 4}, "@deep@",
)  # fmt: skip
_DEEP = "[" * 100_000 + "]" * 100_000
TEMPLATES = (
    "", "{{ messages", "{{ messages[7].content }}", "{{ raise_exception('no\nno') }}", "{% for m in messages %}{% endif %}", "{{ ''.__class__.__mro__ }}", "{% include 'x' %}",
    "{{ strftime_now('%Y' * 10000) }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ " + "[" * 500 + "]" * 500 + " }}", "{{ 1 / 0 }}", "{{ 'x' | nothing }}", "\ud800",
    "{% for x in range(10 ** 9) %}{% endfor %}", "{% for a in range(99999) %}{% for b in range(99999) %}{% set x = a * b %}{% endfor %}{% endfor %}", "{{ '%0999999999d' % 1 }}",
    "{{ '{:999999999}'.format(1) }}", "{{ 'x' * 10 ** 10 }}", "{{ 10 ** 10 ** 10 }}", "{{ [1] * 10 ** 10 }}", "{{ 'a' | center(10 ** 10) }}", "{{ 'a' | indent(10 ** 10) }}",
)  # fmt: skip


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
                holder[key] = _alike(holder[key], rng)
            case 2:
                del holder[key]
            case 3:
                other, name = rng.choice(places)
                holder[key] = json.loads(json.dumps(other[name])) if name in other or (isinstance(other, list) and name < len(other)) else None
        if not isinstance(tree, dict) or not list(_places(tree)):
            break
    return json.dumps(tree).replace('"@deep@"', _DEEP).encode()


def _alike(value: Any, rng: random.Random) -> Any:
    """Another integer, or the float that equals it; what is none as text, or in a list."""
    if isinstance(value, int):
        return float(value) if abs(value) < 2**53 and rng.random() < 0.3 else rng.choice(NUMBERS)
    return [value] if rng.random() < 0.5 else str(value)


def template_changed(content: bytes, rng: random.Random) -> bytes:
    """Another chat template, or some bytes of it changed."""
    return rng.choice(TEMPLATES).encode(errors="surrogatepass") if rng.random() < 0.7 else bytes_changed(content, rng, len(content))


def file_changed(name: str, content: bytes, rng: random.Random) -> bytes:
    """A file of a model's folder changed as its kind is."""
    if name.endswith(".jinja"):
        return template_changed(content, rng)
    if name.endswith(".safetensors"):
        return header_changed(content, rng) if rng.random() < 0.7 else bytes_changed(content, rng, len(content))
    if name == "tokenizer_config.json" and rng.random() < 0.3:
        return json.dumps(json.loads(content) | {"chat_template": rng.choice((*TEMPLATES, *VALUES))}).encode()
    return json_changed(content, rng)


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


def graph_changed(content: bytes, rng: random.Random) -> bytes:
    """An ONNX model whose graph says something else: of its nodes, their ends and attributes, its own ends, its weights or its operator sets."""
    model = onnx.ModelProto.FromString(content)
    graph = model.graph
    for _ in range(rng.choice((1, 1, 2))):
        if not graph.node or not model.opset_import:
            break
        node = rng.choice(graph.node)
        names = rng.choice((node.input, node.output))
        match rng.randrange(8):
            case 0:
                del rng.choice((graph.node, graph.input, graph.output, graph.initializer, model.opset_import))[:: rng.choice((1, 2, 7))]
            case 1:
                many: Any = rng.choice((graph.node, graph.input, graph.output, graph.initializer, model.opset_import))
                many.extend([rng.choice(many)] if many and rng.random() < 0.7 else [many.add()])
            case 2 if names:
                names[rng.randrange(len(names))] = rng.choice(("", "nothing", rng.choice(graph.node).name))
            case 3 if node.attribute:
                rng.choice(node.attribute).CopyFrom(onnx.AttributeProto(name=rng.choice(("K", "axis", "body")), type=rng.randrange(1, 15), i=rng.choice((0, -1, 1 << 62))))
            case 4:
                node.op_type, node.domain = rng.choice(("MatMulNBits", "If", "Loop", "Constant", "DequantizeLinear", "\n")), rng.choice(("", "com.microsoft", "x"))
            case 5:
                rng.choice(model.opset_import).version = rng.choice((0, -1, 1, 7, 999, 1 << 62))
            case 6:
                for attribute in node.attribute:
                    attribute.i = rng.choice((0, -1, 3, 1 << 31, (1 << 63) - 1))
            case 7:
                node.attribute.add(name="body", type=onnx.AttributeProto.GRAPH).g.CopyFrom(onnx.GraphProto(node=[node], initializer=graph.initializer[:1]))
    return model.SerializeToString()


def _places(tree: Any) -> Any:
    """Every (holder, key) of a JSON tree."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(items):
        yield tree, key
        yield from _places(value)


SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # GGUF's types of numbers (ggml's docs/gguf.md)
_STRING, _ARRAY = 8, 9


def metadata_changed(content: bytes, rng: random.Random) -> bytes:
    """A GGUF file that says something else in its metadata or of its tensors, everything put where it belongs: what a check of offsets does not find."""
    at, pairs, rows = 24, [], []
    tensors, count = struct.unpack_from("<QQ", content, 8)
    for _ in range(count):
        key, at = _value(content, at, _STRING)
        kind = struct.unpack_from("<I", content, at)[0]
        value, at = _value(content, at + 4, kind)
        pairs.append([key, kind, value])
    for _ in range(tensors):
        name, at = _value(content, at, _STRING)
        dims = struct.unpack_from("<I", content, at)[0]
        rows.append([name, *struct.unpack_from(f"<{dims}QIQ", content, at + 4)])
        at += 16 + 8 * dims
    data = content[-(-at // 32) * 32 :]
    for _ in range(rng.choice((1, 1, 2))):
        chosen = rng.choice(pairs)
        match rng.randrange(6):
            case 0 | 1:
                chosen[1:] = _any_value(rng)
            case 2:
                if chosen[1] in SCALARS:
                    chosen[1:] = [11, rng.choice([n for n in NUMBERS if n < 2**63] + [-1, -(2**63), 3, 64, 1000])]
                elif chosen[1] == _ARRAY and chosen[2][1]:
                    kind, values = chosen[2]
                    values = list(values)
                    match rng.randrange(3):
                        case 0:
                            values = values[: rng.randrange(len(values))]
                        case 1:
                            values = values + values[: rng.randrange(1, len(values) + 1)]
                        case 2:
                            values[rng.randrange(len(values))] = rng.choice(values)
                    chosen[2] = (kind, values)
            case 3:
                pairs.remove(chosen)
            case 4:
                chosen[1:] = copy.deepcopy(rng.choice(pairs)[1:])
            case 5:
                row = rng.choice(rows)
                match rng.randrange(4):
                    case 0:
                        row[0] = rng.choice(rows)[0] if rng.random() < 0.5 else row[0].replace(b"0", b"7")
                    case 1:
                        row[1:-1] = rng.choice(rows)[1:-1]
                    case 2:
                        row[1:-2] = row[1:-2][::-1]
                    case 3:
                        rows.remove(row)
    head = content[:8] + struct.pack("<QQ", len(rows), len(pairs)) + b"".join(_written(_STRING, k) + struct.pack("<I", t) + _written(t, v) for k, t, v in pairs)
    head += b"".join(_written(_STRING, name) + struct.pack(f"<I{len(rest) - 2}QIQ", len(rest) - 2, *rest) for name, *rest in rows)
    return head + bytes(-len(head) % 32) + data


def _value(content: bytes, at: int, kind: int) -> tuple[Any, int]:
    """A GGUF value and where it ends; an array as (type, values)."""
    if kind == _STRING:
        end = at + 8 + struct.unpack_from("<Q", content, at)[0]
        return content[at + 8 : end], end
    if kind == _ARRAY:
        inner, length = struct.unpack_from("<IQ", content, at)
        at, values = at + 12, []
        for _ in range(length):
            value, at = _value(content, at, inner)
            values.append(value)
        return (inner, values), at
    return struct.unpack_from(f"<{SCALARS[kind]}", content, at)[0], at + struct.calcsize(f"<{SCALARS[kind]}")


def _written(kind: int, value: Any) -> bytes:
    if kind == _STRING:
        return struct.pack("<Q", len(value)) + value
    if kind == _ARRAY:
        return struct.pack("<IQ", value[0], len(value[1])) + b"".join(_written(value[0], v) for v in value[1])
    return struct.pack(f"<{SCALARS[kind]}", value)


def _any_value(rng: random.Random) -> tuple[int, Any]:
    """A GGUF type and a value of it."""
    match rng.randrange(5):
        case 0:
            return _STRING, rng.choice(
                (
                    b"",
                    b"llama",
                    b"gpt2",
                    b"none",
                    b"yarn",
                    b"{{ x }}",
                    b"\x00",
                    b"two\nlines",
                    b"\xed\xa0\x80",
                    b"\xff",
                    b"9" * 5000,
                    *(t.encode(errors="surrogatepass") for t in TEMPLATES),
                )
            )
        case 1:
            return 12, rng.choice((0.0, -1.0, 1e-30, 1e30, float("nan"), float("inf"), 0.5))
        case 2:
            return 7, rng.random() < 0.5
        case 3:
            inner = rng.choice((_STRING, 0, 5, 6, 11))
            return _ARRAY, (inner, [rng.choice((b"", b"x")) if inner == _STRING else 0.5 if inner == 6 else rng.randrange(3) for _ in range(rng.choice((0, 1, 2, 384)))])
        case _:
            return 10, rng.choice(NUMBERS) % 2**64
