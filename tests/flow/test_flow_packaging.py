"""The sdist and the wheel: built here, installed where there is no compiler, and used from there."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path, path: Path | None = None, code: int = 0) -> str:
    """Standard output of a command; `path`: the only folder that programs are found in."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "CC", "CXX")}
    if path is not None:
        environment["PATH"] = str(path)
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tracked and new files, so that building leaves nothing in the checkout."""
    folder = tmp_path_factory.mktemp("source")
    ignored = shutil.ignore_patterns(".git", ".venv", "build", "dist", "runs", "__pycache__", ".*_cache", ".hypothesis", "*.so")
    shutil.copytree(ROOT, folder / "qforge", ignore=ignored)
    return folder / "qforge"


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", out, cwd=source)
    (archive,) = out.glob("*.tar.gz")
    return archive


def build_wheel(sdist: Path, folder: Path, *options: str) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder / "dist", *options, cwd=folder / sdist.name.removesuffix(".tar.gz"))
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, as an installer without a fitting wheel would."""
    return build_wheel(sdist, tmp_path_factory.mktemp("wheel"))


def install(wheel: Path, folder: Path) -> Path:
    """A new environment that has the wheel, and this environment's packages in place of downloaded dependencies; its bin folder."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel, cwd=folder)
    # Only the folder is added, its .pth files are not read: an editable qforge there stays out.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


@pytest.fixture(scope="module")
def bin_folder(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(wheel, tmp_path_factory.mktemp("environment") / "venv")


def test_the_wheel_holds_the_package_its_data_and_the_native_module(source: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    packaged = {f"qforge/{p.relative_to(source / 'qforge')}" for p in (source / "qforge").rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    texts = {f"qforge/calibration_data/{p.name}" for p in (source / "calibration_data").iterdir() if p.suffix in (".jsonl", ".txt", ".md")}
    assert texts
    assert packaged | texts <= names
    assert not any(n.startswith("qforge/calibration_data/") and n.endswith(".py") for n in names)
    assert any(n.startswith("qforge/ops/_native.") for n in names)
    assert any(n.endswith("licenses/LICENSE") for n in names)
    strangers = {n.split("/")[0] for n in names} - {"qforge"}
    assert all(s.startswith("qforge-") and s.endswith(".dist-info") for s in strangers)


def test_the_sdist_holds_what_building_and_testing_need(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {n.partition("/")[2] for n in archive.getnames()}
    assert {"pyproject.toml", "CMakeLists.txt", "LICENSE", "README.md", "Makefile", "qforge/scheme.py", "recipes/demo.yaml", "tests/tiny.py"} <= names
    assert any(n.startswith("kernels/cpu/") for n in names)
    assert not any("__pycache__" in n or n.endswith(".so") or n.startswith((".venv", "runs", "build")) for n in names)


def test_the_installed_wheel_works_without_a_compiler(bin_folder: Path, tmp_path: Path) -> None:
    version = run(bin_folder / "qforge", "--version", cwd=tmp_path, path=bin_folder)
    assert version.startswith("qforge, version ")
    run(bin_folder / "qforge", "recipe", "init", "--out", "first.yaml", cwd=tmp_path, path=bin_folder)
    assert "is valid" in run(bin_folder / "qforge", "recipe", "validate", "first.yaml", cwd=tmp_path, path=bin_folder)
    machine = json.loads(run(bin_folder / "qforge", "doctor", "--json", cwd=tmp_path, path=bin_folder))
    assert machine["native"]["present"]
    assert machine["problems"] == []


def test_the_installed_package_finds_its_text_and_its_templates(bin_folder: Path, tmp_path: Path) -> None:
    code = (
        "import pathlib, qforge\n"
        "from qforge.text.builtin import builtin_files\n"
        "home = pathlib.Path(qforge.__file__).parent\n"
        "files = [*builtin_files('calibration'), *builtin_files('evaluation')]\n"
        "assert all(f.stat().st_size > 1000 and home in f.parents for f in files), files\n"
        "print(home)"
    )
    home = run(bin_folder / "python", "-c", code, cwd=tmp_path, path=bin_folder).strip()
    assert str(bin_folder.parent) in home


def test_without_a_compiler_the_reference_is_installed(sdist: Path, tmp_path: Path) -> None:
    options = ("-Ccmake.define.CMAKE_CXX_COMPILER=/nonexistent/c++",)
    wheel = build_wheel(sdist, tmp_path, *options)
    assert wheel.name.endswith("-py3-none-any.whl")
    folder = install(wheel, tmp_path / "venv")
    code = "import torch; from qforge.ops.select import choose; from qforge.scheme import parse; print(choose(parse('int4-g32-sym'), (64, 64)).explain())"
    assert run(folder / "python", "-c", code, cwd=tmp_path, path=folder).startswith("reference")
    machine = json.loads(run(folder / "qforge", "doctor", "--json", cwd=tmp_path, path=folder))
    assert not machine["native"]["present"]
    assert "C++20 compiler" in machine["problems"][0]
