"""Writing files so that a reader never sees half of one: temporary name, then rename; hashes; the lock on an output folder; where the user's cache is."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from qforge.errors import OutputError

_POINTER, _LARGEST_POINTER = b"version https://git-lfs.github.com/spec/", 1024  # its first bytes, and its size in bytes, by the specification
LOCK = ".lock"  # in every output folder, and left there: it marks the folder as ours


def expanded(path: str) -> Path:
    """A path that a user wrote, with `~` as the home folder; that of a user whom nobody knows is taken as it is written."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def cache_folder() -> Path:
    """`$QFORGE_CACHE`, else `$XDG_CACHE_HOME/qforge`, else `~/.cache/qforge`."""
    if os.environ.get("QFORGE_CACHE"):
        return Path(os.environ["QFORGE_CACHE"]).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "qforge"


def is_full(error: OSError) -> bool:
    """Whether a write failed because there is no room left."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT) or (error.errno is None and "requested and" in str(error))  # numpy's short write has no number


@contextlib.contextmanager
def readable_errors(path: Path) -> Iterator[None]:
    """Turn what the operating system says about writing `path` into one clear OutputError."""
    try:
        yield
    except OSError as e:
        if is_full(e):
            raise OutputError(f"the disk is full: writing {path} failed; free some space and run again (finished work is kept)") from e
        raise OutputError(f"cannot write {path}: {e.strerror or e}; choose another place") from e


def check_regular(path: Path, *, most_bytes: int | None = None) -> None:
    """Refuse what is there and no file (to read a pipe may wait for ever, a device may never end), larger than it can be, or what Git LFS leaves in a file's place.

    Raises:
        OSError: with `strerror`, as opening it would.
    """
    if path.exists() and not path.is_file() and not path.is_dir():  # a folder says so itself
        raise OSError(errno.EINVAL, "it is a pipe, a socket or a device, and no file", str(path))
    if most_bytes is not None and path.exists() and path.stat().st_size > most_bytes:
        raise OSError(errno.EFBIG, f"it has {path.stat().st_size:,} bytes, and such a file has at most {most_bytes:,}", str(path))
    if path.is_file() and path.stat().st_size <= _LARGEST_POINTER:
        with open(path, "rb") as f:
            if f.read(len(_POINTER)) == _POINTER:
                raise OSError(errno.EINVAL, f"it is a Git LFS pointer, not the file itself; `git lfs pull` in {path.parent} fetches that", str(path))


@contextlib.contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; when the block succeeds the file is synced and renamed to `path`, otherwise it is removed."""
    with readable_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.part")
        try:
            yield temporary
            with open(temporary, "rb") as f:
                os.fsync(f.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically (UTF-8, newlines as given)."""
    with atomic(path) as temporary:
        temporary.write_bytes(text.encode())


def write_texts(folder: Path, texts: Mapping[str, str]) -> None:
    """Write text files that belong together (UTF-8, newlines as given) to `folder`, which is made if missing: all of them or none. The last name appears last.

    Raises:
        OutputError: the disk is full, or one of them cannot be written.
    """
    with readable_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    parts = {folder / name: folder / f".{name}.part" for name in texts}
    try:
        for (path, part), text in zip(parts.items(), texts.values(), strict=True):
            with readable_errors(path), open(part, "wb") as f:
                f.write(text.encode())
                f.flush()
                os.fsync(f.fileno())
        for path, part in parts.items():
            with readable_errors(path):
                os.replace(part, path)
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield an empty temporary folder beside `path`; when the block succeeds it replaces `path`, otherwise it is removed."""
    with readable_errors(path):
        temporary = path.with_name(f".{path.name}.part")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        try:
            yield temporary
            shutil.rmtree(path, ignore_errors=True)
            os.replace(temporary, path)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def sha256_file(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def sha256_tree(folder: Path) -> str:
    """Hex SHA-256 over the sorted relative names and contents of all files below `folder`."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + sha256_file(path).encode() + b"\n")
    return digest.hexdigest()


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    return path.stat().st_size if path.is_file() else sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold the lock of an output folder (made if missing); the operating system releases it when the process dies.

    Raises:
        OutputError: another process holds it, or the folder cannot be written.
    """
    with contextlib.ExitStack() as stack:
        with readable_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            handle = stack.enter_context(open(folder / LOCK, "a"))
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as e:
            raise OutputError(f"{folder} is in use by another qforge run; wait for it or choose another --out") from e
        yield
