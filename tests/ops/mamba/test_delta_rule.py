"""The gated delta rule against its equations in float64, one head and one token at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cairn import ops
from cairn.ops.mamba.chunk_gated_delta_rule import gated_delta_rule

H, HV, K, V = 2, 4, 6, 5
WAYS = ("reference", "torch")


def words(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def drawn(tokens: int, seed: int = 0, fastest: float = 1.0) -> dict[str, Tensor]:
    """Tokens of one sequence; decay per token ranges over the heads from nearly none to
    `fastest`."""
    torch.manual_seed(seed)
    rates = torch.logspace(-4, 0, HV) * fastest
    return {
        "q": torch.randn(1, tokens, H, K),
        "k": torch.randn(1, tokens, H, K),
        "v": torch.randn(1, tokens, HV, V),
        "g": -torch.rand(1, tokens, HV) * rates,
        "beta": torch.rand(1, tokens, HV),
    }


def by_hand(given: dict[str, Tensor], state: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """o [T, HV, V] and the last state [HV, V, K], in float64."""
    q, k, v, g, beta = (given[name][0].double() for name in ("q", "k", "v", "g", "beta"))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    out = torch.zeros(v.shape, dtype=torch.float64)
    last = torch.zeros(HV, V, K, dtype=torch.float64)
    for head in range(HV):
        s = torch.zeros(V, K, dtype=torch.float64) if state is None else state[head].double()
        for t in range(v.shape[0]):
            key, query = k[t, head // (HV // H)], q[t, head // (HV // H)] / K**0.5
            s = s * g[t, head].exp()
            u = beta[t, head] * (v[t, head] - s @ key)
            s = s + torch.outer(u, key)
            out[t, head] = s @ query
        last[head] = s
    return out, last


def run(way: str, given: dict[str, Tensor], **options: Any) -> Tensor:
    return gated_delta_rule.using(way)(**given, use_qk_l2norm_in_kernel=True, **options)


def close(got: Tensor, wanted: Tensor, bound: float = 2e-6) -> None:
    scale = wanted.abs().max().clamp(min=1e-30)
    assert float((got.double() - wanted).abs().max() / scale) < bound


@pytest.mark.parametrize("tokens", [1, 2, 17, 63, 64, 65, 128, 200])
@pytest.mark.parametrize("way", WAYS)
def test_it_is_the_recurrence(way: str, tokens: int) -> None:
    given, state = drawn(tokens, tokens), torch.randn(1, HV, V, K)
    expected = by_hand(given, state[0])
    o = run(way, given, initial_state=state)
    close(o[0], expected[0])
    close(state[0], expected[1])


def test_decays_that_overflow_when_they_are_not_differences() -> None:
    given = drawn(150, fastest=60.0)
    assert given["g"].sum(1).min() < -2000
    state = torch.zeros(1, HV, V, K)
    o, expected = run("torch", given, initial_state=state), by_hand(given)
    for head in range(HV):
        close(o[0, :, head], expected[0][:, head], 1e-5)
        close(state[0, head], expected[1][head], 1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_sequences_side_by_side_are_those_alone(way: str) -> None:
    lengths = (70, 0, 1, 16, 3, 130, 17)
    parts = [drawn(length, n) for n, length in enumerate(lengths)]
    together = {name: torch.cat([part[name] for part in parts], dim=1) for name in parts[0]}
    tail = drawn(4)
    tail["v"][:] = torch.nan
    together = {name: torch.cat((x, tail[name]), dim=1) for name, x in together.items()}
    starts = words(0, *torch.tensor(lengths).cumsum(0).tolist())
    pool, slot = torch.randn(9, HV, V, K), words(8, 1, -1, 0, 3, 2, 5)
    pool[3] = torch.nan
    used = torch.tensor([True, True, True, True, False, True, True])
    before = pool.clone()
    where = {"initial_state_indices": slot, "has_initial_state": used, "cu_seqlens": starts}
    o = run(way, together, initial_state=pool, **where)
    for n, part in enumerate(parts):
        fresh = int(slot[n]) < 0 or not used[n]
        wanted, last = by_hand(part, None if fresh else before[slot[n]])
        if lengths[n]:
            close(o[0, starts[n] : starts[n + 1]], wanted)
        if slot[n] >= 0:
            close(pool[slot[n]], last)
    assert torch.equal(o[0, starts[-1] :], torch.zeros(4, HV, V))
    assert torch.equal(pool[[4, 6, 7]], before[[4, 6, 7]])


@pytest.mark.parametrize("cut", [1, 3, 63, 64, 100, 149])
@pytest.mark.parametrize("way", WAYS)
def test_cut_anywhere_it_is_the_whole(way: str, cut: int) -> None:
    given, state = drawn(150), torch.zeros(1, HV, V, K)
    expected = by_hand(given)
    parts = [
        run(way, {name: x[:, a:b] for name, x in given.items()}, initial_state=state)
        for a, b in ((0, cut), (cut, 150))
    ]
    close(torch.cat(parts, dim=1)[0], expected[0])
    close(state[0], expected[1])


def test_cuts_at_whole_chunks_change_no_bit() -> None:
    given, whole, state = drawn(200), torch.zeros(1, HV, V, K), torch.zeros(1, HV, V, K)
    o = run("torch", given, initial_state=whole)
    parts = [
        run("torch", {name: x[:, a:b] for name, x in given.items()}, initial_state=state)
        for a, b in ((0, 64), (64, 192))
    ]
    assert torch.equal(torch.cat(parts, dim=1), o[:, :192])


def test_which_way_a_sequence_runs_depends_on_its_length() -> None:
    call, state = (torch.zeros(1, tokens, HV, V) for tokens in (16, 17)), torch.zeros(1, HV, V, K)
    names = [
        gated_delta_rule.choice(
            *(torch.zeros(1, v.shape[1], H, K),) * 2, v, v[..., 0], v[..., 0], state
        )
        for v in call
    ]
    assert names == ["reference", "torch"]


def test_heads_may_come_first() -> None:
    given = drawn(20)
    o, none, also = ops.chunk_gated_delta_rule(**given)
    assert none is None and also is None
    turned = {name: x.transpose(1, 2) for name, x in given.items()}
    assert torch.equal(ops.chunk_gated_delta_rule(**turned, head_first=True)[0].transpose(1, 2), o)


def test_the_cpu_form_has_keys_before_values_and_leaves_its_state() -> None:
    given, state = drawn(90), torch.randn(2, HV, K, V)
    before = state.clone()
    starts = words(0, 20, 90)
    o, last, none = ops.chunk_gated_delta_rule_cpu(
        **given,
        initial_state=state,
        cu_seqlens=starts,
        head_first=False,
        use_qk_l2norm_in_kernel=True,
    )
    assert none is None and torch.equal(state, before)
    for n in range(2):
        part = {name: x[:, starts[n] : starts[n + 1]] for name, x in given.items()}
        wanted, end = by_hand(part, before[n].transpose(-1, -2))
        close(o[0, starts[n] : starts[n + 1]], wanted)
        close(last[n].transpose(-1, -2), end)


def gated(given: dict[str, Tensor]) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
    """Gates for given decays and strengths: first arguments of the update, and the tokens."""
    tokens = given["v"].shape[1]
    a_log, dt_bias = torch.randn(HV), torch.randn(HV)
    a, b = torch.randn(tokens, HV), torch.randn(tokens, HV)
    g = -a_log.exp() * torch.log1p((a + dt_bias).exp())
    own = {**given, "g": g[None], "beta": b.sigmoid()[None]}
    return (a_log, a, dt_bias, 1.0, 20.0, given["q"], given["k"], given["v"], b), own


def test_gates() -> None:
    (a_log, a, dt_bias, *_, b), own = gated(drawn(30))
    g, beta = ops.fused_gdn_gating(a_log, a, b, dt_bias)
    torch.testing.assert_close(g, own["g"])
    torch.testing.assert_close(beta, own["beta"])
    large = ops.fused_gdn_gating(torch.zeros(HV), torch.full((1, HV), 30.0), b[:1], torch.zeros(HV))
    assert torch.equal(large[0], torch.full((1, 1, HV), -30.0))


def test_update_is_the_rule_with_gates() -> None:
    first, own = gated(drawn(7))
    starts, slot = words(0, 1, 3, 7), words(2, 0, -1)
    pool = torch.randn(3, HV, V, K)
    before = pool.clone()
    o = ops.fused_sigmoid_gating_delta_rule_update(*first, pool, slot, None, True, starts)
    for n in range(3):
        part = {name: x[:, starts[n] : starts[n + 1]] for name, x in own.items()}
        wanted, last = by_hand(part, before[slot[n]] if slot[n] >= 0 else None)
        close(o[0, starts[n] : starts[n + 1]], wanted)
        if slot[n] >= 0:
            close(pool[slot[n]], last)
    assert torch.equal(pool[1], before[1])


def test_a_fresh_sequence_of_the_update_reads_no_slot() -> None:
    first, own = gated(drawn(1))
    pool = torch.full((2, HV, V, K), torch.nan)
    o = ops.fused_sigmoid_gating_delta_rule_update(
        *first, pool, words(1), None, True, has_initial_state=torch.tensor([False])
    )
    wanted, last = by_hand(own)
    close(o[0], wanted)
    close(pool[1], last)
    assert pool[0].isnan().all()


def test_drafts_in_a_tree_go_on_from_their_parents() -> None:
    first, own = gated(drawn(5))
    pool, buffer = torch.randn(1, HV, V, K), torch.full((2, 6, HV, V, K), -1.0)
    before = pool.clone()
    # Paths 0 1 3 and 0 2 4.
    parents = words(-1, 0, 0, 1, 2)[None]
    o = ops.fused_sigmoid_gating_delta_rule_update(
        *first,
        *(pool, words(0), None, True),
        disable_state_update=True,
        intermediate_states_buffer=buffer,
        intermediate_state_indices=words(1),
        cache_steps=6,
        retrieve_parent_token=parents,
    )
    assert torch.equal(pool, before)
    for path in ([0, 1, 3], [0, 2, 4]):
        wanted, last = by_hand({name: x[:, path] for name, x in own.items()}, before[0])
        close(o[0, path], wanted)
        close(buffer[1, path[-1]], last)
    assert (buffer[0] == -1).all() and (buffer[1, 5] == -1).all()


def test_a_decay_for_each_column() -> None:
    first, _ = gated(drawn(4))
    a, shift = torch.randn(4, HV, K), torch.randn(HV, K)
    a_log, q, k, v, b = first[0], *first[5:]
    pool = torch.randn(1, HV, V, K)
    s = pool[0].clone()
    o = ops.fused_sigmoid_gating_delta_rule_update(
        *(a_log, a, shift, 1.0, 20.0, q, k, v, b, pool, words(0)), is_kda=True
    )
    for t in range(4):
        decay = (-a_log.exp()[:, None] * torch.nn.functional.softplus(a[t] + shift)).exp()
        key, query = (x[0, t].repeat_interleave(HV // H, 0) for x in (k, q))
        s = s * decay[:, None]
        u = b[t].sigmoid()[:, None] * (v[0, t] - torch.einsum("hvk,hk->hv", s, key))
        s = s + u[..., None] * key[:, None]
        torch.testing.assert_close(o[0, t], torch.einsum("hvk,hk->hv", s, query) / K**0.5)
    torch.testing.assert_close(pool[0], s)


def test_projections_taken_apart() -> None:
    tokens, r = 3, HV // H
    names = {"q": (H, K), "k": (H, K), "v": (HV, V), "z": (HV, V)}
    part = {name: torch.randn(tokens, *shape) for name, shape in names.items()}
    b, a = torch.randn(tokens, HV), torch.randn(tokens, HV)
    groups = [
        torch.cat(
            [part["q"][:, h], part["k"][:, h]]
            + [part[x][:, h * r : (h + 1) * r].flatten(1) for x in ("v", "z")],
            dim=1,
        )
        for h in range(H)
    ]
    ba = [x[:, h * r : (h + 1) * r] for h in range(H) for x in (b, a)]
    first = ops.fused_qkvzba_split_reshape_cat(torch.cat(groups, 1), torch.cat(ba, 1), H, HV, K, V)
    flat = torch.cat([part[x].flatten(1) for x in "qkvz"], dim=1)
    second = ops.fused_qkvzba_split_reshape_cat_contiguous(flat, torch.cat((b, a), 1), H, HV, K, V)
    for qkv, z, own_b, own_a in (first, second):
        assert torch.equal(qkv, flat[:, : 2 * H * K + HV * V])
        assert torch.equal(z, part["z"]) and torch.equal(own_b, b) and torch.equal(own_a, a)
