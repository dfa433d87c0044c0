"""`qforge quantize`: run a recipe, print the outcome; exit code 1 when a gate failed."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from qforge.cli import options


@click.command("quantize", help="Merge, quantize, export, check and report, by recipe; all its variants where it has a sweep. Run it again to resume.")
@click.option("--recipe", "recipe_file", type=click.Path(path_type=Path), required=True, help="The recipe (YAML).")
@click.option("--set", "overrides", multiple=True, metavar="KEY.PATH=VALUE", help="Change a field of the recipe; repeatable.")
@click.option("--out", type=options.FOLDER, help="Output folder; runs/<recipe name> unless given.")
@click.option("--fresh", is_flag=True, help="Forget finished work and start over.")
@click.option("--dry-run", is_flag=True, help="Print the plan; write nothing.")
def command(recipe_file: Path, overrides: tuple[str, ...], out: Path | None, fresh: bool, dry_run: bool) -> None:
    """Run the recipe, or with `dry_run` print its plan; exits with 0, or with 1 where a gate failed. A QforgeError says what is wrong with the recipe, the files or the machine."""
    from qforge import pipeline
    from qforge.cli.output import print_plan, print_results
    from qforge.cli.progress import TerminalProgress
    from qforge.recipe import load_members, load_recipe
    from qforge.search import explain

    recipe = load_recipe(recipe_file, overrides)
    folder = out if out is not None else Path("runs") / recipe.name
    if dry_run:
        if recipe.sweep is not None:
            from qforge.search.sweep import refuse_foreign

            refuse_foreign(folder)
        for one in [recipe] if recipe.sweep is None else load_members(recipe_file, overrides):
            click.echo(f"variant {one.name}" if recipe.sweep is not None else "", nl=recipe.sweep is not None)
            print_plan(*pipeline.plan(one, out=folder))
        return
    if recipe.sweep is not None:
        sys.exit(_sweep(recipe_file, overrides, out, fresh))
    with TerminalProgress() as progress:
        results = pipeline.quantize(recipe, out=folder, fresh=fresh, progress=progress)
        if explain.wanted(results):
            progress.note("a gate on quality failed: measuring where the divergence comes from")
            results = explain.explain(recipe, results, folder)
    print_results(results, folder)
    sys.exit(0 if results.passed else 1)


def _sweep(recipe_file: Path, overrides: tuple[str, ...], out: Path | None, fresh: bool) -> int:
    """Run all variants and print their table; the exit code."""
    import json

    from qforge.cli.progress import TerminalProgress
    from qforge.report import sweep as words
    from qforge.search.sweep import sweep

    with TerminalProgress() as progress:
        made = sweep(recipe_file, out=out, overrides=overrides, fresh=fresh, progress=progress)
    click.echo("\n".join(words.text(json.loads(made.to_json()))))
    click.echo(f"report: {(out or Path('runs') / made.recipe) / 'sweep.md'}")
    return made.exit_code
