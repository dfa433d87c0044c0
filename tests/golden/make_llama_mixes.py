"""Makes llama_mixes.json: the type that llama.cpp's own quantizer gives each tensor, by mix, for two tiny models.

    python make_llama_mixes.py LIBRARIES

on the folder of libllama.so (see benchmarks/gguf_k.py, which calls it). `{case: {mix: {tensor: type, or the types of its layers}}}`
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import gguf

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "benchmarks")]
import gguf_k
import tiny

from qforge.export.gguf import GgufExporter
from qforge.export.gguf_types import MIXES
from qforge.models.model import open_model

CASES = {
    "wide": {"layers": 17, "hidden": 256, "intermediate": 512, "heads": 4, "kv_heads": 1, "tied": False},
    "narrow": {"layers": 17, "hidden": 96, "intermediate": 256, "heads": 4, "kv_heads": 2},
}


def types(path: Path) -> dict[str, str | list[str]]:
    """By tensor, layers gathered."""
    found: dict[str, list[str]] = {}
    for t in sorted(gguf.GGUFReader(path).tensors, key=lambda t: int(t.name.split(".")[1]) if t.name.startswith("blk.") else 0):
        name = ".".join(t.name.split(".")[2:]) if t.name.startswith("blk.") else t.name
        if len(t.shape) == 2:
            found.setdefault(name, []).append(t.tensor_type.name)
    return {name: kinds[0] if len(set(kinds)) == 1 else kinds for name, kinds in found.items()}


def main() -> None:
    told = {}
    with tempfile.TemporaryDirectory() as folder:
        for case, shape in CASES.items():
            (source,) = GgufExporter("f16").write(open_model(str(tiny.make(Path(folder) / case, **shape))), Path(folder) / f"{case}-gguf")
            told[case] = {}
            for mix in MIXES:
                gguf_k.theirs(Path(sys.argv[1]), source, Path(folder) / "out.gguf", mix, {}, 1)
                told[case][mix] = types(Path(folder) / "out.gguf")
    (HERE / "llama_mixes.json").write_text(json.dumps(told, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
