"""Pages in host memory, with a few frames on the device, give what pages on the device give."""

from __future__ import annotations

import random

import numpy as np
import pytest

from cairn.cache.frames import Frames
from cairn.engine.build import Built
from cairn.errors import BadConfig, OutOfMemory
from tests.engine.fakes import all_pages_back
from tests.engine.harness import assert_same, engine, greedy, occupy, poison, run, text
from tests.engine.test_families import FAMILIES, OUTPUT, build, prompts_of, serve
from tests.support import shows

LANDMARKS = ("landmarks", "landmarks and windows")


def tiered(family: str, frames: int, **options) -> Built:
    """An engine with so many frames of each layer and head."""
    built = build(family, kv_host_memory="2MiB", kv_host_tier=True, **options)
    pools = built.runner.pools
    for i, layer in enumerate(pools.schema.layers):
        fields = [entry for entry in layer.pages if entry.selected is not None]
        if fields:
            pages = len(pools.pages[i][fields[0].name])
            pools.frames[i] = Frames(fields, pages, frames, "cpu")
    poison(built)
    return built


def traffic(built: Built) -> tuple[int, int]:
    """Sheets that were found in frames, and that were fetched."""
    states = [frames.state for frames in built.runner.pools.frames if frames is not None]
    return sum(int(s[:, 2].sum()) for s in states), sum(int(s[:, 3].sum()) for s in states)


@shows("hils", "host tier")
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("family", LANDMARKS)
def test_a_random_schedule_with_few_frames_gives_what_requests_give_alone(
    family: str, seed: int
) -> None:
    rng = random.Random(seed)
    built, plain = tiered(family, rng.choice([4, 5, 9])), build(family, enable_prefix_caching=False)
    size, vocab = built.config.page_size, built.spec.vocab_size
    prompts = prompts_of(rng, min(size, 32), vocab)
    alone = [run(plain, [prompt], greedy(OUTPUT), poisoned=False)[0] for prompt in prompts]
    longest = max(len(prompt) for prompt in prompts) + OUTPUT
    hostage = occupy(built.core.cache, keep=2 * int(built.slots.pages_for(longest)) + 1)
    for _ in range(2):
        for found, wanted in zip(serve(built, rng, prompts, hostage), alone, strict=True):
            if found is not None:
                assert_same(found, wanted)
    built.core.cache.close(hostage)
    assert all_pages_back(built.core)
    assert all(traffic(built))
