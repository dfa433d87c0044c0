"""Where quantization computes: on the processor, or on a card to which block after block is brought.

On a card tensors come into being there (`torch.device` as a context), the compiled loops make room for the same in PyTorch, and what waits between two blocks lies in the
processor's memory. The card holds one block in fp32, the Hessians of one linear and what all calibration tokens leave behind within a block.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from qforge.errors import MissingCapabilityError, UnsupportedError
from qforge.methods.base import Options


def device_of(asked: str) -> torch.device:
    """What `run.device` means here; `auto` is the processor.

    Raises:
        MissingCapabilityError: there is no such card.
    """
    if not asked.startswith("cuda"):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise MissingCapabilityError(f"run.device: {asked}, but this machine has no usable CUDA device; use device: cpu")
    device = torch.device("cuda", torch.device(asked).index or 0)
    if device.index >= torch.cuda.device_count():
        raise MissingCapabilityError(f"run.device: {asked}, but this machine has {torch.cuda.device_count()} CUDA devices; use device: cuda or cpu")
    return device


def name_of(device: torch.device) -> str | None:
    """A card's own name, since results depend on it; None for the processor."""
    return None if device.type == "cpu" else str(torch.cuda.get_device_name(device))


def check_runs_there(device: torch.device, options: Options) -> None:
    """Refuse what has no loop for a card.

    Raises:
        UnsupportedError: by name.
    """
    if device.type != "cpu" and options.fisher:
        raise UnsupportedError("quantize.options.fisher goes through codes one by one, in loops for processors; use run.device: cpu, or fisher: false")
    if device.type != "cpu" and options.tune:
        raise UnsupportedError("quantize.options.tune has been run on processors only; use run.device: cpu, or tune: 0")


@contextlib.contextmanager
def computing_on(device: torch.device) -> Iterator[None]:
    """While open, calibration and methods compute there.

    Raises:
        MissingCapabilityError: the card's memory is too small.
    """
    if device.type == "cpu":
        yield
        return
    try:
        with torch.device(device):
            yield
    except torch.OutOfMemoryError as e:
        said = str(e).partition("\n")[0]
        raise MissingCapabilityError(f"a block and its calibration do not fit into the memory of {device}; use fewer calibration.samples, or run.device: cpu ({said})") from e
