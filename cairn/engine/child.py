"""Starts the engine as a child process, with two sockets for messages, and ends it.

No torch here.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable

import msgspec
import zmq

from cairn.engine.messages import FROM_ENGINE, TO_ENGINE, FromEngine, Launch, Ready, ToEngine
from cairn.errors import BadConfig, BadRequest, EngineDead

MESSAGES = 64
"""Most messages received per turn of the event loop; a step sends one message for all requests."""


class Child:
    """Starts the process in the running event loop; `close` must follow.

    The sockets live in a folder that only this user can enter, until both sides hold them.

    Args:
        launch: what to load.
        take: called with every message.

    Raises:
        BadConfig: no socket or no process can be made.
    """

    def __init__(self, launch: Launch, take: Callable[[FromEngine], None]) -> None:
        self._take = take
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._loop = asyncio.get_running_loop()
        self._folder = tempfile.mkdtemp(prefix="cairn-")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._outbox = self._bind(zmq.PUSH, TO_ENGINE)
            self._inbox = self._bind(zmq.PULL, FROM_ENGINE)
            self._process = self._spawn(launch)
        except BaseException:
            self._drop()
            raise
        self._turn_due = False
        self._loop.add_reader(self._inbox.FD, self._on_bell)
        # Messages that arrived before the reader was added do not trigger it.
        self._loop.call_soon(self._on_bell)

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it has not ended; reaps it if it has."""
        return self._process.poll() is None

    def kill(self) -> None:
        """End it at once; nothing happens when it has ended."""
        self._process.kill()

    def send(self, message: ToEngine) -> None:
        """Send without waiting.

        Raises:
            EngineDead: the process has ended; the message says how, if known.
            BadRequest: a text is not valid Unicode.
        """
        try:
            self._outbox.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError:
            if not self.alive:
                raise self.exit_reason() from None
            raise EngineDead("the engine process cannot be reached") from None
        except UnicodeEncodeError as error:
            raise BadRequest(
                f"a text holds {error.object[error.start]!r}, half of a surrogate pair",
                "Send valid Unicode",
            ) from None

    def receive(self) -> None:
        """Receive all pending messages."""
        while self._receive_one():
            pass

    def _on_bell(self) -> None:
        """Called when the socket becomes readable, possibly again between two turns."""
        if not self._turn_due:
            self._take_turn()

    def _take_turn(self) -> None:
        """Receive pending messages in batches, yielding to the event loop in between. The socket
        signals only once until it is empty, so this reschedules itself."""
        self._turn_due = False
        for _ in range(MESSAGES):
            if not self._receive_one():
                return
        self._turn_due = True
        self._loop.call_soon(self._take_turn)

    def _receive_one(self) -> bool:
        """Receive the next message; False: there is none."""
        if self._inbox.closed:
            return False
        try:
            frame = self._inbox.recv(zmq.NOBLOCK)
        except zmq.Again:
            return False
        message = self._decoder.decode(frame)
        if isinstance(message, Ready) and self._outbox.poll(0, zmq.POLLOUT):
            self._hide()
        self._take(message)
        return True

    def exit_reason(self) -> EngineDead:
        """How the process ended; only valid when it is not alive."""
        code = self._process.returncode
        hint = "Look at its last log lines"
        if code >= 0:
            return EngineDead(f"the engine process ended with exit code {code}", hint)
        if -code == signal.SIGKILL:
            hint = (
                "If the machine ran out of memory (dmesg tells), lower kv_cache_memory "
                "(--kv-cache-memory)"
            )
        return EngineDead(f"the engine process was killed by {signal.Signals(-code).name}", hint)

    def close(self) -> None:
        """Close the sockets and remove their folder."""
        self._loop.remove_reader(self._inbox.FD)
        self._drop()

    def _spawn(self, launch: Launch) -> subprocess.Popen[bytes]:
        try:
            # -P: a module in the working directory must not pass for one of ours. A session of
            # its own: Ctrl-C reaches the parent only, which then decides.
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "cairn.engine.process", self._folder],
                stdin=subprocess.PIPE,
                start_new_session=True,
                pass_fds=() if launch.listener is None else (launch.listener,),
            )
        except OSError as error:
            raise BadConfig(
                f"the engine process cannot be started: {error}", "Check the limits of processes"
            ) from error
        assert process.stdin is not None
        with process.stdin as stdin:
            stdin.write(msgspec.json.encode(launch))
        return process

    def _bind(self, kind: int, name: str) -> zmq.Socket[bytes]:
        """A socket with an unbounded queue: the number of requests is bounded elsewhere."""
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        try:
            socket.bind(f"ipc://{self._folder}/{name}")
        except zmq.ZMQError as error:
            raise BadConfig(
                f"no socket can be made in {self._folder}: {error}",
                "Set TMPDIR to a folder that can be written and whose path is short",
            ) from error
        return socket

    def _hide(self) -> None:
        """Remove the sockets' names from the file system once both sides are connected: no other
        process can connect, and a killed process leaves no files."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _drop(self) -> None:
        self._context.destroy(linger=0)
        self._hide()
