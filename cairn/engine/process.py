"""The engine process: `python -m cairn.engine.process FOLDER`, started by `EngineClient`.

FOLDER holds the two sockets of the client. The start-up message is read from standard input. The
process never outlives its client; it ends with exit code 0 after a Stop, and with the exit code of
a Fatal after that. torch is imported after the first heartbeat.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq

from cairn.engine.messages import (
    FROM_ENGINE,
    HEARTBEAT_SECONDS,
    TO_ENGINE,
    Fatal,
    FromEngine,
    Heartbeat,
    Launch,
    Phase,
    Ready,
    Stats,
)
from cairn.engine.placement import placed
from cairn.errors import (
    BadConfig,
    BadModel,
    BadRequest,
    CairnError,
    EngineDead,
    InvariantError,
    OutOfMemory,
    short_of_memory,
)
from cairn.obs.log import configure, get_logger
from cairn.specs.model import selecting_window

if TYPE_CHECKING:
    from cairn.engine.build import Built

log = get_logger("cairn.engine.process")

PR_SET_PDEATHSIG = 1
FLUSH_MILLISECONDS = 1000


class Pulse(threading.Thread):
    """Thread that sends heartbeats, whatever the main thread is doing, and ends the process when
    its parent ends.

    Attributes:
        stats: totals to send.
        step_began: when the step in flight began (time.monotonic), None when none runs.
        fatal: set to end the process, whatever the main thread is doing; None: keep running.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], folder: str, parent: int) -> None:
        super().__init__(name="pulse", daemon=True)
        self.stats = Stats()
        self.step_began: float | None = None
        self.fatal: Fatal | None = None
        self._context = context
        self._folder = folder
        self._parent = parent
        self._stopped = threading.Event()

    def run(self) -> None:
        """Beat until stopped."""
        outbox = _connect(self._context, zmq.PUSH, self._folder, FROM_ENGINE)
        encoder = msgspec.msgpack.Encoder()
        while True:
            if os.getppid() != self._parent:
                os._exit(1)
            began = self.step_began
            age = 0.0 if began is None else time.monotonic() - began
            outbox.send(encoder.encode(Heartbeat(age, self.stats)))
            if self.fatal is not None:
                outbox.send(encoder.encode(self.fatal))
                time.sleep(FLUSH_MILLISECONDS / 10_000)
                os._exit(self.fatal.exit_code)
            if self._stopped.wait(HEARTBEAT_SECONDS):
                break
        outbox.close()

    def stop(self) -> None:
        """End the thread and wait for it."""
        self._stopped.set()
        self.join()


def main() -> None:
    """Entry point of the process; never returns."""
    launch = msgspec.json.decode(sys.stdin.buffer.read(), type=Launch)
    _die_with_parent(launch.parent)
    # Signals to the process group are handled by the client: it drains, then sends Stop.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    configure(launch.log_level)
    code = serve(sys.argv[1], launch)
    sys.stdout.flush()
    sys.stderr.flush()
    # All messages are sent. A normal interpreter shutdown of a large process can take seconds, or
    # hang in a driver.
    os._exit(code)


def serve(folder: str, launch: Launch) -> int:
    """Load the model, serve until told to stop; returns the exit code.

    Args:
        folder: where the client's sockets are.
        launch: what to load.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pulse = Pulse(context, folder, launch.parent)
    pulse.start()
    outbox = _connect(context, zmq.PUSH, folder, FROM_ENGINE)
    inbox = _connect(context, zmq.PULL, folder, TO_ENGINE)
    encoder = msgspec.msgpack.Encoder()

    def send(message: FromEngine) -> None:
        outbox.send(encoder.encode(message))

    try:
        _serve(launch, inbox, send, pulse)
        code = 0
    except BaseException as error:
        # Any exception is reported to the client.
        fatal = fatal_of(error)
        if fatal.exit_code == 1 and not isinstance(error, EngineDead):
            log.error("the engine ends", exc_info=error)
        send(fatal)
        code = fatal.exit_code
    pulse.stop()
    context.destroy(linger=FLUSH_MILLISECONDS)
    return code


def _serve(
    launch: Launch, inbox: zmq.Socket[bytes], send: Callable[[FromEngine], None], pulse: Pulse
) -> None:
    began = time.monotonic()

    def phase_ended(name: str) -> None:
        nonlocal began
        now = time.monotonic()
        send(Phase(name, now - began))
        began = now

    options = placed(launch)
    # Imported objects stay alive: garbage collections would take a tenth of the start-up time.
    gc.disable()
    from cairn.distributed.rendezvous import group_of_engines
    from cairn.engine.build import build, ranks_of
    from cairn.engine.faults import FaultyExecutor, faults_of
    from cairn.engine.loop import EngineLoop
    from cairn.engine.rounds import Engines
    from cairn.engine.warmup import warm_up

    gc.freeze()
    gc.enable()

    def rank_ended(error: EngineDead) -> None:
        # The main thread may wait for ever in a collective.
        pulse.fatal = fatal_of(error)

    faults = faults_of(os.environ)
    phase_ended("import")
    start = functools.partial(ranks_of, on_death=rank_ended, listener=launch.listener)
    engines = None
    if launch.meeting is not None:
        group = group_of_engines(launch.meeting, launch.replica, launch.replicas)
        engines = Engines(group, rank_ended)
    built = build(Path(launch.model), options, phase_ended, start, engines)
    warm_up(built)
    phase_ended("warmup")
    if faults:
        log.warning("faults are injected: %s", faults)
        built.core.executor = FaultyExecutor(built.core.executor, faults)
    # Exclude loaded objects from garbage collection.
    gc.collect()
    gc.freeze()
    loop = EngineLoop(built, inbox, send, pulse)
    send(ready_of(built))
    loop.run()


def ready_of(built: Built) -> Ready:
    """The Ready message of a loaded engine."""
    spec, config, memory, core = built.spec, built.config, built.memory, built.core
    return Ready(
        vocab_size=core.shape.vocab_size,
        max_model_len=core.shape.max_model_len,
        eos_ids=core.shape.eos_ids,
        page_size=config.page_size,
        landmarks=spec.landmarks,
        selecting_layers=spec.selecting_layers,
        num_pages=memory.num_pages,
        max_num_seqs=config.max_num_seqs,
        has_tokenizer=core.tokenizer is not None,
        choices=tuple(str(choice) for choice in (*config.choices, *memory.choices)),
        memory=built.table,
        memory_flag=memory.flag,
        selecting_window=selecting_window(spec),
        media=core.shape.media,
    )


def fatal_of(error: BaseException) -> Fatal:
    """The Fatal message of an exception: cause and remedy in one line."""
    if isinstance(error, BadModel | BadConfig | BadRequest | OutOfMemory):
        return Fatal(_line(str(error)), type(error).__name__, 2)
    if isinstance(error, InvariantError):
        return Fatal(_line(f"an internal rule was broken: {error}. Please report it"))
    if isinstance(error, CairnError):
        return Fatal(_line(str(error)))
    if (short := short_of_memory(error)) is not None:
        return Fatal(str(short), "OutOfMemory", 2)
    what = _line(f"{type(error).__name__}: {error}")
    return Fatal(f"the engine failed with {what}. Look at the log above for where")


def _line(text: str) -> str:
    return " ".join(text.split())


def _connect(
    context: zmq.Context[zmq.Socket[bytes]], kind: int, folder: str, name: str
) -> zmq.Socket[bytes]:
    """A socket with an unbounded queue: the client bounds the number of requests instead."""
    socket = context.socket(kind)
    socket.set_hwm(0)
    socket.connect(f"ipc://{folder}/{name}")
    return socket


def _die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when the client's process ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    main()
