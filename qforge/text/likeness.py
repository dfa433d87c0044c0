"""Whether a calibration text is of the language of the evaluation text: the share of words that both have in common."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

FEWEST = 500  # words of each text, below which nothing is said
# Languages share hardly a word, and all texts of one language share the words that every sentence needs, whatever they are about. Measured, 1,000 to 10,000 words of each text:
# prose of five kinds and a manual .26 to .57, program code beside prose .13 to .28, another language .01 to .09 (German, Dutch, Danish, Swedish, Spanish, Italian, Polish,
# Finnish, Turkish, Vietnamese, Russian, Korean, Japanese and Chinese beside English).
UNLIKE = 0.1
# Thai, Lao, Burmese, Khmer, kana, Han: written without spaces, so that a character counts as a word.
_UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W\d_{_UNSPACED}]+")


@dataclass(frozen=True, slots=True)
class Likeness:
    """How alike two texts are.

    Attributes:
        shared_words: sum over words of the smaller of the two shares that a word has in each text; 1 for equal texts, None where one has fewer than `FEWEST` words.
        warning: what the report should say; None where the texts are alike.
    """

    shared_words: float | None
    warning: str | None


def likeness(source: str, calibration: Sequence[str], evaluation: Sequence[str]) -> Likeness:
    """Compare what calibration reads (from `source`) with what is evaluated."""
    counts = [Counter(word for text in texts for word in _WORD.findall(text.lower())) for texts in (calibration, evaluation)]
    totals = [sum(c.values()) for c in counts]
    if min(totals) < FEWEST:
        return Likeness(None, None)
    ours, theirs = counts
    shared = sum(min(count / totals[0], theirs[word] / totals[1]) for word, count in ours.items())
    if shared >= UNLIKE:
        return Likeness(shared, None)
    common = ", ".join(word for word, _ in ours.most_common(5))
    told = f"the calibration text reads like another language or kind of text than the evaluation text: they share {shared:.1%} of their words"
    advice = "rounding is then fitted to activations that the model does not have in use: calibrate on text like that of its use"
    return Likeness(shared, f"{source}: {told} (most frequent in calibration: {common}); {advice}")
