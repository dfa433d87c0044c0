"""Where a model lies: a path, a hub id or `demo` -> a file or a folder. Imports nothing heavy unless something must be downloaded."""

from __future__ import annotations

import re
from pathlib import Path

from qforge.errors import ModelError
from qforge.files import expanded

IMATRIX = "imatrix.gguf"  # the importance matrix that a GGUF export may have beside its model
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def locate(source: str, folder: Path, revision: str | None = None, *, what: str = "model", trust_remote_code: bool = False) -> Path:
    """The file or folder that a source names; downloaded where it is a hub id or `demo`.

    Raises:
        ModelError: there is no such path, and it cannot be a hub id.
        MissingCapabilityError: it must be downloaded, and that is not possible here.
    """
    if source == "demo" and what == "model":
        from qforge.models.demo import demo_file

        return demo_file()
    path = folder / expanded(source)
    if source and path.exists():
        return path
    near = "/" in source and (folder / Path(source).parts[0]).exists()
    if not _HUB_ID.fullmatch(source) or source.endswith((".gguf", ".safetensors")) or near:
        allowed = "a Hugging Face directory, a .gguf file, a hub id, or demo" if what == "model" else "the folder that peft's save_pretrained wrote, or a hub id"
        raise ModelError(f"there is no {what} at '{source}' (looked for {path.absolute()}); give {allowed}")
    from qforge.models.hub import download

    return download(source, revision, trust_remote_code=trust_remote_code)


def model_folder(path: Path) -> Path:
    """Where a model's files are: `model` below the output folder of a run, the one .gguf file of a folder that is no model directory, else the path itself."""
    if not path.is_dir() or (path / "config.json").exists():
        return path
    if (path / "model" / "config.json").exists():
        return path / "model"
    ggufs = [p for p in path.glob("*.gguf") if p.name != IMATRIX]
    return ggufs[0] if len(ggufs) == 1 else path
