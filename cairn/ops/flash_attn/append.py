"""Append of new keys and values to a cache, with rotary embedding of queries and new keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cairn.ops.checks import expect, expect_within, on_host, refuse
from cairn.ops.elementwise.fp8 import fp8_quantize
from cairn.ops.flash_attn.append_kv import append_kv, positions
from cairn.ops.flash_attn.call import FP8, MAX_KEYS, Call
from cairn.ops.rotary.rotary_embedding import rotary_embedding

_INT32 = (torch.int32,)


@dataclass(slots=True)
class Append:
    """The part of `flash_attn_with_kvcache` before attention; same arguments."""

    call: Call
    k: Tensor | None
    v: Tensor | None
    cu_seqlens: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    rotary_seqlens: Tensor | None

    def _check(self) -> None:
        call, name = self.call, self.call.name
        if (self.k is None) != (self.v is None):
            refuse(name, "v" if self.v is None else "k", "is None, the other one is not")
        if (self.cos is None) != (self.sin is None):
            missing = "rotary_sin" if self.sin is None else "rotary_cos"
            refuse(name, missing, "is None, the other one is not")
        if call.seqused_k is None and (self.k is not None or self._turns_by_length):
            refuse(name, "cache_seqlens", "is None", "New keys and rotation need the lengths")
        if self.k is not None and self.v is not None:
            lead: tuple[int | None, ...] = (call.batch, None)
            if self.cu_seqlens is not None:
                ends = (call.batch + 1,)
                expect(name, "cu_seqlens_k_new", self.cu_seqlens, ends, _INT32, call.q, dense=-1)
                lead = (None,)
            same = (call.q.dtype,)
            expect(name, "k", self.k, (*lead, *call.k.shape[-2:]), same, call.q, dense=1)
            shape = (*self.k.shape[:-1], call.v.shape[-1])
            expect(name, "v", self.v, shape, same, call.q, dense=1)
        if self.cos is not None and self.sin is not None:
            kinds = (call.q.dtype, torch.float32)
            expect(name, "rotary_cos", self.cos, (None, None), kinds, call.q, dense=1)
            expect(name, "rotary_sin", self.sin, self.cos.shape, (self.cos.dtype,), call.q)
            if 2 * self.cos.shape[1] > call.q.shape[-1]:
                width = 2 * self.cos.shape[1]
                refuse(name, "rotary_cos", f"turns {width} numbers of {call.q.shape[-1]}")
        if self.rotary_seqlens is not None:
            size = (call.batch,)
            expect(name, "rotary_seqlens", self.rotary_seqlens, size, _INT32, call.q, dense=-1)

    @property
    def _turns_by_length(self) -> bool:
        return self.cos is not None and self.rotary_seqlens is None

    def run(self, interleaved: bool, causal: bool) -> None:
        """Write the new keys and values, rotate the call's queries, and increase its lengths.

        Args:
            interleaved: as rotary_interleaved.
            causal: as in the op; with it, or with a window, query i is rotated by position base +
                i, otherwise by base.
        Raises:
            BadArgument: the call, or the new keys and values, are inconsistent.
        """
        self.call.check()
        self._check()
        call, lengths = self.call, self.call.seqused_k
        each = causal or call.sides != (-1, -1)
        base = lengths if self.rotary_seqlens is None else self.rotary_seqlens
        if self.k is not None and lengths is not None:
            grown = self.k.shape[1] if self.cu_seqlens is None else self.cu_seqlens.diff()
            expect_within(call.name, "cache_seqlens", lengths, MAX_KEYS)
            call.seqused_k = lengths + grown
        call.check_numbers(written=self.k is not None)
        if self.cos is not None and base is not None:
            row, place = positions(call.q, call.cu_seqlens_q)
            call.q = self._rotated(call.q, base[row] + place if each else base[row], interleaved)
        if self.k is None or self.v is None or lengths is None:
            return
        k = self.k
        if self.cos is not None and base is not None:
            row, place = positions(k, self.cu_seqlens)
            k = self._rotated(k, base[row] + place, interleaved)
        where = (self.cu_seqlens, call.page_table, call.batch_idx)
        append_kv(k, self.v, call.k, call.v, lengths, *where)

    def _rotated(self, x: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
        assert self.cos is not None and self.sin is not None
        at, small, rows = positions.long(), x.dtype in FP8, len(self.cos)
        if on_host(at):
            least, most = (int(position) for position in at.aminmax())
            if least < 0 or most >= rows:
                beyond = least if least < 0 else most
                refuse(self.call.name, "rotary_cos", f"has {rows} rows, none of position {beyond}")
        # Not every device can index 8-bit floats.
        cos, sin = (self.cos.float(), self.sin.float()) if small else (self.cos, self.sin)
        table = torch.cat((cos[at], sin[at]), dim=-1)
        order = torch.arange(len(at), device=x.device)
        wide = torch.float32 if small else x.dtype
        rotated = x.to(wide, copy=True, memory_format=torch.contiguous_format)
        heads = rotated.view(-1, *x.shape[-2:])
        rotary_embedding(order, heads, None, x.shape[-1], table, not interleaved)
        return fp8_quantize(rotated, fp8_dtype=x.dtype) if small else rotated
