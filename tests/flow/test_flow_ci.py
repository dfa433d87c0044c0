"""The CI kit: its steps are executed, on a repository of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import yaml
from flows import write_recipe

KIT = Path(__file__).resolve().parents[2] / "examples" / "ci"
pytestmark = pytest.mark.slow


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    tiny.make(tmp_path / "model")
    (tmp_path / "recipes").mkdir()
    write_recipe(tmp_path, export=[]).rename(tmp_path / "recipe.json")
    recipe = json.loads((tmp_path / "recipe.json").read_text())
    recipe["model"]["source"] = "../model"
    recipe["calibration"]["source"] = "../calibration.txt"
    recipe["evaluate"]["text"] = "../evaluation.txt"
    (tmp_path / "recipes" / "demo.yaml").write_text(yaml.safe_dump(recipe))
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "ci").symlink_to(KIT)
    run(tmp_path, "git init -q && git commit -q --allow-empty -m first")
    return tmp_path


def run(folder: Path, script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    who = {f"GIT_{a}_{b}": "tester@example.com" for a in ("AUTHOR", "COMMITTER") for b in ("NAME", "EMAIL")}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(["bash", "-e", "-c", script], cwd=folder, env={**os.environ, **who, "PATH": path, **environment}, capture_output=True, text=True, timeout=300)


def steps() -> dict[str, str]:
    job = yaml.safe_load((KIT / "github.yml").read_text())["jobs"]["quantize"]
    return {s["name"]: s["run"] for s in job["steps"] if "run" in s}


def test_the_steps_of_the_workflow(repository: Path) -> None:
    check = steps()["Check"]
    first = run(repository, check)
    assert first.returncode == 0, first.stderr
    assert "this one is the first" in first.stdout
    run(repository, "git commit -q --allow-empty -m second")
    summary = repository / "summary.md"
    same = run(repository, check, GITHUB_STEP_SUMMARY=str(summary))
    assert same.returncode == 0, same.stderr
    assert "PASSED: all 2 gates hold" in same.stdout
    assert "held against its ancestor" in same.stdout
    assert summary.read_text().startswith("<!-- qforge compare -->")
    worse = yaml.safe_load((repository / "recipes" / "demo.yaml").read_text())
    worse["quantize"]["scheme"] = "int2-g32-sym"
    (repository / "recipes" / "demo.yaml").write_text(yaml.safe_dump(worse))
    run(repository, "git commit -q --allow-empty -m third")
    failed = run(repository, check)
    assert failed.returncode == 1, failed.stderr
    assert "kl_mean_change beyond the limit" in failed.stdout
    assert "recipe: quantize.scheme: int4-g32-sym -> int2-g32-sym" in failed.stdout
    assert len(list((repository / "runs" / "history").glob("*.json"))) == 2  # what failed is no baseline
    uploaded = yaml.safe_load((KIT / "github.yml").read_text())["jobs"]["quantize"]["steps"][-1]["with"]["path"].split()
    assert [p for p in uploaded if not (repository / p).exists()] == []


GH = """#!{python}
import json, pathlib, sys
kept = pathlib.Path("comments.json")
comments = json.loads(kept.read_text())
assert sys.argv[1] == "api", sys.argv
path = next(a for a in sys.argv if a.startswith("repos/"))
body = [pathlib.Path(a.partition("=@")[2]).read_text() for a in sys.argv if a.startswith("body=@")]
if "PATCH" in sys.argv:
    next(c for c in comments if str(c["id"]) == path.rpartition("/")[2])["body"] = body[0]
elif "POST" in sys.argv:
    comments.append({"id": len(comments) + 1, "body": body[0]})
else:
    mark = sys.argv[sys.argv.index("--jq") + 1].split('startswith("')[1].split('"')[0]
    print(*(c["id"] for c in comments if c["body"].startswith(mark)), sep="\\n")
kept.write_text(json.dumps(comments))
"""


def test_there_is_one_comment_and_nobody_elses_is_touched(tmp_path: Path) -> None:
    """The step against a stand-in for GitHub's interface: it writes its comment once, updates that, and leaves the bot's other comments alone."""
    (tmp_path / "bin").mkdir()
    gh = tmp_path / "bin" / "gh"
    gh.write_text(GH.replace("{python}", sys.executable))
    gh.chmod(0o755)
    (tmp_path / "comments.json").write_text(json.dumps([{"id": 1, "body": "coverage: 93 %"}]))
    step = f"export PATH={gh.parent}:$PATH\n{steps()['Comment']}"
    for words in ("### qforge: NO VERDICT: the job ended before the check", "first", "FAILED", "PASSED"):
        if words.isalpha():
            (tmp_path / "runs" / "ci" / "comment.md").write_text(f"{words}\n")
        done = run(tmp_path, step, NUMBER="7", GITHUB_REPOSITORY="a/b")
        assert done.returncode == 0, done.stderr
        other, mine = json.loads((tmp_path / "comments.json").read_text())
        assert other["body"] == "coverage: 93 %"
        assert mine["body"].splitlines()[1] == words


def test_what_fails_is_accepted_by_one_line(repository: Path) -> None:
    """As README.md of the kit says; between the runs only what the jobs cache is left."""
    check = "examples/ci/check.sh recipes/demo.yaml 'kl_mean_change <= 0.001'"
    left = "mv runs kept && mkdir -p runs/ci && mv kept/history runs/history && mv kept/ci/work kept/ci/.lock runs/ci && rm -r kept"
    assert run(repository, check).returncode == 0
    recipe = repository / "recipes" / "demo.yaml"
    recipe.write_text(recipe.read_text().replace("int4-g32-sym", "int3-g32-sym"))
    run(repository, "git add recipes && git commit -q -m int3")
    failed = run(repository, f"{left} && {check}")
    assert failed.returncode == 1, failed.stdout
    assert "commit a line in baseline.txt" in failed.stdout
    run(repository, "echo 'int3: a quarter less, agreed' > baseline.txt && git add baseline.txt && git commit -q -m accept")
    accepted = run(repository, f"{left} && {check}")
    assert accepted.returncode == 0, accepted.stdout + accepted.stderr
    assert "Accepted in baseline.txt: int3: a quarter less, agreed" in accepted.stdout
    work = json.loads((repository / "runs" / "ci" / "results.json").read_text())["work"]
    assert work["resumed"] > work["computed"]
    run(repository, "git commit -q --allow-empty -m next")
    assert run(repository, f"{left} && {check}").returncode == 0


def test_a_run_that_cannot_be_made_is_no_failed_gate(repository: Path) -> None:
    assert run(repository, "examples/ci/check.sh recipes/missing.yaml").returncode == 2


def test_gitlab_runs_the_same_script() -> None:
    job = yaml.safe_load((KIT / "gitlab.yml").read_text())["quantize"]
    assert job["script"] == [steps()["Check"]]
