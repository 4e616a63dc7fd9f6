"""Starts a server from a model folder and options, and runs it until it is stopped or its engine
ends."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from cairn.config import EngineOptions
from cairn.errors import BadConfig
from cairn.models.checkpoint import read_headers
from cairn.models.registry import load_spec
from cairn.obs.log import get_logger
from cairn.obs.trace import Tracer
from cairn.server.admin import create_admin_app
from cairn.server.app import create_app
from cairn.server.hosts import HostCheck, is_loopback
from cairn.server.limits import MAX_HEADER_BYTES, BoundedProtocol
from cairn.server.loading import close, load, new_state
from cairn.server.middleware import wrap
from cairn.server.options import ServerOptions
from cairn.server.report import Report, Say
from cairn.specs.nodes import Nodes, resolve_nodes

log = get_logger(__name__)

LOOPBACK = "127.0.0.1"
BACKLOG = 2048
KEEP_ALIVE_SECONDS = 75
"""Longer than load balancers keep an idle connection: they close it before this side does."""
OPEN_FILES = 65536
"""Every connection is one; the usual soft limit of 1,024 is soon reached."""
LAST_WORDS_SECONDS = 0.5
"""Seconds for open streams to send an error after the engine has ended, and for requests that were
on their way."""
STOP_SECONDS = 2.0
POLL_SECONDS = 0.05


def serve(model: Path, engine: EngineOptions, options: ServerOptions, say: Say) -> int:
    """Run a server until SIGTERM or SIGINT.

    The ports are bound before the model loads: a busy one fails at once, and load balancers get
    answers from /health and /ready all the time. The first signal lets running requests finish
    while new ones get 503; a second one ends everything at once.

    Args:
        model: the model folder.
        engine: options of the engine.
        options: options of the server.
        say: shows one line of the start-up at once.

    Returns:
        The exit code: 0 when every request could finish, 1 when the time for that was up, 128 and
        the signal's number when a second one came.

    Raises:
        BadModel, BadConfig, OutOfMemory: the server cannot start.
        EngineDead: the engine ended while it served.
    """
    # Errors in config files are reported before anything large is loaded.
    load_spec(model)
    if engine.load_format != "random":
        read_headers(model)
    _allow_open_files()
    nodes = resolve_nodes(engine, engine.tensor_parallel_size, os.environ)
    if nodes is not None and options.data_parallel_size > 1:
        raise BadConfig(
            f"nnodes is {nodes.count} and data_parallel_size {options.data_parallel_size}, but "
            "replicas are on one host",
            "Start a server on each host, with a router in front",
        )
    if nodes is not None and nodes.number:
        _serve_node(nodes, options, say)
        return 0
    with _listening(options) as sockets, contextlib.closing(Tracer(options.trace)) as tracer:
        return asyncio.run(_Life(model, engine, options, tracer, Report(say)).run(sockets))


def _serve_node(nodes: Nodes, options: ServerOptions, say: Say) -> None:
    """Run the ranks of a node above 0, which answers /health alone; see `serve_node`."""
    from cairn.engine.node import serve_node

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    if nodes.launched:
        # Several torchrun processes share a host: none of them takes the port for /health.
        serve_node(nodes, None, stop, say)
        return
    with _bound(options.host, options.port, "--port") as listener:
        serve_node(nodes, listener, stop, say)


class _Server(uvicorn.Server):
    """Leaves signals alone: what they mean is decided once, for both ports and the engine."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Life:
    """One server from its start to its end."""

    def __init__(
        self,
        model: Path,
        engine: EngineOptions,
        options: ServerOptions,
        tracer: Tracer,
        report: Report,
    ) -> None:
        self._model = model
        self._report = report
        self._state = new_state(model, engine, options, tracer)
        self._client = self._state.client
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._last_signal = 0
        self._servers: dict[_Server, asyncio.Task[Any]] = {}

    async def run(self, sockets: Sequence[socket.socket]) -> int:
        """Serve on the given sockets, the API's and perhaps the admin routes'; see `serve`."""
        began = time.perf_counter()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        _warn_of_open_port(self._state.options, sockets[0])
        checks = [HostCheck.of(self._state.options, s.getsockname()[0]) for s in sockets]
        self._listen(create_app(self._state, checks[0]), sockets[0])
        for listener, check in zip(sockets[1:], checks[1:], strict=True):
            self._listen(wrap(create_admin_app(self._state), self._state, check), listener)
        urls = [_url(listener) for listener in sockets]
        self._report.listening(self._state.model_name, *urls)
        try:
            if not await _unless(self._stop, self._load(), self._listeners_ended()):
                return 0
            self._report.ready(urls[0], time.perf_counter() - began)
            await _unless(self._stop, self._engine_ended(), self._listeners_ended())
            return await self._drain()
        finally:
            await self._end()

    def _listen(self, app: ASGIApp, listener: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        )
        server = _Server(config)
        self._servers[server] = asyncio.create_task(server.serve([listener]))

    def _on_signal(self, number: int) -> None:
        self._last_signal = number
        (self._stop_now if self._stop.is_set() else self._stop).set()

    async def _load(self) -> None:
        await load(self._state, self._model, self._report.phase)
        self._report.loaded(self._client.info, self._state.sampling_defaults)
        # Exclude loaded objects from garbage collection.
        gc.collect()
        gc.freeze()
        self._state.loaded = True

    async def _engine_ended(self) -> None:
        """Raise EngineDead when the engine has ended and its streams have said so. Until then new
        requests get 503."""
        error = await self._client.died()
        await asyncio.sleep(LAST_WORDS_SECONDS)
        await self._idle(LAST_WORDS_SECONDS)
        raise error

    async def _listeners_ended(self) -> None:
        """Raise what ended a listener; none ends by itself."""
        ended, _ = await asyncio.wait(self._servers.values(), return_when=asyncio.FIRST_COMPLETED)
        ended.pop().result()

    async def _drain(self) -> int:
        """Let running requests finish; returns the exit code."""
        state, seconds = self._state, self._state.options.shutdown_timeout
        state.draining = True
        self._report.stopping(state.open_requests, seconds)
        if not await _unless(self._stop_now, self._idle(seconds), self._engine_ended()):
            return 128 + self._last_signal
        if state.open_requests:
            self._report.cut(state.open_requests)
            return 1
        return 0

    async def _idle(self, seconds: float) -> None:
        """Wait until no request is open, at most this long."""
        deadline = time.monotonic() + seconds
        while self._state.open_requests and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)

    async def _end(self) -> None:
        """Shut everything down: the engine first, so that open streams send an error to their
        clients."""
        at_once = self._stop_now.is_set()
        await self._client.stop(0.0 if at_once else STOP_SECONDS)
        for listener in [each for server in self._servers for each in server.servers]:
            listener.close()
        if not at_once:
            # A client that has just connected gets an answer.
            await asyncio.sleep(POLL_SECONDS)
            await self._idle(LAST_WORDS_SECONDS)
        for server in self._servers:
            server.should_exit, server.force_exit = True, at_once
        await asyncio.wait(self._servers.values(), timeout=STOP_SECONDS)
        close(self._state)


async def _unless(event: asyncio.Event, *works: Coroutine[Any, Any, None]) -> bool:
    """Run until the first of `works` ends (True; what it raises is raised) or the event comes
    (False); what still runs then is cancelled."""
    stopped = asyncio.create_task(event.wait())
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
        ended = [task for task in tasks if task.done()]
        for task in ended:
            task.result()
        return bool(ended)
    finally:
        stopped.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(stopped, *tasks, return_exceptions=True)


@contextlib.contextmanager
def _listening(options: ServerOptions) -> Iterator[list[socket.socket]]:
    """The API's listening socket and, where there is one, that of the admin routes."""
    with contextlib.ExitStack() as stack:
        api = stack.enter_context(_bound(options.host, options.port, "--port"))
        sockets = [api]
        admin_port = options.admin_port
        if admin_port is None:
            admin_port = options.port + 1 if options.port else 0
        if options.admin_port != 0:
            hint = "--admin-port (0 for none)"
            sockets.append(stack.enter_context(_bound(LOOPBACK, admin_port, hint)))
        yield sockets


def _bound(host: str, port: int, option: str) -> socket.socket:
    """A socket that listens already: of two servers with the same port, the second fails here.

    Raises:
        BadConfig: with the remedy.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise BadConfig(
            f"host {host!r} cannot be resolved ({error})", "Give an address of this machine"
        ) from None
    family, kind, protocol, _, address = found[0]
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(BACKLOG)
        made.setblocking(False)
    except OSError as error:
        made.close()
        if error.errno == errno.EADDRINUSE:
            raise BadConfig(
                f"port {port} of {host} is in use", f"Stop what listens there, or change {option}"
            ) from None
        raise BadConfig(
            f"port {port} of {host} cannot be bound ({error.strerror})",
            f"Change --host or {option}",
        ) from None
    return made


def _warn_of_open_port(options: ServerOptions, listener: socket.socket) -> None:
    """Log a warning when other machines can use the API without a key."""
    address = listener.getsockname()[0]
    if not options.api_keys and not is_loopback(address):
        log.warning(
            "host %s: every machine that reaches %s can use the API, because there is no API key. "
            "Give --api-key (or CAIRN_API_KEY), or listen on --host %s",
            options.host,
            _url(listener),
            LOOPBACK,
        )


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _allow_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
