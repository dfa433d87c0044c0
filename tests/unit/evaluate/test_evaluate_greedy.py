"""Where greedy continuations part: against both models writing on their own, and on models whose choices are known."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from evaluations import Windows
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from qforge import pipeline
from qforge.engines.base import chunks
from qforge.errors import DataError
from qforge.evaluate.greedy import PROMPT, TOKENS, departures


@torch.no_grad()
def written(folder: Path, prompt: list[int]) -> list[int]:
    """A model's own greedy continuation, by transformers' generate."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    return [int(t) for t in model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, do_sample=False)[0, len(prompt) :]]


def test_both_models_write_so_far_alike(tmp_path: Path) -> None:
    """`eval --against`: as many tokens as transformers' continuations of both models have in common."""
    whole, other = tiny.make(tmp_path / "whole"), tiny.make(tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    torch.manual_seed(1)
    save_file({n: t + 0.04 * t.std() * torch.randn_like(t) if "proj" in n else t for n, t in tensors.items()}, other / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "text.txt").write_text("\n\n".join(" ".join(tiny.TEXT[i % 4 :] + tiny.TEXT[: i % 4]) for i in range(12)))
    found = pipeline.evaluate(other, against=whole, text=str(tmp_path / "text.txt"), window=48).greedy
    assert found is not None
    ids = tiny.tokenizer()((tmp_path / "text.txt").read_text(), add_special_tokens=False).input_ids
    starts = [ids[i : i + 24] for i in range(0, len(ids) - 47, 48)]
    chosen = [starts[i * len(starts) // len(found.kept)] for i in range(len(found.kept))]
    expected = []
    for prompt in chosen:
        a, b = written(whole, prompt), written(other, prompt)
        expected.append(next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), TOKENS))
    assert found.kept == expected
    assert len(set(expected)) > 3
    assert found.limit == TOKENS
    assert found.mean == pytest.approx(np.mean(expected))
    assert found.whole == pytest.approx(np.mean([e == TOKENS for e in expected]))
    assert found.mean_ci95 is not None
    assert found.mean_ci95[0] < found.mean < found.mean_ci95[1]


def test_models_that_read_text_otherwise_are_not_compared(tmp_path: Path) -> None:
    model, other = tiny.make(tmp_path / "model", layers=1), tiny.make(tmp_path / "other", layers=1)
    raw = json.loads((other / "tokenizer.json").read_text())
    raw["model"]["merges"] = raw["model"]["merges"][:5]
    (other / "tokenizer.json").write_text(json.dumps(raw))
    (tmp_path / "text.txt").write_text(" ".join(tiny.TEXT) * 12)
    with pytest.raises(DataError, match=r"1 of 1 documents are other token ids.*their tokenizers differ"):
        pipeline.evaluate(model, against=other, text=str(tmp_path / "text.txt"), window=64)


def test_equal_models_never_part(tmp_path: Path) -> None:
    model = tiny.make(tmp_path / "model", layers=1)
    (tmp_path / "text.txt").write_text(" ".join(tiny.TEXT) * 12)
    found = pipeline.evaluate(model, against=model, text=str(tmp_path / "text.txt"), window=64)
    assert found.greedy is not None
    assert set(found.greedy.kept) == {TOKENS}
    assert found.greedy.whole == 1
    assert found.greedy.mean_ci95 == (TOKENS, TOKENS)


@dataclass
class Counts:
    """Its first choice after token t is t + 1; writes that, too, but for every `wrong`-th token of a continuation."""

    wrong: int
    room: int = TOKENS
    name: str = "counts"
    version: str = "1"

    def score(self, windows: list[list[int]]) -> Iterator[torch.Tensor]:
        for window in windows:
            for start, stop in chunks(len(window)):
                yield torch.nn.functional.one_hot(torch.tensor(window[start:stop]) + 1, 6200).float()

    def write(self, prompts: list[list[int]], count: int) -> list[list[int]]:
        self.prompts = prompts
        return [[p[-1] + 1 + i + (i >= self.wrong) for i in range(min(count, self.room))] for p in prompts] if self.room else []


def test_what_is_written_is_held_against_the_first_choices() -> None:
    text = Windows([list(range(100 * i, 100 * i + 90)) for i in range(9)], list(range(9)))
    for wrong, room, kept in ((7, TOKENS, 7), (0, TOKENS, 0), (TOKENS, TOKENS, TOKENS), (20, 10, 10)):
        found = departures(Counts(wrong, room), Counts(0), text)
        assert found is not None
        assert found.kept == [kept] * 9
        assert found.limit == room
        assert found.mean == kept
        assert found.whole == (kept == room)
        assert found.cluster == "document"
    assert departures(Counts(3, 0), Counts(0), text) is None


def test_prompts_are_pieces_of_the_text_and_what_an_assistant_answers_to() -> None:
    ids = [list(range(100 * i, 100 * i + 90)) for i in range(60)]
    writer = Counts(3)
    departures(writer, Counts(0), Windows(ids, [0] * 60))
    assert len(writer.prompts) == 24
    assert writer.prompts[1] == ids[2][:PROMPT]
    long = [list(range(512)), list(range(1000, 1512))]
    departures(writer, Counts(0), Windows(long, [0, 1]))
    assert writer.prompts == [w[64 * i : 64 * i + PROMPT] for w in long for i in range(8)]
    departures(writer, Counts(0), Windows(ids[:3], [0] * 3, protocol={"bos": True}, scored=[[50, 51], [10], [1]]))
    assert writer.prompts == [[0, *range(18, 50)], list(range(100, 110)), [200]]
    departures(writer, Counts(0), Windows([[5, 6, 7]], [0]))
    assert writer.prompts == [[5]]
