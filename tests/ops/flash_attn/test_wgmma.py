"""The wgmma kernel of flash_attention, on a Hopper GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cairn.ops import gpu
from cairn.ops.attention.tuning import TUNING as ATTENTION_TUNING
from cairn.ops.flash_attn.flash_attention import drawn, flash_attention
from cairn.ops.flash_attn.tuning import TUNING
from cairn.ops.testing import Make, check, run
from tests.ops.tables import Tuned

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and gpu.supports_wgmma(torch.device("cuda", 0))),
        reason="needs Hopper's tensor cores and Triton 3.6",
    ),
]
RAGGED = {"queries": (200, 0, 129, 1, 300), "keys": (200, 7, 500, 130, 64)}
"""Sequences with and without earlier keys, queries that see no key, one query, and none."""


@pytest.fixture(autouse=True)
def small(tuned: Tuned) -> None:
    """Within the block, the kernel accepts calls of any size."""
    tuned(ATTENTION_TUNING, tma_min_flops=0)
    tuned(TUNING, wgmma_full=0)


def agrees(**options: Any) -> None:
    torch.manual_seed(0)
    dtype = options.pop("dtype", torch.bfloat16)
    given = drawn(Make("cuda"), dtype, **options)
    assert flash_attention.accepts("gluon", *given.args, **given.kwargs)
    check(flash_attention, "gluon", given)


@pytest.mark.parametrize("right", [-1, 0, 3])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("layout", [{"page": -1}, {"page": 64}, {"page": 192}, {"even": True}])
def test_layouts_and_masks(layout: dict[str, Any], width: int, right: int) -> None:
    agrees(**RAGGED, heads=(4, 2), widths=(width, width), right=right, **layout)


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (8, 8), (12, 2), (64, 1), (200, 1)])
def test_groups_of_heads(heads: tuple[int, int]) -> None:
    agrees(queries=(140, 131), keys=(300, 131), heads=heads, widths=(64, 64), page=64, right=0)


@pytest.mark.parametrize("width", [64, 128, 256])
def test_sinks_and_float16(width: int) -> None:
    shape = {**RAGGED, "heads": (4, 2), "widths": (width, width)}
    agrees(**shape, page=64, right=0, sinks=True, dtype=torch.float16)


def test_many_keys_are_the_same_every_time() -> None:
    torch.manual_seed(0)
    shape = {"queries": (1500, 2000), "keys": (9000, 70_000), "heads": (8, 2)}
    given = drawn(Make("cuda"), torch.bfloat16, **shape, widths=(128, 128), page=64, right=0)
    check(flash_attention, "gluon", given)
    first, _ = run(flash_attention, "gluon", given)
    for _ in range(20):
        again, _ = run(flash_attention, "gluon", given)
        assert torch.equal(again.args[3], first.args[3])
        assert torch.equal(again.args[4], first.args[4])


def test_nan_of_one_sequence_does_not_reach_others() -> None:
    torch.manual_seed(0)
    shape = {"queries": (300, 200), "keys": (300, 400), "heads": (2, 1), "widths": (64, 64)}
    given = drawn(Make("cuda"), torch.bfloat16, **shape, page=-1, right=0)
    wanted = run(flash_attention, "gluon", given)[0].args[3]
    # In the second sequence: the value of key 250, visible from query 50 on, and a query.
    given.args[2][550] = torch.nan
    given.args[0][303] = torch.nan
    got = run(flash_attention, "gluon", given)[0].args[3]
    assert torch.equal(got[:300], wanted[:300])
    assert got[350:].isnan().all()
    assert got[303].isnan().all()


@pytest.mark.parametrize(
    "options",
    [
        {"left": 5, "right": 0},
        {"chunk": 8},
        {"softcap": 3.0},
        {"pad": 3},
        {"qv": True},
        {"descale": True},
        {"page": 32},
        {"scale": -1.0},
        {"widths": (32, 32)},
        {"queries": (3,), "keys": (300,)},
        {"dtype": torch.float32},
    ],
)
def test_unsupported_calls_go_to_other_implementations(options: dict[str, Any]) -> None:
    shape = {"queries": (200,), "keys": (300,), "heads": (2, 1), "widths": (64, 64), "page": 64}
    shape |= options
    given = drawn(Make("cuda"), shape.pop("dtype", torch.bfloat16), **shape)
    assert not flash_attention.accepts("gluon", *given.args, **given.kwargs)
