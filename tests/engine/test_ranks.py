"""A model that is divided between ranks gives what it gives in one piece."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from cairn.cache.invariants import check
from cairn.engine.planned_step import Limits
from tests.engine import dsv4
from tests.engine.fakes import all_pages_back
from tests.engine.harness import assert_same, greedy, run, text, trace
from tests.engine.ranked import engine
from tests.engine.test_families import FAMILIES
from tests.support import shows

OUTPUT = 6


def built(family: str, size: int, tmp_path: Path, **options):
    folder = FAMILIES[family]
    if folder is None:
        (tmp_path / "config.json").write_text(json.dumps(dsv4.CONFIG), encoding="utf-8")
        folder, options = tmp_path, options | {"load_format": "random", "page_size": dsv4.PAGE}
    return engine(folder, size, **options)


@shows("hils qwen3_moe qwen3_next qwen3_5 glm_moe_dsa deepseek_v4", "TP")
@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "latent in 8 bits"])
def test_two_ranks_give_what_one_gives(family: str, tmp_path: Path) -> None:
    rng = random.Random(3)
    alone, core = built(family, 1, tmp_path), built(family, 2, tmp_path).core
    vocab, base = alone.spec.vocab_size, text(1, 90, alone.spec.vocab_size)
    # The last two find a part of the first in the prefix cache.
    prompts = [base, text(2, 7, vocab), [*base[:70], 3], base[:80]]
    live = []
    while len(live) < len(prompts) or core.has_work:
        if len(live) < len(prompts) and (rng.random() < 0.2 or not core.has_work):
            live.append(core.add(f"r{len(live)}", prompts[len(live)], greedy(OUTPUT, True)))
        core.scheduler.limits = Limits(4, rng.choice([3, 40, 1000]))
        core.step()
        check(core.cache, [r.lease for r in core.scheduler.running if r.lease is not None])
    for continuation, wanted in zip(live, run(alone, prompts, greedy(OUTPUT, True)), strict=True):
        assert_same(trace(continuation, vocab), wanted)
    assert all_pages_back(core)
