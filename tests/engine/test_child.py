"""Messages from the engine process to the event loop."""

import asyncio
from itertools import pairwise
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from cairn.engine import child
from cairn.engine.messages import FROM_ENGINE, Delta, Outputs

SENT = 10 * child.MESSAGES


@pytest.fixture
def no_process(monkeypatch):
    """A child without a process: the test is the other end of its socket."""
    monkeypatch.setattr(child.Child, "_spawn", lambda self, launch: SimpleNamespace())


def test_others_have_their_turn_while_messages_come(no_process):
    taken, turns = [], []

    async def run():
        parent = child.Child(None, taken.append)
        with zmq.Context() as context, context.socket(zmq.PUSH) as engine:
            engine.set_hwm(0)
            engine.connect(f"ipc://{parent._folder}/{FROM_ENGINE}")
            for number in range(SENT):
                engine.send(msgspec.msgpack.encode(Outputs([Delta("a", number)])))
            async with asyncio.timeout(10):
                while len(taken) < SENT:
                    await asyncio.sleep(0)
                    turns.append(len(taken))
        parent.close()

    asyncio.run(run())
    assert [message.deltas[0].index for message in taken] == list(range(SENT))
    steps = [after - before for before, after in pairwise(turns)]
    assert 0 < max(steps) <= child.MESSAGES


class Frames:
    """A socket with received messages."""

    closed = False

    def __init__(self, frames):
        self._frames = frames

    def recv(self, flags):
        assert flags == zmq.NOBLOCK
        if not self._frames:
            raise zmq.Again
        return self._frames.pop(0)


def test_receive_takes_all_that_has_come(no_process):
    taken = []
    frames = [msgspec.msgpack.encode(Outputs([Delta("a", number)])) for number in range(SENT)]

    async def run():
        parent = child.Child(None, taken.append)
        inbox, parent._inbox = parent._inbox, Frames(frames)
        parent.receive()
        parent._inbox = inbox
        parent.close()

    asyncio.run(run())
    assert len(taken) == SENT
