"""What several runs over one model measure alike, kept in their common journal: the original's hidden states on the evaluation text, and the base's own perplexity.

Letters: D hidden width, T tokens of a window.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from qforge.engines.transformers_engine import TransformersEngine
from qforge.evaluate.divergence import evaluate
from qforge.models.model import Model
from qforge.progress import Progress
from qforge.stages.journal import Journal, key
from qforge.text.windows import EvaluationWindows


class KeptReference(TransformersEngine):
    """The reference, computed once for all runs with this journal.

    What is kept are the states `[T, D]` fp32 after the last block: a lossless form of the logits, and a small one (47 MB where 20,440 rows of 49,152 logits are 4 GB).
    The head is applied to them chunk by chunk, so figures are the same bits as of a reference that runs in step.
    """

    def __init__(self, model: Model, text: EvaluationWindows, journal: Journal) -> None:
        super().__init__(model)
        self._journal = journal
        self._name = key("reference", model=model.fingerprint(), ids=text.ids)

    def _states(self, windows: list[list[int]]) -> Iterable[torch.Tensor]:
        if self._journal.stored(self._name) is None:
            self._journal.save(self._name, {str(i): states for i, states in enumerate(self.hidden(windows))}, None, count=False)
        return self._kept(len(windows))

    def _kept(self, count: int) -> Iterator[torch.Tensor]:
        """One window's states at a time, read when they are wanted."""
        kept = self._journal.stored(self._name)
        assert kept is not None, "the reference's states were kept and are gone"
        for i in range(count):
            yield kept[str(i)].load()


def base_figures(base: Model, text: EvaluationWindows, journal: Journal, progress: Progress) -> dict[str, Any]:
    """The base model's own figures on the text (`Evaluation.base`), measured once for a journal."""
    name = key("base", model=base.fingerprint(), ids=text.ids, documents=text.documents, bytes=text.bytes)
    found = journal.load(name, count=False)
    if found is None:
        alone = evaluate(TransformersEngine(base), None, text, progress=progress)
        journal.save(name, {"done": torch.ones(1)}, alone.candidate, count=False)
        return alone.candidate
    figures: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in found[1].items()}
    return figures
