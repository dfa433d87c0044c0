"""Whether two texts are of one language: own sentences in five languages, program code, and what is too short to tell."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from qforge.text.builtin import builtin_files
from qforge.text.likeness import FEWEST, UNLIKE, likeness

ROOT = Path(__file__).resolve().parents[3]
SENTENCES = {
    "English": "the {} is on the {}, and when {} comes we go with the {} to the house of {}.",
    "German": "der {} liegt auf dem {}, und wenn {} kommt, gehen wir mit der {} in das Haus von {}.",
    "Spanish": "el {} está sobre la {}, y cuando {} viene vamos con los {} a la casa de {}.",
    "Russian": "когда {} лежит на столе, а {} идёт домой, мы вместе с {} пойдём к реке, где живёт {} и ждёт {}.",
    "Chinese": "{}在桌子上,当{}来的时候,我们和{}一起去{}的家,看{}的书。",
}


def written(language: str, seed: int, sentences: int = 120) -> list[str]:
    """Sentences about things with names that no other text has, as the names in honest texts are."""
    rng = random.Random(f"{language}{seed}")
    letters = {"Russian": "абвгдежзиклмнопрст", "Chinese": "山水火木金土日月人口手足耳目心"}.get(language, "abcdefghiklmnoprstu")
    return [SENTENCES[language].format(*("".join(rng.choices(letters, k=2 if language == "Chinese" else 6)) for _ in range(5))) for _ in range(sentences)]


def builtin(role: str) -> list[str]:
    records = [json.loads(line) for file in builtin_files(role) for line in file.read_text("utf-8").splitlines()]  # type: ignore[arg-type]
    return [r["text"] if "text" in r else "\n".join(m["content"] for m in r["messages"]) for r in records]


@pytest.mark.parametrize("ours", SENTENCES)
@pytest.mark.parametrize("theirs", SENTENCES)
def test_languages_are_told_apart(ours: str, theirs: str) -> None:
    found = likeness("text.txt", written(ours, 1), written(theirs, 2))
    assert found.shared_words is not None
    assert (found.warning is None) == (ours == theirs), found
    assert found.shared_words > 3 * UNLIKE if ours == theirs else found.shared_words < UNLIKE / 2


def test_other_subjects_and_program_code_raise_no_alarm() -> None:
    stories, conversations = builtin("calibration"), builtin("evaluation")
    code = [p.read_text() for p in sorted((ROOT / "qforge" / "models").glob("*.py"))]
    manual = [p.read_text() for p in sorted((ROOT / "docs").glob("*.md"))]
    for text in (conversations, code, manual):
        assert likeness("x", stories, text).warning is None
        assert likeness("x", text, stories).warning is None


def test_the_share_is_that_of_a_plain_sum() -> None:
    a, b = ["a", "a", "a", "b", "c"] * FEWEST, ["a", "b", "b", "d"] * FEWEST
    p, q = Counter(a), Counter(b)
    expected = sum(min(p[w] / p.total(), q[w] / q.total()) for w in {*a, *b})
    assert likeness("x", [" ".join(a)], [" ".join(b)]).shared_words == pytest.approx(expected)


def test_a_few_words_say_nothing() -> None:
    short = ["word " * (FEWEST - 1)]
    assert likeness("x", short, written("English", 1)).shared_words is None
    assert likeness("x", written("German", 1), short).warning is None


def test_the_warning_names_the_source_and_the_words() -> None:
    warning = likeness("deutsch.txt", written("German", 1), written("English", 2)).warning
    assert warning is not None
    assert warning.startswith("deutsch.txt: the calibration text reads like another language")
    assert "most frequent in calibration:" in warning
    assert "wenn" in warning or "der" in warning
