"""A checked call of `flash_attention`, shared by the public functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.checks import FLOATS, check_pages, expect, expect_within, on_host, refuse
from cairn.ops.flash_attn.flash_attention import flash_attention

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
WIDEST = 576
"""Largest head dim."""
MAX_KEYS = 1 << 30
"""Most keys of a sequence: kernels add window sizes to key indices in 32 bits."""
_INT32 = (torch.int32,)


@dataclass(slots=True)
class Call:
    """The tensors of a call; as in `flash_attention`.

    Attributes:
        name: of the public function, for messages.
        names: public names of k, v, seqused_k and leftpad.
        window: window_size as given; None means -1.
        chunk: attention_chunk as given.
    """

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    page_table: Tensor | None = None
    batch_idx: Tensor | None = None
    leftpad: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    qv: Tensor | None = None
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    sinks: Tensor | None = None
    names: tuple[str, str, str, str] = ("k", "v", "seqused_k", "leftpad")
    window: Sequence[int | None] = (-1, -1)
    chunk: int | None = None

    def __post_init__(self) -> None:
        # Tensors whose sizes the other checks use come first.
        expect(self.name, "q", self.q)
        expect(self.name, self.names[0], self.k)
        if self.cu_seqlens_q is not None:
            expect(self.name, "cu_seqlens_q", self.cu_seqlens_q, 1)

    @property
    def sides(self) -> tuple[int, int]:
        """Window size to the left and to the right; -1: unbounded."""
        try:
            numbers = [-1 if side is None else min(int(side), MAX_KEYS) for side in self.window]
        except (TypeError, ValueError):
            numbers = []
        if len(numbers) != 2 or min(numbers) < -1:
            refuse(self.name, "window_size", f"is {self.window}, not two numbers from -1 on")
        return numbers[0], numbers[1]

    @property
    def batch(self) -> int:
        """Number of sequences."""
        if self.cu_seqlens_q is not None:
            return self.cu_seqlens_q.numel() - 1
        return self.q.shape[0]

    def check(self) -> None:
        """Raise BadArgument unless all shapes, dtypes, devices and strides are consistent.

        Afterwards the page table holds only the rows selected by batch_idx.
        """
        name, q, k = self.name, self.q, self.k
        ragged = self.cu_seqlens_q is not None
        expect(name, "q", q, (None,) * (3 if ragged else 4), (*FLOATS, *FP8), dense=1)
        lead = (None,) * (1 if self.cu_seqlens_k is not None else 2)
        expect(name, self.names[0], k, (*lead, None, q.shape[-1]), (q.dtype,), q, dense=1)
        kv_heads = k.shape[-2]
        if not kv_heads or not q.shape[-2] or q.shape[-2] % kv_heads:
            refuse(name, "q", f"has {q.shape[-2]} heads, not a multiple of {kv_heads}")
        expect(name, self.names[1], self.v, (*k.shape[:-1], None), (q.dtype,), q, dense=1)
        for what, width in (("q", q.shape[-1]), (self.names[1], self.v.shape[-1])):
            if not 1 <= width <= WIDEST:
                refuse(name, what, f"has heads of {width} numbers, not 1 to {WIDEST}")
        self._check_lengths()
        if self.qv is not None:
            shape = (*q.shape[:-1], self.v.shape[-1])
            expect(name, "qv", self.qv, shape, (q.dtype,), q, dense=1)
        for what, tensor in (
            ("q_descale", self.q_descale),
            ("k_descale", self.k_descale),
            ("v_descale", self.v_descale),
        ):
            if tensor is not None:
                expect(name, what, tensor, (self.batch, kv_heads), (torch.float32,), q)
        if self.sinks is not None:
            expect(name, "sinks", self.sinks, (q.shape[-2],), FLOATS, q, dense=-1)
        if self.batch_idx is not None:
            lines = len(self.k if self.page_table is None else self.page_table)
            expect_within(name, "cache_batch_idx", self.batch_idx, lines)
        if self.page_table is not None and self.batch_idx is not None:
            self.page_table = self.page_table.index_select(0, self.batch_idx)
            self.batch_idx = None

    def _check_lengths(self) -> None:
        batch, name = self.batch, self.name
        if self.page_table is not None:
            shape = (batch if self.batch_idx is None else None, None)
            expect(name, "page_table", self.page_table, shape, _INT32, self.q, dense=1)
            if not self.k.shape[1]:
                refuse(name, self.names[0], f"has shape {list(self.k.shape)}: pages of no keys")
        elif self.cu_seqlens_k is None and self.batch_idx is None and len(self.k) != batch:
            refuse(name, self.names[0], f"has {len(self.k)} sequences, q has {batch}")
        for what, tensor, size in (
            ("cu_seqlens_q", self.cu_seqlens_q, batch + 1),
            ("cu_seqlens_k", self.cu_seqlens_k, batch + 1),
            ("seqused_q", self.seqused_q, batch),
            (self.names[2], self.seqused_k, batch),
            (self.names[3], self.leftpad, batch),
            ("cache_batch_idx", self.batch_idx, batch),
        ):
            if tensor is not None:
                expect(name, what, tensor, (size,), _INT32, self.q, dense=-1)

    def check_numbers(self, written: bool = False) -> None:
        """Raise BadArgument if lengths or pages (if they are on the host) are out of range. Pages
        that are completely masked by a window, a chunk or a pad may be negative. Those of a
        sequence without queries are not checked, unless its keys are `written`."""
        if not on_host(self.q):
            return
        name, table, size = self.name, self.page_table, self.k.shape[1]
        keys = self.k.shape[-3] if table is None else size * table.shape[1]
        for what, ends, lines in (
            ("cu_seqlens_q", self.cu_seqlens_q, self.q.shape[-3]),
            ("cu_seqlens_k", self.cu_seqlens_k, keys),
        ):
            if ends is not None:
                expect_within(name, what, ends, lines + 1)
        self._check_used("seqused_q", self.seqused_q, self.cu_seqlens_q, self.q.shape[-3])
        used, asked = self.seqused_k, self.seqused_q
        if asked is None and self.cu_seqlens_q is not None:
            asked = self.cu_seqlens_q.diff()
        if asked is not None and not written and (used is not None or table is not None):
            used = (torch.full_like(asked, keys) if used is None else used).where(asked > 0, 0)
        self._check_used(self.names[2], used, self.cu_seqlens_k, keys)
        if table is not None:
            seen = self.leftpad is None and not self.chunk and self.sides[0] < 0
            check_pages(name, table, used, size, len(self.k), 0 if seen else None)

    def _check_used(self, what: str, used: Tensor | None, ends: Tensor | None, most: int) -> None:
        if used is None:
            return
        room = [most] * self.batch if ends is None else ends.diff().tolist()
        for length, there in zip(used.tolist(), room, strict=True):
            if not 0 <= length <= there:
                problem = f"gives a sequence the length {length}, not 0 to {there}"
                refuse(self.name, what, problem)

    def run(
        self,
        scale: float | None,
        causal: bool,
        softcap: float,
        max_seqlen_q: int | None,
        out: Tensor | None,
        with_lse: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """out, or (out, lse); arguments as in the public functions. The checks above must have been
        called."""
        q, width = self.q, self.v.shape[-1]
        shape, dtype = (*q.shape[:-1], width), torch.bfloat16 if q.dtype in FP8 else q.dtype
        if out is None:
            out = gpu.empty(shape, dtype, q.device)
        expect(self.name, "out", out, shape, (dtype,), q, dense=1)
        lines = (q.shape[-2], *q.shape[:-2][-1:])
        lse = gpu.empty((*q.shape[:-3], *lines), torch.float32, q.device)
        left, right = self.sides
        if scale is None:
            scale = (q.shape[-1] + (0 if self.qv is None else width)) ** -0.5
        longest = q.shape[-3]
        if max_seqlen_q is not None and self.cu_seqlens_q is not None:
            longest = min(longest, max(0, max_seqlen_q))
        # A single scale arrives as an expanded tensor with strides of 0.
        of_q, of_k, of_v = (
            x if x is None else x.contiguous()
            for x in (self.q_descale, self.k_descale, self.v_descale)
        )
        flash_attention(
            q,
            self.k,
            self.v,
            out,
            lse,
            self.page_table,
            self.batch_idx,
            self.leftpad,
            self.cu_seqlens_q,
            self.cu_seqlens_k,
            self.seqused_q,
            self.seqused_k,
            self.qv,
            of_q,
            of_k,
            of_v,
            self.sinks,
            float(scale),
            left,
            0 if causal else right,
            max(0, self.chunk or 0),
            float(softcap),
            longest,
        )
        return (out, lse) if with_lse else out


def refuse_modifiers(name: str, score_mod: object, aux_tensors: object) -> None:
    """Raise BadArgument if a score modifier is given, which is not supported."""
    for what, given in (("score_mod", score_mod), ("aux_tensors", aux_tensors)):
        if given is not None:
            refuse(name, what, "is not supported", "Pass None")
