"""A tiny model, and a copy of it for tests that change its files."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import tiny
import torch


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("models") / "base", layers=2, dtype=torch.bfloat16)


@pytest.fixture
def copy(base: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(base, tmp_path / "copy"))
