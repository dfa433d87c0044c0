"""Log-probabilities of tokens, of the logits of a step: natural logarithms of the softmax, in fp64."""

from __future__ import annotations

from collections.abc import Callable

import torch

from qforge.ops.native_module import module
from qforge.runtime.sampler import sample
from qforge.runtime.scheduler import Piece
from qforge.runtime.sequence import Draw, Logprob
from qforge.runtime.step import Runner, StepInput

Logprobs = Callable[[int, int], Logprob]  # of a token at a place among those that a step found for a sequence


def choose(runner: Runner, step: StepInput, pieces: list[Piece], draws: list[Draw]) -> list[tuple[Piece, list[int], Logprobs | None]]:
    """What `Runner.choose` finds, with each piece that gets tokens, and their log-probabilities where its sequence wants them; those of prompts are noted in the sequences."""
    rows = runner.step(step).split([p.end - p.wanted for p in pieces])
    for piece, logits in zip(pieces, rows, strict=True):
        if piece.tells_prompt:
            _note_prompt(piece, logits)
    ready = [(p, logits[p.stop - 1 - p.wanted :]) for p, logits in zip(pieces, rows, strict=True) if p.wants_logits]
    found = iter(_sampled(torch.cat([logits for _, logits in ready]), draws) if ready else [])
    return [(p, [next(found) for _ in logits], _told(logits, p.sequence.params.logprobs)) for p, logits in ready]


def _sampled(logits: torch.Tensor, draws: list[Draw]) -> list[int]:
    """As `sample`; with the native module as native steps choose, so that who wants no log-probabilities does not wait for a sorted vocabulary."""
    native, vocabulary = module(), logits.shape[1]
    if native is None:
        return sample(logits, draws)
    return [native.draw(row.data_ptr(), vocabulary, p.temperature, p.top_k, p.top_p, p.min_p, seed, at) for row, (p, seed, at) in zip(logits, draws, strict=True)]


def _told(logits: torch.Tensor, most: int | None) -> Logprobs | None:
    return None if most is None else lambda place, token: of(logits[place], token, most)


def _note_prompt(piece: Piece, logits: torch.Tensor) -> None:
    """Of the tokens behind a piece's own; one that is computed again is noted once."""
    sequence = piece.sequence
    for row, place in zip(logits, range(piece.start + 1, min(piece.stop + 1, sequence.num_prompt)), strict=False):
        if place == len(sequence.prompt_logprobs):
            sequence.prompt_logprobs.append(of(row, sequence.tokens[place], sequence.params.prompt_logprobs or 0))


def of(logits: torch.Tensor, token: int, most: int) -> Logprob:
    """Of a token by the logits `[V]` where it stands, and the `most` most likely ones, those with smaller ids first where they are equal."""
    each = torch.log_softmax(logits.double(), 0)
    least = each.topk(most).values[-1] if most else torch.inf
    best = [int(i) for i in (each >= least).nonzero()[:, 0]]
    best.sort(key=lambda i: -float(each[i]))
    return Logprob(token, float(each[token]), tuple((i, float(each[i])) for i in best[:most]))
