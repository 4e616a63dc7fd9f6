"""Models that guess by their own draft layer: its cache, its guesses, and what they change: nothing
but the speed. Weights are drawn, so its guesses are mostly wrong; right ones are put in their
place."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from cairn.cache.invariants import check
from cairn.engine.build import Built
from cairn.engine.planned_step import Limits
from cairn.engine.request import Request
from cairn.layers.norm import RMSNorm
from tests.engine import dsv4
from tests.engine.fakes import FakeDrafter, all_pages_back
from tests.engine.harness import Lease, occupy, poison, text
from tests.engine.test_families import build, prompts_of
from tests.engine.test_speculation import DRAWN, PLAIN
from tests.support import shows

STEPS = 3
RECURRENT = ["recurrent", "recurrent with experts"]
LATENT = ["latent, shared selections"]
COMPRESSED = "compressed"


def drafting(family: str, **options) -> Built:
    asked = {"speculative_algorithm": "NEXTN", "speculative_num_steps": STEPS}
    return plain(family, **asked, **options)


def plain(family: str, **options) -> Built:
    return build(family, load_format="random", **options)


class Seen:
    """The drafts after each text."""

    def __init__(self) -> None:
        self.behind: dict[tuple[int, ...], list[int]] = {}
        self.count = 0

    def look(self, request: Request) -> None:
        text, found = tuple(request.tokens), list(request.guesses)
        known = self.behind.get(text, [])
        short = min(len(found), len(known))
        assert found[:short] == known[:short]
        self.behind[text] = max(found, known, key=len)
        self.count += bool(short)


class Mixed(FakeDrafter):
    """The draft layer's drafts, or right ones instead.

    Args:
        seen: is told what the layer guesses.
        right: share of the times that right ones are, mostly.
    """

    ahead = STEPS

    def __init__(self, seen: Seen, right: float = 0.0) -> None:
        super().__init__(4, 0.9, most=STEPS)
        self.seen, self.often = seen, right

    def guess(self, request: Request, most: int) -> list[int]:
        own = list(request.guesses[:most])
        if not request.choosing:
            self.seen.look(request)
        return super().guess(request, len(own)) or own if self.rng.random() < self.often else own


def serve(built: Built, prompts, params, rng=None, hostage: Lease | None = None):
    core, size = built.core, built.config.page_size
    waiting, live, doomed = list(zip(prompts, params, strict=True)), [], {}
    while waiting or core.has_work:
        if waiting and (rng is None or rng.random() < 0.3 or not core.has_work):
            live.append(core.add(f"r{core._arrivals}", *waiting.pop(0)))
            if rng is not None and rng.random() < 0.15:
                doomed[len(live) - 1] = rng.randint(1, 5)
        if rng is not None:
            core.scheduler.limits = Limits(4, rng.choice([3, 65, size, 2 * size, 1000]))
        core.step()
        for number in doomed:
            doomed[number] -= 1
            if doomed[number] == 0:
                core.abort(live[number].request.id)
        poison(built)
        running = [r.lease for r in core.scheduler.running if r.lease is not None]
        check(core.cache, [*running, *([hostage] if hostage else [])])
    return [continuation.stream.output for continuation in live]


@shows("qwen3_next qwen3_5 glm_moe_dsa deepseek_v4", "speculation")
@pytest.mark.parametrize(
    "family, overlap",
    [
        pytest.param("recurrent", True, marks=pytest.mark.slow),
        ("recurrent with experts", False),
        *((family, True) for family in (*LATENT, COMPRESSED)),
    ],
)
def test_any_schedule_gives_the_same_tokens_and_guesses(family: str, overlap: bool) -> None:
    """Drafts depend on the text alone, with prefix cache, chunks, batches, aborts and
    preemptions."""
    size, count = (48, 3) if family != COMPRESSED else (24, 2)
    rng = random.Random(f"{family} {overlap}")
    cold, alone = (make(family, enable_prefix_caching=False) for make in (drafting, plain))
    prompts = prompts_of(rng, size, cold.spec.vocab_size)[:count]
    params = [replace(DRAWN if n % 2 else PLAIN, max_tokens=10) for n in range(len(prompts))]
    # Turns of a conversation, which share pages.
    prompts += [
        prompt[: 3 * size] + text(n, size, cold.spec.vocab_size) for n, prompt in enumerate(prompts)
    ]
    params *= 2
    wanted, seen = [], Seen()
    cold.core.scheduler.drafter, cold.core.scheduler.pace = Mixed(seen), None
    for prompt, param in zip(prompts, params, strict=True):
        wanted += serve(alone, [prompt], [param])
        assert serve(cold, [prompt], [param])[0].token_ids == wanted[-1].token_ids
    # Snapshots of recurrent states are at least half a step apart: few pages.
    built = drafting(family, chunked_prefill_size=64)
    built.core.overlap, built.core.scheduler.pace = overlap, None
    built.core.scheduler.drafter = drafter = Mixed(seen, 0.6)
    for prompt, output in zip(prompts, wanted, strict=True):
        drafter.knows(prompt, output.token_ids)
    longest = max(map(len, prompts)) + 10
    hostage = occupy(built.core.cache, keep=3 * int(built.slots.pages_for(longest)))
    before = seen.count
    for found, output in zip(serve(built, prompts, params, rng, hostage), wanted, strict=True):
        if found.finish_reason == "abort":
            assert found.token_ids == output.token_ids[: len(found.token_ids)]
        else:
            assert found.token_ids == output.token_ids
    built.core.cache.close(hostage)
    assert all_pages_back(built.core)
    totals = built.core.scheduler.drafts
    assert 5 * count < totals.accepted < totals.drafted
    assert built.core.scheduler.cached_prompt_tokens > 0 and seen.count > before + 5 * count


@shows("glm_moe_dsa", "speculation")
@pytest.mark.gpu
@pytest.mark.parametrize("family", [*RECURRENT, *LATENT])
def test_on_a_gpu(family: str) -> None:
    """With CUDA graphs."""
    prompts = [text(n, length, 120) for n, length in enumerate((3, 70, 130))]
    params = [replace(DRAWN if n % 2 else PLAIN, max_tokens=30) for n in range(3)]
    wanted = serve(plain(family, device="cuda"), prompts, params)
    built = drafting(family, device="cuda")
    built.core.scheduler.pace = None
    built.core.scheduler.drafter = drafter = Mixed(Seen(), 0.6)
    for prompt, output in zip(prompts, wanted, strict=True):
        drafter.knows(prompt, output.token_ids)
    found = serve(built, prompts, params)
    assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
    assert built.core.scheduler.drafts.accepted > 20
    assert any(kind.guessing for kind in built.runner.graphs._captured)


def drafted(built: Built, tokens: list[int], states: Tensor) -> Tensor:
    """The formula: the draft layer's output [hidden] for all tokens and the previous states [N - 1,
    hidden], after its norm, which is the head's input; and the state before its guess."""
    model, spec = built.runner.model, built.spec.draft.layer.mixer
    draft, mixer = model.draft, model.draft.block.mixer
    embedded = model.embedding(torch.tensor(tokens[1:]))
    x = (
        torch.cat((draft.token_norm(embedded), draft.state_norm(states)), -1)
        @ draft.join.map.weight.T
    )
    projected = draft.block.mixer_norm(x) @ mixer.qkv.weight.T
    heads, kv, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
    q, k, v = projected.split((2 * heads * dim, kv * dim, kv * dim), -1)
    q, gate = q.unflatten(-1, (heads, 2, dim)).unbind(-2)
    q, k = mixer.q_norm(q), mixer.k_norm(k.unflatten(-1, (kv, dim)))
    q, k = (rotated(part, spec.rotary.head_dim, spec.rotary.theta) for part in (q, k))
    q, k, v = (part.transpose(0, 1) for part in (q, k, v.unflatten(-1, (kv, dim))))
    o = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x = x + (o.transpose(0, 1) * gate.sigmoid()).flatten(1) @ mixer.out.weight.T
    h = draft.block.ffn_norm(x)
    ffn = draft.block.ffn
    a, b = (h @ ffn.gate_up.weight.T).chunk(2, -1)
    x = x + (functional.silu(a) * b) @ ffn.down.weight.T
    return draft.norm(x[-1])


def rotated(x: Tensor, width: int, theta: float) -> Tensor:
    """Rotate the halves of the first `width` dimensions of x [N, h, d] by the positions 0, 1,
    ..."""
    angle = torch.arange(len(x))[:, None] * theta ** (-torch.arange(0, width, 2) / width)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b, rest = x.split((width // 2, width // 2, x.shape[-1] - width), -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos, rest), -1)


@pytest.mark.parametrize("length", [1, 2, 65])
def test_guesses_follow_the_formula(length: int) -> None:
    built, hidden = drafting("recurrent"), list[Tensor]()
    # The family's norms multiply by 1 + the checkpoint's value, also in the draft layer.
    norms = [part for part in built.runner.model.draft.modules() if isinstance(part, RMSNorm)]
    assert len(norms) == 7 and all(norm.unit_offset for norm in norms)
    built.runner.model.register_forward_hook(lambda module, given, x: hidden.append(x.clone()))
    tokens, logits, guesses = first_guesses(built, length)
    model = built.runner.model
    states = model.norm(torch.cat(hidden)[: len(tokens) - 1])
    for found, guess in zip(logits, guesses, strict=True):
        state = drafted(built, tokens, states)
        wanted = state @ model.head._embedding[0].weight[: built.spec.vocab_size].T
        assert (found - wanted).abs().max() < 2e-4 * wanted.abs().max()
        assert guess == int(wanted.argmax())
        tokens, states = [*tokens, guess], torch.cat((states, state[None]))


@pytest.mark.parametrize("length", [1, 2, 22, 65])
def test_a_guess_behind_several_streams_follows_the_formula(length: int) -> None:
    """Below, at and beyond the draft layer's window of 20 tokens."""
    built, weights = drafting("compressed"), dict[str, Tensor]()
    for weight in built.runner.model.weights():
        weights[weight.source] = weight.place
        if weight.source.endswith(("_scale", "attn_sink")):
            # Otherwise it would have no visible effect.
            weight.place.mul_(3.0)
    tokens, (logits, *_), (guess, *_) = first_guesses(built, length)
    wanted = dsv4.Reference(dsv4.CONFIG, weights).guessed(tokens)[-1]
    assert (logits - wanted).abs().max() < 2e-4 * wanted.abs().max()
    assert guess == int(wanted.argmax())


def first_guesses(built: Built, length: int) -> tuple[list[int], list[Tensor], list[int]]:
    """A prompt with the token sampled after it; of each guess, its logits [V] and the guess."""
    model, logits = built.runner.model, list[Tensor]()
    guess_logits = model.guess_logits
    model.guess_logits = lambda x: logits.append(guess_logits(x)) or logits[-1]
    prompt = text(3, length, built.spec.vocab_size)
    live = built.core.add("r", prompt, PLAIN)
    while not live.stream.output.token_ids:
        built.core.step()
    tokens = [*prompt, *live.stream.output.token_ids]
    return tokens, [found[0] for found in logits], list(live.request.guesses)
