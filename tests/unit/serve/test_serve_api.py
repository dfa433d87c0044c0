"""The server over HTTP, asked by OpenAI's own client: answers are the runtime's, streamed or whole, and what it does not do is refused."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
import tiny

from qforge.errors import MissingCapabilityError
from qforge.runtime import LLM, SamplingParams, prompts
from qforge.runtime.engine import Engine
from qforge.runtime.sequence import Sequence
from qforge.serve import starlette_app as application
from qforge.serve import uvicorn_server as listening
from qforge.serve.choice import Choice
from qforge.serve.starlette_app import Server
from qforge.serve.uvicorn_server import bind, server_of
from qforge.serve.worker import Piece

MESSAGES = [{"role": "user", "content": "The miller"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make(tmp_path_factory.mktemp("serve") / "tiny", layers=2)


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[str]:
    with running(LLM(str(folder), max_num_seqs=4)) as url:
        yield url


class running:
    """A server in a thread, on a port that is free."""

    def __init__(self, llm: LLM, key: bytes | None = None) -> None:
        self.app, self.socket = Server(llm, "tiny", key=key), bind("127.0.0.1", 0)
        self.server = server_of(self.app.app, self.app.stop)
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.socket]})

    def __enter__(self) -> str:
        self.socket.listen()
        self.thread.start()
        return f"http://127.0.0.1:{self.socket.getsockname()[1]}"

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()


@pytest.fixture
def client(served: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def alone(folder: Path) -> LLM:
    return LLM(str(folder))


def test_a_completion_is_what_the_runtime_gives(client: openai.OpenAI, alone: LLM) -> None:
    (want,) = alone.generate(["The miller had"], SamplingParams(max_tokens=16))
    got = client.completions.create(model="tiny", prompt="The miller had", temperature=0)
    assert (got.choices[0].text, got.choices[0].finish_reason) == (want.text, "length")
    assert got.usage is not None
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (len(want.prompt_token_ids), 16)
    drawn = client.completions.create(model="tiny", prompt=want.prompt_token_ids, temperature=0.9, seed=5, max_tokens=9, extra_body={"top_k": 30, "min_p": 0.01})
    (want,) = alone.generate([want.prompt_token_ids], SamplingParams(max_tokens=9, temperature=0.9, seed=5, top_k=30, min_p=0.01))
    assert drawn.choices[0].text == want.text


def test_a_chat_goes_through_the_models_template(client: openai.OpenAI, alone: LLM) -> None:
    (want,) = alone.generate([MESSAGES], SamplingParams(max_tokens=12))
    got = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_completion_tokens=12)  # type: ignore[arg-type]
    assert got.choices[0].message.content == want.text
    parts = [{"role": "user", "content": [{"type": "text", "text": "The "}, {"type": "text", "text": "miller"}]}]
    assert client.chat.completions.create(model="tiny", messages=parts, temperature=0, max_tokens=12).choices[0].message.content == want.text  # type: ignore[arg-type]


def test_a_stream_is_the_same_text_piece_by_piece(client: openai.OpenAI, alone: LLM) -> None:
    (want,) = alone.generate(["A sack of"], SamplingParams(max_tokens=40))
    events = list(client.completions.create(model="tiny", prompt="A sack of", temperature=0, max_tokens=40, stream=True, stream_options={"include_usage": True}))
    assert "".join(e.choices[0].text for e in events if e.choices) == want.text
    assert len(events) > 5
    assert [e.choices[0].finish_reason for e in events if e.choices][-1] == "length"
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == 40
    (chat,) = alone.generate([MESSAGES], SamplingParams(max_tokens=20))
    chunks = list(client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_tokens=20, stream=True))  # type: ignore[call-overload]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == chat.text


def test_several_prompts_have_several_choices_each_in_order(client: openai.OpenAI, alone: LLM) -> None:
    prompts = ["One", "Two more", "Three of them"]
    got = client.completions.create(model="tiny", prompt=prompts, n=2, temperature=0.8, seed=3, max_tokens=7)
    want = [alone.generate([p], SamplingParams(max_tokens=7, temperature=0.8, seed=seed))[0].text for p in prompts for seed in (3, 4)]
    assert [c.text for c in got.choices] == want
    assert [c.index for c in got.choices] == list(range(6))
    assert got.usage is not None
    assert got.usage.prompt_tokens == sum(len(alone.tokenize(p)[1]) for p in prompts)
    streamed = [""] * 6
    how = {"stream": True, "stream_options": {"include_usage": True}}
    for event in client.completions.create(model="tiny", prompt=prompts, n=2, temperature=0.8, seed=3, max_tokens=7, **how):  # type: ignore[call-overload]
        for choice in event.choices:
            streamed[choice.index] += choice.text
    assert streamed == want
    assert event.usage == got.usage


def test_logprobs_are_the_runtimes_with_the_tokens_texts(client: openai.OpenAI, alone: LLM) -> None:
    (want,) = alone.generate(["The miller had"], SamplingParams(max_tokens=12, logprobs=3, prompt_logprobs=3))
    assert want.logprobs is not None
    assert want.prompt_logprobs is not None
    decode = alone.tokenizer.decode
    how = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    for echo in (False, True):
        got = client.completions.create(model="tiny", prompt="The miller had", temperature=0, max_tokens=12, logprobs=3, echo=echo)
        found = got.choices[0].logprobs
        assert found is not None
        told = [*want.prompt_logprobs, *want.logprobs] if echo else want.logprobs
        assert found.token_logprobs == [None if t is None else t.logprob for t in told]
        for spelled, one in zip(found.top_logprobs or (), told, strict=True):
            assert (spelled is None) == (one is None)
            if one is not None:  # of tokens with the same text, which are bytes here, the most likely is told
                assert max(spelled.values()) == one.top[0][1]
                assert set(spelled.values()) <= {p for _, p in one.top} | {one.logprob}
                assert len(spelled) == len({decode([t], **how) for t, _ in one.top} | {decode([one.token], **how)})
        assert got.choices[0].text == ("The miller had" if echo else "") + want.text
        ids = want.prompt_token_ids * echo + want.token_ids
        whole = decode(want.prompt_token_ids + want.token_ids, **how)
        whole = whole if echo else whole[len(decode(want.prompt_token_ids, **how)) :]
        assert "".join(found.tokens or ()).replace("\ufffd", "") == whole.replace("\ufffd", "")
        assert found.text_offset == [sum(map(len, (found.tokens or ())[:i])) for i in range(len(ids))]
        events = client.completions.create(model="tiny", prompt="The miller had", temperature=0, max_tokens=12, logprobs=3, echo=echo, stream=True)
        parts = [e.choices[0] for e in events]
        assert "".join(p.text for p in parts) == got.choices[0].text
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [one for p in parts if p.logprobs for one in getattr(p.logprobs, name)] == getattr(found, name)


def test_an_event_of_all_of_a_prompts_tokens_is_made_beside_the_loop(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_prompt: list[threading.Thread] = []
    completion = Choice.completion

    def told(self: Choice, piece: Piece) -> dict[str, list[object]] | None:
        if piece.prompt_logprobs is not None:
            of_prompt.append(threading.current_thread())
        return completion(self, piece)

    monkeypatch.setattr(Choice, "completion", told)
    server = running(LLM(str(folder)))
    with server as url:
        for stream in (False, True):
            body = {"prompt": "The miller had", "max_tokens": 3, "echo": True, "logprobs": 1, "stream": stream}
            assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
    assert len(of_prompt) == 2
    assert server.thread not in of_prompt


def test_an_echo_without_logprobs_is_the_prompt_as_it_was_or_reads(client: openai.OpenAI, alone: LLM) -> None:
    (want,) = alone.generate(["The miller had"], SamplingParams(max_tokens=5))
    for prompt in ("The miller had", want.prompt_token_ids):
        got = client.completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=5, echo=True, n=2)
        assert [(c.text, c.logprobs) for c in got.choices] == [("The miller had" + want.text, None)] * 2


def test_a_chat_tells_logprobs_and_the_bytes_of_tokens(client: openai.OpenAI, alone: LLM) -> None:
    (want,) = alone.generate([MESSAGES], SamplingParams(max_tokens=12, logprobs=2))
    assert want.logprobs is not None
    got = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_tokens=12, logprobs=True, top_logprobs=2)  # type: ignore[arg-type]
    assert got.choices[0].logprobs is not None
    content = got.choices[0].logprobs.content or []
    assert [(c.logprob, [t.logprob for t in c.top_logprobs]) for c in content] == [(t.logprob, [p for _, p in t.top]) for t in want.logprobs]
    assert all(c.bytes is None if "\ufffd" in c.token else bytes(c.bytes or ()).decode() == c.token for c in content)
    whole = alone.tokenizer.decode(want.token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert "".join(c.token for c in content).replace("\ufffd", "") == whole.replace("\ufffd", "")
    chunks = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0, max_tokens=12, logprobs=True, top_logprobs=2, stream=True)  # type: ignore[call-overload]
    assert [one for c in chunks if c.choices[0].logprobs for one in c.choices[0].logprobs.content] == content


def test_a_chat_without_max_tokens_takes_what_room_there_is(folder: Path) -> None:
    with running(LLM(str(folder), num_blocks=4)) as url:
        answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": MESSAGES, "temperature": 0, "ignore_eos": True}, timeout=60).json()
        assert (answer["usage"]["total_tokens"], answer["choices"][0]["finish_reason"]) == (64, "length")
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["max_model_len"] == 64
        long = httpx.post(f"{url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "The miller " * 100}]})
        assert long.status_code == 400


def test_a_stop_string_ends_a_text_and_is_no_part_of_it(client: openai.OpenAI, alone: LLM) -> None:
    (whole,) = alone.generate(["The miller had"], SamplingParams(max_tokens=30))
    stop = whole.text[5:8]
    got = client.completions.create(model="tiny", prompt="The miller had", temperature=0, max_tokens=30, stop=[stop])
    assert (got.choices[0].text, got.choices[0].finish_reason) == (whole.text[: whole.text.index(stop)], "stop")


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("completions", {"prompt": "a", "model": "other"}, 404, "'other' is not served here; 'tiny' is"),
        ("completions", {"prompt": ""}, 400, "empty"),
        ("completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens is 0; it must be at least 1"),
        ("completions", {"prompt": "a", "temperature": -1}, 400, "temperature is -1"),
        ("completions", {"prompt": "a", "temperature": "hot"}, 400, "temperature: Input should be a valid number"),
        ("completions", {"prompt": [1, 2, 10**6]}, 400, "not in the model's vocabulary"),
        ("completions", {"prompt": [5] * 300}, 400, "leaves no room in the model's context"),
        ("completions", {"max_tokens": 3}, 400, "prompt: Field required"),
        ("completions", {"prompt": "a", "logprobs": 21}, 400, "logprobs is 21; it must be from 0 to 20"),
        ("chat/completions", {"messages": MESSAGES, "top_logprobs": 2}, 400, "`top_logprobs` are of `logprobs`, and these are not asked for"),
        ("completions", {"prompt": "a", "presence_penalty": 0.5}, 400, "`presence_penalty` is not supported here, only 0"),
        ("chat/completions", {"messages": MESSAGES, "echo": True}, 400, "`echo` is not known here"),
        ("completions", {"prompt": "a", "beams": 2}, 400, "`beams` is not known here"),
        ("completions", {"prompt": "a", "n": 0}, 400, "n: Input should be greater than or equal to 1"),
        ("chat/completions", {"messages": []}, 400, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, 400, "a part that is not text alone"),
        ("chat/completions", {"messages": [{"role": "user", "content": None}]}, 400, "a message of 'user' has no content"),
        ("chat/completions", {"messages": MESSAGES, "tools": [{"type": "function"}]}, 400, "`tools` is not supported here"),
        ("chat/completions", {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]}, 400, "tool_calls"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]}]}, 400, "not text alone"),
        ("completions", {"prompt": ["a", ""]}, 400, "prompt 2 of 2: it is empty"),
        ("completions", {"prompt": "a", "top_k": -7}, 400, "top_k is -7"),
        ("completions", {"prompt": "a", "stream_options": {"include_usage": True}}, 400, "`stream` is not asked for"),
        ("completions", {"prompt": "a", "stream": True, "stream_options": {"continuous_usage_stats": True}}, 400, "`stream_options.continuous_usage_stats` is not known here"),
        (
            "completions",
            {"prompt": "a", "stream": True, "stream_options": {"include_obfuscation": True}},
            400,
            "`stream_options.include_obfuscation` is not supported here, only false",
        ),
        ("completions", {"prompt": "a", "stop": ["x"] * 17}, 400, "`stop` has 17 strings"),
        ("completions", {"prompt": "a", "stop": "x" * 257}, 400, "at most 16 of at most 256 characters"),
        ("completions", {"prompt": [[5]] * 600, "n": 2}, 400, "1,200 continuations are asked for at once"),
        ("completions", {"prompt": [1, "a"] * 1000}, 400, "prompt: Input should be"),
        ("embeddings", {"input": "a"}, 404, "Not Found"),
    ],
)
def test_what_is_not_done_is_refused_by_name(served: str, path: str, body: dict[str, object], status: int, says: str) -> None:
    answer = httpx.post(f"{served}/v1/{path}", json=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert says in error["message"]


@pytest.mark.parametrize(
    ("messages", "says"), [([{"role": "user", "content": ""}] * 257, "257 messages of 1,028"), ([{"role": "user", "content": "a" * 33_000}] * 2, "2 messages of 66,008")]
)
def test_more_messages_than_fit_are_refused_before_a_template_goes_over_them(served: str, monkeypatch: pytest.MonkeyPatch, messages: list[dict[str, str]], says: str) -> None:
    asked: list[object] = []
    monkeypatch.setattr(prompts, "apply_template", lambda messages, *_, **__: asked.append(messages) or "a")
    answer = httpx.post(f"{served}/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
    assert (answer.status_code, asked) == (400, [])
    assert f"it has {says} characters; the model's context of 256 tokens holds fewer" in answer.json()["error"]["message"]
    assert httpx.post(f"{served}/v1/chat/completions", json={"messages": messages[:1], "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b'{"prompt": "\\ud800"}'])
def test_a_body_that_is_none_is_refused(served: str, body: bytes) -> None:
    assert httpx.post(f"{served}/v1/completions", content=body).status_code == 400


def test_fields_that_ask_for_nothing_are_taken(client: openai.OpenAI) -> None:
    idle = {"logprobs": None, "presence_penalty": 0, "frequency_penalty": 0.0, "best_of": 1, "echo": False, "user": "me", "logit_bias": {}, "reasoning_effort": None}
    got = client.completions.create(model="tiny", prompt="a", max_tokens=2, extra_body=idle)
    assert got.choices[0].finish_reason == "length"
    chat = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=9, max_completion_tokens=3, extra_body={"ignore_eos": True, "top_k": -1})  # type: ignore[arg-type]
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 3  # the newer name's
    for options in ({"include_usage": None, "include_obfuscation": None}, {"include_obfuscation": False}):
        events = list(client.completions.create(model="tiny", prompt="a", max_tokens=2, stream=True, extra_body={"stream_options": options}))
        assert [e.usage for e in events] == [None] * len(events)


def test_a_method_that_is_none_of_a_routes_is_told_which_are(served: str) -> None:
    answer = httpx.get(f"{served}/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


def test_a_list_with_one_prompt_that_does_not_fit_is_refused_whole(served: str) -> None:
    before = _figures(served)
    assert httpx.post(f"{served}/v1/completions", json={"prompt": [[5]] * 9 + [[5] * 300], "max_tokens": 200}).status_code == 400
    after = _figures(served)
    assert after['qforge_requests_total{reason="refused"}'] == before.get('qforge_requests_total{reason="refused"}', 0) + 1
    assert after.get('qforge_requests_total{reason="cancelled"}') == before.get('qforge_requests_total{reason="cancelled"}')
    assert after["qforge_prompt_tokens_total"] == before["qforge_prompt_tokens_total"]
    assert (after["qforge_requests_running"], after["qforge_requests_waiting"]) == (0, 0)


def test_a_text_that_cannot_be_decoded_is_an_error_of_one_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, cancel = Engine.text, Engine.cancel

    def broken(self: Engine, sequence: Sequence) -> str:
        if sequence.params.seed == 13:
            raise ValueError("no text")
        return text(self, sequence)

    def broken_too(self: Engine, sequence: Sequence) -> None:
        cancel(self, sequence)
        broken(self, sequence)

    monkeypatch.setattr(Engine, "text", broken)
    monkeypatch.setattr(Engine, "cancel", broken_too)
    with running(LLM(str(folder))) as url:
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 9, "seed": 13, "ignore_eos": True})
        assert (answer.status_code, answer.json()["error"]["message"]) == (500, "ValueError: no text")
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 3, "seed": 1}).status_code == 200
        assert httpx.get(f"{url}/health").status_code == 200


def test_models_health_and_metrics(served: str, client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    assert httpx.get(f"{served}/health").status_code == 200
    before = _figures(served)
    client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=4, temperature=0, extra_body={"ignore_eos": True})
    after = _figures(served)
    grown = {name: after[name] - before.get(name, 0) for name in after}
    assert (grown['qforge_requests_total{reason="length"}'], grown["qforge_prompt_tokens_total"], grown["qforge_generated_tokens_total"]) == (1, 3, 4)
    assert (grown["qforge_time_to_first_token_seconds_count"], grown["qforge_time_per_output_token_seconds_count"]) == (1, 1)
    assert (after["qforge_requests_running"], after["qforge_requests_waiting"]) == (0, 0)


def test_a_server_with_a_key_answers_who_sends_it(folder: Path) -> None:
    with running(LLM(str(folder)), b"sk-qforge") as url:

        def client(key: str) -> openai.OpenAI:
            return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)

        assert client("sk-qforge").completions.create(model="tiny", prompt="The", max_tokens=2).usage is not None
        assert [m.id for m in client("sk-qforge").models.list()] == ["tiny"]
        for wrong in ("sk-qforg", "sk-qforge2"):
            with pytest.raises(openai.AuthenticationError, match="key is missing or another"):
                client(wrong).chat.completions.create(model="tiny", messages=MESSAGES)  # type: ignore[arg-type]
        assert httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer sk-qf\u00f6rge".encode()}).status_code == 401
        for path in ("models", "models/tiny"):
            assert httpx.get(f"{url}/v1/{path}").status_code == 401
            assert httpx.get(f"{url}/v1/{path}", headers={"Authorization": "Basic sk-qforge"}).status_code == 401
        for path in ("completions", "chat/completions"):
            answer = httpx.post(f"{url}/v1/{path}", content=b"{")
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
            assert httpx.post(f"{url}/v1/{path}", content=b"{", headers={"Authorization": "bearer  sk-qforge"}).status_code == 400
        assert httpx.get(f"{url}/health").status_code == httpx.get(f"{url}/metrics").status_code == 200


def test_seeds_below_zero_and_turns_without_content_are_taken(client: openai.OpenAI, alone: LLM) -> None:
    how = {"model": "tiny", "prompt": "a", "temperature": 1.0, "max_tokens": 9}
    drawn = [client.completions.create(**how, seed=seed).choices[0].text for seed in (-1, -1, -2)]  # type: ignore[call-overload]
    assert drawn[0] == drawn[1] != drawn[2]
    turns = [*MESSAGES, {"role": "assistant", "content": None}, *MESSAGES]
    (want,) = alone.generate([[*MESSAGES, {"role": "assistant", "content": ""}, *MESSAGES]], SamplingParams(max_tokens=9))
    assert client.chat.completions.create(model="tiny", messages=turns, temperature=0, max_tokens=9).choices[0].message.content == want.text  # type: ignore[arg-type]


def test_what_was_asked_before_is_in_the_cache_and_counted(served: str, client: openai.OpenAI, alone: LLM) -> None:
    prompt = list(range(40, 80))
    before = _figures(served)
    (want,) = alone.generate([prompt], SamplingParams(max_tokens=3))
    for cached in (0, 32):
        got = client.completions.create(model="tiny", prompt=prompt, max_tokens=3, temperature=0, n=2)
        assert got.usage is not None
        assert got.usage.prompt_tokens_details is not None
        assert (got.usage.prompt_tokens, got.usage.prompt_tokens_details.cached_tokens) == (40, cached)
        assert {c.text for c in got.choices} == {want.text}
    after = _figures(served)
    assert after["qforge_cached_prompt_tokens_total"] - before["qforge_cached_prompt_tokens_total"] == 3 * 32
    assert after["qforge_prompt_tokens_total"] - before["qforge_prompt_tokens_total"] == 4 * 40 - 3 * 32


def _figures(served: str) -> dict[str, float]:
    lines = [line for line in httpx.get(f"{served}/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def _until(condition: object, seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_client_that_leaves_stops_what_was_computed_for_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "_LOOK_S", 0.05)
    llm = LLM(str(folder), max_num_seqs=2)
    step = llm.runner.choose
    monkeypatch.setattr(llm.runner, "choose", lambda *given: (time.sleep(0.05), step(*given))[1])
    with running(llm) as url:
        body = {"prompt": "a", "max_tokens": 200, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as answer:
            next(answer.iter_lines())
        _until(lambda: _figures(url).get('qforge_requests_total{reason="cancelled"}') == 1)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{url}/v1/completions", json={**body, "stream": False}, timeout=0.5)
        _until(lambda: _figures(url)['qforge_requests_total{reason="cancelled"}'] == 2)
        assert _figures(url)["qforge_requests_running"] == 0
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 2}).status_code == 200


def test_requests_of_many_clients_are_one_batch_and_each_has_its_own_text(folder: Path, alone: LLM) -> None:
    llm = LLM(str(folder), max_num_seqs=4)
    sizes: list[int] = []
    choose = llm.runner.choose
    llm.runner.choose = lambda step, draws: (sizes.append(len(draws)), time.sleep(0.01), choose(step, draws))[2]  # type: ignore[method-assign]
    prompts = [f"Sack number {i}" for i in range(9)]
    found: dict[str, str] = {}
    with running(llm) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

        def ask(prompt: str) -> None:
            found[prompt] = client.completions.create(model="tiny", prompt=prompt, temperature=0, max_tokens=20).choices[0].text

        threads = [threading.Thread(target=ask, args=(p,)) for p in prompts]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
    assert found == {p: alone.generate([p], SamplingParams(max_tokens=20))[0].text for p in prompts}
    assert max(sizes) >= 4


def test_a_server_that_ends_tells_those_whose_requests_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "_GRACE_S", 1)
    llm = LLM(str(folder))
    choose = llm.runner.choose
    llm.runner.choose = lambda step, draws: (time.sleep(0.05), choose(step, draws))[1]  # type: ignore[method-assign]
    answers: dict[bool, httpx.Response] = {}

    def ask(url: str, stream: bool) -> None:
        answers[stream] = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 230, "ignore_eos": True, "stream": stream}, timeout=60)

    server = running(llm)
    with server as url:
        threads = [threading.Thread(target=ask, args=(url, stream)) for stream in (False, True)]
        for thread in threads:
            thread.start()
        _until(lambda: server.app._worker.counts()[0] == 2)
    for thread in threads:
        thread.join(30)
    assert server.app._worker.counts() == (0, 0)
    assert (answers[False].status_code, answers[False].json()["error"]["message"]) == (503, "the server is ending")
    assert "the server is ending" in answers[True].text.strip().split("\n\n")[-1]


def test_logits_that_are_not_finite_are_a_servers_error_of_one_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(str(folder))
    choose = llm.runner.choose
    llm.runner.choose = lambda step, draws: [-1 if d.params.seed == 13 else t for d, t in zip(draws, choose(step, draws), strict=True)]  # type: ignore[method-assign]
    with running(llm) as url:
        body = {"prompt": "a", "max_tokens": 3, "seed": 13}
        answer = httpx.post(f"{url}/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
        assert "not finite" in answer.json()["error"]["message"]
        events = httpx.post(f"{url}/v1/completions", json={**body, "stream": True}).text.strip().split("\n\n")
        assert "not finite" in json.loads(events[-1].removeprefix("data: "))["error"]["message"]
        assert httpx.post(f"{url}/v1/completions", json={**body, "seed": 1}).status_code == 200


def test_a_runner_that_is_gone_ends_the_computing_and_health_says_so(folder: Path) -> None:
    llm = LLM(str(folder))
    steps: list[object] = []

    def gone(step: object, draws: object) -> list[int]:
        time.sleep(0.2)
        steps.append(step)
        raise MissingCapabilityError("process 2 of 2 that share the model has ended")

    server = running(llm)
    with server as url:
        body = {"prompt": "a", "max_tokens": 3}
        assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
        llm.runner.choose = gone  # type: ignore[method-assign]
        answers = [httpx.post(f"{url}/v1/completions", json=body | {"stream": stream}) for stream in (False, True)]
        assert [a.status_code for a in answers] == [500, 503]
        assert [a.json()["error"]["message"] for a in answers] == ["process 2 of 2 that share the model has ended"] * 2
        assert httpx.get(f"{url}/health").status_code == 503
        assert (len(steps), server.app._worker.counts()) == (1, (0, 0))
        server.app._worker._thread.join(5)
        assert not server.app._worker._thread.is_alive()
