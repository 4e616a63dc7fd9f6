"""AMX loops of window attention: all geometries, any order and number of tokens, and mixed with
torch's tiles."""

from __future__ import annotations

import pytest
import torch

from cairn.ops import window_attention
from cairn.ops.cpu import amx
from cairn.ops.testing import Arguments, Make, check

pytestmark = pytest.mark.skipif(not amx.AVAILABLE, reason="this CPU has no AMX for bfloat16")

KINDS = [(False, False), (True, False), (True, True)]


def step(
    make: Make, group: int, size: int, dim: int, window: int, kind: tuple[bool, bool]
) -> Arguments:
    """Last tokens of rows of several lengths; NaN in unwritten slots."""
    lengths, counts = (5 * size + 7, 3, 2 * size, size - 1), (150, 3, 1, 40)
    paged = make.paged(lengths, 2, size, dim, dtype=torch.bfloat16)
    row, slot, _ = paged.queries(counts)
    q = make.randn(row.numel(), 2 * group, dim, dtype=torch.bfloat16)
    caches = (paged.k_cache, paged.v_cache)
    aligned, masked = kind
    return make.args(
        *(q, *caches, row, slot, paged.page_table, window),
        aligned=aligned,
        mask_landmarks=masked,
        dtype=torch.bfloat16,
    )


def pick(arguments: Arguments, tokens: torch.Tensor) -> Arguments:
    q, k_cache, v_cache, row, slot, *rest = arguments.args
    return Arguments(
        (q[tokens], k_cache, v_cache, row[tokens], slot[tokens], *rest), arguments.kwargs
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [1, 3, 8, 16])
def test_groups_and_kinds(group: int, kind: tuple[bool, bool]) -> None:
    for window in (1, 65, 130, 1000):
        arguments = step(Make(seed=window), group, 64, 64, window, kind)
        assert window_attention.choice(*arguments.args, **arguments.kwargs) == "amx"
        check(window_attention, "amx", arguments)


@pytest.mark.parametrize(("size", "dim"), [(128, 64), (64, 128), (128, 256)])
def test_pages_and_widths(size: int, dim: int) -> None:
    arguments = step(Make(seed=dim), 4, size, dim, 150, (True, True))
    assert window_attention.choice(*arguments.args, **arguments.kwargs) == "amx"
    check(window_attention, "amx", arguments)


def test_a_token_is_the_same_in_every_step() -> None:
    make = Make(seed=3)
    arguments = step(make, 4, 64, 64, 100, (True, True))
    whole = window_attention.using("amx")(*arguments.args, **arguments.kwargs)
    tokens = make.rand(arguments.args[0].shape[0]).argsort()
    for some in (tokens, tokens[:5], tokens[:1], tokens[:0]):
        given = pick(arguments, some)
        for all_of_it, part in zip(
            whole, window_attention.using("amx")(*given.args, **given.kwargs), strict=True
        ):
            assert torch.equal(all_of_it[some], part)


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_scales_that_turn_the_order_are_left_to_others(scale: float) -> None:
    arguments = step(Make(seed=5), 4, 64, 64, 100, (True, True))
    given = Arguments((*arguments.args, scale), arguments.kwargs)
    chosen = window_attention.choice(*given.args, **given.kwargs)
    assert chosen != "amx"
    check(window_attention, chosen, given)


def test_torchs_products_stay_right_after_amx_loops() -> None:
    """oneDNN caches the AMX tile configuration per thread and reloads it only when it changes."""
    make = Make(seed=4)
    arguments = step(make, 4, 64, 64, 100, (True, True))
    for rows, width in ((48, 96), (1000, 512), (17, 40)):
        a, b = make.randn(rows, width, dtype=torch.bfloat16), make.randn(width, rows).bfloat16()
        before = a @ b
        for _ in range(3):
            window_attention.using("amx")(*arguments.args, **arguments.kwargs)
            assert torch.equal(a @ b, before)
