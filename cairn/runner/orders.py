"""Orders from rank 0 to the other ranks: one numbered stream of steps and calls, in MessagePack.

Every rank executes it in order; besides the collectives in a step, nothing else synchronises ranks.
Arrays are sent as the bytes of little-endian int64. Fields that only rank 0 reads are left out:
rank 0 samples, and the other ranks receive the tokens.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from cairn.cache.host import Move
from cairn.config import EngineOptions
from cairn.errors import InvariantError
from cairn.runner.step import RowOpen, StepPlan
from cairn.types import SamplingParams


class Load(msgspec.Struct, frozen=True, tag=True):
    """Load the rank's share of a model, replacing the current one; order numbers restart.

    Attributes:
        number: number of the order.
        model: the model's folder.
        options: with every automatic choice fixed that could differ between ranks.
    """

    number: int
    model: str
    options: EngineOptions


class Step(msgspec.Struct, frozen=True, tag=True):
    """Launch a step; `number` is the order's."""

    number: int
    plan: StepPlan


class Moves(msgspec.Struct, frozen=True, tag=True):
    """Move records between device and host memory, see `cairn.cache.host.Mover`."""

    number: int
    moves: list[Move]
    into_host: bool


class Call(msgspec.Struct, frozen=True, tag=True):
    """Call a method of the runner.

    Attributes:
        number: of the order.
        name: a method of `cairn.runner.runner.Runner` or its parts, one of CALLS.
        arguments: by name.
    """

    number: int
    name: str
    arguments: dict[str, Any] = {}


Order = Load | Step | Moves | Call
FRAME = struct.Struct("<Q")
"""Length prefix of an order."""

CAPTURES = ("graphs.prepare_next", "prefill_graphs.prepare_next")
"""Calls that each capture one graph; they return False when none is missing."""
CALLS = ("forget_reads", "encoder.rehearse", "experts.rebalance", *CAPTURES)
"""The methods that may be called."""


class OrderWriter:
    """Encodes orders, and numbers them."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
        self._number = 0

    def load(self, model: str, options: EngineOptions) -> bytes:
        """The order to load a model."""
        return self._next(Load, model, options)

    def step(self, plan: StepPlan) -> bytes:
        """The order to launch a step."""
        opened = tuple(map(_for_others, plan.opened))
        return self._next(Step, plan._replace(opened=opened))

    def move(self, moves: Sequence[Move], into_host: bool) -> bytes:
        """The order to move records."""
        return self._next(Moves, list(moves), into_host)

    def call(self, name: str, arguments: Mapping[str, Any]) -> bytes:
        """The order to call a method."""
        return self._next(Call, name, dict(arguments))

    def _next(self, kind: type[Order], *content: Any) -> bytes:
        self._number += 1
        return self._encoder.encode(kind(self._number, *content))


class OrderReader:
    """Decodes orders, and checks that none is missing."""

    def __init__(self) -> None:
        self._decoder = msgspec.msgpack.Decoder(Order, dec_hook=_array)
        self._number = 0

    def read(self, frame: bytes) -> Order:
        """The next order. Raises InvariantError if another one is missing before it."""
        order: Order = self._decoder.decode(frame)
        self._number = 1 if isinstance(order, Load) else self._number + 1
        if order.number != self._number:
            raise InvariantError(f"order {order.number} came in the place of {self._number}")
        return order


def _plain(value: Any) -> Any:
    """An array as bytes, another sequence as a list."""
    if isinstance(value, np.ndarray):
        return value.astype("<i8", copy=False).tobytes()
    return list(value)


def _array(kind: Any, content: bytes) -> Any:
    # A copy, because arrays behind tensors must be writable.
    return np.frombuffer(content, dtype="<i8").copy()


def _for_others(opened: RowOpen) -> RowOpen:
    """A RowOpen without the fields that only rank 0 reads."""
    reported = SamplingParams(
        temperature=0,
        prompt_logprobs=opened.params.prompt_logprobs,
        selection=opened.params.selection,
    )
    return replace(opened, params=reported, history=(), stop_ids=(), num_prompt=0)
