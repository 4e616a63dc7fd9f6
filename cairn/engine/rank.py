"""The process of a rank above 0: `python -m cairn.engine.rank HOST PORT DEVICE SEAT`.

HOST and PORT are those of rank 0's store, SEAT is a `cairn.engine.ranks.Seat` in JSON. Orders
(`cairn.runner.orders`) arrive on standard input, each preceded by its length. The process ends with
its input.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import torch

from cairn.config import resolve
from cairn.distributed.groups import Group
from cairn.distributed.rendezvous import join_store
from cairn.engine.build import load_runner, this_machine
from cairn.engine.ranks import ERROR, PHASE, Seat
from cairn.errors import short_of_memory
from cairn.models.registry import load_spec
from cairn.obs.log import configure, get_logger
from cairn.runner.executor import Follower
from cairn.runner.orders import FRAME, Load, OrderReader

log = get_logger("cairn.engine.rank")


def main() -> None:
    """Entry point of the process; never returns."""
    host, port, device, text = sys.argv[1:]
    seat = msgspec.json.decode(text, type=Seat)
    # Signals to the whole group are for rank 0 to handle.
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    configure(None)
    frames: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=read, args=(frames,), name="orders", daemon=True).start()
    rank, store = seat.rank, join_store(host, int(port))
    code = 0
    try:
        store.set(f"{PHASE}/{rank}", "start")
        kind = torch.device(device)
        if kind.type == "cuda":
            torch.cuda.set_device(kind)
        follow(frames, seat.group(store, kind), store)
    except BaseException as error:
        log.error("rank %d ends", rank, exc_info=error)
        told = short_of_memory(error) or f"{error}" or type(error).__name__
        store.set(f"{ERROR}/{rank}", " ".join(f"{told}".split()))
        code = 1
    sys.stderr.flush()
    os._exit(code)


def read(frames: queue.SimpleQueue[bytes]) -> None:
    """Thread that reads orders as they arrive and ends the process at the end of the input."""
    stream = sys.stdin.buffer
    while len(head := stream.read(FRAME.size)) == FRAME.size:
        frames.put(stream.read(FRAME.unpack(head)[0]))
    os._exit(0)


def follow(frames: queue.SimpleQueue[bytes], group: Group, store: Any) -> None:
    """Run orders in sequence."""
    follower: Follower | None = None
    reader = OrderReader()
    while True:
        order = reader.read(frames.get())
        if isinstance(order, Load):
            follower = None
            config = resolve(
                order.options, load_spec(Path(order.model)), this_machine(order.options.device)
            )
            loaded = load_runner(
                Path(order.model),
                order.options,
                config,
                group,
                lambda name: store.set(f"{PHASE}/{group.rank}", name),
            )
            follower = Follower(loaded.executor)
            continue
        assert follower is not None
        follower.follow(order)


if __name__ == "__main__":
    main()
