"""Page pools of more than 2^31 elements, where 32-bit offsets would overflow."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cairn.ops.registry import Op
from cairn.ops.testing import Arguments, compare, runnable, tolerance_of
from tests.ops.test_shapes import BF16, CASES, STEPS, Shape, kernels_of, step_of

SHAPE = Shape(64, 8, 16, 16, BF16)
"""A page's keys, and its summary keys, have 2^13 elements."""
PAGES = (1 << 18) + 64
POOLS = ("k_cache", "v_cache", "summary_key", "summary_bias", "key_pool", "bias_pool")


def moved(op: Op, given: Arguments) -> Arguments:
    """The same call with its pages at the end of pools of PAGES pages, whose other pages are
    NaN."""
    named = given.named(list(op.__signature__.parameters))
    shift = PAGES - next(named[name].shape[0] for name in POOLS if named.get(name) is not None)
    for name, value in named.items():
        if name in POOLS and value is not None:
            named[name] = value.new_full((PAGES, *value.shape[1:]), torch.nan)
            named[name][shift:] = value
        elif name in ("page_table", "pages"):
            named[name] = value + shift
        elif name == "location":
            named[name] = value + shift * SHAPE.size
    return Arguments((), named)


def call(op: Op, name: str, given: Arguments) -> tuple[list[Tensor], list[Tensor]]:
    """Results of a call, and the pools that it may change."""
    returned = op.using(name)(*given.args, **given.kwargs)
    named = given.named(list(op.__signature__.parameters))
    pools = [named[parameter] for parameter in op.mutates if named[parameter] is not None]
    if returned is None:
        return [], pools
    return [returned] if isinstance(returned, Tensor) else list(returned), pools


def check_far(op: Op, name: str, given: Arguments) -> None:
    what = f"{op.name}[{name}] far out"
    far = moved(op, given)
    (got, far_pools), (wanted, pools) = call(op, name, far), call(op, name, given)
    for far_pool, pool in zip(far_pools, pools, strict=True):
        shift = PAGES - pool.shape[0]
        assert bool(far_pool[:shift].isnan().all()), f"{what}: another page was written"
        got, wanted = [*got, far_pool[shift:]], [*wanted, pool]
    for one, other in zip(got, wanted, strict=True):
        compare(one, other, tolerance_of(op, given, other.dtype), what)


# One test for all ops, because the pools of several would not fit in memory.
@pytest.mark.gpu
def test_every_op_reaches_pages_beyond_2_to_the_31_numbers() -> None:
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GB of free device memory")
    for kind in STEPS:
        step = step_of(SHAPE, kind)
        for op, cases in CASES.items():
            given = list(cases(step))[-1]
            for implementation in kernels_of(op):
                for accepted in runnable(implementation, [given], "cuda"):
                    check_far(op, implementation.name, accepted)
    torch.cuda.empty_cache()
