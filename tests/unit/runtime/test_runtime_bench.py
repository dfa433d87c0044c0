"""What a cache or a context has no room for is left out of the figures, and no figure is no number."""

from __future__ import annotations

import json

import pytest
from runtime_models import model

from qforge.runtime import LLM
from qforge.runtime.bench import decode_speed, measure


@pytest.mark.parametrize(("blocks", "rows"), [(400, [(1, 128), (8, 128), (32, 128)]), (200, [(1, 128), (8, 128), (32, 63)]), (11, [(1, 128)]), (3, [(1, 15)]), (2, [])])
def test_batches_and_contexts_are_those_that_fit_the_cache(blocks: int, rows: list[tuple[int, int]]) -> None:
    llm = LLM(model("llama"), num_blocks=blocks)
    found = measure(llm)
    json.dumps(found, allow_nan=False)
    assert [(row["batch"], row["context"]) for row in found["decode"]] == rows
    assert all(row["tokens_per_second"] > 0 for row in found["decode"] + found["prefill"])
    assert (found["tpot_ms"] is not None) == (decode_speed(llm) is not None) == bool(rows)
