"""Runs an HTTP request on the engine: submits its prompts, merges the outputs, sends the
response."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cairn.engine.fleet import Engine
from cairn.engine.messages import Delta
from cairn.engine.submission import Submission
from cairn.errors import BadRequest, CairnError, EngineDead
from cairn.obs.metrics import Track
from cairn.runner.media import PromptMedia
from cairn.server.protocol.common import CachedTokens, SamplingFields, StreamOptions, Usage
from cairn.server.protocol.explain import BadField
from cairn.server.sampling import field_named_in
from cairn.server.sse import DONE, EventStream, cancel_on_disconnect, event
from cairn.server.state import ServerState
from cairn.types import KvTransferParams, SamplingParams


class Part(Protocol):
    """New content of one choice."""

    @property
    def index(self) -> int:
        """Index of the choice."""


C = TypeVar("C", bound=Part)


class RequestFailed(CairnError):
    """The engine aborted one request.

    Args:
        message: why.
        status: HTTP status of the answer.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.http_status = status


@dataclass(frozen=True, slots=True)
class Work:
    """The prompts of one HTTP request, as the engine runs them.

    Attributes:
        prompts: token ids of each prompt. Output i of prompt p is choice `p * n + i`.
        params: sampling parameters of all prompts.
        priority: requests with smaller values are scheduled first.
        field: name of the request field that the prompts came from, for errors.
        media: images and videos of each prompt; empty for text.
        transfer: parameters of disaggregated prefill; only with a single prompt.
    """

    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    priority: int
    field: str
    media: Sequence[PromptMedia | None] = ()
    transfer: KvTransferParams | None = None


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """Fields that every chunk of a response repeats.

    Attributes:
        id: id of the response.
        created: seconds since the epoch.
        model: name of the served model.
    """

    id: str
    created: int
    model: str

    @classmethod
    def new(cls, prefix: str, state: ServerState) -> Self:
        """A head with a new id, at the current time."""
        return cls(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), state.model_name)

    @property
    def fields(self) -> dict[str, Any]:
        """The attributes by name."""
        return {"id": self.id, "created": self.created, "model": self.model}


class ResponseBuilder(Protocol[C]):
    """Builds the responses of an endpoint. Whole responses are joined from the parts of streams."""

    head: ResponseHead

    async def push(self, choice: int, delta: Delta) -> list[C]:
        """Convert a delta of the engine to parts of the response."""

    def over(self, choice: int) -> bool:
        """Whether the choice is complete although the engine still generates."""

    def chunk(self, parts: list[C], usage: Usage | msgspec.UnsetType | None) -> msgspec.Struct:
        """One event of a streamed response."""

    def whole(self, parts: list[list[C]], usage: Usage) -> msgspec.Struct:
        """The whole response, joined from the parts of each choice."""


class Generation:
    """The outputs of one HTTP request. A context manager, which cancels unfinished outputs on exit.

    Args:
        client: the engine, or its replicas.
        work: the prompts to run.
        request_id: id in the engine; prompts after the first append their index.

    Attributes:
        transfer: parameters for the decoding engine, in disaggregated prefill.
    """

    def __init__(self, client: Engine, work: Work, request_id: str) -> None:
        self._client = client
        self._work = work
        self._id = request_id
        self._submissions: list[Submission] = []
        self._open = ExitStack()
        self._generated = 0
        self._cached: dict[int, int] = {}
        self.transfer: KvTransferParams | None = None

    @property
    def choices(self) -> int:
        """Number of outputs."""
        return len(self._work.prompts) * self._work.params.n

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        prompt = sum(len(ids) for ids in self._work.prompts)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=self._generated,
            total_tokens=prompt + self._generated,
            prompt_tokens_details=CachedTokens(sum(self._cached.values())),
        )

    @property
    def reading(self) -> bytes | None:
        """An SSE comment with the progress of the prefill; None before it has begun."""
        read = sum(submission.read for submission in self._submissions)
        total = sum(len(ids) for ids in self._work.prompts)
        return b": read %d of %d tokens\n\n" % (read, total) if read else None

    def __enter__(self) -> Self:
        """Submit every prompt, or none.

        Raises:
            BadRequest, TooLong: the request can never be served.
            Busy: the queue is full.
            EngineDead: the engine has stopped.
        """
        work = self._work
        _, bound = self._client.load
        if self.choices > bound:
            raise BadField(
                "n" if len(work.prompts) == 1 else work.field,
                f"the request asks for {self.choices} outputs, but this server runs and queues "
                f"at most {bound}",
                "Send it in parts",
            )
        with ExitStack() as opened:
            for i, prompt in enumerate(work.prompts):
                self._submissions.append(opened.enter_context(self._submit(i, prompt)))
            self._open = opened.pop_all()
        return self

    def _submit(self, i: int, prompt: Sequence[int]) -> Submission:
        work = self._work
        name = f"{self._id}-{i}" if i else self._id
        try:
            media = work.media[i] if work.media else None
            return self._client.submit(
                prompt, work.params, work.priority, name, media, work.transfer
            )
        except BadRequest as error:
            error.param = field_named_in(error, SamplingFields) or work.field
            raise

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def count(self, choice: int, delta: Delta) -> None:
        """Add a delta to the usage."""
        self._generated += len(delta.token_ids)
        if delta.transfer is not None:
            self.transfer = delta.transfer
        if delta.cached_tokens is not None:
            self._cached.setdefault(choice // self._work.params.n, delta.cached_tokens)

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """Yield (choice, delta) of all outputs; the deltas of one output are in order.

        Raises CairnError when the engine fails on an output or aborts it.
        """
        async with aclosing(_merged(self._submissions)) as merged:
            async for prompt, delta in merged:
                if delta.finish_reason in ("error", "abort"):
                    raise _failure(delta)
                yield prompt * self._work.params.n + delta.index, delta


def _failure(delta: Delta) -> CairnError:
    if delta.finish_reason == "abort":
        return EngineDead("the server aborted the request", "It is shutting down; try again")
    message = delta.error or "the engine failed on this request"
    if delta.status == BadRequest.http_status:
        return BadRequest(message)
    return RequestFailed(message, delta.status)


async def _merged(
    submissions: Sequence[Submission],
) -> AsyncGenerator[tuple[int, Delta], None]:
    """Yield (index of the submission, delta), at most one delta per submission ahead of the
    consumer."""
    if len(submissions) == 1:
        async for delta in submissions[0]:
            yield 0, delta
        return
    queue: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue()
    taken = [asyncio.Event() for _ in submissions]

    async def pump(i: int, submission: AsyncIterator[Delta]) -> None:
        try:
            async for delta in submission:
                taken[i].clear()
                queue.put_nowait((i, delta))
                # Until then the submission joins further deltas into one.
                await taken[i].wait()
            queue.put_nowait(None)
        except Exception as error:  # noqa: BLE001 - raised again where the queue is read
            queue.put_nowait(error)

    pumps = [asyncio.create_task(pump(i, s)) for i, s in enumerate(submissions)]
    try:
        running = len(pumps)
        while running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
                taken[item[0]].set()
    finally:
        for task in pumps:
            task.cancel()


async def answer(
    request: Request,
    work: Work,
    builder: ResponseBuilder[C],
    track: Track,
    streaming: StreamOptions | None,
) -> Response:
    """Run the work on the engine and return the response.

    Args:
        request: the HTTP request.
        work: the prompts to run.
        builder: builds the response.
        track: records the request's metrics.
        streaming: how to stream; None for one whole response.

    Raises:
        CairnError: the work cannot be served or has failed. A stream sends later errors as events.
        ClientDisconnect: the client has disconnected; the work is cancelled.
    """
    state: ServerState = request.app.state.server
    generation = Generation(state.client, work, builder.head.id)
    if streaming is not None:
        events = _events(generation, builder, track, streaming)
        return EventStream(events, lambda: generation.reading)
    body = await cancel_on_disconnect(request.receive, _whole(generation, builder, track))
    return Response(body, media_type="application/json")


async def _whole(generation: Generation, builder: ResponseBuilder[C], track: Track) -> bytes:
    parts: dict[int, list[C]] = {}
    async with aclosing(parts_of(generation, builder, track)) as run:
        async for part in run:
            parts.setdefault(part.index, []).append(part)
    ordered = [parts[index] for index in sorted(parts)]
    whole = builder.whole(ordered, generation.usage)
    if generation.transfer is not None:
        whole = msgspec.structs.replace(whole, kv_transfer_params=generation.transfer)
    return msgspec.json.encode(whole)


async def _events(
    generation: Generation, builder: ResponseBuilder[C], track: Track, options: StreamOptions
) -> AsyncGenerator[bytes, None]:
    no_usage = None if options.include_usage else msgspec.UNSET
    async with aclosing(parts_of(generation, builder, track)) as run:
        async for part in run:
            usage = generation.usage if options.continuous_usage_stats else no_usage
            yield event(builder.chunk([part], usage))
    if options.include_usage:
        yield event(builder.chunk([], generation.usage))
    yield DONE


async def parts_of(
    generation: Generation, builder: ResponseBuilder[C], track: Track
) -> AsyncGenerator[C, None]:
    """Yield parts of the response as tokens arrive. Closing the generator cancels the work."""
    with track, generation:
        over: set[int] = set()
        async with aclosing(generation.deltas()) as deltas:
            async for choice, delta in deltas:
                track.delta(delta)
                if choice in over:
                    continue
                generation.count(choice, delta)
                for part in await builder.push(choice, delta):
                    yield part
                if builder.over(choice):
                    over.add(choice)
                    if len(over) == generation.choices:
                        break
        track.end()
