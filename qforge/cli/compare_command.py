"""`qforge compare`: hold one result against another; exit 1 where it is worse."""

from __future__ import annotations

from pathlib import Path

import click

from qforge.cli import options


@click.command("compare")
@click.argument("baseline", metavar="BASELINE")
@click.argument("candidate", type=click.Path(path_type=Path), metavar="CANDIDATE")
@click.option("--gate", "gates", multiple=True, metavar="EXPR", help="A limit: 'perplexity_ratio <= 1.02' (candidate / baseline), 'warn: kl_mean <= 0.1'. Repeatable.")
@click.option("--out", type=options.FOLDER, metavar="FOLDER", help="Write comparison.json, comparison.md (a pull-request comment), comparison.html and junit.xml.")
@options.json_file("Write the comparison as JSON; - for stdout.")
def command(baseline: str, candidate: Path, gates: tuple[str, ...], out: Path | None, json_file: str | None) -> int:
    """Hold CANDIDATE against BASELINE: results.json (or the folder of its run) or what `eval --json` wrote, measured on the same text.

    BASELINE may also be a folder of past runs named by commit (<commit>.json or <commit>/results.json; FOLDER@REF for another ref than HEAD) or REF:PATH in git:
    where a commit has no run, its nearest ancestor is taken, and that is said. A text file of one line may name any of these, so that accepting a new baseline is a change
    of one line in the repository. Differences are paired by document and have 95 % intervals. Without --gate the exit code is 1 when perplexity, KL divergence or
    agreement, or the accuracy of a task, is significantly worse by more than matters: 0.1 % of perplexity, 0.25 % of the KL divergence, 0.2 % of the positions; where the runs
    were calibrated with different tokens of one text (another seed), a tenth of the KL divergence and of the disagreement, and a fifth of the KL divergence (nats) in perplexity.
    Where it fails and both artifacts lie beside their results.json, the weights that differ are named. With --gate only the gates decide: one fails when the whole interval is
    beyond its limit, and one that cannot be judged, because the text is too short for an interval, ends in exit code 2. A candidate whose own run failed always fails. Figures:
    perplexity_ratio and size_change (candidate / baseline), kl_mean_change, top1_agreement_change and TASK.METRIC_change (candidate - baseline), and the candidate's own
    perplexity, kl_mean, top1_agreement, size_bytes, bits_per_weight, TASK.METRIC (acc alone where one task has it).
    """
    import json
    from dataclasses import replace

    from qforge.cli.output import write_json
    from qforge.errors import DataError
    from qforge.evaluate.baseline import find
    from qforge.evaluate.compare import compare
    from qforge.evaluate.sides import parse, read, result_of
    from qforge.report import comparison, write_comparison
    from qforge.search.altered import altered_files

    candidate = result_of(candidate)
    found = find(baseline, candidate)
    sides = parse(found.text, found.name), read(candidate)
    result = compare(*sides, gates)
    told = None if result.passed else altered_files(Path(found.name), sides[0].results, candidate, sides[1].results)
    result = replace(result, notes=[*([told] if told else []), *found.notes, *result.notes], history=found.history)
    written = result.to_json()
    data = json.loads(written)
    click.echo("\n".join(comparison.text(data)), err=json_file == "-")
    if out is not None:
        write_comparison(written, out)
    if json_file is not None:
        write_json(json_file, written)
    if result.undecided:
        raise DataError(comparison.headline(data))
    return 0 if result.passed else 1
