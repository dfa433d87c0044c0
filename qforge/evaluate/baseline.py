"""Which result a candidate is held against: a file, one at a git commit, the run of a commit or its nearest ancestor in a folder of past runs, or a file that names one."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from qforge.errors import DataError, MissingCapabilityError
from qforge.evaluate.sides import RESULTS, read
from qforge.files import expanded

ALLOWED = (
    "a results.json or the folder of its run, FOLDER or FOLDER@REF of past runs named by commit (<commit>.json or <commit>/results.json), REF:PATH in git, "
    "or a text file that names one of these"
)
HISTORY = 30  # past runs shown
_SECONDS = 60  # that git may take
_COMMIT = re.compile(r"(?:^|[^0-9a-f])([0-9a-f]{7,40})$")


@dataclass(frozen=True, slots=True)
class Past:
    """One past run's figures, for the history; oldest first in a list."""

    commit: str
    perplexity: float
    kl_mean: float | None


@dataclass(frozen=True, slots=True)
class Found:
    """A baseline: what it is called, its text, what the reader should know about how it was found, and the runs before it."""

    name: str
    text: str
    notes: list[str]
    history: list[Past]


def find(baseline: str, candidate: Path, *, folder: Path = Path("."), through: tuple[Path, ...] = ()) -> Found:
    """Look up a baseline.

    Args:
        baseline: see `ALLOWED`.
        candidate: never taken for its own baseline.
        folder: what relative paths are relative to, and where git is asked.
        through: text files that lead here.

    Raises:
        DataError: text files name each other in a circle, or there is no such baseline, or it cannot be read (the message says what is allowed, and what git said).
        MissingCapabilityError: git is needed and not installed.
    """
    try:
        return _found(baseline, candidate, folder, through)
    except OSError as e:
        raise DataError(f"{baseline}: {e.strerror or e}; give {ALLOWED}") from e


def _found(baseline: str, candidate: Path, folder: Path, through: tuple[Path, ...]) -> Found:
    path = folder / expanded(baseline)
    if (path / RESULTS).is_file() and not _past_runs(path, path / RESULTS):
        return _from_file(path / RESULTS, candidate, through)
    if path.is_dir():
        return _from_runs(path, None, candidate, folder)
    if path.is_file():
        return _from_file(path, candidate, through)
    name, at, ref = baseline.rpartition("@")
    runs = folder / expanded(name)
    if at and runs.is_dir():
        return _from_runs(runs, ref, candidate, folder)
    ref, colon, inside = baseline.partition(":")
    if colon and ref and inside:
        return _from_git(ref, inside, folder)
    raise DataError(f"{baseline}: there is no such file or folder; give {ALLOWED}")


def _from_file(path: Path, candidate: Path, through: tuple[Path, ...]) -> Found:
    if path.resolve() in through:
        raise DataError(f"{path}: names itself as the baseline{'' if len(through) == 1 else ', through other files'}; give {ALLOWED}")
    text = _text(path)
    lines = [line for line in (raw.partition("#")[0].strip() for raw in text.splitlines()) if line]
    if path.suffix == ".json" or len(lines) != 1 or lines[0][0] in "{[":
        return Found(str(path), text, [], [])
    named = find(lines[0], candidate, folder=path.parent, through=(*through, path.resolve()))
    return Found(named.name, named.text, [f"baseline accepted in {path}: {lines[0]}", *named.notes], named.history)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as e:
        raise DataError(f"{path}: cannot be read as text ({e}); give {ALLOWED}") from e


def _from_git(ref: str, inside: str, folder: Path) -> Found:
    """A file as it is at a commit, or at the nearest ancestor that has it."""
    wanted = _commit(ref, folder)
    here = _blob(wanted, inside, folder)
    touched = (_git(folder, "rev-list", wanted, "--", inside) or "").split()
    source = wanted if here else next((c for c in touched if _blob(c, inside, folder)), None)
    text = None if source is None else _git(folder, "show", f"{source}:./{inside}")
    if text is None:
        raise DataError(f"{ref}:{inside}: neither {wanted[:10]} nor any of its ancestors holds this file; give {ALLOWED}")
    return Found(f"{ref}:{inside}", text, [] if here else [_fallback(ref, wanted, str(source), folder)], [])


def _blob(commit: str, inside: str, folder: Path) -> bool:
    return _git(folder, "cat-file", "-t", f"{commit}:./{inside}") == "blob"


def _from_runs(runs: Path, ref: str | None, candidate: Path, folder: Path) -> Found:
    """The run of a commit (HEAD without a ref) or of its nearest ancestor that has one."""
    present = _past_runs(runs, candidate)
    if not present:
        raise DataError(f"{runs}: no past run is named by a commit; give {ALLOWED}")
    wanted = _commit(ref or "HEAD", folder)
    ancestors = (_git(folder, "rev-list", "--topo-order", wanted) or "").split()
    line = [(commit, path) for commit in ancestors for path, name in present.items() if commit.startswith(name)]
    if not line:
        raise DataError(f"{runs}: holds {len(present)} past runs, none of them of {wanted[:10]} or one of its ancestors; run the baseline once, or name a file")
    commit, path = line[0]
    notes = [] if commit == wanted else [_fallback(ref or "HEAD", wanted, commit, folder)]
    return Found(str(path), _text(path), notes, [p for c, f in reversed(line[:HISTORY]) if (p := _past(c, f))])


def _past_runs(runs: Path, without: Path) -> dict[Path, str]:
    """The commit by which each run in a folder is named."""
    return {p: c for p in sorted([*runs.glob("*.json"), *runs.glob(f"*/{RESULTS}")]) if p.resolve() != without.resolve() and (c := _named(p))}


def _named(path: Path) -> str | None:
    found = _COMMIT.search(path.parent.name if path.name == RESULTS else path.stem)
    return found[1] if found else None


def _past(commit: str, path: Path) -> Past | None:
    """A past run's figures; None for a file that tells none."""
    try:
        evaluation = read(path).evaluation
        return Past(commit, evaluation["candidate"]["perplexity"], evaluation.get("kl_mean"))
    except DataError:
        return None


def _fallback(ref: str, wanted: str, used: str, folder: Path) -> str:
    distance = _git(folder, "rev-list", "--count", f"{used}..{wanted}")
    return f"there is no run of {ref} ({wanted[:10]}); held against its ancestor {used[:10]}, {distance} {'commit' if distance == '1' else 'commits'} before"


def _commit(ref: str, folder: Path) -> str:
    done = _run(folder, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
    if done.returncode == 0 and done.stdout:
        return done.stdout.decode().strip()
    said = " ".join(done.stderr.decode(errors="replace").split())  # nothing where the commit alone is missing
    raise DataError(f"{ref}: git {f'says: {said}' if said else 'knows no such commit here'}; give {ALLOWED}")


def _git(folder: Path, *args: str) -> str | None:
    """What git prints, stripped of the last line break; None when it fails.

    Raises:
        DataError: it prints no UTF-8.
    """
    done = _run(folder, *args)
    try:
        return done.stdout.decode().rstrip("\n") if done.returncode == 0 and done.stdout else None
    except UnicodeDecodeError as e:
        raise DataError(f"git {' '.join(args)}: prints no text ({e}); give {ALLOWED}") from e


def _run(folder: Path, *args: str) -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run(["git", *args], cwd=folder, capture_output=True, timeout=_SECONDS)
    except FileNotFoundError as e:
        raise MissingCapabilityError("git is not installed, and this baseline needs it; install git, or name a results.json") from e
    except subprocess.TimeoutExpired as e:
        raise DataError(f"git {' '.join(args)} did not end within {_SECONDS} s; name a results.json") from e
    except ValueError as e:  # a null byte in a name
        raise DataError(f"git cannot be asked for {args[-1]!r} ({e}); give {ALLOWED}") from e
