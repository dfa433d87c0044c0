#!/usr/bin/env bash
# Quantize by recipe, hold the result against the nearest past run, leave a report. Exit code 1 when a gate fails, 0 when all is well, another where there is no verdict.
#   examples/ci/check.sh RECIPE [GATE ...]          for example: examples/ci/check.sh recipes/demo.yaml 'perplexity_ratio <= 1.01'
# Environment: QFORGE_OUT (runs/ci), QFORGE_RUNS (runs/history: one <commit>.json a past run), QFORGE_ACCEPTED (baseline.txt: a line that is new since that run accepts this one).
set -euo pipefail

recipe=$1
shift
out=${QFORGE_OUT:-runs/ci}
runs=${QFORGE_RUNS:-runs/history}
accepted=${QFORGE_ACCEPTED:-baseline.txt}
commit=$(git rev-parse HEAD)
mkdir -p "$runs" "$out"
rm -rf "$out/comparison" "$out"/{results.json,report.md,report.html,junit.xml,comment.md} # or an earlier run's could pass for this one's

remark=
finish() { # whatever happened: what the comment and the summary say is of this run
    status=$?
    {
        [ -z "$remark" ] || printf '%s\n\n' "$remark"
        if [ -f "$out/comparison/comparison.md" ]; then
            cat "$out/comparison/comparison.md"
        elif [ "$status" -le 1 ] && [ -f "$out/report.md" ]; then
            cat "$out/report.md"
        else
            echo "### qforge: NO VERDICT: the check ended with exit code $status; its log says why"
        fi
    } >"$out/comment.md"
    [ -z "${GITHUB_STEP_SUMMARY:-}" ] || cat "$out/comment.md" >>"$GITHUB_STEP_SUMMARY"
    exit "$status"
}
trap finish EXIT

if [ "$(git rev-parse --is-shallow-repository)" = true ]; then
    echo "this clone is shallow, so that past runs of ancestors are not found; fetch the whole history" >&2
    exit 2
fi
last=
for ancestor in $(git rev-list --topo-order HEAD); do
    if [ -e "$runs/$ancestor.json" ]; then
        last=$ancestor
        break
    fi
done

status=0
qforge quantize --recipe "$recipe" --out "$out" || status=$?
[ "$status" -le 1 ] || exit "$status" # not a gate: the run itself failed

gates=()
for gate in "$@"; do
    gates+=(--gate "$gate")
done
if [ -n "$last" ]; then
    compared=0
    qforge compare "$runs" "$out/results.json" --out "$out/comparison" ${gates[@]+"${gates[@]}"} || compared=$?
    why=$(git diff --unified=0 "$last" HEAD -- "$accepted" | sed -n 's/^+\([^+]\)/\1/p')
    if [ "$compared" -eq 0 ] || [ "$compared" -gt 2 ]; then
        : # nothing to accept, or nothing that a person decides
    elif [ -n "$why" ]; then
        remark="Accepted in $accepted: $why"
        compared=0
    else
        remark="If this is meant, commit a line in $accepted that says why: this run is then the baseline of those to come."
    fi
    [ -z "$remark" ] || echo "$remark"
    [ "$compared" -le "$status" ] || status=$compared
else
    echo "no past run of this commit or an ancestor in $runs yet: this one is the first"
fi
if [ "$status" -eq 0 ]; then # a run that failed is no baseline
    cp "$out/results.json" "$runs/$commit.json"
fi
exit "$status"
