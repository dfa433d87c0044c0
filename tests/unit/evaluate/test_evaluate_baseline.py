"""A baseline is found by file, by commit, by the nearest ancestor of a commit, or through a file of one line; fallbacks are said."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from evaluations import evaluation

from qforge.cli.main import main
from qforge.errors import DataError
from qforge.evaluate import baseline
from qforge.evaluate.baseline import find


class Repository:
    """A git repository with a folder of runs, each named by the commit that made it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.commits: list[str] = []
        self.git("init", "-q", "-b", "main")
        self.runs = folder / "runs"
        self.runs.mkdir()
        for i in range(4):
            self.commit(f"commit {i}")

    def git(self, *args: str) -> str:
        who = {f"GIT_{a}_{b}": "tester@example.com" for a in ("AUTHOR", "COMMITTER") for b in ("NAME", "EMAIL")}
        return subprocess.run(["git", *args], cwd=self.folder, env={**os.environ, **who}, check=True, capture_output=True, text=True).stdout.strip()

    def commit(self, message: str) -> None:
        self.git("commit", "-q", "--allow-empty", "-m", message)
        self.commits.append(self.git("rev-parse", "HEAD"))

    def run(self, number: int, perplexity: float = 9.0) -> Path:
        path = self.runs / f"{self.commits[number]}.json"
        path.write_text(json.dumps({**evaluation(), "candidate": {"perplexity": perplexity}}))
        return path


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    monkeypatch.chdir(tmp_path)
    return Repository(tmp_path)


CANDIDATE = Path("candidate.json")


def test_the_run_of_a_commit_or_of_its_nearest_ancestor(repository: Repository) -> None:
    old, near = repository.run(0, 9.5), repository.run(1, 9.25)
    found = find("runs", CANDIDATE)
    assert Path(found.name) == near.relative_to(repository.folder)
    assert found.notes == [f"there is no run of HEAD ({repository.commits[3][:10]}); held against its ancestor {repository.commits[1][:10]}, 2 commits before"]
    assert [p.perplexity for p in found.history] == [9.5, 9.25]
    exact = find(f"runs@{repository.commits[0][:8]}", CANDIDATE)
    assert (exact.notes, Path(exact.name).name) == ([], old.name)
    assert find("runs@HEAD~2", CANDIDATE).notes == []
    assert "1 commit before" in find("runs@HEAD~1", CANDIDATE).notes[0]


def test_a_run_of_another_branch_is_no_ancestor(repository: Repository) -> None:
    repository.git("checkout", "-q", "-b", "side", repository.commits[1])
    repository.commit("aside")
    repository.run(4)
    repository.git("checkout", "-q", "main")
    with pytest.raises(DataError, match=r"none of them of .* or one of its ancestors"):
        find("runs", CANDIDATE)


def test_the_candidate_is_not_its_own_baseline(repository: Repository) -> None:
    newest, older = repository.run(3), repository.run(2)
    assert Path(find("runs", Path("runs") / newest.name).name).name == older.name


def test_folders_named_by_commit(repository: Repository) -> None:
    folder = repository.runs / f"demo-{repository.commits[2][:10]}"
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps({"evaluation": evaluation()}))
    assert find("runs", CANDIDATE).name.endswith("results.json")


def test_the_folder_of_a_run_means_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """For both sides, and without git; a folder without a result is refused as before."""
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        Path(name, "work").mkdir(parents=True)
        Path(name, "results.json").write_text(json.dumps({"evaluation": evaluation()}))
    for baseline_run, candidate in (("a", "b"), ("a/results.json", "b"), ("a/", "b/results.json")):
        with pytest.raises(SystemExit) as e:
            main(["compare", baseline_run, candidate])
        assert e.value.code == 0, capsys.readouterr().err
    Path("accepted.txt").write_text("a\n")
    assert find("accepted.txt", CANDIDATE).name == find("a", CANDIDATE).name == "a/results.json"
    with pytest.raises(SystemExit) as e:
        main(["compare", "a", "a/work"])
    assert e.value.code == 2
    assert "a/work: Is a directory; give a results.json, the folder of its run" in capsys.readouterr().err


def test_runs_named_by_commit_win_over_a_result_beside_them(repository: Repository) -> None:
    run = repository.run(3)
    (repository.runs / "results.json").write_text(json.dumps({"evaluation": evaluation()}))
    assert Path(find("runs", CANDIDATE).name).name == run.name


def test_a_file_in_git(repository: Repository) -> None:
    file = repository.folder / "ci" / "baseline.json"
    file.parent.mkdir()
    file.write_text("one")
    repository.git("add", ".")
    repository.commit("a baseline")
    file.write_text("two")
    repository.git("commit", "-q", "-am", "another")
    repository.git("rm", "-q", "ci/baseline.json")
    repository.git("commit", "-q", "-m", "gone")
    assert find("HEAD~1:ci/baseline.json", CANDIDATE).text == "two"
    assert find("HEAD~2:ci/baseline.json", CANDIDATE).text == "one"
    fallen = find("HEAD:ci/baseline.json", CANDIDATE)
    assert fallen.text == "two"
    assert "held against its ancestor" in fallen.notes[0]
    with pytest.raises(DataError, match="nor any of its ancestors holds this file"):
        find("HEAD:ci/other.json", CANDIDATE)


def test_one_line_names_the_accepted_baseline(repository: Repository) -> None:
    run = repository.run(1)
    (repository.folder / "ci").mkdir()
    accepted = repository.folder / "ci" / "baseline.txt"
    accepted.write_text(f"# accepted by hand\n../runs/{run.name}   # int4 costs 2 % here, agreed\n")
    found = find("ci/baseline.txt", CANDIDATE)
    assert json.loads(found.text) == json.loads(run.read_text())
    assert found.notes[0].startswith("baseline accepted in ci/baseline.txt: ../runs/")


@pytest.mark.parametrize("names", [["a.txt"], ["b.txt", "./a.txt"], ["b.txt", "c.txt", "b.txt"]])
def test_files_that_name_each_other_in_a_circle_are_refused(repository: Repository, names: list[str]) -> None:
    for file, named in zip("abc", names, strict=False):
        (repository.folder / f"{file}.txt").write_text(named)
    with pytest.raises(DataError, match=r"names itself as the baseline"):
        find("a.txt", CANDIDATE)


@pytest.mark.parametrize("given", ["missing.json", "runs@nowhere", "runs", "nowhere:file.json", "nowhere", "x" * 300, "runs@" + "x" * 300])
def test_what_is_not_there_is_refused(repository: Repository, given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DataError):
        find(given, CANDIDATE)
    CANDIDATE.write_text(json.dumps(evaluation()))
    with pytest.raises(SystemExit) as e:
        main(["compare", given, "candidate.json"])
    assert e.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_what_is_no_text_is_refused(repository: Repository) -> None:
    """In a folder of past runs, as a file, at a commit, and as the name of one."""
    run = repository.run(3)
    run.write_bytes(b"\xff\xfe")
    (repository.folder / "name.txt").write_bytes(b"a\0b:results.json")
    repository.git("add", ".")
    repository.commit("no text")
    for given in ("runs", f"runs/{run.name}", f"HEAD:runs/{run.name}", "name.txt"):
        with pytest.raises(DataError, match=r"give a results\.json"):
            find(given, CANDIDATE)


def test_a_folder_of_past_runs_at_home(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    repository.run(1)
    monkeypatch.setenv("HOME", str(repository.folder))
    assert find("~/runs@HEAD~2", CANDIDATE).text == find("runs@HEAD~2", CANDIDATE).text == find("~/runs", CANDIDATE).text


def test_what_git_says_is_told(repository: Repository, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Usual in a container whose checkout belongs to another user."""
    repository.run(3)
    for name, value in {"GIT_TEST_ASSUME_DIFFERENT_OWNER": "1", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "LC_ALL": "C"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(DataError, match=r"HEAD: .*dubious ownership.*safe\.directory") as e:
        find("runs", CANDIDATE)
    assert "\n" not in str(e.value)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path_factory.getbasetemp()))
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    with pytest.raises(DataError, match="not a git repository"):
        find("HEAD:results.json", CANDIDATE)


def test_a_git_that_does_not_answer_is_one_message(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    repository.run(3)
    slow = repository.folder / "bin" / "git"
    slow.parent.mkdir()
    slow.write_text("#!/bin/sh\nexec sleep 20\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(baseline, "_SECONDS", 0.2)
    with pytest.raises(DataError, match=r"git rev-parse .* did not end"):
        find("runs", CANDIDATE)


def test_compare_says_that_it_fell_back(repository: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    repository.run(0)
    repository.run(1)
    CANDIDATE.write_text(json.dumps(evaluation()))
    with pytest.raises(SystemExit) as e:
        main(["compare", "runs", "candidate.json", "--out", "out"])
    assert e.value.code == 0
    assert "note: there is no run of HEAD" in capsys.readouterr().out
    assert "perplexity of past runs" in Path("out/comparison.html").read_text()
