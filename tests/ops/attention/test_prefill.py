"""dense_attention of a prefill chunk with the wgmma kernel of flash attention."""

from __future__ import annotations

import pytest
import torch

from cairn.ops import gpu
from cairn.ops.attention import prefill
from cairn.ops.attention.dense_attention import dense_attention
from cairn.ops.attention.tuning import TUNING
from cairn.ops.flash_attn.tuning import TUNING as FLASH_ATTN_TUNING
from cairn.ops.testing import Arguments, Make, check
from tests.ops.tables import Tuned


def chunk(
    device: str, first: int, count: int, dim: int = 64, row: int = 1, page: int = 64
) -> Arguments:
    """Arguments for tokens first .. first + count - 1 of a row, as from the engine."""
    make = Make(device)
    filled = [9, 9]
    filled[row] = first + count
    paged = make.paged(filled, 2, page, dim, dtype=torch.bfloat16)
    running = [count if at == row else 0 for at in range(2)]
    where = paged.queries(running)[:2]
    q = make.randn(count, 8, dim, dtype=torch.bfloat16)
    given = (q, paged.k_cache, paged.v_cache, *where, paged.page_table)
    return make.args(*given, segments=[row, first, count])


@pytest.fixture
def small(tuned: Tuned) -> None:
    """Within the block, the kernel accepts calls of any size."""
    tuned(TUNING, tma_min_flops=0)
    tuned(FLASH_ATTN_TUNING, wgmma_full=0)


@pytest.mark.gpu
@pytest.mark.skipif(
    not (torch.cuda.is_available() and gpu.supports_wgmma(torch.device("cuda", 0))),
    reason="needs Hopper's tensor cores and Triton 3.6",
)
@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("first, count", [(0, 200), (65, 64), (1000, 333), (63, 2000)])
def test_a_chunk_with_and_without_a_past(first: int, count: int, dim: int, small: None) -> None:
    for row, page in ((0, 64), (1, 128)):
        given = chunk("cuda", first, count, dim, row, page)
        assert dense_attention.accepts("gluon", *given.args, **given.kwargs)
        check(dense_attention, "gluon", given)


def test_which_calls_are_one_chunk(
    small: None, monkeypatch: pytest.MonkeyPatch, tuned: Tuned
) -> None:
    monkeypatch.setattr(gpu, "supports_wgmma", lambda device: True)
    given = chunk("cpu", 100, 200)
    q, k_cache, v_cache, _, _, page_table = given.args

    def fits(segments: list[int] | None, cache: torch.Tensor = k_cache) -> bool:
        return prefill.fits(q, cache, v_cache, page_table, None, segments)

    assert fits([1, 100, 200])
    assert not fits(None)
    assert not fits([0, 0, 100, 1, 100, 100])
    assert not fits([1, 100, 200], k_cache.float())
    assert not fits([1, 100, 200], k_cache[..., :32])
    tuned(TUNING, tma_min_flops=1e12)
    assert not fits([1, 100, 200])
