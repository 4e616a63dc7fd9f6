"""Dense attention by FlashInfer, where it is installed.

FlashInfer plans a call on the host, from the tokens and pages of every sequence; the plan then
serves all layers of a step. So it takes calls that say these numbers (`stretches`). A captured step
cannot know those of its replays: CUDA graphs hold the Triton kernels.

Two of its kernels serve: where the tokens fill the device, the one it picks for that
(FlashAttention-3 on Hopper); else the older one, which splits keys among programs and packs the
query heads of a KV head.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cairn.ops.attention import launch

log = logging.getLogger(__name__)

MISSING = (
    ""
    if importlib.util.find_spec("flashinfer")
    else "FlashInfer is not installed; pip install 'cairn-llm[flashinfer]'"
)
DTYPES = (torch.bfloat16, torch.float16)
WIDTHS = (64, 128, 256)
"""Head widths that both kernels are made for."""
TILE = 128
"""Tokens of a tile, and tiles that fill a device."""
WORKSPACE_BYTES = 128 << 20
"""For the states of split keys; the size that FlashInfer recommends."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Calls that the same wrappers serve, one after the other.

    Attributes:
        device: with its index.
        stream: the CUDA stream; plans and workspaces are used in its order.
        dtype: of queries, keys and values.
        heads, kv_heads, width, page_size: h_q, h_kv, d, S.
    """

    device: torch.device
    stream: int
    dtype: torch.dtype
    heads: int
    kv_heads: int
    width: int
    page_size: int

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}, heads {self.heads}/{self.kv_heads} of {self.width}"


def accepts(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    stretches: Sequence[int] | None,
    mask_landmarks: bool,
) -> bool:
    """Whether FlashInfer takes a call; arguments as in the op."""
    fitting = (
        q.device.type == "cuda"
        and bool(stretches)
        and not mask_landmarks
        and q.dtype in DTYPES
        and q.dtype == k_cache.dtype == v_cache.dtype
        and q.shape[2] in WIDTHS
        and all(x.is_contiguous() for x in (q, k_cache, v_cache, page_table))
        and not torch.cuda.is_current_stream_capturing()
    )
    return fitting and wrappers(_kind(q, k_cache)) is not None


def attend(task: launch.Task, stretches: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Dense attention of a task without a window; `stretches` as in the op, accepted before.

    Returns:
        (o [T, h_q, d] in q's dtype, lse [T, h_q] float32).
    """
    pair = wrappers(_kind(task.q, task.k_cache))
    assert pair is not None
    tokens, heads, _ = task.q.shape
    full = tokens >= TILE * max(len(stretches) // 3, TILE / heads)
    return pair[full].run(task, tuple(stretches))


def _kind(q: Tensor, k_cache: Tensor) -> Kind:
    # What is captured nevertheless (a benchmark's calls) was planned on the default stream before.
    captured = torch.cuda.is_current_stream_capturing()
    stream = 0 if captured else torch.cuda.current_stream(q.device).cuda_stream
    _, kv_heads, page_size, width = k_cache.shape
    return Kind(q.device, stream, q.dtype, q.shape[1], kv_heads, width, page_size)


@functools.cache
def wrappers(kind: Kind) -> tuple[Wrapper, Wrapper] | None:
    """What serves a kind of calls: few tokens, and those that fill the device. None if FlashInfer
    has nothing for it here; the log says why."""
    try:
        # Both now: a kernel that is not there yet is compiled, which takes minutes.
        few, many = Wrapper(kind, "fa2"), Wrapper(kind, "auto")
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError, OSError) as error:
        log.warning("no FlashInfer for dense attention (%s): %s", kind, error)
        return None
    log.info(
        "dense attention (%s) by FlashInfer %s: its choice of a kernel where the tokens fill the "
        "device; else fa2, for it splits keys",
        *(kind, few.version),
    )
    return few, many


@functools.cache
def _workspace(device: torch.device, stream: int) -> Tensor:
    """What all wrappers of a stream use in turn; FlashInfer wants it zeroed."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


class Wrapper:
    """One of FlashInfer's wrappers, and what it has planned.

    A plan follows from the numbers of `stretches` alone; which pages they mean is read from the
    page table in every call.

    Args:
        kind: of the calls.
        backend: FlashInfer's name of the kernel.
    """

    @torch.inference_mode(False)
    def __init__(self, kind: Kind, backend: str) -> None:
        library = importlib.import_module("flashinfer")
        self.version: str = library.__version__
        self.kind = kind
        self._inner: Any = library.BatchPrefillWithPagedKVCacheWrapper(
            _workspace(kind.device, kind.stream), "HND", backend=backend
        )
        self._lock = threading.Lock()
        self._planned: tuple[object, ...] = ()
        self._copied: torch.cuda.Event | None = None
        # Loads the kernel, or compiles it.
        self.plan((0, 0, 1), 1, None)

    def run(self, task: launch.Task, stretches: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """As `attend`."""
        width = task.page_table.shape[1]
        o, lse = task.empty(dtype=task.q.dtype)
        with self._lock:
            if self._planned != (stretches, width, task.scale):
                self.plan(stretches, width, task.scale)
            torch.index_select(task.page_table.view(-1), 0, self._entries, out=self._pages)
            caches = (task.k_cache, task.v_cache)
            self._inner.run(task.q, caches, out=o, lse=lse, return_lse=True)
        # FlashInfer's logarithms are to the base of two.
        return o, lse.mul_(math.log(2))

    @torch.inference_mode(False)
    def plan(self, stretches: tuple[int, ...], width: int, scale: float | None) -> None:
        """Plan a step.

        Args:
            stretches: as in the op.
            width: of the page table.
            scale: of the dot products; None: d ** -0.5.
        """
        if self._copied is not None:
            # The last plan's numbers may still be on their way from memory that is written anew.
            self._copied.synchronize()
        self._planned = ()
        kind = self.kind
        numbers = torch.tensor(stretches, dtype=torch.int32, device="cpu")
        row, first, tokens = numbers.view(-1, 3).unbind(1)
        slots = first + tokens
        pages = (slots + kind.page_size - 1) // kind.page_size
        bounds = _bounds(pages)
        total = int(bounds[-1])
        # Where the entries of a stretch lie in the page table, less their place among all.
        shift, counts = (
            x.pin_memory().to(kind.device, non_blocking=True)
            for x in (row * width - bounds[:-1], pages)
        )
        self._entries = torch.arange(total, dtype=torch.int32, device=kind.device)
        self._entries += shift.repeat_interleave(counts, output_size=total)
        # The wrapper keeps this very tensor: it is filled before every run.
        self._pages = torch.zeros(total, dtype=torch.int32, device=kind.device)
        self._inner.plan(
            *(_bounds(tokens).pin_memory(), bounds.pin_memory(), self._pages),
            ((slots - 1) % kind.page_size + 1).pin_memory(),
            *(kind.heads, kind.kv_heads, kind.width, kind.page_size),
            causal=True,
            sm_scale=scale,
            q_data_type=kind.dtype,
            kv_data_type=kind.dtype,
            seq_lens=slots.pin_memory(),
        )
        self._copied = torch.cuda.Event()
        self._copied.record()
        self._planned = (stretches, width, scale)


def _bounds(counts: Tensor) -> Tensor:
    """0 and the running sums: [n + 1] int32."""
    return torch.cat((counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)))
