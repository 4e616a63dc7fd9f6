"""A node above 0: starts the ranks of this host, passes node 0's orders on, and ends with it."""

from __future__ import annotations

import contextlib
import http.server
import socket
import threading
import time
from collections.abc import Callable, Iterator

import torch

from cairn.engine.nodes import BEAT_SECONDS, SILENCE_SECONDS, Beat, Died, join
from cairn.engine.ranks import RankProcess, Seat, end_processes
from cairn.engine.transfer.wire import receive_into, send_frame
from cairn.obs.log import get_logger
from cairn.runner.orders import FRAME
from cairn.specs.nodes import Nodes

log = get_logger(__name__)

WATCHED_EVERY = 0.2


def serve_node(
    nodes: Nodes,
    health: socket.socket | None,
    stop: threading.Event,
    say: Callable[[str], object],
) -> None:
    """Run this host's ranks until node 0 ends or `stop` is set.

    Args:
        nodes: this node's index (not 0) and the others.
        health: a listening socket on which /health answers; None: none does.
        stop: set from outside.
        say: shows one line.

    Raises:
        EngineDead: node 0 cannot be reached or refuses this node; a rank has ended.
    """
    connection, welcome = join(nodes)
    here = welcome.ranks // nodes.count
    ranks = range(nodes.number * here, (nodes.number + 1) * here)
    local = nodes.local if nodes.launched else (0, here)
    own_address = connection.getsockname()[0]
    seats = [
        Seat(rank, welcome.ranks, local[0] + i, local[1], own_address)
        for i, rank in enumerate(ranks)
    ]
    device = torch.device(welcome.device)
    processes = [RankProcess(seat, nodes.host, welcome.store, device) for seat in seats]
    say(f"node {nodes.number} of {nodes.count}: ranks {', '.join(map(str, ranks))}")
    try:
        with _answering(health):
            _pass_on(nodes, connection, processes, stop)
    finally:
        end_processes([each.process for each in processes])
        connection.close()


def _pass_on(
    nodes: Nodes, connection: socket.socket, processes: list[RankProcess], stop: threading.Event
) -> None:
    ended = threading.Event()
    reading = threading.Thread(target=_orders, args=(connection, processes, ended), daemon=True)
    reading.start()
    beaten = 0.0
    while not stop.wait(WATCHED_EVERY):
        for process in processes:
            dead = process.death(None)
            if dead is not None and not ended.is_set():
                with contextlib.suppress(OSError):
                    send_frame(connection, Died(dead.message, dead.hint), nodes.secret)
                raise dead
        if ended.is_set():
            log.warning("node 0 has ended, and this node with it")
            return
        if time.monotonic() - beaten > BEAT_SECONDS:
            beaten = time.monotonic()
            with contextlib.suppress(OSError):
                send_frame(connection, Beat(), nodes.secret)


def _orders(
    connection: socket.socket, processes: list[RankProcess], ended: threading.Event
) -> None:
    """Forward orders to the ranks until node 0 is gone or times out."""
    connection.settimeout(SILENCE_SECONDS)
    head = bytearray(FRAME.size)
    try:
        while True:
            receive_into(connection, memoryview(head))
            body = bytearray(FRAME.unpack(head)[0])
            if not body:
                continue
            receive_into(connection, memoryview(body))
            for process in processes:
                # That a rank has ended is noticed, and reported, where the processes are watched.
                with contextlib.suppress(OSError):
                    process.send(bytes(head) + body)
    except OSError:
        ended.set()


@contextlib.contextmanager
def _answering(listener: socket.socket | None) -> Iterator[None]:
    """Answer /health with 200 within, and everything else with 404."""
    if listener is None:
        yield
        return

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = http.server.ThreadingHTTPServer(listener.getsockname()[:2], Handler, False)
    server.socket.close()
    server.socket = listener
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
