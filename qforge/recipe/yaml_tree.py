"""YAML text -> plain values and the line of each, by the core schema of YAML 1.2 (so that `on`, `off`, `yes` are texts and `1e-3` is a number).

Duplicate keys, tags, merge keys and endless anchors are refused: a recipe means what it shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from qforge.errors import RecipeError
from qforge.yaml_text import TAG, add_core


class _CoreLoader(yaml.SafeLoader):
    """Scanner and parser of PyYAML with YAML 1.2's core scalars."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 (PyYAML's own class attribute)


add_core(_CoreLoader)


def _integer(text: str) -> int:
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


def _text(text: str) -> str:
    """Joins the halves in which JSON's escapes write characters beyond U+FFFF."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")


_SCALARS: dict[str, Callable[[str], Any]] = {
    "str": _text,
    "int": _integer,
    "float": lambda t: float(t.lower().replace(".inf", "inf").replace(".nan", "nan")),
    "bool": lambda t: t.lower() == "true",
    "null": lambda t: None,
}


@dataclass(frozen=True, slots=True)
class YamlTree:
    """A parsed YAML document."""

    value: Any
    root: yaml.Node | None

    def line(self, path: Sequence[str | int]) -> int:
        """Line (from 1) of the node at `path`, or of the deepest part of it that exists; for a key that is itself wrong, the key's line."""
        node, line = self.root, _line(self.root)
        for part in path:
            node, at = _child(node, part)
            if node is None:
                break
            line = at
        return line


def _line(node: yaml.Node | None) -> int:
    return 1 if node is None else node.start_mark.line + 1


def _child(node: yaml.Node | None, part: str | int) -> tuple[yaml.Node | None, int]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == part:
                return value, _line(key)
    if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
        return node.value[part], _line(node.value[part])
    return None, 0


def parse_yaml(text: str, name: str) -> YamlTree:
    """Parse one YAML document; `name` stands before the line number in messages.

    Raises:
        RecipeError: it is not YAML, or uses what a recipe has no use for (tags, duplicate or merge keys, anchors inside themselves).
    """
    try:
        root = yaml.compose(text, Loader=_CoreLoader)
        return YamlTree(None if root is None else _Builder(name).build(root), root)
    except yaml.MarkedYAMLError as e:
        line = e.problem_mark.line + 1 if e.problem_mark else 1
        raise RecipeError(f"{name}:{line}: this is not valid YAML: {_one_line(e)}") from e
    except yaml.YAMLError as e:
        raise RecipeError(f"{name}: this is not valid YAML: {str(e).splitlines()[0]}") from e
    except RecursionError as e:
        raise RecipeError(f"{name}: this is not a recipe: it is nested too deeply") from e


def _one_line(error: yaml.MarkedYAMLError) -> str:
    problem = " ".join((error.problem or "cannot be read").split())
    context = " ".join((error.context or "").split())
    hint = " (a value with ': ', '#', '[' or '*' in it needs quotes)" if "mapping values" in problem or "alias" in problem or "anchor" in problem else ""
    return f"{problem} {context}".strip() + hint


@dataclass(slots=True)
class _Builder:
    """Nodes -> plain values, counting them, because anchors can make a short text very large."""

    name: str
    left: int = 20_000

    def build(self, node: yaml.Node, depth: int = 0) -> Any:
        self.left -= 1
        if depth > 12 or self.left < 0:
            raise RecipeError(f"{self.where(node)}this is not a recipe: it is nested too deeply, or an anchor repeats itself")
        kind = node.tag.removeprefix(TAG)
        if isinstance(node, yaml.MappingNode) and kind == "map":
            return self.mapping(node, depth)
        if isinstance(node, yaml.SequenceNode) and kind == "seq":
            return [self.build(item, depth + 1) for item in node.value]
        if isinstance(node, yaml.ScalarNode) and kind in _SCALARS:
            return self.scalar(node, kind)
        raise RecipeError(f"{self.where(node)}YAML tags ('{node.tag.replace(TAG, '!!')}') are not allowed in a recipe; write the plain value")

    def where(self, node: yaml.Node) -> str:
        return f"{self.name}:{_line(node)}: "

    def scalar(self, node: yaml.ScalarNode, kind: str) -> Any:
        try:
            return _SCALARS[kind](node.value)
        except ValueError as e:
            raise RecipeError(f"{self.where(node)}{node.value!a} is no {kind}") from e

    def mapping(self, node: yaml.MappingNode, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            where = self.where(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                raise RecipeError(f"{where}a key must be a word")
            key: str = self.scalar(key_node, "str")
            if key == "<<":
                raise RecipeError(f"{where}merge keys (<<) are not part of YAML 1.2; repeat the values, or give each an anchor")
            if key in result:
                raise RecipeError(f"{where}'{key}' is given twice (first in line {lines[key]}); keep one")
            result[key], lines[key] = self.build(value_node, depth + 1), _line(key_node)
        return result
