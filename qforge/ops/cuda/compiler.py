"""Compile CUDA C++ with NVRTC, which PyTorch's CUDA builds bring, and keep what was compiled in the cache folder.

What this takes of NVRTC is called through ctypes: its Python bindings (cuda-bindings) would be one more package to match with PyTorch's CUDA.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
import os
import threading
from pathlib import Path

import torch

from qforge.errors import QforgeError
from qforge.files import cache_folder
from qforge.ops.cuda.source import Source

_STANDARD = ("-std=c++17",)
_DIGEST = 32  # bytes


def missing() -> str | None:
    """None, or why nothing can be compiled here."""
    try:
        _library()
    except OSError as e:
        return f"NVRTC is not there, which PyTorch's CUDA builds bring ({e})"
    return None


def compiled(source: Source, architecture: str) -> bytes:
    """Machine code (a cubin) for an architecture such as `sm_90a`, from the cache folder if it was compiled before.

    Raises:
        QforgeError: the compiler refuses the source; with what it says.
    """
    text = [source.code, *(f"{n}\n{h}" for n, h in sorted(source.headers.items())), *_STANDARD, *source.options, architecture, version()]
    name = f"{source.kernel}-{hashlib.sha256('|'.join(text).encode()).hexdigest()[:32]}.cubin"
    code = _kept(name)
    if code is None:
        code, _ = compile_now(source, architecture)
        _keep(name, code)
    return code


def _kept(name: str) -> bytes | None:
    """What the cache folder has under a name, if it is whole: after its own hash."""
    try:
        content = (cache_folder() / "cuda" / name).read_bytes()
    except (OSError, RuntimeError):  # the latter of a home folder that nobody knows
        return None
    digest, code = content[:_DIGEST], content[_DIGEST:]
    return code if hashlib.sha256(code).digest() == digest else None


def _keep(name: str, code: bytes) -> None:
    """Several processes may at once. A cache that cannot be written costs time and nothing else."""
    with contextlib.suppress(OSError, RuntimeError):
        folder = cache_folder() / "cuda"
        folder.mkdir(parents=True, exist_ok=True)
        new = folder / f".{name}.{os.getpid()}-{threading.get_ident()}"
        try:
            new.write_bytes(hashlib.sha256(code).digest() + code)
            os.replace(new, folder / name)
        finally:
            new.unlink(missing_ok=True)


def compile_now(source: Source, architecture: str, *options: str) -> tuple[bytes, str]:
    """As `compiled`, whatever is kept, with more options; and what the compiler has to say."""
    library, program = _library(), ctypes.c_void_p()
    headers = list(source.headers.items())
    names, texts = ((ctypes.c_char_p * len(headers))(*(t.encode() for t in column)) for column in zip(*headers, strict=True))
    _check(library.nvrtcCreateProgram(ctypes.byref(program), source.code.encode(), f"{source.kernel}.cu".encode(), len(headers), texts, names), "nvrtcCreateProgram")
    try:
        given = [o.encode() for o in (f"--gpu-architecture={architecture}", *_STANDARD, *source.options, *options)]
        if library.nvrtcCompileProgram(program, len(given), (ctypes.c_char_p * len(given))(*given)):
            raise QforgeError(f"NVRTC {version()} does not compile {source.kernel}.cu for {architecture}: {_text(library, program, 'ProgramLog').strip()[:2000]}")
        return _bytes(library, program, "CUBIN"), _text(library, program, "ProgramLog")
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


@functools.cache
def version() -> str:
    """NVRTC's version."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(_library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
    return f"{major.value}.{minor.value}"


@functools.cache
def _library() -> ctypes.CDLL:
    """NVRTC: that of PyTorch's CUDA among the packages that are installed, else another, else what the system finds."""
    found = importlib.util.find_spec("nvidia")
    folders = [Path(p) for p in (found.submodule_search_locations or ())] if found else []
    paths = [p for folder in folders for p in sorted(folder.glob("*/lib/libnvrtc.so.*")) if "alt" not in p.name]
    own = f"libnvrtc.so.{(torch.version.cuda or '').partition('.')[0]}"
    failure: OSError | None = None
    for name in (*map(str, sorted(paths, key=lambda p: (p.name != own, p.name))), own, "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"):
        for builtins in Path(name).parent.glob("libnvrtc-builtins.so.*") if "/" in name else ():  # which not every release finds beside itself
            with contextlib.suppress(OSError):
                ctypes.CDLL(str(builtins))
        try:
            return ctypes.CDLL(name)
        except OSError as e:
            failure = e
    assert failure is not None
    raise failure


def _bytes(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(library[f"nvrtcGet{what}Size"](program, ctypes.byref(size)), f"nvrtcGet{what}Size")
    buffer = ctypes.create_string_buffer(size.value)
    _check(library[f"nvrtcGet{what}"](program, buffer), f"nvrtcGet{what}")
    return buffer.raw


def _text(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> str:
    return _bytes(library, program, what).rstrip(b"\0").decode(errors="replace")


def _check(result: int, call: str) -> None:
    if result:
        raise QforgeError(f"{call} of NVRTC fails with error {result}")
