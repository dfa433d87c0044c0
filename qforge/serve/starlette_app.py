"""The routes: OpenAI's completions and chat completions, models, health and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hmac
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from qforge.errors import DataError, QforgeError
from qforge.runtime.sequence import SamplingParams
from qforge.serve.asked import Asked, Chat, Completion, read
from qforge.serve.choice import Choice
from qforge.serve.prometheus_client_metrics import Metrics
from qforge.serve.worker import ENDING, MOST_WAITING, Overloaded, Piece, Worker

if TYPE_CHECKING:
    from qforge.runtime.llm import LLM

_LOOK_S = 0.5  # between looks whether a client is still there
_MOST_BYTES = 8 << 20  # of a body
Answer = Callable[[Request], Awaitable[Response]]


class Refused(Exception):
    """A request that gets another answer than it asked for."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


class Failed(Refused):
    """One that was begun and came to no end; it is counted as that."""


class Server:
    """The application over one model.

    Args:
        name: by which clients call it.
        other: another name that they may use.
        key: what they have to send for what is below /v1 (`Authorization: Bearer KEY`).
    """

    def __init__(self, llm: LLM, name: str, other: str | None = None, *, key: bytes | None = None) -> None:
        self._llm, self._name, self._names, self._began = llm, name, (name, other), int(time.time())
        self._key = key
        self._loop: asyncio.AbstractEventLoop | None = None
        self._worker = Worker(llm.engine(), self._call, lambda ticket, reason: self._metrics.ended(ticket, reason))
        self._metrics = Metrics(self._worker.counts)
        routes = [
            Route("/v1/completions", self._with_key(self._completions), methods=["POST"]),
            Route("/v1/chat/completions", self._with_key(self._chat), methods=["POST"]),
            Route("/v1/models", self._with_key(self._models)),
            Route("/v1/models/{name:path}", self._with_key(self._model)),
            Route("/health", self._health),
            Route("/metrics", self._figures),
        ]
        answers: dict[Any, Any] = {QforgeError: self._wrong, Refused: self._refused, HTTPException: _not_found, ClientDisconnect: _gone}
        self.app = Starlette(routes=routes, lifespan=self._lifespan, exception_handlers=answers)

    def stop(self) -> None:
        """End what is computed, each request with an error that says so."""
        self._worker.stop()

    @contextlib.asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._loop = asyncio.get_running_loop()
        self._worker.start()
        try:
            yield
        finally:
            await run_in_threadpool(self._worker.stop)

    def _call(self, deliveries: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server is ending
            assert self._loop is not None
            self._loop.call_soon_threadsafe(deliveries)

    def _with_key(self, answer: Answer) -> Answer:
        """The same for those who have the key, before anything else is read of what they send."""

        async def run(request: Request) -> Response:
            given = request.headers.get("authorization", "").partition(" ")
            if self._key is not None and not (given[0].lower() == "bearer" and hmac.compare_digest(given[2].strip().encode(), self._key)):
                raise Refused(HTTPStatus.UNAUTHORIZED, "the server's key is missing or another; send it as `Authorization: Bearer KEY`")
            return await answer(request)

        return run

    async def _completions(self, request: Request) -> Response:
        began, asked = time.monotonic(), await self._read(request, Completion)
        prompts: list[Any] = list(asked.prompts())
        return await self._answer(request, asked, prompts, _Completions(), began, echo=bool(asked.echo))

    async def _chat(self, request: Request) -> Response:
        began, asked = time.monotonic(), await self._read(request, Chat)
        messages = [message.plain() for message in asked.messages]
        return await self._answer(request, asked, [messages], _Chats(), began)

    async def _read(self, request: Request, kind: type[Any]) -> Any:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > _MOST_BYTES:
                raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has more than {_MOST_BYTES:,} bytes")
        asked = await run_in_threadpool(read, kind, bytes(body))
        if asked.model is not None and asked.model not in self._names:
            raise Refused(HTTPStatus.NOT_FOUND, f"the model {asked.model!r} is not served here; {self._name!r} is")
        return asked

    async def _answer(self, request: Request, asked: Asked, prompts: list[Any], shape: _Shape, began: float, *, echo: bool = False) -> Response:
        params, pieces = asked.sampling(), _Pieces()
        choices = await run_in_threadpool(self._submit, prompts, params, pieces, began, echo, not asked.stream)
        head = {"id": f"{shape.prefix}-{uuid.uuid4().hex}", "object": shape.kind, "created": int(time.time()), "model": self._name}
        if asked.stream:
            events = self._events(choices, pieces, head | {"object": shape.part_kind}, shape, len(params) if asked.wants_usage else 0)
            return StreamingResponse(events, media_type="text/event-stream")
        with self._held(choices):
            found = await _whole(request, pieces, len(choices))
        told = await run_in_threadpool(lambda: [shape.whole(c, piece) for c, piece in zip(choices, found, strict=True)])
        return JSONResponse(head | {"choices": told, "usage": _usage(choices, len(params))})

    def _submit(self, prompts: list[Any], params: list[SamplingParams], pieces: _Pieces, began: float, echo: bool, whole: bool) -> list[Choice]:
        """Tokenize and queue; all of them or none."""
        if len(prompts) * len(params) > MOST_WAITING:
            raise DataError(f"{len(prompts) * len(params):,} continuations are asked for at once, and {MOST_WAITING:,} may wait; ask for fewer")
        read: list[tuple[str | None, list[int]]] = []
        for number, prompt in enumerate(prompts, 1):
            try:
                text, ids = self._llm.tokenize(prompt)
            except DataError as e:
                raise DataError(f"prompt {number} of {len(prompts)}: {e}" if len(prompts) > 1 else f"the prompt: {e}") from e
            read.append((None if not echo else self._llm.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False) if text is None else text, ids))
        asked = [(ids, one) for _, ids in read for one in params]
        tickets = self._worker.submit([(ids, one, functools.partial(_put, pieces, i)) for i, (ids, one) in enumerate(asked)], began, whole=whole)
        return [Choice(i, ticket, self._llm.tokenizer, read[i // len(params)][0]) for i, ticket in enumerate(tickets)]

    @contextlib.contextmanager
    def _held(self, choices: list[Choice]) -> Iterator[None]:
        """Whatever happens, nothing is computed for nobody."""
        try:
            yield
        finally:
            if any(c.ticket.sequence.finish_reason is None for c in choices):
                asyncio.get_running_loop().run_in_executor(None, self._cancel, choices)  # it may wait for a step, and the loop must not

    def _cancel(self, choices: list[Choice]) -> None:
        for choice in choices:
            self._worker.cancel(choice.ticket)

    async def _events(self, choices: list[Choice], pieces: _Pieces, head: dict[str, Any], shape: _Shape, usage: int) -> AsyncIterator[str]:
        """`usage`: choices of each prompt if tokens are to be counted at the end, else 0."""
        with self._held(choices):
            begin = [_event(head | {"choices": [first]}) for choice in choices for first in shape.first(choice.index)]
            if begin:
                yield "".join(begin)
            left = len(choices)
            while left:
                events: list[str] = []
                for index, piece in [await pieces.get(), *_ready(pieces)]:
                    choice = choices[index]
                    if piece.error is not None:
                        yield "".join([*events, _event(_error(_status(piece.error), piece.error))])
                        return
                    if piece.text or piece.finish_reason or piece.logprobs or choice.echo:
                        told = functools.partial(_part, head, shape, choice, piece)
                        events.append(told() if piece.prompt_logprobs is None else await run_in_threadpool(told))
                    left -= piece.finish_reason is not None
                if events:
                    yield "".join(events)
            end = [_event(head | {"choices": [], "usage": _usage(choices, usage)})] if usage else []
            yield "".join([*end, "data: [DONE]\n\n"])

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def _model(self, request: Request) -> Response:
        if request.path_params["name"] not in self._names:
            raise Refused(HTTPStatus.NOT_FOUND, f"the model {request.path_params['name']!r} is not served here; {self._name!r} is")
        return JSONResponse(self._described())

    def _described(self) -> dict[str, Any]:
        return {
            "id": self._name,
            "object": "model",
            "created": self._began,
            "owned_by": "qforge",
            "max_model_len": min(self._llm.max_context, self._llm.num_blocks * self._llm.block_size),
        }

    async def _health(self, request: Request) -> Response:
        if not self._worker.alive():
            raise Refused(HTTPStatus.SERVICE_UNAVAILABLE, "nothing is computed any more")
        return Response()

    async def _figures(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")

    async def _wrong(self, request: Request, error: Exception) -> Response:
        self._metrics.refused()
        status = HTTPStatus.SERVICE_UNAVAILABLE if isinstance(error, Overloaded) else HTTPStatus.BAD_REQUEST
        return JSONResponse(_error(status, str(error)), status)

    async def _refused(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, Refused)
        if not isinstance(error, Failed) and request.method == "POST":
            self._metrics.refused()
        headers = {"WWW-Authenticate": "Bearer"} if error.status == HTTPStatus.UNAUTHORIZED else None
        return JSONResponse(_error(error.status, str(error)), error.status, headers=headers)


class _Completions:
    """How an answer to a completion names its parts: whole choices, what a stream begins with, and choices of its events."""

    prefix, kind, part_kind = "cmpl", "text_completion", "text_completion"

    def whole(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        return self.part(choice, piece)

    def first(self, index: int) -> tuple[dict[str, Any], ...]:
        return ()

    def part(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        return {"index": choice.index, "text": choice.text(piece), "logprobs": choice.completion(piece), "finish_reason": piece.finish_reason}


class _Chats:
    """The same of a chat."""

    prefix, kind, part_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def whole(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        message = {"role": "assistant", "content": piece.text}
        return {"index": choice.index, "message": message, "logprobs": choice.chat(piece), "finish_reason": piece.finish_reason}

    def first(self, index: int) -> tuple[dict[str, Any], ...]:
        return ({"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None},)

    def part(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        delta = {"content": piece.text} if piece.text else {}
        return {"index": choice.index, "delta": delta, "logprobs": choice.chat(piece), "finish_reason": piece.finish_reason}


_Shape = _Completions | _Chats


_Pieces = asyncio.Queue[tuple[int, Piece]]  # of all choices of an answer, with their places in it


def _put(pieces: _Pieces, index: int, piece: Piece) -> None:
    pieces.put_nowait((index, piece))


def _ready(pieces: _Pieces) -> Iterator[tuple[int, Piece]]:
    """Those that are there already."""
    while not pieces.empty():
        yield pieces.get_nowait()


async def _whole(request: Request, pieces: _Pieces, count: int) -> list[Piece]:
    """The one piece of each choice.

    Raises:
        Failed: one of them has.
        ClientDisconnect: nobody waits for them.
    """
    found: dict[int, Piece] = {}
    while len(found) < count:
        try:
            async with asyncio.timeout(_LOOK_S):
                index, piece = await pieces.get()
        except TimeoutError:
            if await request.is_disconnected():
                raise ClientDisconnect from None
            continue
        if piece.error is not None:
            raise Failed(_status(piece.error), piece.error)
        found[index] = piece
    return [found[i] for i in range(count)]


def _usage(choices: list[Choice], each: int) -> dict[str, Any]:
    """Tokens of prompts, each of which has so many choices, and of what was generated."""
    prompts = [c.ticket.sequence for c in choices[::each]]
    prompt, cached = sum(s.num_prompt for s in prompts), sum(s.cached for s in prompts)
    generated = sum(c.ticket.tokens for c in choices)
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated, "prompt_tokens_details": {"cached_tokens": cached}}


def _part(head: dict[str, Any], shape: _Shape, choice: Choice, piece: Piece) -> str:
    return _event(head | {"choices": [shape.part(choice, piece)]})


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


def _status(problem: str) -> HTTPStatus:
    return HTTPStatus.SERVICE_UNAVAILABLE if problem == ENDING else HTTPStatus.INTERNAL_SERVER_ERROR


def _error(status: HTTPStatus, message: str) -> dict[str, Any]:
    kind = "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": int(status)}}


async def _not_found(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse(_error(HTTPStatus(error.status_code), f"{request.method} {request.url.path}: {error.detail}"), error.status_code, headers=error.headers)


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=HTTPStatus.BAD_REQUEST)  # nobody reads it
