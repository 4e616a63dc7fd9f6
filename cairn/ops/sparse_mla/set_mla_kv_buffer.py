"""Write of latents and rotary keys to a cache with one row per slot (DeepSeek-V2 report, section
2.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.checks import FLOATS, INDICES, expect, expect_within, refuse
from cairn.ops.memory.rows import store_rows
from cairn.ops.registry import op
from cairn.ops.sparse_mla import store_launch

NAME = "set_mla_kv_buffer"
BYTE_SIZED = (torch.uint8, torch.float8_e4m3fn, torch.float8_e5m2)


@op(mutates=("kv_buffer",))
def set_mla_kv_buffer(
    kv_buffer: Tensor, loc: Tensor, cache_k_nope: Tensor, cache_k_rope: Tensor, num_warps: int = 0
) -> None:
    """kv_buffer[loc] = [cache_k_nope | cache_k_rope], byte for byte.

    Args:
        kv_buffer: [slots, r + dr] or [slots, 1, r + dr] float32, bfloat16, float16, float8 or
            uint8, changed; with one byte per element, r and dr are even.
        loc: [T] int32 or int64; tokens with a negative slot are skipped; repeated slots are
            undefined.
        cache_k_nope, cache_k_rope: [T, r], [T, dr], or with a head dim of size 1, of kv_buffer's
            dtype; rows may be strided.
        num_warps: ignored.
    Raises:
        BadArgument: for another shape, dtype or device, or (on a CPU) a location beyond the buffer.
    """
    latent, k_pe = cache_k_nope.flatten(1), cache_k_rope.flatten(1)
    rows = torch.cat((latent.view(torch.uint8), k_pe.view(torch.uint8)), dim=1)
    store_rows(kv_buffer.view(torch.uint8).flatten(1), loc, rows)


@set_mla_kv_buffer.check
def _(call: Call) -> None:
    buffer, tokens = call.kv_buffer, len(call.loc) if call.loc.dim() else 0
    expect(NAME, "loc", call.loc, 1, INDICES)
    expect(NAME, "kv_buffer", buffer, dtypes=(*FLOATS, *BYTE_SIZED), like=call.loc, dense=1)
    widths = []
    for name, part in (("cache_k_nope", call.cache_k_nope), ("cache_k_rope", call.cache_k_rope)):
        shape = (tokens, None) if part.dim() == 2 else (tokens, 1, None)
        expect(NAME, name, part, shape, (buffer.dtype,), like=call.loc, dense=1)
        widths.append(part.shape[-1])
        if buffer.dtype in BYTE_SIZED and part.shape[-1] % 2:
            refuse(NAME, name, f"has shape {list(part.shape)}: an odd number of bytes")
    middle = () if buffer.dim() == 2 else (1,)
    expect(NAME, "kv_buffer", buffer, (None, *middle, sum(widths)))
    expect_within(NAME, "loc", call.loc, len(buffer), begin=None)


def _words(x: Tensor) -> Tensor:
    """x viewed as [n, 1, width] of a dtype that the kernel copies."""
    x = x.flatten(1).unsqueeze(1)
    return x.view(torch.float16) if x.element_size() == 1 else x


def _fits(call: Call) -> bool:
    rows = (call.kv_buffer, call.cache_k_nope, call.cache_k_rope)
    pairs = call.kv_buffer.element_size() > 1 or all(
        x.stride(0) % 2 == 0 and x.storage_offset() % 2 == 0 for x in rows
    )
    return pairs and call.loc.is_contiguous()


@set_mla_kv_buffer.implementation("triton", devices=gpu.DEVICES, when=_fits)
def _(call: Call) -> None:
    latent, k_pe = _words(call.cache_k_nope).squeeze(1), _words(call.cache_k_rope).squeeze(1)
    store_launch.store_records(latent, k_pe, _words(call.kv_buffer), call.loc)
