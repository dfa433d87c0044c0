"""A call's storages go away while it waits and come back as they were, those that it shares with others stay; places in the file are used again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qforge.calibration.parking import Parking
from qforge.calibration.room import Room
from qforge.calibration.spill import Spill

SIZE = (100, 300)  # 120 kB


@pytest.fixture
def room(tmp_path: Path) -> Room:
    return Room(tmp_path, 0)


def values(seed: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


def test_what_a_call_made_goes_and_comes_back_when_it_is_read(room: Room) -> None:
    parking, weight = Parking(room), values(0)
    with parking:
        kept = weight * 2
        view = kept.T[3:]
        small = kept[0, :5].clone()
    parking.rest()
    assert kept.untyped_storage().nbytes() == view.untyped_storage().nbytes() == 0
    assert weight.untyped_storage().nbytes() > 0  # not its own
    assert small.untyped_storage().nbytes() > 0  # not worth it
    with parking:
        total = view + 1
    assert torch.equal(total, (values(0) * 2).T[3:] + 1)
    assert torch.equal(kept, values(0) * 2)


def test_what_is_changed_after_it_came_back_is_written_again(room: Room) -> None:
    parking = Parking(room)
    with parking:
        kept = values(1) * 1
    for round_ in range(3):
        parking.rest()
        assert kept.untyped_storage().nbytes() == 0
        with parking:
            kept.add_(round_ + 1)
    parking.rest()
    parking.wake(kept)
    assert torch.equal(kept, values(1) + 1 + 2 + 3)


def test_a_new_tensor_where_a_dead_one_was_is_not_mistaken_for_it(room: Room) -> None:
    parking = Parking(room)
    for seed in range(20):  # storages of one size take each other's addresses
        with parking:
            kept = values(seed) * 1
            dead = kept + 1
            del dead
            again = kept + 2
        parking.rest()
        parking.wake(again)
        assert torch.equal(again, values(seed) + 2)
        with parking:
            del kept, again


def test_what_a_call_made_and_the_block_kept_is_there_for_others(room: Room) -> None:
    first, second = Parking(room), Parking(room)
    with first:
        table = values(4) * 2
    first.rest()
    assert table.untyped_storage().nbytes() == 0
    with second:
        assert torch.equal(table + 1, values(4) * 2 + 1)
        table.add_(1)
    first.rest()
    assert table.untyped_storage().nbytes() == 0
    first.leave()
    assert torch.equal(table, values(4) * 2 + 1)
    assert not room.filed


def test_a_budget_is_kept_and_given_back(tmp_path: Path) -> None:
    size = 4 * SIZE[0] * SIZE[1]
    room = Room(tmp_path, size)
    first, second = Parking(room), Parking(room)
    with first:
        a = values(2) * 1
    first.rest()
    with second:
        b = values(3) * 1
    second.rest()
    assert (room.used, a.untyped_storage().nbytes(), b.untyped_storage().nbytes()) == (size, size, 0)
    del a
    first.rest()
    assert room.used == 0
    second.leave()
    assert room.used == 0


def test_places_are_used_again_and_the_file_has_no_name(tmp_path: Path) -> None:
    spill, data = Spill(tmp_path), [values(i) for i in range(3)]
    size = data[0].numel() * 4
    first = spill.write(data[0].data_ptr(), size)
    second = spill.write(data[1].data_ptr(), size)
    spill.free(first, size)
    assert spill.write(data[2].data_ptr(), size) == first != second
    for place, wanted in ((first, data[2]), (second, data[1])):
        got = torch.empty(SIZE)
        spill.read(place, got.data_ptr(), size)
        assert torch.equal(got, wanted)
    assert not list(tmp_path.iterdir())
