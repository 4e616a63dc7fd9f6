"""merge_state_v2 and merge_state against softmax over the keys of both parts, in float64."""

from __future__ import annotations

import math

import pytest
import torch

from cairn import ops
from cairn.errors import BadArgument
from cairn.ops import merge_state, merge_state_v2
from cairn.ops.attention.merge_states import merge_states
from cairn.ops.registry import force
from tests.ops.attention.geometry import softmax_attention
from tests.ops.sampling.variants import runnable_on

FRONTS = ((merge_state_v2, 1.0), (merge_state, math.log(2)))


@pytest.mark.parametrize("front, unit", FRONTS)
@pytest.mark.parametrize("left", [0, 1, 9])
def test_merge_is_attention_over_both_parts(front, unit, left: int, device: str) -> None:
    g = torch.Generator().manual_seed(left)
    k, v = (torch.randn(9, 8, generator=g, dtype=torch.float64) * scale for scale in (4, 1))
    q = torch.randn(8, generator=g, dtype=torch.float64)
    parts = [
        softmax_attention(q, list(k[at]), list(v[at]), 1.0)
        for at in (slice(0, left), slice(left, 9))
    ]
    given = [x.float()[None, None].to(device) for o, s in parts for x in (o, s / unit)]
    got, lse = front(*given)
    wanted, total = softmax_attention(q, list(k), list(v), 1.0)
    torch.testing.assert_close(got[0, 0].double().cpu(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse[0, 0].double().cpu() * unit, total, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("front", [merge_state_v2, merge_state])
@pytest.mark.parametrize("sign", [1, -1])
def test_merge_of_nothing_is_nothing(front, sign: int, device: str) -> None:
    nan = torch.full((1, 2, 4), torch.nan, device=device)
    none = torch.full((1, 2), -torch.inf, device=device)
    v, s = front(nan, none, nan, sign * none)
    assert bool((v == 0).all())
    assert bool((s == -torch.inf).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_outputs_are_written_and_may_be_a_part(dtype: torch.dtype, device: str) -> None:
    v_a, v_b = (torch.randn(7, 3, 20, device=device).to(dtype) for _ in range(2))
    s_a, s_b = (torch.randn(7, 3, device=device) for _ in range(2))
    fresh = merge_state_v2(v_a, s_a, v_b, s_b)
    assert fresh[0].dtype == dtype
    v, s = torch.empty_like(v_a), torch.empty_like(s_a)
    given = merge_state_v2(v_a, s_a, v_b, s_b, v, s)
    assert given[0] is v and given[1] is s
    torch.testing.assert_close(given, fresh, rtol=0, atol=0)
    merge_state_v2(v_a, s_a, v_b, s_b, v_b, s_b)
    torch.testing.assert_close((v_b, s_b), fresh, rtol=0, atol=0)


@pytest.mark.parametrize("name", runnable_on(merge_states, "cpu"))
def test_far_apart_parts_lose_nothing(name: str) -> None:
    v_a, v_b = torch.full((1, 1, 3), 2.0), torch.full((1, 1, 3), 5.0)
    v, s = torch.empty(1, 1, 3), torch.empty(1, 1)
    for low, high in ((-1e30, 3.0), (-90.0, 90.0)):
        given = (v_a, torch.full((1, 1), low), v_b, torch.full((1, 1), high), v, s)
        merge_states.using(name)(*given)
        assert v.tolist() == [[[5.0] * 3]] and s.item() == pytest.approx(high, rel=1e-6)


@pytest.mark.parametrize("name", runnable_on(merge_states, "cpu"))
def test_an_infinite_part_is_not_read(name: str) -> None:
    nan, two = torch.full((1, 1, 3), torch.nan), torch.full((1, 1, 3), 2.0)
    one, none = torch.ones(1, 1), torch.full((1, 1), torch.inf)
    for sign in (1, -1):
        for parts in ((nan, sign * none, two, one), (two, one, nan, sign * none)):
            v, s = torch.empty(1, 1, 3), torch.empty(1, 1)
            merge_states.using(name)(*parts, v, s)
            assert v.tolist() == [[[2.0] * 3]] and s.item() == 1.0
    v, s = torch.empty(1, 1, 3), torch.empty(1, 1)
    merge_states.using(name)(nan, none, nan, -none, v, s)
    assert v.tolist() == [[[0.0] * 3]] and s.item() == -torch.inf


def test_wrong_arguments_are_named() -> None:
    v, s = torch.zeros(4, 2, 8), torch.zeros(4, 2)
    for given, named in (
        ((v, s, v[:3], s), "v_b"),
        ((v, s, v.half(), s), "v_b"),
        ((v, s.half(), v, s), "s_a"),
        ((v, s, v, s[:, :1]), "s_b"),
        ((v.double(), s, v, s), "v_a"),
        ((v.transpose(0, 1), s.T, v, s), "v_a"),
        ((v, s, v, s, v[..., :4], s), "v_merged"),
        ((v, s, v, s.to("meta")), "s_b"),
    ):
        with pytest.raises(BadArgument, match=f"merge_state_v2: argument `{named}`"):
            merge_state_v2(*given)


def test_forced_definition_serves_the_front() -> None:
    v, s = torch.randn(2, 2, 4), torch.randn(2, 2)
    with force("merge_states=reference"):
        torch.testing.assert_close(merge_state_v2(v, s, v, s)[0], v)


@pytest.mark.parametrize("name", runnable_on(merge_states, "cpu"))
def test_a_part_that_is_no_number_gives_none(name: str) -> None:
    values, one = torch.ones(1, 2, 3), torch.ones(1, 2)
    spoilt = torch.tensor([[torch.nan, 1.0]])
    for parts in ((values, spoilt, values, one), (values, one, values, spoilt)):
        v, s = torch.empty(1, 2, 3), torch.empty(1, 2)
        merge_states.using(name)(*parts, v, s)
        assert v[0, 0].isnan().all() and s[0, 0].isnan()
        assert v[0, 1].tolist() == [1.0] * 3


def test_the_module_has_the_functions_by_the_names_that_peers_have_there() -> None:
    module = ops.attention
    names = (
        "merge_state",
        "merge_state_v2",
        "cutlass_mla_decode",
        "cutlass_mla_get_workspace_size",
    )
    assert set(names) == set(module.__all__)
    assert all(getattr(module, name) is getattr(ops, name) for name in names)
