"""`qforge recipe`: validate a recipe, print the schema that editors use, write a first one."""

from __future__ import annotations

import json
from pathlib import Path

import click

from qforge.errors import OutputError


@click.group("recipe", help="Validate a recipe, print its JSON Schema, or write a first one.")
def command() -> None:
    """The group of `validate`, `schema` and `init`."""


@command.command("validate", help="Check a recipe file without running it. Exit code 2 where it is wrong.")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY.PATH=VALUE", help="Change a field first; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print the recipe with all its defaults as JSON.")
def validate(file: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Print that a recipe is valid, or all of it as JSON; RecipeError where it is not valid."""
    from qforge.recipe import load_members, load_recipe

    recipe = load_recipe(file, overrides)
    variants = [] if recipe.sweep is None else load_members(file, overrides)
    if as_json:
        click.echo(json.dumps({"name": recipe.name, "sha256": recipe.sha256, "recipe": recipe.to_dict()}, indent=1))
        return
    what = f"{recipe.model.source}, {' + '.join(recipe.quantize.method)} {recipe.quantize.scheme or ''}".rstrip()
    named = f", {len(variants)} variant{'s' if len(variants) > 1 else ''}: {', '.join(v.name for v in variants)}" if variants else ""
    click.echo(f"{file} is valid: {what}{named}")


@command.command("schema", help="Print the JSON Schema of a recipe, for editors and CI.")
def schema() -> None:
    """Print the JSON Schema of a recipe."""
    from qforge.recipe import json_schema

    click.echo(json.dumps(json_schema(), indent=1))


@command.command("init", help="Write a commented first recipe.")
@click.option("--out", type=click.Path(path_type=Path), default="recipe.yaml", show_default=True, help="File to write; - prints it.")
def init(out: Path) -> None:
    """Write a first recipe; OutputError where the file exists already."""
    from qforge.files import write_text
    from qforge.recipe.template import FIRST_RECIPE

    if str(out) == "-":
        click.echo(FIRST_RECIPE, nl=False)
        return
    if out.exists():
        raise OutputError(f"{out} exists already; choose another --out or remove it")
    write_text(out, FIRST_RECIPE)
    click.echo(f"wrote {out}; run it with: qforge quantize --recipe {out}")
