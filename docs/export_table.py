"""The tables of docs/exports.md, from what `benchmarks/exports.py --save` left in benchmarks/results."""

from __future__ import annotations

from typing import Any

HEAD = "| | scheme | run by | weights | KL divergence | same first token | |\n|---|---|---|---|---|---|---|"
OPERATORS = "onnxruntime, operator by operator"
OPENVINO = "openvino, weight by weight"
READERS = {"llama.cpp": "gguf package", "onnxruntime": OPERATORS, "onnxruntime-genai": OPERATORS, "openvino": OPENVINO}  # engine -> who compared its weights

TWIN = "dequantized twin"
REMARKS = ("bitsandbytes", "its ", TWIN)  # how parts of a note begin that explain a figure


def tables(results: dict[str, dict[str, Any]]) -> str:
    """A table for each result."""
    return "\n\n".join(map(_section, results.values()))


def _section(found: dict[str, Any]) -> str:
    machine = found["environment"]
    said = f"**{found['model']}** ({found['positions']} positions of {found['text']}; {found['date']}, {machine['cores']} cores of an {machine['cpu']}):"
    rows = found["rows"]
    return "\n".join([said, "", HEAD, *(_line(row, rows) for row in rows if row["executed"] or row["engine"] == "none")])


def _line(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    name = f"{row['format']} {row['type'] or ''}".strip()
    if row["engine"] == "none":
        return f"| {name} | {row['scheme']} | not run | {_equal(_weights(row, rows, None))} | | | {row['note']} |"
    reference = row["note"].partition("against ")[2].partition(";")[0] or "qforge"
    beside = "" if reference == "qforge" else f"against {reference}" + (", which rounds the same activations" if reference == "transformers" else "")
    said = [part for part in row["note"].split("; ") if part.startswith(REMARKS)]
    remarks = "; ".join(filter(None, [row["failed"], _operators(row, rows), beside, *said]))
    of = f" of {row['positions']} generated" if row["engine"] == "onnxruntime-genai" else ""
    figures = f"{row['kl_mean']:.1e} | {100 * row['top1_agreement']:.1f} %{of}"
    return f"| {name} | {row['scheme']} | {row['engine']} {row['version'].removeprefix('xllamacpp ')} | {_held(row, rows)} | {figures} | {remarks} |"


def _held(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """What is known of the weights that a row ran with."""
    if row["engine"] == "vLLM":
        return "by product"  # it packs them when it loads them
    if row["engine"] == "llama.cpp" and row["weights_equal"] is None:  # a mix; the note says where llama.cpp's C code reads its blocks otherwise
        return "**unequal**" if "dequantized otherwise" in row["note"] else "anew"
    return _equal(_weights(row, rows, row["engine"]))


def _same_file(row: dict[str, Any], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [r for r in rows if all(r[key] == row[key] for key in ("format", "type", "scheme"))]


def _weights(row: dict[str, Any], rows: list[dict[str, Any]], engine: str | None) -> bool | None:
    """What the engine's own dequantization gave; of a file that was not run, what its reader found."""
    if row["weights_equal"] is not None:
        return bool(row["weights_equal"])
    readers = [r for r in _same_file(row, rows) if r["weights_equal"] is not None and r["engine"] == READERS.get(str(engine), r["engine"])]
    return None if not readers else all(r["weights_equal"] for r in readers)


def _operators(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The operators with weights of an ONNX file or an OpenVINO model, and their types; those of the tensors of a GGUF file or, beside its first run, of a checkpoint."""
    if row["tensors"] is not None:
        return str(row["tensors"]) if next(r for r in _same_file(row, rows) if r["executed"]) is row else ""
    if row["engine"] not in ("onnxruntime", "openvino", "llama.cpp") or TWIN in row["note"]:
        return ""
    return next((str(r["note"]).rpartition("; ")[2] for r in _same_file(row, rows) if r["engine"] == READERS[row["engine"]] and r["note"]), "")


def _equal(equal: bool | None) -> str:
    return {True: "equal", False: "**unequal**", None: ""}[equal]
