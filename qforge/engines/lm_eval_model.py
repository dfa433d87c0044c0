"""One of our engines as lm-eval's model: log-likelihoods of continuations, tokenized as lm-eval's own transformers model does it. Imported where lm-eval is installed.

Letters: L positions of a continuation, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from transformers import PreTrainedTokenizerBase

from qforge.engines.base import Scorer, chunks
from qforge.errors import UnsupportedError

Request = tuple[tuple[str, str], list[int], list[int]]


class TaskModel(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """A `Scorer` that answers lm-eval's questions.

    Args:
        scorer: the engine.
        tokenizer: the model's. A BOS stands before plain text where it puts one there, as in lm-eval's default.
        context: tokens that the model takes; a longer question loses tokens on its left.
    """

    def __init__(self, scorer: Scorer, tokenizer: PreTrainedTokenizerBase, context: int) -> None:
        super().__init__()
        self.tokenizer = tokenizer
        self._scorer, self._context = scorer, context

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        assert self.tokenizer is not None
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a continuation without a context: BOS, or the end of the text before."""
        assert self.tokenizer is not None
        return self.eot_token_id if self.tokenizer.bos_token_id is None else int(self.tokenizer.bos_token_id)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids; special tokens as the tokenizer adds them by itself, but no second BOS."""
        assert self.tokenizer is not None
        bos = self.tokenizer.bos_token
        if add_special_tokens is None:
            add_special_tokens = not (bos and string.startswith(str(bos)))
        return [int(i) for i in self.tokenizer.encode(string, add_special_tokens=add_special_tokens)]

    def _loglikelihood_tokens(self, requests: list[Request], **kwargs: Any) -> list[tuple[float, bool]]:
        """Natural log-likelihood of each continuation after its context, and whether it is what the model itself would have written."""
        questions = [(context + continuation)[-self._context :] for _, context, continuation in requests]
        order = sorted(range(len(questions)), key=lambda i: (len(questions[i]), i))  # engines take neighbours of one length together
        found: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        for i, logits in zip(order, _rows(self._scorer, [questions[i] for i in order], [len(requests[i][2]) for i in order]), strict=True):
            found[i] = _answer(logits, torch.tensor(requests[i][2]))
        return found

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Refused: perplexity of a text is what `evaluate.text` measures, by a protocol that is stated.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError("this task measures perplexity of a text; name the text as evaluate.text instead")

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Refused: the original is computed one block at a time, which cannot write text.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError("this task has the model write text; only tasks that choose among given answers (by likelihood) can be scored")


def _rows(scorer: Scorer, windows: list[list[int]], lengths: list[int]) -> Iterator[torch.Tensor]:
    """Of each window the logits `[L, V]` that predict its last `lengths` tokens."""
    pieces = scorer.score(windows)
    for window, length in zip(windows, lengths, strict=True):
        first, kept = len(window) - 1 - length, []
        for start, stop in chunks(len(window)):
            logits = next(pieces)
            if stop > first:
                kept.append(logits[max(0, first - start) :].float())
        yield torch.cat(kept)


def _answer(logits: torch.Tensor, continuation: torch.Tensor) -> tuple[float, bool]:
    """Sum of log-probabilities (fp64 sums over fp32 logits) of a continuation `[L]`, and whether each token has the largest one."""
    logits = logits.double()
    chosen = logits.gather(-1, continuation[:, None])[:, 0] - logits.logsumexp(-1)
    return float(chosen.sum()), bool((logits.argmax(-1) == continuation).all())
