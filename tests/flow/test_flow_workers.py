"""Runs shared by workers through Ray, on this machine and on a cluster of two nodes: the same bytes each time, also when a worker is killed and the run is taken up again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny

pytestmark = pytest.mark.slow
LAYERS = 8


def write_recipe(folder: Path, **changes: object) -> Path:
    tiny.make(folder / "model", layers=LAYERS)
    (folder / "text.txt").write_text("The small mill stands by the river, and the miller grinds wheat for the village. " * 300)
    calibration = {"source": "text.txt", "samples": 9, "sequence_length": 64}
    recipe = {"version": 1, "model": {"source": "model"}, "calibration": calibration, "quantize": {"method": ["awq", "gptq"], "scheme": "int4-g32-asym"}, "evaluate": None}
    path = folder / "recipe.yaml"
    path.write_text(json.dumps({**recipe, "run": {"workers": 2, "threads": 2}, **changes}))
    return path


def start(recipe: Path, out: str, address: str = "", *more: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "RAY_ADDRESS": address}
    command = [sys.executable, "-m", "qforge", "quantize", "--recipe", str(recipe), "--out", str(recipe.parent / out), *more]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, said = process.communicate(timeout=500)
    return process.returncode, said


def weights(recipe: Path, out: str) -> bytes:
    return (recipe.parent / out / "model" / "model.safetensors").read_bytes()


def results(recipe: Path, out: str) -> dict[str, Any]:
    return dict(json.loads((recipe.parent / out / "results.json").read_text()))


def blocks_done(recipe: Path, out: str) -> int:
    return len(list((recipe.parent / out / "work").glob("block-*.safetensors")))


def workers_of(raylets: set[int]) -> list[int]:
    """Ids of the workers' processes that these have started."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent, name = int((process / "stat").read_text().rpartition(")")[2].split()[1]), (process / "cmdline").read_text()
        except OSError:
            continue
        if parent in raylets and name.startswith("ray::_Process"):
            found.append(int(process.name))
    return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[str, set[int]]]:
    """Two nodes: the address, and their process ids."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    nodes.add_node(num_cpus=1)
    yield nodes.address, {process.process.pid for node in nodes.list_all_nodes() for process in node.all_processes["raylet"]}
    nodes.shutdown()


def test_two_workers_on_this_machine_give_the_same_bytes_and_leave_nothing(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path)
    (tmp_path / "tmp").mkdir()
    os.environ["TMPDIR"], before = str(tmp_path / "tmp"), os.environ.get("TMPDIR")
    try:
        for out in ("one", "two"):
            assert finish(start(recipe, out))[0] == 0
    finally:
        os.environ.pop("TMPDIR") if before is None else os.environ.update(TMPDIR=before)
    assert weights(recipe, "one") == weights(recipe, "two")
    assert not list((tmp_path / "tmp").iterdir())
    assert finish(start(recipe, "alone", "", "--set", "run.workers=1"))[0] == 0
    one, alone = (results(recipe, out)["layers"] for out in ("one", "alone"))
    assert [(layer["name"], layer["tokens"]) for layer in one] == [(layer["name"], layer["tokens"]) for layer in alone]
    errors = [sum(layer["output_error"] or 0 for layer in layers) for layers in (one, alone)]
    assert errors[0] == pytest.approx(errors[1], rel=0.05)  # sums of other parts round otherwise, and what comes after is fitted to it


def test_a_worker_that_is_killed_is_named_and_the_run_taken_up_with_the_same_bytes(tmp_path: Path, cluster: tuple[str, set[int]]) -> None:
    address, raylets = cluster
    recipe = write_recipe(tmp_path, quantize={"method": ["rotate", "gptq"], "scheme": "int4-g32-sym", "ignore": []})
    assert finish(start(recipe, "whole", address))[0] == 0
    process = start(recipe, "killed", address)
    while blocks_done(recipe, "killed") < 2 and process.poll() is None:
        time.sleep(0.01)
    workers = workers_of(raylets)
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    code, said = finish(process)
    assert (code, "a worker has ended" in said, "same command again to resume" in said) == (3, True, True), said
    assert "Traceback" not in said
    finished = blocks_done(recipe, "killed")
    assert 2 <= finished < LAYERS
    code, said = finish(start(recipe, "killed", address))
    assert code == 0, said
    assert results(recipe, "killed")["work"]["resumed"] >= finished
    assert weights(recipe, "killed") == weights(recipe, "whole")


def test_the_workers_share_both_nodes_and_a_cluster_that_is_too_small_is_refused(tmp_path: Path, cluster: tuple[str, set[int]]) -> None:
    address, raylets = cluster
    recipe = write_recipe(tmp_path)
    process = start(recipe, "out", address)
    while blocks_done(recipe, "out") < 1 and process.poll() is None:
        time.sleep(0.01)
    assert all(len(workers_of({raylet})) == 1 for raylet in raylets)
    assert finish(process)[0] == 0
    code, said = finish(start(recipe, "refused", address, "--set", "run.workers=3"))
    assert (code, "needs a CPU for each worker, and the Ray cluster has 2" in said) == (3, True), said
    code, said = finish(start(recipe, "nowhere", "127.0.0.1:1"))
    assert (code, "RAY_ADDRESS=127.0.0.1:1" in said) == (3, True), said
