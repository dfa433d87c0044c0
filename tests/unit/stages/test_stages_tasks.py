"""Both models' answers to a task, paired."""

from __future__ import annotations

import pytest

from qforge.engines.tasks import Answers
from qforge.evaluate import statistics
from qforge.stages.tasks import _paired


def answers(acc: list[float]) -> Answers:
    return Answers({"acc": sum(acc) / len(acc)}, {"acc": acc}, {"version": 1})


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (3, 1)])
def test_flips_have_tangos_interval_also_where_there_are_none(lost: int, gained: int) -> None:
    before, after = ([1.0] * 10 + [1.0 - flipped] * lost + [0.0 + flipped] * gained + [0.0] * 10 for flipped in (0, 1))
    found = _paired(answers(before), answers(after)).metrics["acc"]
    assert (found.lost, found.gained, found.right) == (lost, gained, "1" * 10 + "0" * lost + "1" * gained + "0" * 10)
    assert found.difference_ci95 == statistics.paired_shares(gained, lost, 20 + lost + gained).interval
    assert found.difference_ci95 is not None
    assert found.difference_ci95[0] < found.difference < found.difference_ci95[1]


@pytest.mark.parametrize("reference", [[0.5, 0.4, 0.6, 0.3] * 5, [1.0, 0.0] * 10])
def test_parts_of_a_question_are_neither_right_nor_wrong(reference: list[float]) -> None:
    """As truthfulqa_mc2 has them: of each question the probability of its true answers, named acc."""
    candidate = [0.3, 0.3, 0.4, 0.2] * 5
    for a, b in ((reference, candidate), (candidate, reference)):
        result = _paired(answers(a), answers(b))
        found = result.metrics["acc"]
        assert (found.lost, found.gained, found.right) == (None, None, None)
        assert result.questions == 20
        assert found.difference == pytest.approx(found.candidate - found.reference)
        assert found.difference_ci95 is not None
        assert found.difference_ci95[0] < found.difference < found.difference_ci95[1]
