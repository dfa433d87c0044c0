"""Linears where no batch waits: one that takes something else than it took in the trial is named, and nothing is quantized from wrong inputs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from qforge.calibration.lockstep import lockstep
from qforge.calibration.room import Kept, Room
from qforge.errors import UnsupportedError
from qforge.models.sharing import find_followers

SHORT = 8


class Changing(nn.Module):
    """Two linears that share their input for short texts only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first: torch.Tensor = self.first(x)
        second: torch.Tensor = self.second(x if x.shape[1] <= SHORT else x * 2)
        return first + second


def test_a_follower_that_takes_something_else_is_named() -> None:
    module, room = Changing(), Room()
    linears = {"first": module.first, "second": module.second}
    followers = find_followers(linears, module, torch.ones(1, SHORT, 4))
    assert followers == {"first": ["second"]}
    outputs: list[Kept] = []
    with torch.no_grad():
        stops = lockstep(linears, module, [room.keep(torch.ones(1, SHORT, 4))], outputs, room, {}, followers=frozenset(["second"]))
        assert [s.name for s in stops] == ["first"]
        assert len(outputs) == 1
        with pytest.raises(UnsupportedError, match=r"second took what .* quantize\.ignore"):
            list(lockstep(linears, module, [room.keep(torch.ones(1, 2 * SHORT, 4))], outputs, room, {}, followers=frozenset(["second"])))
