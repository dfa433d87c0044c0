"""The CI kit's script: nothing of an earlier run is taken for this one's, and one line in the repository accepts what fails. `qforge quantize` is a stand-in, `compare` is real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from evaluations import evaluation

KIT = Path(__file__).resolve().parents[3] / "examples" / "ci"
QFORGE = f"""#!/bin/bash
if [ "$1" = compare ]; then exec {sys.executable} -m qforge "$@"; fi
[ -e next.json ] || {{ echo "the recipe is broken" >&2; exit 2; }}
mkdir -p runs/ci && cp next.json runs/ci/results.json && echo "the report" > runs/ci/report.md
"""


class Repository:
    """A git repository in which `qforge quantize` gives what `next.json` holds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        (folder / "bin" / "qforge").write_text(QFORGE)
        (folder / "bin" / "qforge").chmod(0o755)
        self.bash("git init -q")
        self.commit()

    def bash(self, script: str) -> subprocess.CompletedProcess[str]:
        who = {f"GIT_{a}_{b}": "tester@example.com" for a in ("AUTHOR", "COMMITTER") for b in ("NAME", "EMAIL")}
        environment = {**os.environ, **who, "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "GITHUB_STEP_SUMMARY": "summary.md"}
        return subprocess.run(["bash", "-c", script], cwd=self.folder, env=environment, capture_output=True, text=True, timeout=60)

    def commit(self, accepted: str = "") -> None:
        if accepted:
            with (self.folder / "baseline.txt").open("a") as f:
                f.write(accepted + "\n")
        self.bash("git add -- baseline.txt; git commit -q --allow-empty -m next")

    def check(self, result: dict[str, object] | None) -> tuple[int, str, str]:
        """Exit code, comment, and summary of this run alone."""
        for name in ("next.json", "summary.md"):
            (self.folder / name).unlink(missing_ok=True)
        if result is not None:
            (self.folder / "next.json").write_text(json.dumps(result))
        done = self.bash(f"{KIT / 'check.sh'} recipe.yaml 'perplexity_ratio <= 1.01'")
        return done.returncode, (self.folder / "runs/ci/comment.md").read_text(), (self.folder / "summary.md").read_text()

    @property
    def history(self) -> int:
        return len(list((self.folder / "runs" / "history").glob("*.json")))


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    made = Repository(tmp_path)
    assert made.check(evaluation(clusters=20))[:2] == (0, "the report\n")
    made.commit()
    return made


def test_a_run_without_a_verdict_leaves_nothing_of_the_one_before(repository: Repository) -> None:
    status, comment, _ = repository.check(evaluation(clusters=20))
    assert status == 0
    assert "PASSED: the gate holds" in comment
    for broken in (None, {**evaluation(clusters=20), "text_sha256": "cd" * 32}):
        status, comment, summary = repository.check(broken)
        assert status == 2
        assert "NO VERDICT: the check ended with exit code 2" in comment
        assert comment == summary
        assert "PASSED" not in comment
        assert not (repository.folder / "runs/ci/comparison").exists()


@pytest.mark.parametrize("change", [{"nll": 0.02}, {"text": "cd" * 32}])
def test_one_line_accepts_a_regression_and_another_text(repository: Repository, change: dict[str, object]) -> None:
    text = str(change.pop("text", "ab" * 32))
    other = {**evaluation(clusters=20, **change), "text_sha256": text}  # type: ignore[arg-type]
    status, comment, _ = repository.check(other)
    assert status in (1, 2)
    assert "commit a line in baseline.txt" in comment
    assert repository.history == 1
    repository.commit("int4 instead of int8, agreed")
    status, comment, _ = repository.check(other)
    assert (status, repository.history) == (0, 2)  # the baseline of those to come
    assert comment.startswith("Accepted in baseline.txt: int4 instead of int8, agreed\n")


def test_an_old_line_accepts_nothing_new(tmp_path: Path) -> None:
    repository = Repository(tmp_path)
    repository.commit("int4 instead of int8, agreed")
    assert repository.check(evaluation(clusters=20))[0] == 0
    repository.commit()
    assert repository.check(evaluation(clusters=20, nll=0.02))[0] == 1
    assert repository.history == 1


def test_a_shallow_clone_is_refused(repository: Repository) -> None:
    done = repository.bash(f"git clone -q --depth 1 file://{repository.folder} shallow && cd shallow && {KIT / 'check.sh'} recipe.yaml")
    assert done.returncode == 2
    assert "shallow" in done.stderr


def test_caches_hold_nothing_that_is_shown() -> None:
    steps = yaml.safe_load((KIT / "github.yml").read_text())["jobs"]["quantize"]["steps"]
    kept = [*next(s["with"]["path"] for s in steps if "cache@" in s.get("uses", "")).split(), *yaml.safe_load((KIT / "gitlab.yml").read_text())["quantize"]["cache"]["paths"]]
    assert {p for p in kept if p.startswith("runs")} == {"runs/history", "runs/ci/work", "runs/ci/.lock"}
