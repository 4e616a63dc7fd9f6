"""Prompts with images through the whole engine: outputs do not depend on the schedule."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from cairn.cache.invariants import check
from cairn.engine.build import Built
from cairn.engine.media.pixels import Prepared, prepared_image, prepared_video
from cairn.engine.media.prompt import placed
from cairn.runner.encoding import EncoderCache
from cairn.runner.media import PromptMedia
from tests.engine import harness
from tests.engine.harness import Limits, Trace, difference, greedy, occupy, trace
from tests.engine.qwen35 import engine, poison
from tests.seeing import END, IMAGE, START, VIDEO, media_spec, picture, write
from tests.support import shows

MEDIA = media_spec()
ROUNDING = 2e-4
"""Float32 rounding of log-probabilities."""


@dataclass
class Prompt:
    """Tokens and images."""

    ids: list[int]
    media: PromptMedia | None


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("seeing"))


def seeing(folder: Path, **options) -> Built:
    """An engine with random weights and pages of 16 slots."""
    return engine(folder, load_format="random", page_size=16, limit_mm_per_prompt=None, **options)


def image(seed: int, height: int = 40, width: int = 56) -> Prepared:
    return prepared_image(picture(seed, height, width), MEDIA)


def prompt(*parts: int | Prepared, seed: int = 0) -> Prompt:
    """A prompt of text (given as numbers of tokens), images and videos, in order."""
    ids: list[int] = []
    items = []
    for part in parts:
        if isinstance(part, int):
            ids += harness.text(seed, part, 250)
        else:
            token = IMAGE if part.modality == "image" else VIDEO
            ids += [START, token, END]
            items.append(part)
    if not items:
        return Prompt(ids, None)
    return Prompt(*placed(ids, items, MEDIA, lambda text: list(text.encode())))


def start(built: Built, given: Prompt, tokens: int):
    name = f"r{built.core._arrivals}"
    return built.core.add(name, given.ids, greedy(tokens), media=given.media)


def serve(built: Built, given: Prompt, tokens: int = 4, budget: int = 4096) -> Trace:
    """The output of one prompt alone."""
    built.core.scheduler.limits = Limits(built.config.max_num_seqs, budget)
    live = start(built, given, tokens)
    while built.core.has_work:
        built.core.step()
        poison(built)
    return trace(live, built.spec.vocab_size)


def same(got: Trace, wanted: Trace) -> bool:
    return got.tokens == wanted.tokens and difference(got.logprobs, wanted.logprobs) < ROUNDING * 10


@shows("qwen3_5", "prefix cache")
def test_two_images_are_two_prefixes(folder: Path) -> None:
    """Equal ids with other pixels; and the same image again, which is cached and not encoded."""
    # Snapshots of states are at least half a step apart: 2 pages.
    built = seeing(folder, chunked_prefill_size=64)
    cold = seeing(folder, enable_prefix_caching=False)
    one, other = (prompt(5, image(seed), 60) for seed in (1, 2))
    assert one.ids == other.ids
    wanted = [serve(cold, given) for given in (one, other)]
    assert difference(wanted[0].logprobs, wanted[1].logprobs) > 1e-2
    for given, expected in ((one, wanted[0]), (other, wanted[1]), (one, wanted[0])):
        assert same(serve(built, given), expected)
    # Text before an image is shared; a text with the same ids as an image is not.
    encoded = built.runner.encoder.encoded
    again = serve(built, one)
    assert again.cached >= 64 and built.runner.encoder.encoded == encoded
    front = prompt(40, image(1), 5)
    swapped = prompt(40, image(2), 5)
    serve(built, front)
    assert serve(built, swapped).cached == 32
    text = Prompt(front.ids, None)
    assert same(serve(built, text), serve(cold, text))


def test_an_image_is_computed_once_for_several_requests(folder: Path) -> None:
    """A request waits for an image that another one computes, but not for a different image."""
    built = seeing(folder)
    built.core.scheduler.limits = Limits(4, 40)
    given = [prompt(30, image(seed), 20) for seed in (1, 1, 2)]
    live = [start(built, one, 3) for one in given]
    while built.core.has_work:
        built.core.step()
    assert [continuation.request.cached >= 48 for continuation in live] == [False, True, False]
    cold = seeing(folder, enable_prefix_caching=False)
    for one, continuation in zip(given, live, strict=True):
        assert same(trace(continuation, built.spec.vocab_size), serve(cold, one, 3))


@shows("qwen3_5", "batching", "chunked prefill", "prefix cache", "speculation")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"speculative_algorithm": "NEXTN", "speculative_num_steps": 2},
    ],
    ids=["plain", "draft layer"],
)
def test_random_schedules(folder: Path, options: dict) -> None:
    """Prompts that share images and texts, in chunks of any size, with aborts, preemptions, drafts
    and cached prefixes: each output equals that of the prompt alone with a cold cache."""
    rng = random.Random(3)
    cold = seeing(folder, enable_prefix_caching=False, max_num_seqs=1)
    built = seeing(folder, max_num_seqs=3, **options)
    # At most one embedding is kept: dropped ones are recomputed.
    built.runner.encoder._budget = 0
    video = prepared_video([picture(seed, 16, 24) for seed in range(3)], MEDIA, fps=2.0)
    roots: list[tuple[int | Prepared, ...]] = [
        (7, image(1), 30),
        (7, image(2), 30),
        (20, image(3, 16, 200), 3, image(1), 9),
        (5, video, 12, image(2)),
        (50,),
    ]
    held = occupy(built.core.cache, keep=24)
    live, wanted = {}, {}
    for number in range(10):
        given = prompt(*rng.choice(roots), rng.randrange(1, 12), seed=rng.randrange(2))
        wanted[number] = serve(cold, given, 6)
        live[number] = start(built, given, 6)
        for _ in range(rng.randrange(5)):
            built.core.scheduler.limits = Limits(3, rng.choice((5, 16, 33, 200)))
            built.core.step()
            leases = [r.lease for r in built.core.scheduler.running if r.lease is not None]
            check(built.core.cache, [held, *leases])
            poison(built)
        if number % 5 == 4 and not live[number].finished:
            built.core.abort(live.pop(number).request.id)
    while built.core.has_work:
        built.core.step()
        poison(built)
    assert built.core.scheduler.cached_prompt_tokens > 0
    assert len(live) >= 8
    for number, continuation in live.items():
        assert same(trace(continuation, built.spec.vocab_size), wanted[number]), number
    if options:
        assert built.core.scheduler.drafts.drafted > 0


def test_a_draft_layer_runs_a_chosen_token_at_its_position(folder: Path) -> None:
    """After an image, positions differ from indices; wrong ones would only reduce the right
    guesses."""
    built = seeing(folder, speculative_algorithm="NEXTN", speculative_num_steps=1)
    model, positions = built.runner.model, []
    guess = model.guess

    def watched(embedded, states, at, layer):
        positions.append(at.clone())
        return guess(embedded, states, at, layer)

    model.guess = watched
    given = prompt(5, image(1), 9)
    serve(built, given, tokens=3)
    # After the prompt it runs the sampled token; the next step begins with that token.
    drafted = next(i for i, at in enumerate(positions) if at.shape == (1,))
    (chosen,) = positions[drafted].tolist()
    assert positions[drafted + 1][..., 0].unique().tolist() == [chosen]
    assert chosen < len(given.ids)


def test_retracted_requests_keep_their_positions(folder: Path) -> None:
    built = seeing(folder, max_num_seqs=3)
    given = [prompt(10, image(seed), 12 + seed) for seed in range(3)]
    cold = seeing(folder, enable_prefix_caching=False)
    wanted = [serve(cold, one, 40) for one in given]
    held = occupy(built.core.cache, keep=14)
    built.core.scheduler.limits = Limits(3, 100)
    live = [start(built, one, 40) for one in given]
    while built.core.has_work:
        built.core.step()
        poison(built)
    assert built.core.scheduler.preemptions > 0
    for continuation, expected in zip(live, wanted, strict=True):
        assert same(trace(continuation, built.spec.vocab_size), expected)
    built.core.cache.close(held)


def test_few_embeddings_are_kept() -> None:
    import torch

    made = []

    def encode(pixels: torch.Tensor) -> torch.Tensor:
        made.append(int(pixels.sum()))
        return torch.zeros(4, 8)

    cache = EncoderCache(encode, 2 * 4 * 8 * 4, torch.device("cpu"))
    items = [image(seed).item for seed in range(3)]
    for item in (*items[:2], items[0], items[2], items[0], items[1]):
        cache.of([item])
    # The second was the least recently used one when the third arrived.
    assert cache.encoded == len(made) == 4 and cache.found == 2
