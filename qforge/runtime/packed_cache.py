"""Packed weights kept from one start to the next, in `packed` of the cache folder: named by what they were made of, mapped where they are found, thrown away oldest first.

A name is a hash of the model's files, the kind of activations, the instruction set, and the program that packs. Whether files are still those that were hashed is told by
size, times and inode, as version control tells it; what changed in the last two seconds is hashed again. Removing the folder is always safe.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import qforge
from qforge.errors import DataError
from qforge.files import cache_folder, sha256_file
from qforge.ops.native_module import instruction_sets, missing, module
from qforge.runtime import packed_file
from qforge.runtime.packed_file import PackedModel

_LIMIT_GB = "20"  # of all entries together, unless QFORGE_PACKED_GB says otherwise
_DECIDE = (".json", ".safetensors", ".jinja", ".model", ".txt", ".tiktoken")  # what a model is read from
_SETTLED = 2_000_000_000  # ns: a file changed again within the resolution of its file system's clock would look the same
_ABANDONED = 3600  # seconds after which a half-written file is nobody's any more
_PROGRAM = (".", "ops", "ops/cuda", "ops/triton", "runtime", "layouts", "models", "text")  # folders with the code between a model's files and its packed weights
_LIBRARIES = ("transformers", "tokenizers", "torch", "gguf")  # that read them; that another version was installed is seen on its files, since to ask for its number takes 10 ms
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a model's packed weights are kept.

    Attributes:
        source: the model's file or folder.
        state: what `_state` said of its files when they were hashed.
    """

    source: Path
    state: list[list[int | str]]
    path: Path

    @property
    def key(self) -> str:
        """What the file must say of itself."""
        return self.path.stem

    def read(self, threads: int | None = None) -> PackedModel | None:
        """The packed model, mapped; None where it is not there or damaged (then it is removed)."""
        if not self.path.exists():
            return None
        found = packed_file.read(self.path, self.key, threads)
        with contextlib.suppress(OSError):
            os.utime(self.path) if found is not None else self.path.unlink()
        return found

    def write(self, packed: PackedModel, threads: int | None = None) -> None:
        """Keep a packed model. Where that is not possible it is said in the log, and nothing else happens."""
        size = packed_file.nbytes(packed)
        try:
            if _state(self.source) != self.state:
                return
            self.path.parent.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.path.parent).free
            if size > min(_limit(), free // 2):
                _log.warning("packed weights of %.1f GB are not kept for the next start: %.1f GB of disk are free, the cache holds %.1f GB", size / 1e9, free / 1e9, _limit() / 1e9)
                return
            with _replacing(self.path) as temporary:
                packed_file.write(temporary, packed, threads)
        except OSError as e:
            _log.warning("packed weights are not kept for the next start: %s cannot be written (%s)", self.path.parent, e.strerror or e)
            return
        with contextlib.suppress(OSError):  # another process sweeps, too
            _sweep(self.path)


def entry(source: Path, activations: str) -> Entry | None:
    """Where the packed weights of a model's file or folder belong; None where none are to be kept, or cannot be: no native module, a model that is more than files side by side.

    Raises:
        DataError: QFORGE_PACKED_GB is no size.
    """
    if _limit() == 0 or missing() is not None or (source / "additional_chat_templates").exists():
        return None
    try:
        state = _state(source)
        content = _content(source, state)
    except (OSError, RuntimeError):  # RuntimeError: there is no home folder
        return None
    made = hashlib.sha256(f"{content} {activations} {instruction_sets()[0]} {_program()}".encode()).hexdigest()
    return Entry(source, state, cache_folder() / "packed" / f"{content[:32]}-{made[:32]}.qfpack")


def _limit() -> int:
    """Bytes of all entries together."""
    given = os.environ.get("QFORGE_PACKED_GB", _LIMIT_GB)
    try:
        return int(float(given) * 1e9)
    except (ValueError, OverflowError) as e:
        raise DataError(f"QFORGE_PACKED_GB is '{given}'; give a number of gigabytes, or 0 to keep no packed weights") from e


def _files(source: Path) -> list[Path]:
    return [source] if source.is_file() else sorted(p for p in source.iterdir() if p.suffix in _DECIDE and p.is_file())


def _state(source: Path) -> list[list[int | str]]:
    found = ((p.name, p.stat()) for p in _files(source))
    return [[name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino, s.st_dev] for name, s in found]


def _content(source: Path, state: list[list[int | str]]) -> str:
    """Hash of the files' names and bytes: the noted one, where they are as they were when it was noted."""
    note = cache_folder() / "packed" / f"{hashlib.sha256(os.fsencode(source.absolute())).hexdigest()[:32]}.json"
    noted = _noted(note)
    if noted is not None and noted.get("state") == state:
        return str(noted["content"])
    hashed = "\n".join(f"{p.name} {sha256_file(p)}" for p in _files(source))
    content = hashlib.sha256(hashed.encode()).hexdigest()
    newest = max((int(t) for row in state for t in row[2:4]), default=0)
    if time.time_ns() - newest > _SETTLED and _state(source) == state:
        with contextlib.suppress(OSError):
            note.parent.mkdir(parents=True, exist_ok=True)
            with _replacing(note) as temporary:
                temporary.write_text(json.dumps({"state": state, "content": content}))
    return content


@functools.cache
def _program() -> str:
    """Hash of the code between a model's files and its packed weights: whoever changes it needs to think of nothing."""
    home, digest = Path(qforge.__file__).parent, hashlib.sha256(qforge.__version__.encode())
    for path in (path for part in _PROGRAM for path in sorted((home / part).glob("*.py"))):
        digest.update(path.read_bytes())
    libraries = (spec.origin for name in _LIBRARIES if (spec := importlib.util.find_spec(name)) is not None)
    for origin in (getattr(module(), "__file__", None), *libraries):
        written = os.stat(str(origin or home))
        digest.update(f"{origin} {written.st_size} {written.st_mtime_ns}".encode())
    return digest.hexdigest()


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary file that no other process has; when the block succeeds it is renamed to `path`, otherwise removed. Not synced: a checksum finds what a crash tears."""
    handle, name = tempfile.mkstemp(prefix=".", suffix=".part", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _sweep(newest: Path) -> None:
    """Remove what was not used for longest, down to the limit; and what nobody will finish or find."""
    entries = sorted(newest.parent.glob("*.qfpack"), key=lambda p: p.stat().st_mtime, reverse=True)
    room = _limit()
    for path in [newest, *(p for p in entries if p != newest)]:
        room -= path.stat().st_size
        if room < 0:
            path.unlink(missing_ok=True)
    for path in newest.parent.glob(".*.part"):
        if time.time() - path.stat().st_mtime > _ABANDONED:
            path.unlink(missing_ok=True)
    for path in newest.parent.glob("*.json"):
        content = (_noted(path) or {}).get("content", "")
        if not any(newest.parent.glob(f"{content[:32]}-*.qfpack")):
            path.unlink(missing_ok=True)


def _noted(note: Path) -> dict[str, Any] | None:
    """What was noted of a model's files; None where there is nothing, or nothing that can be read."""
    try:
        found = json.loads(note.read_bytes())
        return found if isinstance(found, dict) and isinstance(found["content"], str) else None
    except (OSError, ValueError, KeyError):
        return None
