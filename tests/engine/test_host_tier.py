"""Pages in host memory, with few frames on the device, give the results of pages on the device."""

from __future__ import annotations

import contextlib
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cairn.attention.base import StepPlan
from cairn.attention.hsa import HsaBackend
from cairn.attention.inputs import HilsInputs
from cairn.cache.frames import FrameMap, huge_pages
from cairn.engine.build import Built
from cairn.errors import BadConfig, OutOfMemory
from cairn.ops.registry import force
from cairn.runner import runner
from cairn.specs.hils import HilsSpec
from tests.engine.harness import assert_same, engine, greedy, poison, run, text
from tests.engine.test_families import DATA, build, expect_each_as_alone, prompts_of, serve
from tests.support import shows

LANDMARKS = ("landmarks", "landmarks and windows")
TIER: dict[str, Any] = {"kv_host_memory": "2MiB", "kv_host_tier": True}
ON_GPU: dict[str, Any] = {"device": "cuda", "disable_cuda_graph": True}
gpu = pytest.mark.gpu


def as_on_a_gpu(self: HsaBackend, spec: HilsSpec, inputs: HilsInputs, plan: StepPlan) -> bool:
    """`HsaBackend._few` without the check of the device."""
    return len(inputs.q) <= spec.local_window


def tiered(family: str, count: int, **options: Any) -> Built:
    """An engine with this many frames per layer and head."""
    built = build(family, **TIER, **options)
    frames = built.runner.pools.frames
    assert frames is not None
    frames.count, frames.numbers = count, frames.numbers[:, :count]
    frames.cached = {k: tensor[:, :count].contiguous() for k, tensor in frames.cached.items()}
    pages, device = frames.map.frame_of.shape[1], frames.numbers.device
    frames.map = FrameMap.empty(len(frames.map.state), pages, count, device)
    poison(built)
    return built


def expect_alone(built: Built, plain: Built, seed: int) -> None:
    """A random schedule gives the results of each request alone on the other engine."""
    rng = random.Random(seed)
    size, vocab = built.config.page_size, built.spec.vocab_size
    prompts = prompts_of(rng, min(size, 32), vocab)[-4:]
    expect_each_as_alone(built, plain, rng, prompts)
    assert built.runner.pools.frames is not None
    held = built.runner.pools.frames.map
    head, page = (held.frame_of >= 0).nonzero(as_tuple=True)
    assert len(page) and torch.equal(
        held.page_in[head, held.frame_of[head, page].long()], page.int()
    )
    assert all(built.runner.pools.frame_traffic())


@shows("hils", "host tier")
@pytest.mark.parametrize(
    ("family", "frames", "options"),
    [
        ("landmarks", 4, {}),
        ("landmarks and windows", 9, {}),
        pytest.param("landmarks", 5, ON_GPU, marks=gpu),
        pytest.param("landmarks and windows", 70, ON_GPU, marks=gpu),
        pytest.param("landmarks", 1000, {"device": "cuda"}, marks=gpu),
    ],
)
def test_a_random_schedule_with_few_frames_gives_what_requests_give_alone(
    family: str, frames: int, options: dict[str, Any]
) -> None:
    plain = build(family, enable_prefix_caching=False, **options)
    expect_alone(tiered(family, frames, **options), plain, seed=1)


def test_steps_of_few_queries_read_host_memory_in_place(monkeypatch) -> None:
    """As on a GPU: selected pages are copied into frames after the last layer."""

    monkeypatch.setattr(HsaBackend, "_few", as_on_a_gpu)
    built = tiered("landmarks", 70)
    expect_alone(built, build("landmarks", enable_prefix_caching=False), seed=2)


def test_a_rehearsal_leaves_out_layers_with_frames(monkeypatch) -> None:
    """Warm-up runs the first and the last of each kind, and ops check their arguments, as on a
    GPU."""
    monkeypatch.setattr(HsaBackend, "_few", as_on_a_gpu)
    monkeypatch.setattr(runner, "skip_checks", contextlib.nullcontext)
    built = engine(str(DATA / "hils" / "qwen_rope_fullrank"), kv_cache_memory="16MiB", **TIER)
    assert len(built.spec.layers) == 3
    with built.runner.model.abridged(built.runner.backends.names):
        run(built, [text(1, 60, built.spec.vocab_size)], greedy(2))
    assert all(built.runner.pools.frame_traffic())


def same_schedule(engines: list[Built]) -> None:
    """Two engines follow one schedule; all results are equal bit by bit."""
    size, vocab = engines[0].config.page_size, engines[0].spec.vocab_size
    prompts = prompts_of(random.Random(3), min(size, 32), vocab)[1:4]
    found = []
    for built in engines:
        hostage = built.core.cache.open([1], 0)
        found.append(serve(built, random.Random(5), prompts, hostage))
        built.core.cache.close(hostage)
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.cached == other.cached and one.tokens == other.tokens
            assert np.array_equal(one.logprobs, other.logprobs)
    hits, misses, _ = engines[1].runner.pools.frame_traffic()
    assert hits > misses > 0


def test_few_frames_change_no_bit() -> None:
    """For loops whose choice does not depend on the number of queries."""
    with force("landmark_attention=composed,page_attention=reference"):
        same_schedule([build("landmarks"), tiered("landmarks", 5)])


@gpu
def test_decode_through_frames_gives_the_bits_of_pages() -> None:
    """Prompts run in small chunks, for which the decode step's kernels are used as well."""
    options = ON_GPU | {"chunked_prefill_size": 16}
    engines = [build("landmarks", **options), tiered("landmarks", 100, **options)]
    prompts = [text(seed, 150 + 20 * seed, engines[0].spec.vocab_size) for seed in range(3)]
    plain, found = (run(built, prompts, greedy(24)) for built in engines)
    for one, other in zip(plain, found, strict=True):
        assert one.tokens == other.tokens and np.array_equal(one.logprobs, other.logprobs)
    hits, misses, _ = engines[1].runner.pools.frame_traffic()
    assert hits > misses > 0
    assert re.fullmatch(
        r"host_read_rate=[\d.]+ GB/s  because .*", str(engines[1].memory.choices[-1])
    )


def test_a_page_that_is_written_anew_leaves_its_frame() -> None:
    """Requests that share nothing reuse each other's pages, many of which are still in frames."""
    options = {"enable_prefix_caching": False}
    engines = [build("landmarks", **options), tiered("landmarks", 64, **options)]
    for seed in range(3):
        prompt = text(seed, 120, engines[0].spec.vocab_size)
        plain, found = (run(built, [prompt], greedy(3))[0] for built in engines)
        assert_same(found, plain)


def test_host_memory_may_have_huge_pages() -> None:
    """Shared memory has none in most systems, and a page of it is cleared several times slower."""
    memory = huge_pages(5 << 20)
    assert len(memory) == 5 << 20 and not memory.any()
    for mapping in re.split(r"^(?=[0-9a-f]+-)", Path("/proc/self/smaps").read_text(), flags=re.M):
        begin, end = (int(n, 16) for n in (mapping.split(maxsplit=1) or ["0-0"])[0].split("-"))
        if begin <= memory.data_ptr() < end:
            flags = mapping.split("VmFlags:")[1].split()
            assert {"hg", "dc"} <= {*flags} and "sh" not in flags


def test_models_and_options_without_host_tier_are_refused(monkeypatch) -> None:
    with pytest.raises(BadConfig, match="no layer of this model selects pages by landmarks"):
        build("recurrent", **TIER)
    with pytest.raises(BadConfig, match=r"kv_host_memory gives no memory.*--kv-host-memory"):
        build("landmarks", kv_host_tier=True)
    with pytest.raises(BadConfig, match="Leave out kv_host_tier or disaggregation_mode"):
        build("landmarks", disaggregation_mode="prefill", **TIER)
    with pytest.raises(OutOfMemory, match=r"7 pages need \d+ bytes of host memory.*at least"):
        build("landmarks", kv_host_tier=True, kv_host_memory="8KiB", max_model_len=100)
    monkeypatch.setattr("cairn.engine.build.free_host_memory", lambda: 17 << 20)
    with pytest.raises(OutOfMemory, match=r"256 pages in host .* 2097152 .*at most 1048576"):
        build("landmarks", **TIER)
