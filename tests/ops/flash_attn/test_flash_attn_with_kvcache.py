"""flash_attn_with_kvcache against float64 loops: lengths, pages, masks, new keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cairn.errors import BadArgument
from cairn.ops import flash_attn_with_kvcache, get_scheduler_metadata, gpu, is_fa3_supported
from cairn.ops.flash_attn.flash_attention import flash_attention
from tests.ops.flash_attn.oracle import Rules, attention, rotated

LENGTHS = (13, 0, 30, 4)
OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (5, 2)},
    "causal window": {"window_size": (6, 0), "causal": True},
    "left": {"window_size": (3, -1)},
    "chunk": {"attention_chunk": 4},
    "causal chunk": {"attention_chunk": 7, "causal": True},
    "softcap": {"softcap": 1.5, "causal": True},
    "scale": {"softmax_scale": 0.9},
}


class Problem:
    """A cache of rows of different lengths and queries [B, Sq, H, d], with NaN in unused slots."""

    def __init__(self, seed: int, queries: int = 3, page: int = 0, dims=(16, 16), heads=(4, 2)):
        self.g = torch.Generator().manual_seed(seed)
        self.page, batch, capacity = page, len(LENGTHS), 36
        self.q = self.randn(batch, queries, heads[0], dims[0])
        lines = [self.randn(batch, capacity, heads[1], dim) for dim in dims]
        for line in lines:
            for row, length in enumerate(LENGTHS):
                line[row, length:] = torch.nan
        self.table = None
        if page:
            pages = capacity // page
            table = torch.randperm(batch * pages + 1, generator=self.g)[1:].view(batch, pages)
            self.table = table.int()
            for at, line in enumerate(lines):
                cache = torch.full((batch * pages + 1, page, *line.shape[2:]), torch.nan)
                cache[table.flatten()] = line.reshape(batch * pages, page, *line.shape[2:])
                lines[at] = cache
        self.k, self.v = lines
        self.lengths = torch.tensor(LENGTHS, dtype=torch.int32)

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.g)

    def rows(self, cache: Tensor, row: int, length: int, first: int = 0) -> Tensor:
        """[n, Hk, ..] of a sequence."""
        whole = cache[row] if self.table is None else cache[self.table[row].long()].flatten(0, 1)
        return whole[first:length]

    def run(self, device: str = "cpu", **options):
        moved = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in options.items()}
        given = (x.to(device) for x in (self.q, self.k, self.v))
        table = None if self.table is None else self.table.to(device)
        lengths = moved.pop("cache_seqlens", self.lengths.to(device))
        return flash_attn_with_kvcache(
            *given, cache_seqlens=lengths, page_table=table, return_softmax_lse=True, **moved
        )


def rules_of(dim: int, options: dict) -> Rules:
    return Rules(
        options.get("softmax_scale", dim**-0.5),
        options.get("causal", False),
        options.get("window_size", (-1, -1)),
        options.get("attention_chunk", 0),
        options.get("softcap", 0.0),
    )


def near(got: Tensor, wanted: Tensor, tolerance: float = 2e-5) -> None:
    torch.testing.assert_close(got.double().cpu(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("page", [0, 1, 6])
@pytest.mark.parametrize("kind", OPTIONS)
def test_masks_and_pages(kind: str, page: int, device: str) -> None:
    problem, options = Problem(page, page=page), OPTIONS[kind]
    out, lse = problem.run(device, **options)
    assert out.shape == problem.q.shape and lse.shape == (4, 4, 3)
    for row, length in enumerate(LENGTHS):
        keys, values = (problem.rows(x, row, length) for x in (problem.k, problem.v))
        wanted = attention(rules_of(16, options), problem.q[row], keys, values)
        near(out[row], wanted[0])
        near(lse[row], wanted[1])


@pytest.mark.parametrize("dims", [(512, 512), (576, 512), (576, 576)])
def test_heads_as_wide_as_latents(dims: tuple[int, int], device: str) -> None:
    problem = Problem(7, queries=2, page=6, dims=dims)
    out, lse = problem.run(device, causal=True)
    assert out.shape == (4, 2, 4, dims[1])
    rules = rules_of(dims[0], {"causal": True})
    for row, length in enumerate(LENGTHS):
        keys, values = (problem.rows(x, row, length) for x in (problem.k, problem.v))
        wanted = attention(rules, problem.q[row], keys, values)
        near(out[row], wanted[0])
        near(lse[row], wanted[1])
    wide = Problem(7, dims=(16, 577))
    with pytest.raises(BadArgument, match="`v_cache` has heads of 577 numbers, not 1 to 576"):
        wide.run(device)


@pytest.mark.skipif(not gpu.INTERPRETED, reason="needs Triton, and a machine without CUDA")
@pytest.mark.parametrize("side", [(1 << 31) - 1, 1 << 31, 1 << 62])
def test_windows_wider_than_any_sequence_show_all(side: int, monkeypatch) -> None:
    monkeypatch.setattr(
        "cairn.ops.flash_attn.call.flash_attention", flash_attention.using("triton")
    )
    problem = Problem(4)
    for window in ((3, side), (side, 2), (side, side)):
        plain = [-1 if one == side else one for one in window]
        wanted, got = (problem.run(window_size=given) for given in (plain, window))
        for one, expected in zip(got, wanted, strict=True):
            assert torch.equal(one, expected)


def test_a_negative_chunk_is_none(device: str) -> None:
    problem = Problem(3)
    wanted = problem.run(device, causal=True)
    for got, expected in zip(
        problem.run(device, causal=True, attention_chunk=-1), wanted, strict=True
    ):
        assert torch.equal(got, expected)


def test_nothing_seen_is_zero_and_infinite(device: str) -> None:
    problem = Problem(1)
    out, lse = problem.run(device, causal=True, sinks=torch.randn(4))
    assert bool((out[1] == 0).all()) and bool((lse[1] == torch.inf).all())
    assert bool(out.isfinite().all()) and not bool(lse.isnan().any())


@pytest.mark.parametrize("page", [0, 6])
def test_sinks_join_the_sum_but_not_lse(page: int, device: str) -> None:
    problem = Problem(3, page=page)
    sinks = torch.tensor([-1.0, 0.0, 2.0, 30.0])
    out, lse = problem.run(device, causal=True, sinks=sinks)
    for row, length in enumerate(LENGTHS):
        keys, values = (problem.rows(x, row, length) for x in (problem.k, problem.v))
        wanted = attention(Rules(0.25, causal=True), problem.q[row], keys, values, sinks)
        near(out[row], wanted[0])
        near(lse[row], wanted[1])


@pytest.mark.parametrize("page", [0, 6])
def test_values_of_another_width_and_qv(page: int, device: str) -> None:
    problem = Problem(4, page=page, dims=(16, 40), heads=(3, 1))
    qv = problem.randn(*problem.q.shape[:-1], 40)
    out, _ = problem.run(device, causal=True, qv=qv)
    for row, length in enumerate(LENGTHS):
        keys, values = (problem.rows(x, row, length) for x in (problem.k, problem.v))
        rules = Rules((16 + 40) ** -0.5, causal=True)
        near(out[row], attention(rules, problem.q[row], keys, values, None, qv[row])[0])


@pytest.mark.parametrize("page", [0, 6])
@pytest.mark.parametrize("kind", ["plain", "causal", "causal chunk", "causal window"])
def test_leftpad_hides_the_front(kind: str, page: int, device: str) -> None:
    problem, pads = Problem(5, page=page), torch.tensor([2, 0, 7, 4], dtype=torch.int32)
    for row, pad in enumerate(pads.tolist()):
        if page == 0:
            problem.k[row, :pad] = problem.v[row, :pad] = torch.nan
    out, _ = problem.run(device, cache_leftpad=pads, **OPTIONS[kind])
    for row, length in enumerate(LENGTHS):
        keys, values = (
            problem.rows(x, row, length, int(pads[row])) for x in (problem.k, problem.v)
        )
        near(out[row], attention(rules_of(16, OPTIONS[kind]), problem.q[row], keys, values)[0])


@pytest.mark.parametrize("page", [0, 6])
def test_cache_rows_by_batch_index(page: int, device: str) -> None:
    problem = Problem(6, page=page)
    order = torch.tensor([2, 3, 0, 0], dtype=torch.int32)
    lengths = problem.lengths[order.long()]
    out, _ = problem.run(device, cache_batch_idx=order, cache_seqlens=lengths, causal=True)
    for row, line in enumerate(order.tolist()):
        keys, values = (problem.rows(x, line, LENGTHS[line]) for x in (problem.k, problem.v))
        near(out[row], attention(Rules(0.25, causal=True), problem.q[row], keys, values)[0])


def test_new_keys_go_to_the_line_of_the_page_table_that_a_number_names() -> None:
    problem, line = Problem(20, page=6), 2
    k, v = problem.randn(1, 1, 2, 16), problem.randn(1, 1, 2, 16)
    problem.q, index = problem.q[:1], torch.tensor([line], dtype=torch.int32)
    given = {"k": k, "v": v, "cache_seqlens": torch.tensor([7], dtype=torch.int32)}
    problem.run(cache_batch_idx=index, **given)
    for cache, new in ((problem.k, k), (problem.v, v)):
        assert torch.equal(problem.rows(cache, line, 36)[7], new[0, 0])


@pytest.mark.parametrize("window", [(None, None), (3, None), [None, 2], torch.tensor([3, 2])])
def test_no_end_of_a_window_is_all_on_that_side(window) -> None:
    problem = Problem(21)
    bounds = tuple(-1 if side is None else int(side) for side in window)
    wanted = problem.run(window_size=bounds)
    for got, expected in zip(problem.run(window_size=window), wanted, strict=True):
        assert torch.equal(got, expected)
    new = {name: problem.randn(4, 1, 2, 16) for name in ("k", "v")}
    angles = {name: problem.randn(40, 8) for name in ("rotary_cos", "rotary_sin")}
    with_rope, as_before = (
        Problem(21).run(window_size=each, **new, **angles)[0] for each in (window, bounds)
    )
    assert torch.equal(with_rope, as_before)


@pytest.mark.parametrize("page", [0, 6])
def test_the_default_device_is_not_looked_at(page: int) -> None:
    problem, options = Problem(22, page=page), {"causal": True, "window_size": (4, 0)}
    wanted = problem.run(**options)
    with torch.device("meta"):
        got = problem.run(**options)
    for mine, expected in zip(got, wanted, strict=True):
        assert torch.equal(mine, expected)


def test_one_length_for_all_and_the_whole_cache() -> None:
    problem = Problem(7)
    for cache in (problem.k, problem.v):
        cache.nan_to_num_(0.3)
    for one, each in ((9, problem.lengths * 0 + 9), (None, 36)):
        wanted, _ = problem.run(cache_seqlens=each)
        near(problem.run(cache_seqlens=one)[0], wanted.double())


def test_ragged_queries(device: str) -> None:
    problem, counts = Problem(8), (3, 0, 5, 1)
    q = problem.randn(sum(counts), 4, 16)
    ends = torch.tensor([0, 3, 3, 8, 9], dtype=torch.int32)
    problem.q = q
    out, lse = problem.run(device, cu_seqlens_q=ends, max_seqlen_q=5, causal=True)
    assert lse.shape == (4, 9)
    for row, (length, begin, end) in enumerate(zip(LENGTHS, ends, ends[1:], strict=False)):
        keys, values = (problem.rows(x, row, length) for x in (problem.k, problem.v))
        wanted = attention(Rules(0.25, causal=True), q[begin:end], keys, values)
        near(out[begin:end], wanted[0])
        near(lse[:, begin:end], wanted[1])


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("page", [0, 6])
def test_new_keys_are_written_and_seen(page: int, ragged: bool, device: str) -> None:
    problem, counts = Problem(9, page=page), [2, 2, 2, 2]
    ends = None
    new = [problem.randn(4, 2, 2, 16) for _ in range(2)]
    lines = [list(x) for x in new]
    if ragged:
        counts = [1, 3, 0, 2]
        ends = torch.tensor([0, 1, 4, 4, 6], dtype=torch.int32)
        new = [problem.randn(6, 2, 16) for _ in range(2)]
        lines = [list(x.split(counts)) for x in new]
    before = problem.k.clone(), problem.v.clone()
    caches = problem.k.to(device).clone(), problem.v.to(device).clone()
    table = None if problem.table is None else problem.table.to(device)
    out = flash_attn_with_kvcache(
        *(problem.q.to(device), *caches, new[0].to(device), new[1].to(device)),
        cache_seqlens=problem.lengths.to(device),
        page_table=table,
        cu_seqlens_k_new=None if ends is None else ends.to(device),
        causal=True,
    )
    problem.k, problem.v = (x.cpu() for x in caches)
    for at, cache in enumerate((problem.k, problem.v)):
        for row, length in enumerate(LENGTHS):
            after = length + counts[row]
            assert torch.equal(problem.rows(cache, row, after, length), lines[at][row])
            old = problem.rows(before[at], row, length)
            assert torch.equal(problem.rows(cache, row, length), old)
        assert int(cache.isnan().sum()) == int(before[at].isnan().sum()) - sum(counts) * 32
    for row, length in enumerate(LENGTHS):
        after = length + counts[row]
        keys, values = (problem.rows(x, row, after) for x in (problem.k, problem.v))
        near(out[row], attention(Rules(0.25, causal=True), problem.q[row], keys, values)[0])


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("own_base", [True, False])
def test_new_keys_and_queries_turn(interleaved: bool, causal: bool, own_base: bool) -> None:
    problem = Problem(10, page=6)
    angles = problem.randn(60, 5)
    cos, sin = angles.cos(), angles.sin()
    new_k, new_v = (problem.randn(4, 2, 2, 16) for _ in range(2))
    base = torch.tensor([7, 1, 0, 20]).int() if own_base else None
    q = problem.q.clone()
    out, _ = problem.run(
        k=new_k,
        v=new_v,
        rotary_cos=cos,
        rotary_sin=sin,
        rotary_interleaved=interleaved,
        rotary_seqlens=base,
        causal=causal,
    )
    assert torch.equal(problem.q, q)
    for row, length in enumerate(LENGTHS):
        start = length if base is None else int(base[row])
        keys, values = (problem.rows(x, row, length + 2) for x in (problem.k, problem.v))
        for j in range(2):
            wanted = rotated(new_k[row, j], start + j, cos, sin, interleaved)
            near(keys[length + j], wanted, 1e-5)
        queries = torch.stack(
            [
                rotated(q[row, i], start + (i if causal else 0), cos, sin, interleaved)
                for i in range(3)
            ]
        )
        near(out[row], attention(Rules(0.25, causal=causal), queries, keys, values)[0])


@pytest.mark.gpu
def test_eight_bits_with_descales() -> None:
    problem = Problem(11, page=6)
    q, k, v = (x.to(torch.float8_e4m3fn) for x in (problem.q, problem.k, problem.v))
    scales = [torch.rand(4, 2, generator=problem.g) + 0.5 for _ in range(3)]
    problem.q, problem.k, problem.v = q, k, v
    names = ("q_descale", "k_descale", "v_descale")
    for device in ("cpu", "cuda"):
        out, _ = problem.run(device, causal=True, **dict(zip(names, scales, strict=True)))
        assert out.dtype == torch.bfloat16
        for row, length in enumerate(LENGTHS):
            factor = [x[row].view(1, 2, 1) for x in scales]
            keys = problem.rows(k.float(), row, length) * factor[1]
            values = problem.rows(v.float(), row, length) * factor[2]
            queries = q[row].float() * factor[0].repeat_interleave(2, 1)
            wanted = attention(Rules(0.25, causal=True), queries, keys, values)[0]
            near(out[row], wanted, 2e-2)


def test_one_scale_of_all_heads_may_come_expanded(device: str, monkeypatch) -> None:
    """Also with the kernels, which are interpreted on machines without a GPU."""
    problem = Problem(11, page=6)
    scale = torch.tensor([[0.5], [2.0], [1.0], [3.0]]).expand(4, 2)
    scales = {"k_descale": scale, "v_descale": scale}
    wanted, _ = problem.run("cpu", causal=True, **{k: x.contiguous() for k, x in scales.items()})
    if gpu.INTERPRETED:
        kernel = flash_attention._named("triton")
        monkeypatch.setattr(flash_attention, "_select", lambda *call: kernel)
    out, _ = problem.run(device, causal=True, **scales)
    near(out, wanted.double())


def test_half_precision_is_as_near_as_half_precision_can_be(device: str) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        problem = Problem(12)
        problem.q, problem.k, problem.v = (x.to(dtype) for x in (problem.q, problem.k, problem.v))
        out, _ = problem.run(device, causal=True)
        assert out.dtype == dtype
        for row, length in enumerate(LENGTHS):
            keys, values = (problem.rows(x, row, length) for x in (problem.k, problem.v))
            wanted = attention(Rules(0.25, causal=True), problem.q[row], keys, values)[0]
            near(out[row], wanted, 2e-2 if dtype == torch.bfloat16 else 3e-3)


def test_out_is_written_and_strides_are_free(device: str) -> None:
    problem = Problem(13)
    wanted, _ = problem.run(device, causal=True)
    wide = torch.full((4, 3, 4, 32), torch.nan, device=device)
    problem.q = torch.stack((problem.q, problem.q), -2).flatten(-2)[..., :16]
    problem.k, problem.v = (
        x.transpose(1, 2).contiguous().transpose(1, 2) for x in (problem.k, problem.v)
    )
    out, _ = problem.run(device, causal=True, out=wide[..., :16])
    assert out.data_ptr() == wide.data_ptr()
    near(wide[..., :16], wanted.double().cpu())
    assert bool(wide[..., 16:].isnan().all())


def test_scheduler_metadata_is_accepted() -> None:
    problem = Problem(14)
    plan = get_scheduler_metadata(4, 3, 36, 4, 2, 16, problem.lengths)
    assert plan.device == problem.lengths.device
    near(problem.run(scheduler_metadata=plan, ver=4)[0], problem.run()[0].double())
    assert is_fa3_supported() is True


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("bits", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("angles", ["as q", "float32"])
def test_eight_bits_turn_in_float32_and_are_cut_off(
    angles: str, bits: torch.dtype, causal: bool, interleaved: bool, device: str
) -> None:
    problem, most = Problem(23, page=6), torch.finfo(bits).max

    def rounded(x: Tensor) -> Tensor:
        return x.float().clamp(-most, most).to(bits)

    angle, kind = problem.randn(60, 5), bits if angles == "as q" else torch.float32
    cos, sin = angle.cos().to(kind), angle.sin().to(kind)
    # Many of the largest values overflow after rotation.
    new_k = rounded(problem.randn(4, 2, 2, 16) * most)
    new_v = rounded(problem.randn(4, 2, 2, 16))
    q, k, v = (rounded(x) for x in (problem.q, problem.k, problem.v))
    problem.q, problem.k, problem.v = q, k.to(device), v.to(device)
    out, _ = problem.run(
        device,
        k=new_k,
        v=new_v,
        rotary_cos=cos,
        rotary_sin=sin,
        rotary_interleaved=interleaved,
        causal=causal,
        softmax_scale=0.1 / most,
    )
    assert out.dtype == torch.bfloat16
    k, v, angles_of = problem.k.cpu(), problem.v.cpu(), (cos.double(), sin.double(), interleaved)
    for row, length in enumerate(LENGTHS):
        keys, values = (problem.rows(x.float(), row, length + 2) for x in (k, v))
        for j in range(2):
            wanted = rounded(rotated(new_k[row, j], length + j, *angles_of))
            assert torch.equal(keys[length + j], wanted.float())
            assert torch.equal(values[length + j], new_v[row, j].float())
        places = [length + (i if causal else 0) for i in range(3)]
        queries = torch.stack([rotated(q[row, i], at, *angles_of) for i, at in enumerate(places)])
        rules = Rules(0.1 / most, causal=causal)
        near(out[row], attention(rules, rounded(queries).float(), keys, values)[0], 1e-2)
    assert float(k[..., :10].float().nan_to_num().abs().max()) == most


def test_wrong_arguments_are_named() -> None:
    problem = Problem(15, page=6)
    q, k, v, lengths, table = problem.q, problem.k, problem.v, problem.lengths, problem.table
    good = {"q": q, "k_cache": k, "v_cache": v, "cache_seqlens": lengths, "page_table": table}
    new = {"k": torch.zeros(4, 1, 2, 16), "v": torch.zeros(4, 1, 2, 16)}
    for change, named in (
        ({"q": q[0]}, "q"),
        ({"q": q.double()}, "q"),
        ({"q": q[:, :, :3]}, "q"),
        ({"k_cache": k[..., :15]}, "k_cache"),
        ({"k_cache": k.half()}, "k_cache"),
        ({"v_cache": v[:, :5]}, "v_cache"),
        ({"cache_seqlens": lengths.long()}, "cache_seqlens"),
        ({"cache_seqlens": lengths[:3]}, "cache_seqlens"),
        ({"cache_seqlens": -1}, "cache_seqlens"),
        ({"page_table": table.long()}, "page_table"),
        ({"page_table": None, "k_cache": k[:3], "v_cache": v[:3]}, "k_cache"),
        ({"cache_leftpad": lengths.long()}, "cache_leftpad"),
        ({"cache_batch_idx": lengths[:2]}, "cache_batch_idx"),
        ({"k": new["k"]}, "v"),
        ({**new, "k": new["k"][..., :8]}, "k"),
        ({**new, "cache_seqlens": None}, "cache_seqlens"),
        ({"rotary_cos": torch.ones(9, 8)}, "rotary_sin"),
        ({"rotary_cos": torch.ones(9, 9), "rotary_sin": torch.ones(9, 9)}, "rotary_cos"),
        ({"qv": q[..., :8]}, "qv"),
        ({"sinks": torch.zeros(3)}, "sinks"),
        ({"q_descale": torch.zeros(4, 4)}, "q_descale"),
        ({"out": q.half()}, "out"),
        ({"window_size": (-2, 0)}, "window_size"),
        ({"window_size": (1, 2, 3)}, "window_size"),
        ({"score_mod": lambda score: score}, "score_mod"),
        ({"aux_tensors": [q]}, "aux_tensors"),
        ({"q": q.to("meta")}, "k_cache"),
    ):
        with pytest.raises(BadArgument, match=f"flash_attn_with_kvcache: argument `{named}`"):
            flash_attn_with_kvcache(**{**good, **change})
