"""Runs a server for a model folder until a signal stops it or its engine ends."""

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
from cairn.server.host_header import HostCheck, is_loopback
from cairn.server.limits import MAX_HEADER_BYTES, BoundedProtocol
from cairn.server.loading import close, load, new_state
from cairn.server.middleware import wrap
from cairn.server.options import ServerOptions
from cairn.server.startup_report import Say, StartupReport
from cairn.specs.nodes import Nodes, resolve_nodes

log = get_logger(__name__)

LOOPBACK = "127.0.0.1"
BACKLOG = 2048
KEEP_ALIVE_SECONDS = 75
"""Keep-alive timeout, longer than that of load balancers, so that they close idle connections."""
OPEN_FILES = 65536
"""Limit of open files to request: each connection uses one, and the usual soft limit is 1,024."""
LAST_WORDS_SECONDS = 0.5
"""Seconds for open streams to send an error after the engine has ended, and for requests that were
on their way."""
STOP_SECONDS = 2.0
POLL_SECONDS = 0.05


def serve(model: Path, engine: EngineOptions, options: ServerOptions, say: Say) -> int:
    """Run a server until SIGTERM or SIGINT.

    The ports are bound before the model loads, so that a port in use is an immediate error and
    load balancers can call /health and /ready while the model loads. After the first signal
    running requests finish and new ones get 503; a second signal stops at once.

    Args:
        model: the model folder.
        engine: options of the engine.
        options: options of the server.
        say: prints a line about the start-up.

    Returns:
        The exit code: 0 if all requests finished, 1 after the shutdown timeout, 128 plus the
        signal's number after a second signal.

    Raises:
        BadModel, BadConfig, OutOfMemory: the server cannot start.
        EngineDead: the engine stopped while serving.
    """
    # Report errors in config files before loading anything large.
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
        return asyncio.run(
            _ServerRun(model, engine, options, tracer, StartupReport(say)).run(sockets)
        )


def _serve_node(nodes: Nodes, options: ServerOptions, say: Say) -> None:
    """Run the ranks of a node above 0, which serves only /health; see `serve_node`."""
    from cairn.engine.node import serve_node

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    if nodes.launched:
        # torchrun starts several processes per host, which cannot share a port for /health.
        serve_node(nodes, None, stop, say)
        return
    with _bound(options.host, options.port, "--port") as listener:
        serve_node(nodes, listener, stop, say)


class _Server(uvicorn.Server):
    """uvicorn's server without signal handlers: `_ServerRun` handles signals for all servers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _ServerRun:
    """One run of the server, from start to shutdown."""

    def __init__(
        self,
        model: Path,
        engine: EngineOptions,
        options: ServerOptions,
        tracer: Tracer,
        report: StartupReport,
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
        """Serve on the sockets of the API and, if there is a second one, the admin routes.

        Returns the exit code, see `serve`.
        """
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
        # Garbage collections skip the objects of the loaded server.
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
        """Raise the exception that ended a listener. Listeners do not end otherwise."""
        ended, _ = await asyncio.wait(self._servers.values(), return_when=asyncio.FIRST_COMPLETED)
        ended.pop().result()

    async def _drain(self) -> int:
        """Wait for running requests. Returns the exit code."""
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
        """Wait until no request is open, at most `seconds`."""
        deadline = time.monotonic() + seconds
        while self._state.open_requests and time.monotonic() < deadline:
            await asyncio.sleep(POLL_SECONDS)

    async def _end(self) -> None:
        """Shut down. The engine goes first, so that open streams can send an error."""
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
    """Run `works` until the first of them ends or the event is set, then cancel the others.

    Returns True if one of them ended, whose exception is raised, and False for the event.
    """
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
    """Context manager: the listening sockets of the API and, unless disabled, the admin routes."""
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
    """A listening socket.

    Raises:
        BadConfig: the address cannot be bound; the hint names the option to change.
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
    """Log a warning if other machines can use the API without a key."""
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
