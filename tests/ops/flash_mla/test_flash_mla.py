"""FlashMLA's functions against softmax in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cairn.errors import BadArgument
from cairn.ops import (
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    flash_mla_with_kvcache_sm90,
    get_mla_metadata,
)
from cairn.ops.sparse_mla import records

SIZE, LATENT, ROPE, PAGES = 4, 128, 16, 9
WIDTH = LATENT + ROPE
LOG2E = math.log2(math.e)


def drawn(device: str, *shape: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=g).to(device)


def attention(q: Tensor, keys: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """o [H, LATENT], lse and largest logit [H] float64 of one query over keys [n, WIDTH]."""
    logits = q.double().cpu() @ keys.double().cpu().T * scale
    o = logits.softmax(-1) @ keys[:, :LATENT].double().cpu()
    return o, logits.logsumexp(-1), logits.amax(-1)


@pytest.mark.parametrize("causal", [False, True])
def test_all_keys_of_sequences(causal: bool, device: str) -> None:
    cache = drawn(device, PAGES, SIZE, 1, WIDTH)
    table = torch.tensor([[4, 1, 7], [2, 0, 3], [5, 6, 8]], dtype=torch.int32, device=device)
    lengths, queries = torch.tensor([11, 1, 0], dtype=torch.int32, device=device), 2
    q = drawn(device, 3, queries, 5, WIDTH, seed=1)
    plan = get_mla_metadata(lengths, queries * 5, 1)
    assert plan[0].shape == (1, 8) and plan[1].tolist() == [0, 1, 2, 3]
    given = (q, cache, table, lengths, LATENT, *plan)
    out, lse = flash_mla_with_kvcache(*given, causal=causal)
    assert out.shape == (3, queries, 5, LATENT) and lse.shape == (3, 5, queries)
    for b, n in enumerate(lengths.tolist()):
        lines = cache[table[b].long(), :, 0].flatten(0, 1)
        for s in range(queries):
            seen = n - (queries - 1 - s) * causal
            if seen <= 0:
                assert not out[b, s].any() and bool((lse[b, :, s] == math.inf).all())
                continue
            o, total, _ = attention(q[b, s], lines[:seen], WIDTH**-0.5)
            torch.testing.assert_close(out[b, s].double().cpu(), o, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(lse[b, :, s].double().cpu(), total, rtol=1e-5, atol=1e-5)
    again = flash_mla_with_kvcache_sm90(*given, causal=causal)
    for one, other in zip(again, (out, lse), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("small", [False, True])
def test_chosen_cells(small: bool, device: str) -> None:
    cache = drawn(device, PAGES, SIZE, 1, WIDTH)
    lines = cache.flatten(0, 2)
    if small:
        cache = records.quantize(*lines.split((LATENT, ROPE), -1)).view(PAGES, SIZE, 1, -1)
        lines = records.dequantize(cache, LATENT).flatten(0, 2)
    q = drawn(device, 2, 1, 3, WIDTH, seed=1)
    indices = torch.tensor([[[7, -1, 30, 99]], [[-1, -5, 36, 1 << 30]]], dtype=torch.int32)
    out, lse = flash_mla_with_kvcache(
        *(q, cache, None, None, LATENT),
        softmax_scale=0.1,
        is_fp8_kvcache=small,
        indices=indices.to(device),
    )
    o, total, _ = attention(q[0, 0], lines[[7, 30]], 0.1)
    torch.testing.assert_close(out[0, 0].double().cpu(), o, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse[0, :, 0].double().cpu(), total, rtol=1e-5, atol=1e-5)
    assert not out[1].any() and bool((lse[1] == math.inf).all())


def test_numbers_in_float8_with_one_scale(device: str) -> None:
    cache = drawn(device, PAGES, SIZE, 1, WIDTH).to(torch.float8_e4m3fn)
    q = drawn(device, 1, 1, 3, WIDTH, seed=1).to(torch.float8_e4m3fn)
    table = torch.tensor([[4, 1, 7]], dtype=torch.int32, device=device)
    lengths = torch.tensor([9], dtype=torch.int32, device=device)
    scales = [torch.tensor([number], device=device) for number in (0.5, 2.0)]
    out, lse = flash_mla_with_kvcache(
        *(q, cache, table, lengths, LATENT),
        descale_q=scales[0],
        descale_k=scales[1],
        is_fp8_kvcache=True,
    )
    lines = cache.float()[table[0].long(), :, 0].flatten(0, 1)[:9] * 2.0
    o, total, _ = attention(q[0, 0].float() * 0.5, lines, WIDTH**-0.5)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out[0, 0].double().cpu(), o, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse[0, :, 0].double().cpu(), total, rtol=1e-2, atol=1e-2)


def test_lines_of_a_prompt_have_logarithms_to_base_2(device: str) -> None:
    q, kv = drawn(device, 3, 4, WIDTH), drawn(device, 20, 1, WIDTH, seed=1)
    indices = torch.tensor([[[3, 19, -1]], [[20, -2, 1 << 30]], [[0, 1, 2]]], dtype=torch.int32)
    out, most, lse = flash_mla_sparse_fwd(q, kv, indices.to(device), 0.1, LATENT)
    for t, own in ((0, [3, 19]), (2, [0, 1, 2])):
        o, total, peak = attention(q[t], kv[own, 0], 0.1)
        torch.testing.assert_close(out[t].double().cpu(), o, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(lse[t].double().cpu(), total * LOG2E, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(most[t].double().cpu(), peak * LOG2E, rtol=1e-5, atol=1e-5)
    assert not out[1].any() and bool((lse[1] == -math.inf).all() and (most[1] == -math.inf).all())


def test_wrong_arguments_are_named() -> None:
    q, cache = torch.zeros(2, 1, 3, WIDTH), torch.zeros(PAGES, SIZE, 1, WIDTH)
    table, lengths = torch.zeros(2, 3, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    cells = torch.zeros(2, 1, 4, dtype=torch.int32)
    for given, options, said in (
        ((q, cache, table, lengths, 200), {}, "`head_dim_v` is 200, not 1 to the 144"),
        ((q, cache, None, lengths, LATENT), {}, "`block_table` is None, and so is `indices`"),
        ((q, cache, table, lengths * 13, LATENT), {}, "`cache_seqlens` holds 13, not numbers"),
        ((q, cache, table, lengths, LATENT), {"is_fp8_kvcache": True}, "`is_fp8_kvcache` is True"),
        ((q, cache, None, None, LATENT), {"indices": cells, "causal": True}, "`causal` is True"),
    ):
        with pytest.raises(BadArgument, match=said):
            flash_mla_with_kvcache(*given, **options)
