from __future__ import annotations

import pytest
import torch

from cairn.errors import BadArgument
from cairn.ops import set_kv_buffer_kernel
from tests.ops.sampling.variants import runnable_on

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 7, 63, 1100])
def test_every_slot_and_no_other(width: int, dtype: torch.dtype, device: str) -> None:
    g = torch.Generator().manual_seed(width)
    slots, tokens = 20, 9

    def numbers(rows: int) -> torch.Tensor:
        return torch.randint(0, 100, (rows, 2, width), generator=g).to(dtype)

    loc = torch.randperm(slots, generator=g)[:tokens].to(torch.int32)
    loc[4] = -3
    k, v = numbers(tokens), numbers(2 * tokens)[::2]
    for name in runnable_on(set_kv_buffer_kernel, device):
        caches = [numbers(slots), numbers(slots)]
        wanted = [cache.float() for cache in caches]
        for token, slot in enumerate(loc.tolist()):
            for cache, given in zip(wanted, (k, v), strict=True):
                if slot >= 0:
                    cache[slot] = given[token].float()
        moved = [x.to(device) for x in (*caches, loc, k, v)]
        set_kv_buffer_kernel.using(name)(*moved)
        for cache, expected in zip(moved[:2], wanted, strict=True):
            assert torch.equal(cache.float().cpu(), expected), name


LOC = torch.zeros(2, dtype=torch.int64)


@pytest.mark.parametrize(
    "argument, given",
    [
        ("loc", (torch.zeros(3, 4), torch.zeros(3, 4), LOC.float(), *[torch.zeros(2, 4)] * 2)),
        ("k", (torch.zeros(3, 4), torch.zeros(3, 4), LOC, torch.zeros(2, 5), torch.zeros(2, 4))),
        ("k", (torch.zeros(3, 4), torch.zeros(3, 4), LOC, torch.zeros(3, 4), torch.zeros(2, 4))),
        (
            "v",
            (
                torch.zeros(3, 4),
                torch.zeros(3, 4),
                LOC,
                torch.zeros(2, 4),
                torch.zeros(2, 4).half(),
            ),
        ),
        (
            "v_cache",
            (torch.zeros(3, 4), torch.zeros(3, 4, device="meta"), LOC, *[torch.zeros(2, 4)] * 2),
        ),
    ],
)
def test_refuses(argument: str, given: tuple) -> None:
    with pytest.raises(BadArgument, match=f"`{argument}`"):
        set_kv_buffer_kernel(*given)
