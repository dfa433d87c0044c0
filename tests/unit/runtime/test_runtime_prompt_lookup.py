"""Guesses at what comes next: what they are, and that a runtime with them gives the tokens that it gives without."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from runtime_models import model, prompts, quantized

from qforge.errors import UnsupportedError
from qforge.models.model import Model
from qforge.runtime import LLM, SamplingParams
from qforge.runtime.blocks import BlockPool
from qforge.runtime.engine import Engine
from qforge.runtime.prompt_lookup import PromptLookup
from qforge.runtime.scheduler import Piece, Scheduler
from qforge.runtime.sequence import Sequence
from qforge.runtime.step import build_step


def _searched(tokens: list[int], length: int) -> list[int]:
    """The last place before the end where the last four tokens stand, and what follows it, read on into what is read."""
    places = [i for i in range(4, len(tokens)) if tokens[i - 4 : i] == tokens[-4:]]
    read = list(tokens)
    for i in range(length if places else 0):
        read.append(read[places[-1] + i])
    return read[len(tokens) :]


@given(st.lists(st.lists(st.integers(0, 1), min_size=0, max_size=12), min_size=1, max_size=16), st.integers(0, 9))
def test_a_guess_is_what_followed_the_last_four_tokens(grows: list[list[int]], most: int) -> None:
    lookup = PromptLookup(8)
    tokens: list[int] = []
    expected: list[int] = []
    length = 0
    for more in grows:
        if more and expected:
            right = next((i for i, (a, b) in enumerate(zip(more, expected, strict=False)) if a != b), 9)
            length = min(8, max(1, 2 * length) if right >= min(len(more), 9) else right)
        tokens += more
        expected = _searched(tokens, 9)
        assert lookup.guess(tokens, most, sure=False) == expected[: min(most, length)]


def test_who_was_right_guesses_more() -> None:
    lookup, tokens = PromptLookup(8), [*range(40), 0, 1, 2, 3]
    asked = []
    for came in (1, 1, 2, 3, 9, 9):  # as expected
        asked.append(len(lookup.guess(tokens, 8, sure=False)))
        tokens += tokens[tokens.index(tokens[-1]) + 1 :][:came]
    assert asked == [0, 1, 2, 4, 8, 8]
    tokens[-2:] = [70, 71]  # the last two are others
    assert lookup.guess(tokens, 8, sure=False) == []
    tokens += [0, 1, 2, 3]
    assert lookup.guess(tokens, 3, sure=False) == [4, 5, 6]
    assert lookup.guess(tokens, 8, sure=False) == list(range(4, 11)), "seven of nine were right, and nothing came since"
    tokens += [99, 0, 1, 2, 3]
    assert lookup.guess(tokens, 8, sure=False) == [], "none was right"


def test_where_rows_are_dear_only_who_is_mostly_right_guesses() -> None:
    lookup, tokens = PromptLookup(8), [*range(30), 0, 1, 2, 3]
    asked = []
    for token in range(4, 30):
        asked.append(lookup.guess(tokens, 8, sure=True) != [])
        tokens.append(token)
    assert asked == [False] * 22 + [True] * 4, "1 - .9^22 is the first share above .9"
    tokens[-1] = 99
    assert lookup.guess(tokens, 8, sure=True) == []
    tokens += [0, 1, 2, 3]
    assert lookup.guess(tokens, 8, sure=False) == []
    tokens.append(4)
    assert lookup.guess(tokens, 8, sure=False) == [5]
    assert lookup.guess(tokens, 8, sure=True) == []


def test_blocks_of_wrong_guesses_are_free_again() -> None:
    scheduler = Scheduler(BlockPool(2), 16, 4, 64)
    sequence = Sequence(0, list(range(14)), 14, SamplingParams(), 0, 30, frozenset())
    scheduler.add(sequence)
    piece = scheduler.schedule(lambda *_: [1, 2, 3, 4])[0]
    assert (piece.draft, len(sequence.block_table)) == ((1, 2, 3, 4), 2)
    scheduler.advance([piece])
    sequence.tokens += [1, 9]
    scheduler.keep(piece, 1)
    assert (sequence.computed, len(sequence.block_table), scheduler.pool.num_free) == (15, 1, 1)
    scheduler.pool.allocate(1)
    assert scheduler.schedule(lambda *_: [1, 2, 3, 4])[0].draft == ()


def test_a_guess_ends_where_the_pool_does() -> None:
    scheduler = Scheduler(BlockPool(2), 16, 4, 64)
    scheduler.add(Sequence(0, list(range(13)), 13, SamplingParams(), 0, 30, frozenset()))
    scheduler.pool.allocate(1)
    assert scheduler.schedule(lambda *_: [1, 2, 3, 4])[0].draft == (1, 2, 3)


def test_a_step_computes_guesses_after_the_last_token() -> None:
    a, b = (Sequence(i, list(range(100, 118)), 18, SamplingParams(), 0, 40, frozenset(), block_table=[5, 2] if i == 0 else [7, 9]) for i in range(2))
    step = build_step([Piece(a, 15, 18, (7, 8)), Piece(b, 17, 18)], 16)
    assert step.tokens.tolist() == [115, 116, 117, 7, 8, 117]
    assert step.positions.tolist() == [15, 16, 17, 18, 19, 17]
    assert step.slot_mapping.tolist() == [95, 32, 33, 34, 35, 145]
    assert step.query_starts.tolist() == [0, 5, 6]
    assert step.context_lens.tolist() == [20, 18]
    assert step.logit_indices.tolist() == [2, 3, 4, 5]


@pytest.fixture(scope="module", params=["llama", "gemma3", "int4-g32-asym as int8"])
def two(request: pytest.FixtureRequest) -> tuple[LLM, LLM]:
    """A runtime without guesses, and one with."""
    name, _, activations = request.param.partition(" as ")
    opened: Model = model(name) if not activations else quantized("llama", lambda _: name)[0]
    made = [LLM(opened, activations=activations or "fp", num_blocks=60, kv_cache="int8" if activations else "fp32", num_speculative_tokens=n) for n in (0, 8)]
    return made[0], made[1]


def _run(engine: Engine, given: list[list[int]], params: list[SamplingParams], cancel: int | None = None) -> tuple[list[list[int]], int]:
    """Tokens of all requests, and the number of steps; `cancel`: this one, after four steps."""
    requests = [engine.add(p, s) for p, s in zip(given, params, strict=True)]
    came: list[list[int]] = [[] for _ in requests]
    steps = 0
    while engine.busy():
        for sequence, token in engine.step():
            came[sequence.id].append(token)
        steps += 1
        if cancel is not None and steps == 4:
            engine.cancel(requests[cancel])
    assert came == [r.generated for r in requests]
    assert not engine._lookups
    assert engine.scheduler.pool.num_used == 0
    return came, steps


def _told(monkeypatch: pytest.MonkeyPatch, given: list[list[int]], plain: list[list[int]]) -> None:
    """Guesses by somebody who knows what comes, up to a place where they are wrong: random models seldom repeat themselves."""
    rng, whole = random.Random(7), [p + c for p, c in zip(given, plain, strict=True)]

    def guess(_: PromptLookup, tokens: list[int], most: int, *, sure: bool) -> list[int]:
        truth = next(w for w in whole if w[: len(tokens)] == tokens)
        told = [t if rng.random() < 0.8 else (t + 1) % 384 for t in truth[len(tokens) :][: rng.randint(0, 8)]]
        return told[:most]

    monkeypatch.setattr(PromptLookup, "guess", guess)


GIVEN = prompts(9, 40, seed=3)


def _params(temperature: float = 0.0) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=40 + 3 * i, temperature=temperature, top_k=3, seed=i, ignore_eos=True) for i in range(len(GIVEN))]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_tokens_are_the_same_in_fewer_steps(two: tuple[LLM, LLM], temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, steps = _run(two[0].engine(), GIVEN, _params(temperature))
    assert _run(two[1].engine(), GIVEN, _params(temperature))[0] == plain
    _told(monkeypatch, GIVEN, plain)
    guessed, fewer = _run(two[1].engine(), GIVEN, _params(temperature))
    assert guessed == plain
    assert fewer < 0.7 * steps


def test_a_model_that_repeats_itself_takes_fewer_steps() -> None:
    llm = LLM(model("gemma3"))
    (plain, steps), (guessed, fewer) = (_run(llm.engine(speculate=s), GIVEN, _params()) for s in (False, True))
    assert guessed == plain
    assert fewer < 0.6 * steps


def test_outputs_end_where_they_end_without_guesses(two: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    free = two[0].generate(GIVEN, _params())
    params = [SamplingParams(max_tokens=60, stop_token_ids=(o.token_ids[20 + i],)) for i, o in enumerate(free[:4])]
    params += [SamplingParams(max_tokens=60, ignore_eos=True, stop=(o.text[40 + i : 44 + i],)) for i, o in enumerate(free[4:])]
    plain = two[0].generate(GIVEN, params)
    assert {o.finish_reason for o in plain} == {"stop"}
    _told(monkeypatch, GIVEN, [o.token_ids + f.token_ids[len(o.token_ids) :] for o, f in zip(plain, free, strict=True)])
    assert two[1].generate(GIVEN, params) == plain


@pytest.mark.parametrize(("blocks", "budget"), [(8, 40), (11, 9), (60, 1), (60, 12)])
def test_a_pool_or_a_step_without_room_for_guesses_changes_no_token(two: tuple[LLM, LLM], blocks: int, budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = _run(two[0].engine(), GIVEN, _params())
    _told(monkeypatch, GIVEN, plain)
    engine = two[1].engine()
    engine.scheduler = Scheduler(BlockPool(blocks), 16, 32, budget)
    assert _run(engine, GIVEN, _params())[0] == plain


def test_a_cancelled_request_leaves_no_guess(two: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    plain, _ = _run(two[0].engine(), GIVEN, _params())
    _told(monkeypatch, GIVEN, plain)
    kept = _run(two[1].engine(prefix_cache=False), GIVEN, _params(), cancel=2)[0]
    assert [k for i, k in enumerate(kept) if i != 2] == [p for i, p in enumerate(plain) if i != 2]
    assert kept[2] == plain[2][: len(kept[2])] != plain[2]


def test_after_a_step_that_failed_its_guesses_hold_no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(model("llama"), num_blocks=8, threads=1, num_speculative_tokens=40)
    engine = llm.engine()
    sequence = engine.add([5, 6, 7], SamplingParams(max_tokens=40, ignore_eos=True))
    engine.step()

    def failing(*_: object) -> list[int]:
        raise RuntimeError("once")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "_guess", lambda sequence, most, rows: [1] * 30)
        patch.setattr(llm.runner, "choose", failing)
        with pytest.raises(RuntimeError, match="once"):
            engine.step()
        assert len(sequence.block_table) == 3
    monkeypatch.setattr(engine, "_guess", lambda sequence, most, rows: [])
    engine.step()
    assert len(sequence.block_table) == 1


def test_guesses_are_refused_where_rows_move_each_others_bits() -> None:
    with pytest.raises(UnsupportedError, match="num_speculative_tokens is -1; it must be at least 0"):
        LLM(model("llama"), num_speculative_tokens=-1)
    by_batch = quantized("llama", lambda _: "int8-channel-sym+int8-tensor")[0]  # rounds activations by all rows of a step
    with pytest.raises(UnsupportedError, match="native kernels on a CPU"):
        LLM(by_batch, num_speculative_tokens=4)
    assert LLM(by_batch, num_speculative_tokens=0).engine()._most_guesses == LLM(by_batch).engine()._most_guesses == 0


def test_guesses_are_on_where_they_change_nothing() -> None:
    llm = LLM(model("llama"))
    assert (llm.engine()._most_guesses, llm.engine(speculate=False)._most_guesses) == (8, 0)
