"""Our K-quants beside llama.cpp's own (`llama_model_quantize`) with the same importance matrix: size, and KL divergence from the unquantized model.

    python benchmarks/gguf_k.py --model DIR --adapter DIR --text FILE --llama DIR --out OUT [--mixes q4_k_m,q5_k_m,q6_k] [--samples 48] [--positions 8192]

DIR of --llama holds libllama.so and its libggml: a cmake build of llama.cpp, or the `lib` folder of an installed llama-cpp-python. Both files are made from one GGUF file
in 16 bits, and both are scored by our runtime over the file's dequantized weights, so that the figures are the quantizers' and not those of 8-bit activations.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
from pathlib import Path

import gguf
import numpy as np
import torch

from qforge.calibration.importance import square_sums
from qforge.calibration.room import Room
from qforge.engines.runtime_engine import RuntimeEngine
from qforge.export.gguf import GgufExporter
from qforge.export.gguf_mix import GgufMixExporter
from qforge.export.gguf_types import MIXES
from qforge.export.imatrix import FILE, Imatrix
from qforge.models.blocks import BlockModel
from qforge.models.lora import with_adapters
from qforge.models.model import Model, open_model
from qforge.progress import SILENT
from qforge.text.calibration import calibration_set
from qforge.text.documents import documents
from qforge.text.windows import evaluation_windows

_INTEGER, _STRING = 0, 3
_QUIET = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda level, text, data: None)


class _Entry(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("data", ctypes.POINTER(ctypes.c_float)), ("size", ctypes.c_size_t)]


class _Value(ctypes.Union):
    _fields_ = [("number", ctypes.c_int64), ("text", ctypes.c_char * 128)]


class _Override(ctypes.Structure):
    _fields_ = [("tag", ctypes.c_int), ("key", ctypes.c_char * 128), ("value", _Value)]


class _Params(ctypes.Structure):
    _fields_ = [
        *((n, ctypes.c_int) for n in ("nthread", "ftype", "output_tensor_type", "token_embedding_type")),
        *((n, ctypes.c_bool) for n in ("allow_requantize", "quantize_output_tensor", "only_copy", "pure", "keep_split", "dry_run")),
        ("imatrix", ctypes.POINTER(_Entry)),
        ("kv_overrides", ctypes.POINTER(_Override)),
        *((n, ctypes.c_void_p) for n in ("tt_overrides", "prune_layers")),
        ("max_buf_size", ctypes.c_size_t),
    ]


def theirs(folder: Path, source: Path, target: Path, mix: str, matrix: dict[str, np.ndarray], threads: int) -> None:
    """llama.cpp's own quantizer."""
    library = ctypes.CDLL(str(folder / "libllama.so"))
    library.llama_model_quantize_default_params.restype = _Params
    library.llama_model_quantize.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(_Params)]
    library.llama_log_set(_QUIET, None)
    params = library.llama_model_quantize_default_params()
    entries = (_Entry * (len(matrix) + 1))()
    for entry, (name, values) in zip(entries, matrix.items(), strict=False):
        entry.name, entry.data, entry.size = name.encode(), values.ctypes.data_as(ctypes.POINTER(ctypes.c_float)), values.size
    params.nthread, params.ftype, params.imatrix, params.kv_overrides = threads, int(MIXES[mix].file_type), entries, told(len(matrix))
    assert library.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params)) == 0


def told(entries: int) -> ctypes.Array[_Override]:
    """What llama-quantize says of an importance matrix in the file, as long as what we say."""
    made = (_Override * 5)()  # the last one's key is empty: the end
    for override, (name, value) in zip(made, {"file": FILE, "dataset": "builtin", "entries_count": entries, "chunks_count": entries}.items(), strict=False):
        override.key = f"quantize.imatrix.{name}".encode()
        if isinstance(value, str):
            override.tag, override.value.text = _STRING, value.encode()
        else:
            override.tag, override.value.number = _INTEGER, value
    return made


def read_imatrix(path: Path) -> dict[str, np.ndarray]:
    """Mean squares by tensor, as llama-quantize takes them from the file."""
    tensors = {t.name: np.array(t.data, dtype=np.float32) for t in gguf.GGUFReader(path).tensors}
    return {n.removesuffix(".in_sum2"): np.ascontiguousarray((v / tensors[n.replace(".in_sum2", ".counts")]).ravel()) for n, v in tensors.items() if n.endswith(".in_sum2")}


def logprobs(path: Path, windows: list[list[int]]) -> list[torch.Tensor]:
    """fp16 log-probabilities of every position, by our runtime."""
    return [torch.log_softmax(x.float(), -1).half() for x in RuntimeEngine(open_model(str(path), dtype="float32")).score(windows)]


def divergence(reference: list[torch.Tensor], path: Path, windows: list[list[int]]) -> tuple[float, float]:
    """Mean KL divergence in nats, and the share of positions with the same first token."""
    total = same = count = 0.0
    for p, x in zip(reference, RuntimeEngine(open_model(str(path), dtype="float32")).score(windows), strict=True):
        q = torch.log_softmax(x.float(), -1)
        total += float((p.float().exp() * (p.float() - q)).sum(-1).double().sum())
        same += float((p.argmax(-1) == q.argmax(-1)).sum())
        count += len(q)
    return total / count, same / count


def importance(model: Model, samples: int) -> Imatrix:
    tokenizer = model.tokenizer()
    read = documents("builtin", role="calibration", folder=Path(), tokenizer=tokenizer)
    chosen = calibration_set(read, tokenizer, samples=samples, sequence_length=512, seed=0, context=model.config.max_position_embeddings)
    return Imatrix(*square_sums(BlockModel(model), chosen.ids, Room(), SILENT), *map(int, chosen.ids.shape), "builtin")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--adapter", action="append", default=[])
    parser.add_argument("--text", default="builtin")
    parser.add_argument("--llama", type=Path, default=Path(os.environ.get("LLAMA_CPP_LIB_PATH", ".")))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--mixes", default="q4_k_m,q5_k_m,q6_k")
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument("--positions", type=int, default=8192)
    args = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    model = with_adapters(open_model(args.model), [(a, 1.0) for a in args.adapter])
    tokenizer = model.tokenizer()
    read = documents(args.text, role="evaluation", folder=Path(), tokenizer=tokenizer)
    windows = evaluation_windows(read, tokenizer, 512, context=model.config.max_position_embeddings).ids[: max(1, args.positions // 511)]
    matrix = importance(model, args.samples)
    (source,) = GgufExporter("auto").write(model, args.out / "source")
    reference = logprobs(source, windows)
    for mix in args.mixes.split(","):
        own = GgufMixExporter(mix, matrix).write(model, args.out / mix)[0]
        foreign = args.out / mix / "llama.cpp.gguf"
        theirs(args.llama, source, foreign, mix, read_imatrix(args.out / mix / FILE), threads)
        kl, top = divergence(reference, own, windows)
        their_kl, their_top = divergence(reference, foreign, windows)
        row = {"mix": mix, "bytes": own.stat().st_size, "their_bytes": foreign.stat().st_size, "kl": kl, "their_kl": their_kl, "kl_ratio": kl / their_kl}
        print(json.dumps(row | {"top1": top, "their_top1": their_top, "positions": sum(map(len, windows)) - len(windows)}), flush=True)


if __name__ == "__main__":
    main()
