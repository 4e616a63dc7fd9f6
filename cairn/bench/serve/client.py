"""Client of an OpenAI-compatible server: aiohttp, streaming, usage."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec

from cairn.bench.serve.exchange import Outcome, Request
from cairn.errors import BadConfig, CairnError

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

OK = 200
CONNECT_SECONDS = 30.0
ERROR_LENGTH = 300

# Servers close idle connections after 5 s and more; a connection that is dropped before they do is
# never caught in the middle of being closed, which would look like a failed request.
KEEP_ALIVE_SECONDS = 2.0


class _Message(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    text: str | None = None
    delta: _Message | None = None
    message: _Message | None = None
    finish_reason: str | None = None

    @property
    def piece(self) -> str:
        part = self.delta or self.message
        if part is None:
            return self.text or ""
        return (part.reasoning_content or "") + (part.content or "")

    @property
    def has_token(self) -> bool:
        """Whether a chunk contains a token. Chunks without text may (part of a character); chunks
        of a role or an end do not."""
        if self.piece:
            return True
        role = self.delta is not None and self.delta.role is not None
        return self.finish_reason is None and not role


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    """A completion or a chunk of one; other fields are ignored."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Answer).decode


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Address of a server and how to authenticate.

    Attributes:
        base_url: with or without /v1 at its end.
        model: name to ask for; None takes the first that /v1/models lists.
        api_key: sent as a bearer token.
        timeout: seconds without a byte after which a request has failed.
    """

    base_url: str = "http://127.0.0.1:8000"
    model: str | None = None
    api_key: str | None = None
    timeout: float = 600.0

    @property
    def root(self) -> str:
        """The URL without /v1."""
        return re.sub(r"/v1$", "", self.base_url.rstrip("/"))


class Server:
    """A connection pool to a server. Use it as an async context manager.

    Entering asks for the model's name.

    Raises:
        BadConfig: aiohttp is missing, no server answers there, or no model can be named.
    """

    def __init__(self, address: ServerAddress) -> None:
        self.address = address
        self.model = address.model or ""
        self._session: ClientSession | None = None

    async def __aenter__(self) -> Self:
        self.open()
        try:
            models = await self._models()
            if not self.model and not models:
                raise BadConfig(f"{self.address.root} does not list a model", "Give --model")
            self.model = self.model or models[0]
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def open(self) -> None:
        """Open the connection pool; `close` closes it. Entering the context calls it."""
        self._session = self._session or _session(self.address)

    async def close(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def send(
        self,
        request: Request,
        outcome: Outcome | None = None,
        leave_after: float | None = None,
    ) -> Outcome:
        """Send a request and read its answer; what goes wrong is noted in the outcome.

        Args:
            request: what to ask for.
            outcome: filled while the answer comes, for a caller who watches it; None: a new one.
            leave_after: seconds after which the client closes the connection; None: never.
        """
        import aiohttp

        outcome = outcome or Outcome()
        outcome.kind, outcome.input_tokens = request.kind, request.input_len
        outcome.sent = time.perf_counter()
        outcome.due = outcome.due or outcome.sent
        timer = asyncio.timeout(leave_after)
        try:
            async with timer:
                await self._exchange(request, outcome)
        except TimeoutError:
            if timer.expired():
                outcome.aborted = True
            else:
                outcome.fail("timeout", f"no byte for {self.address.timeout:g} s")
        except aiohttp.ClientError as error:
            outcome.fail("connection", f"{type(error).__name__}: {error}")
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            outcome.fail("not the API's JSON", str(error))
        except asyncio.CancelledError:
            outcome.aborted = True
            raise
        finally:
            outcome.ended = time.perf_counter()
        return outcome

    async def tokenize(self, text: str) -> int | None:
        """Tokens of a text by the server's /tokenize; None where it has none that works."""
        found = await self._json("POST", "/tokenize", {"prompt": text})
        if not isinstance(found, dict):
            return None
        count = found.get("count")
        if isinstance(count, int):
            return count
        tokens = found.get("tokens")
        return len(tokens) if isinstance(tokens, list) else None

    async def post(self, path: str, body: Mapping[str, object]) -> Any:
        """The JSON that the server answers to a body posted below its /v1.

        Raises:
            CairnError: there is none, or the server refuses; the message says why.
        """
        import aiohttp

        url = f"{self.address.root}/v1/{path}"
        try:
            async with self._open.post(url, json=body) as response:
                if response.status != OK:
                    text = _error_text(await response.text(errors="replace"))
                    raise CairnError(f"{url} answers {response.status}: {text[:ERROR_LENGTH]}")
                return msgspec.json.decode(await response.read())
        except (aiohttp.ClientError, TimeoutError) as error:
            raise CairnError(f"{url} does not answer: {type(error).__name__} {error}") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CairnError(f"{url} does not answer with JSON: {error}") from error

    async def metrics(self) -> dict[str, float]:
        """Values of /metrics by name, summed over labels; empty where the server has none."""
        import aiohttp

        try:
            async with self._open.get(f"{self.address.root}/metrics") as response:
                text = await response.text() if response.status == OK else ""
        except (aiohttp.ClientError, TimeoutError):
            return {}
        return read_metrics(text)

    @property
    def _open(self) -> ClientSession:
        assert self._session is not None, "enter the server first"
        return self._session

    async def _models(self) -> list[str]:
        import aiohttp

        url = f"{self.address.root}/v1/models"
        try:
            async with self._open.get(url) as response:
                if response.status in (401, 403):
                    raise BadConfig(f"{url} answers {response.status}", "Give --api-key")
                if response.status != OK:
                    return []
                listed = msgspec.json.decode(await response.read())
        except (aiohttp.ClientError, TimeoutError) as error:
            hint = "Start one with `cairn serve`, or give its --base-url"
            raise BadConfig(f"no server answers at {self.address.root}: {error}", hint) from error
        except (msgspec.DecodeError, ValueError) as error:
            hint = "Is --base-url that of an OpenAI-compatible server?"
            raise BadConfig(f"{url} does not answer with JSON: {error}", hint) from error
        entries = listed.get("data") if isinstance(listed, dict) else None
        return [str(x["id"]) for x in entries or () if isinstance(x, dict) and "id" in x]

    async def _json(self, method: str, path: str, body: object) -> Any:
        """The answer's JSON; None when there is no good one."""
        import aiohttp

        url = f"{self.address.root}{path}"
        try:
            async with self._open.request(method, url, json=body) as response:
                if response.status != OK:
                    return None
                return msgspec.json.decode(await response.read())
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError):
            return None

    async def _exchange(self, request: Request, outcome: Outcome) -> None:
        url = f"{self.address.root}/v1/{request.path}"
        async with self._open.post(url, json=request.body(self.model)) as response:
            if response.status != OK:
                text = await response.text(errors="replace")
                outcome.fail(f"HTTP {response.status}", _error_text(text))
            elif request.stream:
                await _read_stream(response, outcome)
            else:
                _note(_decode(await response.read()), outcome, streamed=False)


async def _read_stream(response: ClientResponse, outcome: Outcome) -> None:
    async for data in _events(response):
        if data == b"[DONE]":
            return
        answer = _decode(data)
        if answer.error is not None:
            outcome.fail("error in the stream", _error_text(data.decode()))
            return
        _note(answer, outcome, streamed=True)
    outcome.fail("stream cut short", "it ended without [DONE]")


async def _events(response: ClientResponse) -> AsyncIterator[bytes]:
    """Data of the server-sent events; this API puts each on one line."""
    rest = b""
    async for block in response.content.iter_any():
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip()


def _note(answer: _Answer, outcome: Outcome, streamed: bool) -> None:
    for choice in answer.choices:
        if streamed and choice.index == 0 and choice.has_token:
            outcome.stamps.append(time.perf_counter())
        if not outcome.counted:
            outcome.text += choice.piece
    usage = answer.usage
    if usage is not None:
        outcome.input_tokens, outcome.output_tokens = usage.prompt_tokens, usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            outcome.cached_tokens = usage.prompt_tokens_details.cached_tokens
        outcome.counted, outcome.text = True, ""


def read_metrics(text: str) -> dict[str, float]:
    """Values of Prometheus' text format by name, summed over labels."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        found = re.match(r"([a-zA-Z_:][\w:]*)(?:\{.*\})?\s+(\S+)", line)
        if found:
            with contextlib.suppress(ValueError):
                values[found[1]] = values.get(found[1], 0.0) + float(found[2])
    return values


def _error_text(body: str) -> str:
    """The message of an error in OpenAI's shape, or the body as it is."""
    try:
        error = msgspec.json.decode(body).get("error")
        return str(error["message"])
    except (msgspec.DecodeError, AttributeError, TypeError, KeyError):
        return body


def _session(address: ServerAddress) -> ClientSession:
    try:
        import aiohttp
    except ImportError as error:
        hint = "Install the extra: pip install 'cairn-llm[bench]'"
        raise BadConfig(f"the load generator needs aiohttp: {error}", hint) from error
    headers = {"Authorization": f"Bearer {address.api_key}"} if address.api_key else None
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS),
        timeout=aiohttp.ClientTimeout(
            total=None, sock_connect=CONNECT_SECONDS, sock_read=address.timeout
        ),
        headers=headers,
    )
