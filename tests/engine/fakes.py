"""An engine without a model: the real scheduler, cache and output with a fake executor."""

from __future__ import annotations

import random
import zlib

from cairn.cache.host import HostCache
from cairn.cache.landmarks import SlotMap
from cairn.cache.paged import PageCache
from cairn.cache.states import StateSnapshots
from cairn.cache.window import WindowPages
from cairn.engine.admission import CoreShape
from cairn.engine.core import EngineCore
from cairn.engine.drafts import Drafter
from cairn.engine.planned_step import Limits
from cairn.engine.request import Request
from cairn.runner.fake_executor import FakeExecutor

VOCAB = 10


def next_token(request_id: str, index: int) -> int:
    """The token that the fake model generates for a request at an output index."""
    return zlib.crc32(f"{request_id}/{index}".encode()) % VOCAB


def fake_core(
    *,
    page_size: int = 4,
    landmarks: bool = True,
    pages: int = 64,
    rows: int = 8,
    step_slots: int = 64,
    prefix_caching: bool = True,
    max_model_len: int | None = None,
    eos_ids: tuple[int, ...] = (),
    overlap: bool = False,
    window_pages: int = 0,
    reach: int = 2,
    snapshots: int | None = None,
    drafter: Drafter | None = None,
    host: tuple[int, ...] | None = None,
) -> EngineCore:
    """An engine with a fake executor.

    Args:
        window_pages: some layers have window pages, this many.
        snapshots: some layers are recurrent, with this many snapshots.
        host: places for records in host memory, by kind.
    """
    slots = SlotMap(page_size, landmarks)
    longest = max_model_len or slots.tokens_in(pages * page_size)
    window = WindowPages(window_pages, reach) if window_pages else None
    states = None if snapshots is None else StateSnapshots(snapshots, interval=4)
    executor = FakeExecutor(
        slots, next_token, reach=reach if window else None, stateful=states is not None
    )
    records = None if host is None else HostCache(host, executor.move)
    return EngineCore(
        CoreShape(VOCAB, longest, eos_ids, seed=0),
        Limits(rows, step_slots),
        PageCache(pages, slots, prefix_caching, window, states, records),
        slots,
        executor,
        overlap=overlap,
        drafter=drafter,
    )


class FakeDrafter:
    """Drafts that are right with a given probability, and independent of how many are requested.

    Args:
        seed: of what it guesses.
        right: share of guesses that are right.
        most: guesses at a time.
    """

    ahead = 0

    def __init__(self, seed: int, right: float, most: int = 4) -> None:
        self.rng, self.seed = random.Random(seed), seed
        self.right, self.drafts = right, most
        self.texts: list[tuple[list[int], list[int]]] = []

    def knows(self, prompt: list[int], output: list[int]) -> None:
        """Register the tokens that follow a prompt."""
        self.texts.append((prompt, output))

    def guess(self, request: Request, most: int) -> list[int]:
        tokens = list(request.tokens)
        for prompt, output in self.texts:
            done = len(tokens) - len(prompt)
            if done >= 0 and tokens == prompt + output[:done]:
                count = self.rng.randint(0, most)
                truth = (output[done:] + [0] * count)[:count]
                return [self.one(len(tokens), i, token) for i, token in enumerate(truth)]
        return []

    def one(self, behind: int, place: int, token: int) -> int:
        """The draft at a place, after so many tokens."""
        drawn = random.Random(f"{self.seed}/{behind}/{place}").random()
        return token if drawn < self.right else token ^ 1


def all_pages_back(core: EngineCore) -> bool:
    """Every page is free, or cached without a user."""
    cache = core.cache
    if cache.window is not None and cache.window.available != cache.window.num_pages:
        return False
    if cache.states is not None and cache.states.num_free + cache.states.num_kept != (
        cache.states.count
    ):
        return False
    return cache.num_free + cache.num_evictable == cache.num_pages


def drain(core: EngineCore, limit: int = 1_000_000) -> int:
    """Step until no request is left; returns the number of steps."""
    for step in range(limit):
        if not core.has_work:
            return step
        core.step()
    raise AssertionError(f"{limit} steps were not enough")
