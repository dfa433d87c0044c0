"""The real model that tests cannot make or fetch, and take from a folder of the machine: stories15M, a Llama of 15 million parameters."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

STORIES = Path(os.environ.get("QFORGE_STORIES15M", "stories15M"))
needs_stories = pytest.mark.skipif(not STORIES.is_dir(), reason="QFORGE_STORIES15M names no folder with the stories15M model")
