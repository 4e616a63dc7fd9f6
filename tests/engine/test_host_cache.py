"""A prefix loaded from host memory equals the evicted prefix."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from cairn.cache.host import PAGE, STATE, WINDOW
from cairn.cache.invariants import check
from cairn.cache.record import checksum
from cairn.engine.build import Built
from cairn.errors import BadConfig, OutOfMemory
from cairn.runner import host_records
from cairn.types import SamplingParams
from tests.engine.fakes import all_pages_back, fake_core
from tests.engine.harness import Trace, greedy, occupy, poison, run, text
from tests.engine.test_families import build
from tests.support import shows

LANDMARKS = "landmarks and windows"


def give_up_all(built: Built) -> None:
    """Evict the device's whole prefix cache; unowned memory is NaN afterwards."""
    cache, pools = built.core.cache, built.runner.pools
    if cache.states is not None:
        cache.states.free(list(iter(cache.states.take, None)))
        for state in pools.states():
            state[pools.first_snapshot :] = float("nan")
    cache.close(occupy(cache, 0))
    assert cache.num_cached == 0
    poison(built)


def assert_same_bits(one: Trace, other: Trace) -> None:
    assert one.cached == other.cached
    assert one.tokens == other.tokens
    assert np.array_equal(one.logprobs, other.logprobs)


@shows("hils qwen3_5 deepseek_v32 deepseek_v4", "host prefix cache")
@pytest.mark.parametrize("family", [LANDMARKS, "recurrent", "latent in 8 bits", "compressed"])
def test_a_prefix_from_host_memory_gives_the_bits_of_one_on_the_device(family: str) -> None:
    options = {"page_size": 16} if family in ("recurrent", "latent in 8 bits") else {}
    built = build(family, kv_host_memory="8MiB", **options)
    core, host = built.core, built.core.cache.host
    assert host is not None
    per_page = core.cache.slots.tokens_per_page
    prompt = text(1, 4 * per_page + 3, built.spec.vocab_size)
    run(built, [prompt], greedy(6))
    warm = run(built, [prompt], greedy(6))[0]
    assert warm.cached == 4 * per_page and not host.loaded

    give_up_all(built)
    assert_same_bits(run(built, [prompt], greedy(6))[0], warm)
    assert host.loaded and not host.damaged
    check(core.cache, ())
    assert all_pages_back(core)

    # A corrupted record is a miss: its content is recomputed, as after a shorter prefix.
    give_up_all(built)
    (name, slot), *_ = reversed(host.slots[PAGE].kept.items())
    records = core.executor.records
    records.record(PAGE, slot)[5] ^= 1
    again = run(built, [prompt], greedy(6))[0]
    assert host.damaged == 1 and again.cached < warm.cached and again.tokens == warm.tokens
    check(core.cache, ())
    # It is recomputed and evicted again, so the whole prefix is found the next time.
    give_up_all(built)
    assert records.intact(PAGE, host.slots[PAGE].kept[name])
    assert_same_bits(run(built, [prompt], greedy(6))[0], warm)


def test_checksums_are_computed_beside_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(LANDMARKS, kv_host_memory="8MiB")
    core, go = built.core, threading.Event()
    monkeypatch.setattr(
        host_records, "checksum", lambda content: (go.wait(20), checksum(content))[1]
    )
    prompt = text(1, 4 * core.cache.slots.tokens_per_page + 3, built.spec.vocab_size)
    want = run(built, [prompt], greedy(6))[0]
    give_up_all(built)
    # The engine goes on, until it needs the records.
    run(built, [text(2, 5, built.spec.vocab_size)], greedy(3))
    assert core.cache.host.stored and not go.is_set()
    threading.Timer(0.05, go.set).start()
    again = run(built, [prompt], greedy(6))[0]
    assert go.is_set() and again.cached and again.tokens == want.tokens


@pytest.mark.parametrize(("family", "kind"), [(LANDMARKS, WINDOW), ("recurrent", STATE)])
def test_pages_alone_are_no_hit_where_windows_or_states_are_missing(family: str, kind: int) -> None:
    built = build(family, kv_host_memory="8MiB")
    core, host = built.core, built.core.cache.host
    assert host is not None
    prompt = text(1, 3 * core.cache.slots.tokens_per_page + 3, built.spec.vocab_size)
    cold, warm = (run(built, [prompt], greedy(6))[0] for _ in range(2))
    give_up_all(built)
    for name in list(host.slots[kind].kept):
        host.slots[kind].forget(name)
    again = run(built, [prompt], greedy(6))[0]
    assert host.slots[PAGE].kept and warm.cached > again.cached == 0
    assert_same_bits(again, cold)


@pytest.mark.parametrize("windows", [0, 12])
@pytest.mark.parametrize("snapshots", [None, 3])
def test_the_ledger_is_exact_in_small_pools(windows: int, snapshots: int | None) -> None:
    rng = random.Random(windows)
    counts = (20, 8 if windows else 0, 4 if snapshots else 0)
    pools = {"pages": 24, "window_pages": windows, "snapshots": snapshots, "host": counts}
    core = fake_core(rows=3, step_slots=16, **pools)
    cache, host = core.cache, core.cache.host
    assert host is not None
    prompts = [[n % 4, *(rng.randrange(10) for _ in range(rng.randint(3, 40)))] for n in range(9)]
    for number in range(80):
        core.add(f"{number}", rng.choice(prompts), SamplingParams(max_tokens=rng.randint(1, 5)))
        if rng.random() < 0.2:
            core.abort(f"{rng.randint(0, number)}")
        for _ in range(rng.randint(0, 6)):
            if core.has_work:
                core.step()
            check(cache, [r.lease for r in core.scheduler.running if r.lease is not None])
    while core.has_work:
        core.step()
    check(cache, ())
    assert all_pages_back(core) and host.loaded
    cache.reset()
    check(cache, ())
    assert not any(slots.kept for slots in host.slots)


def test_host_memory_that_cannot_be_had_is_refused() -> None:
    with pytest.raises(BadConfig, match=r"kv_host_memory is 1000.*--kv-host-memory\) to at least"):
        build(LANDMARKS, kv_host_memory=1000)
    with pytest.raises(BadConfig, match="kv_host_memory is '1GiB'.*enable_prefix_caching is false"):
        build(LANDMARKS, kv_host_memory="1GiB", enable_prefix_caching=False)
    with pytest.raises(BadConfig, match="kv_host_memory is 'much'"):
        build(LANDMARKS, kv_host_memory="much")
    with pytest.raises(OutOfMemory, match=r"but \d+ bytes of host memory are free.*to at most"):
        build(LANDMARKS, kv_host_memory="1000TiB")
