"""Settings of every test: one thread (tiny models gain nothing from more, and lose much on a busy machine), no network, no progress bars."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command sets it
os.environ.setdefault("QFORGE_PACKED_GB", "0")  # tests of the cache of packed weights say otherwise
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import transformers

torch.set_num_threads(1)
transformers.utils.logging.disable_progress_bar()


def pytest_runtest_teardown() -> None:
    """A recipe that names no number of threads leaves torch with all cores."""
    torch.set_num_threads(1)
