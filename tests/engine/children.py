"""Engine processes for tests: a shared one, and one for each test that breaks it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from cairn.config import EngineOptions, default_model_path
from cairn.engine.client import EngineClient
from cairn.engine.messages import Delta, Position
from cairn.engine.submission import Submission

MODEL = default_model_path()
OPTIONS = {"dtype": "float32", "device": "cpu", "kv_cache_memory": "16MiB", "max_num_seqs": 16}
PATIENCE = 60.0
"""Time limit of an operation on a busy machine, in seconds."""


def make_client(options: dict | None = None, model: Path = MODEL, **client) -> EngineClient:
    return EngineClient(model, EngineOptions(**{**OPTIONS, **(options or {})}), **client)


@contextlib.asynccontextmanager
async def engine(options: dict | None = None, **client) -> AsyncIterator[EngineClient]:
    """A started engine, stopped at the end."""
    running = make_client(options, **client)
    await running.start()
    try:
        yield running
    finally:
        await running.stop(PATIENCE)


@dataclass
class Output:
    """An output joined from its deltas."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Position] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)

    @property
    def last(self) -> Delta:
        return self.deltas[-1]


async def collect(submission: Submission, n: int = 1) -> list[Output]:
    """The outputs of a submission, iterated to its end."""
    outputs = [Output() for _ in range(n)]
    with submission:
        async for delta in submission:
            assert delta.id == submission.id
            output = outputs[delta.index]
            assert not output.deltas or output.last.finish_reason is None
            output.deltas.append(delta)
            output.text += delta.text
            output.token_ids += delta.token_ids
            output.logprobs += delta.logprobs
    return outputs


async def until(condition: Callable[[], bool], seconds: float = PATIENCE) -> float:
    """Wait until `condition` holds; returns the seconds that it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < seconds, "it never came to hold"
        await asyncio.sleep(0.02)
    return time.monotonic() - began


def gone(pid: int) -> bool:
    """Whether a process does not exist or is a zombie."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
