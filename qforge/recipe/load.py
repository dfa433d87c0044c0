"""A recipe file (and --set overrides) -> Recipe, with errors that name file, line, field, what was given and what is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from qforge.errors import RecipeError
from qforge.recipe.messages import describe, field_of
from qforge.recipe.model import Recipe
from qforge.recipe.sweep import members
from qforge.recipe.sweep import overrides as texts
from qforge.recipe.yaml_tree import YamlTree, parse_yaml

_MAX_BYTES = 1 << 20
_MAX_ERRORS = 6
Key = str | int


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe file.

    Args:
        path: the YAML file; paths inside it are relative to its folder.
        overrides: `key.path=value` texts, the value in YAML, list items by number: `quantize.overrides.0.scheme=int8-g64-sym`. Paths in them are relative to the file's folder too.

    Raises:
        RecipeError: the file cannot be read or is not a valid recipe; one line for each problem found.
    """
    path = Path(path)
    tree = parse_yaml(_read(path), str(path))
    if not isinstance(tree.value, dict):
        raise RecipeError(f"{path}: this is not a recipe: expected keys such as version, model and quantize (qforge recipe init writes a first one)")
    data: dict[str, Any] = tree.value
    changed: dict[tuple[Key, ...], str] = {}
    for override in overrides:
        changed[_apply(data, override)] = override
    return validate(data, path, tree, changed).at(path.parent, path.stem)


def load_members(path: str | Path, overrides: Sequence[str] = ()) -> list[Recipe]:
    """Read the variants of a recipe file with a `sweep`, each a recipe of its own (`Recipe.name` is the variant's), in the order of the file.

    Raises:
        RecipeError: the file has no `sweep`, or a variant is not a valid recipe.
    """
    section = load_recipe(path, overrides).sweep
    if section is None:
        raise RecipeError(f"{path} has no sweep: it is one recipe")
    found = []
    for name, changes in members(section):
        try:
            found.append(load_recipe(path, [*overrides, "sweep=null", *texts(changes)]).at(Path(path).parent, name, variant=True))
        except RecipeError as e:
            raise RecipeError(f"{path}: sweep, variant {name}: {str(e).replace('--set ', '')}") from e
    return found


def _read(path: Path) -> str:
    try:
        with open(path, "rb") as f:
            data = f.read(_MAX_BYTES + 1)
    except OSError as e:
        raise RecipeError(f"cannot read the recipe {path}: {e.strerror} (qforge recipe init writes a first one)") from e
    if len(data) > _MAX_BYTES:
        raise RecipeError(f"{path} is larger than 1 MiB, so it is no recipe")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise RecipeError(f"{path} is not a text file (UTF-8), so it is no recipe") from e


def _apply(data: dict[str, Any], override: str) -> tuple[Key, ...]:
    """Set one `key.path=value` in `data`, making missing mappings (lists where item 0 is meant); the path that was set."""
    name, equals, text = override.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise RecipeError(f"--set {override}: expected key.path=value, for example --set quantize.scheme=int4-g32-sym")
    value = parse_yaml(text, f"--set {override}").value
    target: Any = data
    path: list[Key] = []
    for i, word in enumerate(keys):
        key = _key(target, word, override, field_of(path))
        last = i == len(keys) - 1
        if last or (isinstance(target, list) and key == len(target)) or (isinstance(target, dict) and target.get(word) is None):
            _put(target, key, value if last else [] if keys[i + 1] == "0" else {})
        path.append(key)
        target = target[key]
    return tuple(path)


def _key(target: Any, word: str, override: str, where: str) -> Key:
    if isinstance(target, dict):
        return word
    if not isinstance(target, list):
        raise RecipeError(f"--set {override}: {where} is a single value, it has no '{word}'")
    if not word.isascii() or not word.isdigit() or int(word) > len(target):
        raise RecipeError(f"--set {override}: {where} is a list; its items are 0 to {len(target) - 1}, and {len(target)} adds one")
    return int(word)


def _put(target: Any, key: Key, value: Any) -> None:
    if isinstance(target, list) and key == len(target):
        target.append(value)
    else:
        target[key] = value


def validate(data: dict[str, Any], path: Path, tree: YamlTree, changed: dict[tuple[Key, ...], str]) -> Recipe:
    """Check the values of `path` (whose lines `tree` knows), some of them `changed` by --set.

    Raises:
        RecipeError: one line for each problem, in the order of the file.
    """
    try:
        return Recipe.model_validate(data)
    except ValidationError as e:
        errors = sorted(e.errors(include_url=False), key=lambda x: tree.line(_location(x)))
        lines = [f"{_place(_location(x), path, tree, changed)}: {describe(x)}" for x in errors[:_MAX_ERRORS]]
        if len(errors) > _MAX_ERRORS:
            lines.append(f"and {len(errors) - _MAX_ERRORS} more")
        raise RecipeError("\n".join(lines)) from e


def _location(error: ErrorDetails) -> tuple[Key, ...]:
    return tuple(p for p in error["loc"] if p != "[key]")


def _place(location: tuple[Key, ...], path: Path, tree: YamlTree, changed: dict[tuple[Key, ...], str]) -> str:
    """Where a problem stands: the --set that made it, or file and line."""
    for at, override in reversed(changed.items()):
        if location[: len(at)] == at:
            return f"--set {override}"
    return f"{path}:{tree.line(location)}"
