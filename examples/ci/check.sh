#!/usr/bin/env bash
# Quantize by recipe, hold the result against the accepted baseline, leave a report. Exit code 1 when a gate fails, 0 when all is well.
#   examples/ci/check.sh RECIPE [GATE ...]          for example: examples/ci/check.sh recipes/demo.yaml 'perplexity_ratio <= 1.01'
# Environment: QFORGE_OUT (runs/ci), QFORGE_RUNS (runs/history: one <commit>.json a past run), QFORGE_BASELINE (baseline.txt, where it exists; else QFORGE_RUNS).
set -euo pipefail

recipe=$1
shift
out=${QFORGE_OUT:-runs/ci}
runs=${QFORGE_RUNS:-runs/history}
commit=$(git rev-parse HEAD)
baseline=${QFORGE_BASELINE:-baseline.txt}
[ -e "$baseline" ] || baseline=$runs
mkdir -p "$runs" "$out"

status=0
qforge quantize --recipe "$recipe" --out "$out" || status=$?
if [ "$status" -gt 1 ]; then # not a gate: the run itself failed
    exit "$status"
fi

gates=()
for gate in "$@"; do
    gates+=(--gate "$gate")
done
if [ -f "$baseline" ] || compgen -G "$runs/*.json" >/dev/null; then
    compared=0
    qforge compare "$baseline" "$out/results.json" --out "$out/comparison" ${gates[@]+"${gates[@]}"} || compared=$?
    if [ "$compared" -gt "$status" ]; then
        status=$compared
    fi
    comment=$out/comparison/comparison.md
else
    echo "no past run in $runs yet: this one is the first"
    comment=$out/report.md
fi
if [ -n "${GITHUB_STEP_SUMMARY:-}" ]; then
    cat "$comment" >>"$GITHUB_STEP_SUMMARY"
fi
if [ "$status" -eq 0 ]; then # a run that failed is no baseline
    cp "$out/results.json" "$runs/$commit.json"
fi
exit "$status"
