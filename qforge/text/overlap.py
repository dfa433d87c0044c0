"""Whether calibration text is part of evaluation text: by hash, and by the share of 13-word sequences that both hold."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

import numpy as np

from qforge.text.documents import Documents

NGRAM = 13  # words, as in the contamination study of Brown et al. 2020, "Language Models are Few-Shot Learners", appendix C
REFUSED = 0.25  # of the evaluation's documents or 13-word sequences: more than quotations or boilerplate give
WARNED = 0.01
WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Overlap:
    """How much of an evaluation text the calibration text gives away.

    Attributes:
        identical: both are the same bytes.
        documents: number of evaluation documents.
        shared_documents: those of them that are, as a whole, calibration documents.
        shared_13gram_fraction: share of the evaluation's 13-word sequences (case and punctuation aside) that the calibration text holds.
    """

    calibration_sha256: str
    evaluation_sha256: str
    identical: bool
    documents: int
    shared_documents: int
    shared_13gram_fraction: float

    def refusal(self) -> str | None:
        """Why figures on this evaluation text would not be evidence, or None."""
        if self.identical:
            return "calibration and evaluation read the same text; quality must be measured on text that calibration has not seen: name another one"
        if self.shared_documents >= REFUSED * self.documents or self.shared_13gram_fraction >= REFUSED:
            return f"calibration and evaluation text overlap ({self._share()}); quality must be measured on text that calibration has not seen: name another one"
        return None

    def warning(self) -> str | None:
        """What the report should say about a small overlap, or None."""
        return f"calibration and evaluation text share passages ({self._share()})" if self.shared_documents or self.shared_13gram_fraction >= WARNED else None

    def _share(self) -> str:
        return f"{self.shared_documents} of {self.documents} documents, {self.shared_13gram_fraction:.1%} of the evaluation's 13-word sequences"


def overlap(calibration: Documents, evaluation: Documents) -> Overlap:
    """Compare two texts (before tokenization, so that the answer does not depend on the tokenizer)."""
    seen = {_digest(text) for text in calibration.texts}
    shared = sum(_digest(text) in seen for text in evaluation.texts)
    identical = calibration.sha256 == evaluation.sha256
    return Overlap(calibration.sha256, evaluation.sha256, identical, len(evaluation.texts), shared, _shared_fraction(calibration, evaluation))


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.strip().encode("utf-8", "surrogatepass")).digest()


def _shared_fraction(calibration: Documents, evaluation: Documents) -> float:
    vocabulary: dict[str, int] = {}
    grams = [np.unique(np.concatenate([_grams(text, vocabulary) for text in texts])) for texts in (calibration.texts, evaluation.texts)]
    return float(np.isin(grams[1], grams[0], assume_unique=True).mean()) if len(grams[1]) else 0.0


def _grams(text: str, vocabulary: dict[str, int]) -> np.ndarray:
    """A 64-bit hash of each 13-word sequence: a polynomial in the words' mixed numbers, modulo 2^64."""
    words = np.array([vocabulary.setdefault(word, len(vocabulary)) for word in WORD.findall(text.lower())], dtype=np.uint64)
    if len(words) < NGRAM:
        return np.empty(0, dtype=np.uint64)
    mixed = _mix(words)
    total = np.zeros(len(words) - NGRAM + 1, dtype=np.uint64)
    for offset in range(NGRAM):
        total = total * np.uint64(0x9E3779B97F4A7C15) + mixed[offset : offset + len(total)]
    return total


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(x ^ (x >> np.uint64(31)))
