"""The user's cache folder: what was downloaded or derived once and can be made again."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from qforge.errors import MissingCapabilityError
from qforge.files import cache_folder


def cached_folder(kind: str, key: str, build: Callable[[Path], None]) -> Path:
    """The folder `kind/key` of the cache; where it is not there yet, `build` fills an empty folder that is then renamed to it.

    Several processes may do this at once: the first one to finish wins, and the others use its folder.

    Raises:
        MissingCapabilityError: the cache cannot be written.
    """
    target = cache_folder() / kind / key
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=".", dir=target.parent))
    except OSError as e:
        raise MissingCapabilityError(f"cannot write the cache folder {target.parent} ({e.strerror}); set QFORGE_CACHE to a folder that can be written") from e
    try:
        build(temporary)
        temporary.chmod(0o755)
        try:
            os.rename(temporary, target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target
