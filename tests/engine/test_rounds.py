"""Engines that share experts give the tokens of one that has all experts, whichever engines have
work."""

from __future__ import annotations

import asyncio
import random
import threading
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed

from cairn.config import EngineOptions
from cairn.distributed.rendezvous import group_of
from cairn.distributed.rounds import EnginesStopped, Rounds
from cairn.engine.build import build
from cairn.engine.client import EngineClient
from cairn.engine.fleet import Fleet
from cairn.engine.messages import Launch
from cairn.engine.placement import placed
from cairn.engine.rounds import Engines
from cairn.errors import BadConfig, EngineDead
from cairn.server.loading import new_client
from cairn.server.options import ServerOptions
from cairn.types import SamplingParams
from tests.engine import children, ranked
from tests.engine.fakes import all_pages_back
from tests.engine.harness import greedy, run, text
from tests.engine.test_families import FAMILIES

MODEL = Path(FAMILIES["experts"])
OPTIONS = {
    "dtype": "float32", "device": "cpu", "kv_cache_memory": "2MiB", "max_num_seqs": 3,
    "max_model_len": 120, "enable_expert_parallel": True,
}  # fmt: skip
OUTPUT = 4


def prompts_of(number: int, vocab: int) -> list[list[int]]:
    """Requests of an engine; one has the maximum length."""
    lengths = [3, 60, 120 - OUTPUT, 17][number % 2 :]
    return [text(10 * number + i, length, vocab) for i, length in enumerate(lengths)]


class One:
    """An engine in a separate thread, instead of a process."""

    def __init__(self, number: int, count: int, store, rounds: int, **options) -> None:
        self.number, self.given = number, OPTIONS | {"expert_engines": count} | options
        self.made = lambda: group_of(store, number, count, torch.device("cpu"))
        self.rounds, self.error = rounds, None
        self.tokens: dict[int, list[int]] = {}
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self) -> None:
        try:
            self.run()
        except Exception as error:  # noqa: BLE001 - told by the test
            self.error = error

    def run(self) -> None:
        built = build(MODEL, EngineOptions(**self.given), engines=Engines(self.made()))
        core, rng = built.core, random.Random(self.number)
        waiting = list(enumerate(prompts_of(self.number, built.spec.vocab_size)))
        live = {}
        try:
            # An engine that is done continues for the others; the last engine has no requests at
            # all.
            while built.rounds.count < self.rounds:
                last = self.number == self.given["expert_engines"] - 1
                if waiting and not last and (rng.random() < 0.1 or not core.has_work):
                    at, prompt = waiting.pop(0)
                    live[at] = core.add(f"{at}", prompt, greedy(OUTPUT))
                    core.add(f"doomed {at}", [*prompt[:-1], 1], greedy(OUTPUT))
                if core.has_work:
                    built.rounds.around(core.step)
                    if rng.random() < 0.3:
                        for at in live:
                            core.abort(f"doomed {at}")
                else:
                    built.rounds.idle()
            built.rounds.stop()
        except EnginesStopped:
            pass
        assert not waiting or last
        assert all_pages_back(core)
        self.tokens = {at: list(c.stream.output.token_ids) for at, c in live.items()}


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_engines_give_what_one_gives(count: int) -> None:
    store = torch.distributed.HashStore()
    rounds = 150 if count == 2 else 1000
    more = {"ep_num_redundant_experts": 1}
    engines = [One(number, count, store, rounds, **more) for number in range(count)]
    for each in engines:
        each.thread.join(120)
    assert [each.error for each in engines] == [None] * count
    one = ranked.engine(MODEL, 1, max_model_len=120)
    for each in engines[:-1]:
        wanted = run(one, prompts_of(each.number, one.spec.vocab_size), greedy(OUTPUT))
        assert each.tokens == {at: found.tokens for at, found in enumerate(wanted)}
    assert not engines[-1].tokens


def test_the_end_of_another_engine_is_why_a_step_fails() -> None:
    """The requests of that step get status 503; the server's error is not that of a bug."""

    class Gone:
        rank = 0

        def gathered(self, x: torch.Tensor) -> torch.Tensor:
            reason = "Read error [127.0.0.1]:4: Connection reset by peer. This is typically caused"
            raise RuntimeError(f"[/__w/gloo/pair.cc:537] {reason} by a worker. GLHF!")

        sum = gathered

    rounds, x = Rounds(Gone()), torch.zeros(0)
    for call in (lambda: rounds.begin(1), lambda: rounds.gathered(x), lambda: rounds.own(x, 0)):
        with pytest.raises(
            EngineDead, match=r"reached \(Read error \S+ Connection reset by peer\)"
        ):
            call()


def test_options_that_engines_cannot_share_are_refused() -> None:
    def launched(**options):
        given = EngineOptions(**OPTIONS | options)
        return placed(Launch("model", given, 1, None, 0, 2, "file"))

    assert launched().expert_engines == 2
    with pytest.raises(BadConfig, match="tensor_parallel_size is 2 and data_parallel_size 2"):
        launched(tensor_parallel_size=2)
    with pytest.raises(BadConfig, match="ep_size is 3, but .* 2 replicas"):
        launched(ep_size=3)
    with pytest.raises(BadConfig, match="ep_size is 2, but .* which are 1"):
        build(MODEL, EngineOptions(**OPTIONS, ep_size=2))
    with pytest.raises(BadConfig, match="expert_engines is 2, but experts are shared by 1"):
        build(MODEL, EngineOptions(**OPTIONS, expert_engines=2))
    with pytest.raises(BadConfig, match="enable_eplb does not go together"):
        build(MODEL, EngineOptions(**OPTIONS, expert_engines=2, enable_eplb=True))


@pytest.mark.slow
def test_engines_that_share_experts_end_together() -> None:
    async def serve() -> None:
        options = EngineOptions(**OPTIONS)
        fleet = new_client(MODEL, options, ServerOptions(data_parallel_size=2))
        assert isinstance(fleet, Fleet)
        meeting = fleet._meeting
        await fleet.start()
        params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
        outputs = [fleet.submit([1, 2, 3], params, request_id=f"{i}") for i in range(4)]
        found = [[delta async for delta in output] for output in outputs]
        assert all(found)
        first, second = fleet.engines
        assert isinstance(first, EngineClient)
        psutil.Process(second.pid).kill()
        await asyncio.wait_for(fleet.died(), 10)
        await children.until(lambda: children.gone(first.pid), 5)
        await fleet.stop(1.0)
        assert meeting is not None and not meeting.exists()

    asyncio.run(serve())
