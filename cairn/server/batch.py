"""Answers an OpenAI batch file by calling the API's routes in this process."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from starlette.types import ASGIApp

from cairn.config import EngineOptions
from cairn.obs.trace import Tracer
from cairn.server.app import create_app
from cairn.server.in_process import post
from cairn.server.loading import close, load, new_state
from cairn.server.options import ServerOptions
from cairn.server.startup_report import Say, StartupReport

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
BUSY = 429
JSON = [(b"content-type", b"application/json")]
BUSY_SECONDS = 1.0
STOP_SECONDS = 2.0


@dataclass(slots=True)
class Counts:
    """Number of lines that were answered, and that were refused or failed."""

    answered: int = 0
    failed: int = 0


class BadLine(Exception):
    """A line that is not a valid request."""


class Line(msgspec.Struct):
    """A line of a batch file."""

    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


def run_batch(
    model: Path,
    engine: EngineOptions,
    options: ServerOptions,
    lines: Iterable[str],
    write: Callable[[str], object],
    say: Say,
) -> Counts:
    """Answer every line of a batch file.

    Args:
        model: the model folder.
        engine: options of the engine.
        options: options of the server; ports have no effect.
        lines: JSON objects in OpenAI's format: custom_id, method, url, body.
        write: called with each result line, in order of completion.
        say: prints a line about the start-up.

    Raises:
        BadModel, BadConfig, OutOfMemory: the engine cannot start.
        EngineDead: the engine has stopped.
    """
    return asyncio.run(_run(model, engine, options, lines, write, StartupReport(say)))


async def _run(
    model: Path,
    engine: EngineOptions,
    options: ServerOptions,
    lines: Iterable[str],
    write: Callable[[str], object],
    report: StartupReport,
) -> Counts:
    state = new_state(model, engine, options, Tracer(options.trace))
    try:
        await load(state, model, report.phase)
        report.loaded(state.client.info, state.sampling_defaults)
        state.loaded = True
        client = state.client
        width = min(client.load[1], 2 * client.info.max_num_seqs * len(client.engines))
        work = asyncio.ensure_future(answer_lines(create_app(state), lines, write, width))
        died = asyncio.ensure_future(_died(state.client))
        await asyncio.wait((work, died), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work
            died.result()
        died.cancel()
        return work.result()
    finally:
        await state.client.stop(STOP_SECONDS)
        close(state)


async def _died(client: Any) -> None:
    raise await client.died()


async def answer_lines(
    app: ASGIApp, lines: Iterable[str], write: Callable[[str], object], width: int
) -> Counts:
    """Answer the lines with an application, at most `width` at the same time."""
    counts = Counts()
    seen: set[str] = set()
    running: set[asyncio.Task[None]] = set()

    async def one(text: str) -> None:
        result, good = await _answered(app, text, seen)
        counts.answered += good
        counts.failed += not good
        write(msgspec.json.encode(result).decode() + "\n")

    try:
        for text in lines:
            if not text.strip():
                continue
            if len(running) >= width:
                done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            running.add(asyncio.create_task(one(text)))
        await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
    return counts


async def _answered(app: ASGIApp, text: str, seen: set[str]) -> tuple[dict[str, Any], bool]:
    """The result of a line, and whether the request succeeded."""
    result: dict[str, Any] = {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": None,
        "response": None,
        "error": None,
    }
    try:
        line = _read(text)
        result["custom_id"] = line.custom_id
        if line.custom_id in seen:
            raise BadLine(f"custom_id {line.custom_id!r} was used by an earlier line")
        seen.add(line.custom_id)
        _check(line)
    except BadLine as error:
        result["error"] = {"code": "invalid_line", "message": str(error)}
        return result, False
    body = msgspec.json.encode(line.body)
    status, headers, answer = await post(app, line.url, JSON, body)
    while status == BUSY:
        await asyncio.sleep(BUSY_SECONDS)
        status, headers, answer = await post(app, line.url, JSON, body)
    result["response"] = {
        "status_code": status,
        "request_id": headers.get(b"x-request-id", b"").decode(),
        "body": msgspec.Raw(answer),
    }
    return result, status == 200


def _read(text: str) -> Line:
    try:
        return msgspec.json.decode(text, type=Line)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise BadLine(f"the line is not a request: {error}") from None


def _check(line: Line) -> None:
    if line.method != "POST":
        raise BadLine(f"method is {line.method!r}, use POST")
    if line.url not in URLS:
        raise BadLine(f"url is {line.url!r}, use one of {', '.join(URLS)}")
    if line.body.get("stream"):
        raise BadLine("stream is true, but a batch cannot stream: leave it out")
