"""Workers before Ray is asked: how many threads each has, which machines are alike, where nobody answers (tests/flow/test_flow_workers.py runs them)."""

from __future__ import annotations

import socket
import sys
import types
from pathlib import Path

import pytest
import tiny

from qforge.errors import MissingCapabilityError, ModelError
from qforge.models.model import open_model
from qforge.recipe import Recipe
from qforge.stages import workers
from qforge.stages.journal import Journal, machine


@pytest.mark.parametrize(("cpus", "count", "threads"), [([8], 2, 4), ([8], 3, 2), ([2], 2, 1), ([4, 4], 3, 2), ([1, 5], 2, 2), ([8, 8], 2, 8), ([3, 0], 3, 1)])
def test_each_worker_has_as_many_threads_as_the_machines_have_room_for(monkeypatch: pytest.MonkeyPatch, cpus: list[int], count: int, threads: int) -> None:
    nodes = [{"Alive": True, "Resources": {"CPU": float(n)} if n else {}} for n in cpus]
    dead = {"Alive": False, "Resources": {"CPU": 64.0}}
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(nodes=lambda: [*nodes, dead]))
    assert workers._threads(count) == threads
    with pytest.raises(MissingCapabilityError, match=rf"workers: {sum(cpus) + 1} needs a CPU for each worker, and the Ray cluster has {sum(cpus)}"):
        workers._threads(sum(cpus) + 1)


def test_a_run_keeps_the_threads_that_it_began_with(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert workers._kept(journal, "root", 4) == 4
    assert workers._kept(journal, "root", 2) == 4
    assert workers._kept(journal, "other", 2) == 2
    assert (journal.computed, journal.resumed) == (0, 0)


def test_machines_that_would_give_other_bits_are_refused(tmp_path: Path) -> None:
    recipe = Recipe.model_validate({"version": 1, "model": {"source": str(tiny.make(tmp_path / "m"))}, "quantize": {"method": "gptq", "scheme": "int4-g32-sym"}})
    same = open_model(recipe.model.source).fingerprint()
    workers._check_alike([("10.0.0.1", machine()), ("10.0.0.2", {**machine(), "model": same})], recipe)
    for name, value in (("torch", "1.0"), ("transformers", "4.0"), ("isa", ["NEON", False]), ("model", "0" * 64)):
        with pytest.raises(ModelError, match=rf"machine 10.0.0.2 of the Ray cluster differs from this one in its {name}: "):
            workers._check_alike([("10.0.0.1", machine()), ("10.0.0.2", {**machine(), "model": same, name: value})], recipe)


def test_an_address_where_nobody_listens_is_found_out_at_once() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        with pytest.raises(OSError, match="refused"):
            workers._check_answers(f"127.0.0.1:{listening.getsockname()[1]}")
    workers._check_answers("auto")
