"""Perplexity, KL divergence and agreement against a plain fp64 computation on stored logits."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import numpy as np
import pytest
import torch
from evaluations import Windows
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel

from qforge.engines.base import chunks
from qforge.errors import DataError, NumericalError, UnsupportedError
from qforge.evaluate import power
from qforge.evaluate.divergence import evaluate
from qforge.evaluate.scores import score_windows
from qforge.evaluate.spelling import spelled
from qforge.evaluate.statistics import Mean
from qforge.types import Guess, WorstToken

VOCABULARY = 311


@dataclass
class Stored:
    """A scorer over stored logits `[window][positions, V]`; remembers how many chunks were alive at once."""

    logits: list[torch.Tensor]
    name: str = "stored"
    version: str = "1"

    def score(self, windows: list[list[int]]) -> Iterator[torch.Tensor]:
        for window, logits in zip(windows, self.logits, strict=True):
            for start, stop in chunks(len(window)):
                yield logits[start:stop]


def problem(lengths: list[int], seed: int = 0, spread: float = 4.0) -> tuple[Stored, Stored, Windows]:
    g = torch.Generator().manual_seed(seed)
    theirs = [torch.randn(n - 1, VOCABULARY, generator=g) * spread + 7 for n in lengths]
    ours = [t + torch.randn(t.shape, generator=g) * 0.5 - 3 for t in theirs]
    ids = [torch.randint(VOCABULARY, (n,), generator=g).tolist() for n in lengths]
    return Stored(ours, "ours"), Stored(theirs, "theirs"), Windows(ids, [0] * len(lengths))


def dense(ours: Stored, theirs: Stored, windows: Windows) -> dict[str, np.ndarray]:
    """The same figures written plainly: all positions, fp64, log-softmax."""
    p, q = (torch.cat(s.logits).double().log_softmax(-1) for s in (theirs, ours))
    y = torch.tensor([t for w in windows.ids for t in w[1:]])[:, None]
    best = [[set(row.argsort(descending=True)[:5].tolist()) for row in m] for m in (p, q)]
    return {
        "nll": -q.gather(1, y)[:, 0].numpy(),
        "nll_reference": -p.gather(1, y)[:, 0].numpy(),
        "kl": (p.exp() * (p - q)).sum(-1).numpy(),
        "agree": (p.argmax(-1) == q.argmax(-1)).numpy(),
        "common": np.array([len(a & b) for a, b in zip(*best, strict=True)]),
        "right": (q.argmax(-1) == y[:, 0]).numpy(),
        "right_reference": (p.argmax(-1) == y[:, 0]).numpy(),
    }


@pytest.mark.parametrize("spread", [0.01, 4.0, 30.0])
@pytest.mark.parametrize("lengths", [[2], [129, 130, 2, 300], [257] * 9])
def test_equals_a_plain_fp64_computation(lengths: list[int], spread: float) -> None:
    ours, theirs, windows = problem(lengths, spread=spread)
    want = dense(ours, theirs, windows)
    tokens = list(score_windows(ours, theirs, windows.ids))
    for name in want:
        np.testing.assert_allclose(np.concatenate([getattr(t, name) for t in tokens]), want[name], rtol=1e-6, atol=1e-6)
    got = evaluate(ours, theirs, windows)
    assert got.tokens == sum(lengths) - len(lengths)
    assert got.candidate["perplexity"] == pytest.approx(math.exp(want["nll"].mean()), rel=1e-6)
    assert got.reference is not None
    assert got.reference["perplexity"] == pytest.approx(math.exp(want["nll_reference"].mean()), rel=1e-6)
    assert got.perplexity_ratio == pytest.approx(math.exp((want["nll"] - want["nll_reference"]).mean()), rel=1e-6)
    assert got.kl_mean == pytest.approx(want["kl"].mean(), abs=1e-6)
    assert got.kl_p99 == pytest.approx(np.percentile(want["kl"], 99), abs=1e-6)
    assert got.top1_agreement == want["agree"].mean()


@pytest.mark.parametrize("factor", [5, 30, 300])
@pytest.mark.parametrize("documents", [2, 4, 8])
def test_a_model_however_broken_has_finite_figures(factor: int, documents: int) -> None:
    ours, theirs, windows = problem([100] * documents)
    ours = Stored([t * (factor if i else 1) for i, t in enumerate(ours.logits)], "ours")
    found = evaluate(ours, theirs, replace(windows, documents=list(range(documents))))
    json.dumps(asdict(found), allow_nan=False)
    assert found.candidate["perplexity"] == pytest.approx(math.exp(min(found.candidate["nll"], 700.0)))
    assert found.perplexity_ratio is not None
    assert found.perplexity_ratio > 1e6


@pytest.mark.parametrize("lengths", [[129, 130, 2, 300], [61] * 20])
def test_distributions_equal_a_plain_fp64_computation(lengths: list[int]) -> None:
    ours, theirs, windows = problem(lengths, seed=3)
    want, got = dense(ours, theirs, windows), evaluate(ours, theirs, windows)
    for name, share in (("kl_median", 50), ("kl_p90", 90), ("kl_p99", 99), ("kl_p999", 99.9), ("kl_max", 100)):
        assert getattr(got, name) == pytest.approx(np.percentile(want["kl"], share), abs=1e-6), name
    assert got.top5_agreement == pytest.approx(want["common"].mean() / 5, abs=1e-12)
    change = np.exp(-want["nll"]) - np.exp(-want["nll_reference"])
    assert got.delta_p is not None
    assert got.delta_p.mean == pytest.approx(change.mean(), abs=1e-6)
    assert got.delta_p.rms == pytest.approx(np.sqrt((change**2).mean()), abs=1e-6)
    named = {"min": 0.0, "max": 100.0, **{name: float(name) for name in got.delta_p.percentiles if name not in ("min", "max")}}
    assert list(got.delta_p.percentiles.values()) == pytest.approx([np.percentile(change, named[name]) for name in got.delta_p.percentiles], abs=1e-6)
    assert got.flips is not None
    assert got.flips.right_candidate - got.flips.right_reference == pytest.approx(got.flips.gained - got.flips.lost, abs=1e-12)
    assert got.flips.lost == (want["right_reference"] & ~want["right"]).mean()
    position = np.concatenate([np.arange(1, n) for n in lengths])
    assert sum(b.tokens for b in got.kl_by_position) == got.tokens
    assert got.kl_by_position[-1].stop == max(lengths)
    for b in got.kl_by_position:
        assert b.kl_mean == pytest.approx(want["kl"][(position >= b.start) & (position < b.stop)].mean(), abs=1e-6)
    assert got.kl_histogram is not None
    assert sum(got.kl_histogram.counts) == got.tokens
    counts = np.histogram(want["kl"], got.kl_histogram.edges)[0]
    assert np.abs(counts[1:] - got.kl_histogram.counts[1:]).sum() <= 2  # a value on an edge


def test_every_figure_has_an_interval_that_holds_it() -> None:
    ours, theirs, windows = problem([61] * 20, seed=4)
    got = evaluate(ours, theirs, Windows(windows.ids, windows.documents, bytes=[240] * 20))
    held = {name: getattr(got, name) for name in ("perplexity_ratio", "kl_mean", "kl_median", "kl_p90", "kl_p99", "top1_agreement", "top5_agreement")}
    intervals = {name: getattr(got, f"{name}_ci95") for name in held}
    assert got.kl_p999_ci95 is None  # about one of 1,200 tokens lies beyond: nothing can be said
    assert got.delta_p is not None
    assert got.flips is not None
    assert got.reference is not None
    for source, names in ((got.candidate, ("perplexity", "bits_per_byte")), (got.reference, ("perplexity", "bits_per_byte"))):
        held |= {f"{id(source)} {n}": source[n] for n in names}
        intervals |= {f"{id(source)} {n}": source[f"{n}_ci95"] for n in names}
    held |= {"mean": got.delta_p.mean, "rms": got.delta_p.rms, "lost": got.flips.lost, "gained": got.flips.gained}
    intervals |= {"mean": got.delta_p.mean_ci95, "rms": got.delta_p.rms_ci95, "lost": got.flips.lost_ci95, "gained": got.flips.gained_ci95}
    for name, (low, high) in intervals.items():
        assert low <= held[name] <= high, name
        assert low < high or held[name] in (0.0, 1.0), name
    assert got.candidate["bits_per_byte"] == pytest.approx(got.candidate["nll"] * 60 / 240 / math.log(2), rel=1e-12)
    assert set(got.power) == {"perplexity_ratio", "kl_mean", "top1_agreement"}


def test_the_worst_tokens_are_the_worst_and_can_be_read() -> None:
    ours, theirs, windows = problem([129, 130, 300], seed=5)
    want, got = dense(ours, theirs, windows), evaluate(ours, theirs, windows)
    assert [w.kl for w in got.worst_tokens] == pytest.approx(sorted(want["kl"], reverse=True)[:20], abs=1e-6)
    place = [(i, n) for i, length in enumerate(map(len, windows.ids)) for n in range(1, length)]
    for w in got.worst_tokens:
        row = place.index((w.window, w.position))
        assert want["kl"][row] == pytest.approx(w.kl, abs=1e-6)
        assert w.token == windows.ids[w.window][w.position]
        assert w.probability == pytest.approx(math.exp(-want["nll"][row]), abs=1e-7)
        assert w.probability_reference == pytest.approx(math.exp(-want["nll_reference"][row]), abs=1e-7)
        logits = ours.logits[w.window][w.position - 1].double()
        assert [g.token for g in w.expected] == logits.argsort(descending=True)[:3].tolist()
        assert [g.probability for g in w.expected] == pytest.approx(logits.softmax(-1).sort(descending=True).values[:3].tolist(), abs=1e-6)
    read = spelled(got, windows.ids, lambda ids: "".join(f"<{i}>" for i in ids)).worst_tokens[0]
    assert read.text == f"<{read.token}>"
    assert read.context is not None
    assert read.context.endswith(f"<{windows.ids[read.window][read.position - 1]}>")
    assert read.expected_reference[0].text == f"<{read.expected_reference[0].token}>"


def test_a_token_that_begins_a_word_is_read_with_its_blank() -> None:
    """SentencePiece drops the blank of what stands first in a text, and so that of a token read alone."""
    raw = Tokenizer(WordLevel({"▁surgeon": 0, "falls": 1, "▁falls": 2, "K": 3, "▁K": 4}, unk_token="K"))
    raw.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    worst = WorstToken(0, 1, 3.0, 2, 0.1, 0.5, [Guess(4, 0.4), Guess(3, 0.2)], [Guess(1, 0.5)])
    ours, theirs, windows = problem([60])
    found = spelled(replace(evaluate(ours, theirs, windows), worst_tokens=[worst]), [[0, 2]], raw.decode).worst_tokens[0]
    assert (found.context, found.text) == ("surgeon", " falls")
    assert ([g.text for g in found.expected], [g.text for g in found.expected_reference]) == ([" K", "K"], ["falls"])


def test_equal_models_have_no_divergence_at_all() -> None:
    ours, _, windows = problem([200] * 10)
    got = evaluate(ours, ours, windows)
    assert (got.perplexity_ratio, got.kl_mean, got.kl_p99, got.kl_max, got.top1_agreement, got.top5_agreement) == (1.0, 0.0, 0.0, 0.0, 1.0, 1.0)
    assert (got.perplexity_ratio_ci95, got.kl_mean_ci95, got.top1_agreement_ci95) == ((1.0, 1.0), (0.0, 0.0), (1.0, 1.0))


def test_a_candidate_alone_has_only_its_perplexity() -> None:
    ours, theirs, windows = problem([60, 70])
    alone, beside = evaluate(ours, None, windows), evaluate(ours, theirs, windows)
    assert alone.candidate == beside.candidate
    assert alone.engine == "ours 1"
    assert beside.reference_engine == "theirs 1"
    assert (alone.reference, alone.perplexity_ratio, alone.kl_mean, alone.kl_p99, alone.top1_agreement) == (None,) * 5
    assert all(c.kl_sum is None and c.nll_reference is None and c.agree is None for c in alone.clusters)


def test_clusters_are_documents_where_there_are_several() -> None:
    ours, theirs, windows = problem([40] * 20)
    by_window = evaluate(ours, theirs, windows)
    assert [c.tokens for c in by_window.clusters] == [39] * 20
    assert by_window.protocol == {"window": 300, "cluster": "window"}
    by_document = evaluate(ours, theirs, Windows(windows.ids, [i // 2 for i in range(20)]))
    assert [c.tokens for c in by_document.clusters] == [78] * 10
    assert by_document.protocol["cluster"] == "document"
    assert by_document.kl_mean == pytest.approx(by_window.kl_mean, rel=1e-12)
    few = evaluate(ours, theirs, Windows(windows.ids, [i // 10 for i in range(20)]))
    assert few.protocol["cluster"] == "document"
    assert [c.tokens for c in few.clusters] == [390] * 2
    assert evaluate(*problem([40] * 8)).protocol["cluster"] == "window"
    one = evaluate(*problem([40] * 7))
    assert (one.protocol["cluster"], len(one.clusters), one.kl_mean_ci95) == ("document", 1, None)


def test_sums_of_clusters_give_the_figures() -> None:
    ours, theirs, windows = problem([40, 50, 60])
    got = evaluate(ours, theirs, windows)
    assert math.exp(sum(c.nll_candidate for c in got.clusters) / got.tokens) == pytest.approx(got.candidate["perplexity"], rel=1e-12)
    assert sum(c.kl_sum or 0 for c in got.clusters) / got.tokens == pytest.approx(got.kl_mean, rel=1e-12)
    assert sum(c.agree or 0 for c in got.clusters) / got.tokens == got.top1_agreement


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", [0, 1])
def test_refuses_logits_that_are_no_numbers_and_says_where(bad: float, which: int) -> None:
    scorers = problem([100, 300])
    scorers[which].logits[1][130, 5] = bad
    with pytest.raises(NumericalError, match=rf"{('ours', 'theirs')[which]}: window 1, positions 128\.\.255: 1 of .*first in position 2"):
        evaluate(*scorers)


def test_a_padded_vocabulary_is_compared_on_the_common_part() -> None:
    ours, theirs, windows = problem([100] * 3)
    want = evaluate(ours, theirs, windows)
    padded = Stored([torch.cat([t, torch.full((t.shape[0], 9), -60.0)], 1) for t in theirs.logits], "padded")
    assert evaluate(ours, padded, windows).kl_mean == want.kl_mean
    assert evaluate(padded, ours, windows).reference == want.candidate


def test_other_vocabularies_are_refused() -> None:
    ours, theirs, windows = problem([100] * 3)
    larger = Stored([torch.cat([t, torch.full((t.shape[0], 9), 17.0)], 1) for t in theirs.logits], "larger")
    with pytest.raises(UnsupportedError, match="311 and 320 tokens"):
        evaluate(ours, larger, windows)
    smaller = Stored([t[:, :50] for t in theirs.logits], "smaller")
    with pytest.raises(UnsupportedError, match="vocabulary of 50"):
        evaluate(smaller, None, windows)


def test_nothing_to_score() -> None:
    with pytest.raises(DataError, match="no full window"):
        evaluate(Stored([]), None, Windows([], []))


def test_reads_both_models_chunk_by_chunk() -> None:
    order: list[str] = []

    class Slow(Stored):
        def score(self, windows: list[list[int]]) -> Iterator[torch.Tensor]:
            for chunk in super().score(windows):
                order.append(self.name)
                yield chunk

    ours, theirs, windows = problem([300, 300])
    evaluate(Slow(ours.logits, "ours"), Slow(theirs.logits, "theirs"), windows)
    assert [k for k, _ in itertools.groupby(order)] == ["ours", "theirs"] * 6


def test_only_the_places_that_are_asked_for_count() -> None:
    """Figures of chosen places are those of a plain computation on them; the worst are found among them; a window may begin or end without any."""
    ours, theirs, windows = problem([129, 130, 300] * 4)
    rng = np.random.default_rng(3)
    scored = [sorted(int(p) for p in rng.choice(np.arange(1, len(w)), 7, replace=False)) for w in windows.ids]
    scored[2] = [299]
    whole = dense(ours, theirs, windows)
    starts = np.cumsum([0, *(len(w) - 1 for w in windows.ids)])
    rows = np.concatenate([starts[i] + np.asarray(places) - 1 for i, places in enumerate(scored)])
    found = evaluate(ours, theirs, replace(windows, scored=scored))
    assert found.tokens == len(rows)
    assert found.kl_mean == pytest.approx(whole["kl"][rows].mean(), abs=1e-6)
    assert found.candidate["nll"] == pytest.approx(whole["nll"][rows].mean(), abs=1e-6)
    assert found.top1_agreement == pytest.approx(whole["agree"][rows].mean())
    assert [t.kl for t in found.worst_tokens] == pytest.approx(sorted(whole["kl"][rows], reverse=True)[:20], abs=1e-5)
    assert all(t.position in scored[t.window] for t in found.worst_tokens)
    assert sum(b.tokens for b in found.kl_by_position) == len(rows)
    alone = evaluate(ours, None, replace(windows, scored=scored))
    assert alone.candidate["nll"] == found.candidate["nll"]


def test_errors_by_position_are_those_of_means_over_windows() -> None:
    ours, theirs, windows = problem([61] * 20, seed=6)
    want, got = dense(ours, theirs, windows)["kl"].reshape(20, 60), evaluate(ours, theirs, Windows(windows.ids, list(range(20))))
    for b in got.kl_by_position:
        means = want[:, b.start - 1 : b.stop - 1].mean(1)
        assert b.error == pytest.approx(means.std(ddof=1) / math.sqrt(20), rel=0.01), b.start


def test_two_candidates_differ_by_more_than_each_errs() -> None:
    """Simulated: of differences between two unrelated candidates as large as what is called detectable, four of five intervals exclude 0."""
    error, rng = 0.01, np.random.default_rng(0)
    mean = Mean(0.05, error, (0.05 - 1.959963984540054 * error, 0.05 + 1.959963984540054 * error), 50, 5000)
    found = power.measured(mean, mean, mean)
    for name, difference in (("kl_mean", found["kl_mean"]), ("top1_agreement", found["top1_agreement"]), ("perplexity_ratio", math.log1p(found["perplexity_ratio"]))):
        seen = difference + error * (rng.standard_normal(100_000) - rng.standard_normal(100_000))
        excluded = (np.abs(seen) > 1.959963984540054 * math.sqrt(2) * error).mean()
        assert excluded == pytest.approx(0.8, abs=0.01), name


def test_that_no_position_disagrees_is_not_known_of_all_text() -> None:
    _, theirs, windows = problem([61] * 20)
    ours = Stored([t * 1.001 for t in theirs.logits], "ours")
    found = evaluate(ours, theirs, replace(windows, documents=list(range(20))))
    assert found.top1_agreement == 1.0
    assert found.top1_agreement_ci95 == (pytest.approx(0.025 ** (1.5 / 1200)), 1.0)
    assert found.flips is not None
    assert found.flips.lost_ci95 == (0.0, pytest.approx(1 - 0.025 ** (1.5 / 1200)))
