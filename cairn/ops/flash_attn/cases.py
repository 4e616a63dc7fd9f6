"""Test cases of this family's ops."""

from __future__ import annotations

import torch

from cairn.ops.flash_attn.append_kv import append_kv
from cairn.ops.flash_attn.flash_attention import drawn, flash_attention
from cairn.ops.testing import Cases, Make


@append_kv.cases
def _(make: Make) -> Cases:
    int32 = torch.int32
    lengths, index = make.tensor([3, 0, 11], int32), make.tensor([3, 0, 1], int32)
    ends = make.tensor([0, 2, 2, 7], int32)
    for dtype in (torch.float32, torch.bfloat16):
        for heads, dim, wide in ((2, 16, 16), (3, 7, 40)):
            lead = ((3, 5), (7,), (0,))
            even, ragged, none = (
                [make.randn(*size, heads, width, dtype=dtype) for width in (dim, wide)]
                for size in lead
            )
            lines = [make.randn(4, 20, heads, width, dtype=dtype) for width in (dim, wide)]
            pages = [make.randn(15, 6, heads, width, dtype=dtype) for width in (dim, wide)]
            table = make.rand(15).argsort().view(3, 5).int()
            yield make.args(*even, *lines, lengths, None, None, None)
            yield make.args(*even, *lines, lengths, None, None, index)
            yield make.args(*ragged, *pages, lengths, ends, table, None)
            yield make.args(*ragged, *lines, lengths, ends - 1, None, index)
            yield make.args(*none, *pages, lengths, ends * 0, table, None)


@flash_attention.cases
def _(make: Make) -> Cases:
    few = {"queries": (1, 1, 1), "keys": (70, 1, 33), "heads": (4, 2), "widths": (16, 16)}
    some = {"queries": (5, 0, 40), "keys": (5, 9, 61), "heads": (6, 2), "widths": (24, 24)}
    more = {"queries": (40, 9), "keys": (13, 100), "heads": (3, 1), "widths": (16, 64)}
    wide = {"queries": (1, 3), "keys": (300, 2), "heads": (20, 1), "widths": (64, 512)}
    large = {"queries": (150, 3), "keys": (290, 7), "heads": (2, 2), "widths": (128, 128)}
    broad = {"queries": (9, 130), "keys": (200, 130), "heads": (2, 1), "widths": (256, 256)}
    lines = {"queries": (2, 1), "keys": (50, 9), "heads": (2, 1), "widths": (16, 16)}
    latent = {"queries": (2, 1), "keys": (40, 9), "heads": (3, 1), "widths": (576, 512)}
    none = {"queries": (), "keys": (), "heads": (2, 1), "widths": (16, 16)}
    for dtype in (torch.float32, torch.bfloat16):
        yield drawn(make, dtype, **few, even=True, page=16, right=0)
        yield drawn(make, dtype, **few, page=7, pad=1, chunk=8, softcap=5.0, scale=1.0)
        yield drawn(make, dtype, **some, page=-1, right=0)
        yield drawn(make, dtype, **wide, page=32, right=0, qv=True)
        yield drawn(make, dtype, **large, page=-1, right=0)
        yield drawn(make, dtype, **large, page=128, left=70, right=0)
        yield drawn(make, dtype, **broad, even=True, right=0)
        yield drawn(make, dtype, **latent, page=16, right=0)
    dtype = torch.float32
    yield drawn(make, dtype, **few, even=True, left=20, right=0, sinks=True)
    yield drawn(make, dtype, **some, page=-1, left=3, right=5, descale=True)
    yield drawn(make, dtype, **some, even=True, right=0, chunk=16, softcap=3.0)
    yield drawn(make, dtype, **some, page=1, sinks=True)
    yield drawn(make, dtype, **some, page=64, pad=3, left=11, right=0)
    yield drawn(make, dtype, **more, page=-1, right=0, qv=True, sinks=True)
    whole = list(drawn(make, dtype, **lines, even=True, right=0).args)
    whole[6] = make.tensor([1, 0], torch.int32)
    whole[11] = make.tensor([9, 50], torch.int32)
    yield make.args(*whole)
    yield drawn(make, dtype, **none, page=-1)
    if make.device != "cpu":
        long = {"queries": (1100,), "keys": (1100,), "heads": (4, 2), "widths": (64, 64)}
        yield drawn(make, torch.bfloat16, **long, page=-1, right=0)
        every = list(drawn(make, torch.bfloat16, **long, even=True, right=0).args)
        every[10] = every[11] = None
        yield make.args(*every)
        full = {"queries": (2500, 700), "keys": (3600, 700), "heads": (16, 4), "widths": (128, 128)}
        yield drawn(make, torch.bfloat16, **full, page=64, right=0)
        for fp8 in (few, some, large):
            yield drawn(make, torch.float8_e4m3fn, **fp8, page=16, right=0, descale=True)
