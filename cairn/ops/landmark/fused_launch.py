"""Launch of landmark_attention for few tokens on a GPU: as one kernel, or as four."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cairn.ops import gpu, grid_barrier
from cairn.ops.attention import launch
from cairn.ops.attention.tuning import TUNING as ATTENTION_TUNING
from cairn.ops.landmark import select_launch
from cairn.ops.landmark.kernels.fused import pick_kernel, read_kernel, scan_kernel
from cairn.ops.landmark.kernels.step import step_kernel
from cairn.ops.landmark.page_launch import Pages
from cairn.ops.landmark.tuning import TUNING
from cairn.ops.pdl import pdl_option


@dataclass(frozen=True, slots=True)
class _Plan:
    """How a step is split into programs.

    Attributes:
        whole: whether one launch does everything.
        splits: programs per token and KV head for the window (split-KV).
        single: whether each of these has at most one block of keys.
        tile: candidates that a program scores at a time.
        programs: programs per token that score its candidates.
        chunk, chunks: candidates per chunk, and chunks per row.
        reads, each: programs per token that read its selected pages, and most pages per program.
        pdl: whether kernels are launched with programmatic dependent launch.
        stores: programs per KV head that store the summaries of a completed page.
    """

    whole: bool
    splits: int
    single: bool
    tile: int
    programs: int
    chunk: int
    chunks: int
    reads: int
    each: int
    pdl: bool
    stores: int

    @property
    def scans(self) -> int:
        """Programs of the scan per token."""
        return self.splits + self.programs + self.stores

    @property
    def parts(self) -> int:
        """Partial states to merge per token and head."""
        return self.splits + self.reads

    def listed(self, topk: int) -> int:
        """Most pages found by all chunks of a token, padded to a power of two."""
        return gpu.next_power_of_2(self.chunks * topk)


class InFrames(NamedTuple):
    """Selected pages in a separate pool: all in host memory, some also in frames on the device.

    Attributes:
        k_cache, v_cache: [pages, h_kv, S, d], in host memory.
        k_frames, v_frames: [F, h_kv, S, d]; None: no frames.
        frame_of: [h_kv, pages] int32, as `cairn.ops.resolve_frames` keeps it; None without frames.
    """

    k_cache: Tensor
    v_cache: Tensor
    k_frames: Tensor | None
    v_frames: Tensor | None
    frame_of: Tensor | None


def _plan(
    task: launch.Task,
    job: select_launch.Selection,
    pages: Pages,
    store: bool,
    in_frames: InFrames | None,
) -> _Plan:
    tokens, lines = task.q.shape[0], task.q.shape[0] * job.groups
    tile = max(1, TUNING.fused_tile_numbers // (job.group * job.width))
    wanted = max(TUNING.fused_min_programs, -(-TUNING.fused_programs // lines))
    programs = max(1, min(-(-job.pages // tile), wanted, TUNING.fused_max_programs))
    most = TUNING.fused_chunk if job.pages <= TUNING.fused_long_row else 2 * TUNING.fused_chunk
    chunk = max(min(most, gpu.next_power_of_2(job.pages)), gpu.next_power_of_2(job.topk))
    while (
        chunk < TUNING.fused_max_chunk
        and -(-job.pages // chunk) * job.topk > TUNING.fused_max_listed
    ):
        chunk *= 2
    read = lines * (job.topk * job.page_size + task.window) * 2 * pages.line_bytes
    whole = in_frames is None and read >= TUNING.fused_whole * gpu.memory_rate(task.q.device)
    splits = launch.splits_of(
        task, TUNING.fused_window_programs if whole else ATTENTION_TUNING.programs
    )
    # With PDL, summaries are read before the previous kernel has ended, so no token may select a
    # page that this step completes.
    pdl = tokens <= min(TUNING.fused_early_tokens, task.window) and gpu.supports_pdl(task.q.device)
    chunks = -(-job.pages // chunk)
    stores = 0 if not store else 1 if whole else job.heads // job.groups
    single = splits >= task.blocks
    return _Plan(whole, splits, single, tile, programs, chunk, chunks, *pages.splits, pdl, stores)


@dataclass(frozen=True, slots=True)
class _Memory:
    """Outputs and workspace of a step: out, indices, scores and lse are results, the rest is
    workspace.

    Attributes:
        part_o, part_lse: partial states of the window's splits, then of the programs that read
            pages.
        u: every candidate's score, [T, h_q, line]; tops, sums: partial maxima and sums of the
            normalisers.
        found: the best candidates of every chunk, from `pick`.
    """

    out: Tensor
    indices: Tensor
    scores: Tensor
    lse: Tensor
    part_o: Tensor
    part_lse: Tensor
    u: Tensor
    tops: Tensor
    sums: Tensor
    found: tuple[Tensor, ...]

    @property
    def line(self) -> int:
        """Elements from one head's scores to the next head's."""
        return self.u.shape[2]


def attend(
    task: launch.Task,
    job: select_launch.Selection,
    softmax1: bool,
    store: bool,
    in_frames: InFrames | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o, indices, scores and lse of landmark_attention.

    Args:
        task: the window attention. job: the selection (its lse is not used). Both have the same
            tokens.
        store: store summaries of completed pages first; these must not be candidates of a token of
            the step.
        in_frames: the pool of selected pages; None: that of the window's pages.
    """
    tokens, heads = task.q.shape[:2]
    indices = job.empty(tokens, job.groups, job.topk, dtype=torch.int32)
    scores, lse = job.empty(tokens, heads, job.topk), job.empty(tokens, heads)
    out = gpu.empty(task.q.shape, task.q.dtype, task.q.device)
    if tokens == 0:
        return out, indices, scores, lse
    pages = Pages(
        task.q,
        task.k_cache if in_frames is None else in_frames.k_cache,
        task.v_cache if in_frames is None else in_frames.v_cache,
        task.row,
        task.page_table,
        indices,
        scores,
        task.q.shape[2] ** -0.5 if task.scale is None else task.scale,
    )
    plan = _plan(task, job, pages, store, in_frames)
    # Rows are padded to multiples of 32, so that loads and stores are vectorised.
    u = job.empty(tokens, heads, -(-job.pages // 32) * 32)
    tops, sums = (job.empty(tokens, plan.programs, heads) for _ in range(2))
    shape = (tokens, job.groups, plan.chunks, job.topk)
    page, at = (job.empty(*shape, dtype=torch.int32) for _ in range(2))
    found = (page, at, job.empty(*shape))
    memory = _Memory(out, indices, scores, lse, *task.empty(plan.parts), u, tops, sums, found)
    arguments = _arguments(task, job, plan, memory, pages)
    there = in_frames or InFrames(task.k_cache, task.v_cache, *(None,) * 3)
    if plan.whole:
        _whole(job, plan, pages, memory, arguments, softmax1)
        return out, indices, scores, lse
    # Attends to the window in splits; scores every candidate; partial sums of the normalisers.
    scan_kernel[(plan.scans, job.groups, tokens)](
        **gpu.select_arguments(scan_kernel, arguments),
        num_warps=4,
        num_stages=TUNING.fused_stages,
        **pdl_option(plan.pdl),
    )
    # Selects the best pages of each chunk and computes lse.
    pick_kernel[(plan.chunks, job.groups, tokens)](
        **gpu.select_arguments(pick_kernel, arguments),
        num_warps=min(8, max(4, plan.chunk * job.group // TUNING.fused_warp_numbers)),
        **pdl_option(plan.pdl),
    )
    # Attends to the selected pages, appending their states to the window's, and stores the selected
    # pages and their scores.
    read_kernel[(plan.reads, job.groups, tokens)](
        **gpu.select_arguments(
            read_kernel,
            arguments
            | there._asdict()
            | {"GP": arguments["ROWS"], "KEYS": pages.keys, "total_pages": len(pages.k_cache)},
        ),
        num_warps=_reading_warps(plan, pages),
        num_stages=TUNING.fused_read_stages,
        **pdl_option(plan.pdl and tokens <= TUNING.fused_early_reads),
    )
    launch.merge(memory.part_o, memory.part_lse, out, None, softmax1=softmax1, pdl=plan.pdl)
    return out, indices, scores, lse


def _arguments(
    task: launch.Task,
    job: select_launch.Selection,
    plan: _Plan,
    memory: _Memory,
    pages: Pages,
) -> dict[str, Any]:
    """Keyword arguments shared by the kernels of a step."""
    short = min(TUNING.fused_short_chunk, plan.chunk)
    page, at, value = memory.found
    return {
        **task.arguments(),
        "page_table": job.page_table,
        "window_table": task.page_table,
        "lmk_q": job.lmk_q,
        "key": job.summary_key,
        "bias": job.bias,
        "part_o": memory.part_o,
        "part_lse": memory.part_lse,
        "u": memory.u,
        "tops": memory.tops,
        "sums": memory.sums,
        "found_page": page,
        "found_at": at,
        "found_value": value,
        "indices": memory.indices,
        "scores": memory.scores,
        "lse": memory.lse,
        "splits": plan.splits,
        "first": plan.splits,
        "programs": plan.programs,
        "parts": plan.parts,
        "chunks": plan.chunks,
        "offset": job.offset,
        "score_scale": job.scale,
        "key_page_stride": job.summary_key.stride(0),
        "key_head_stride": job.summary_key.stride(1),
        "pages": memory.line,
        "topk": job.topk,
        "KEY_HEADS": job.summary_key.shape[1],
        "GP": task.group,
        "ROWS": max(16, task.group),
        "PAGE": pages.keys,
        "TILE": plan.tile,
        "BIAS": job.summary_bias is not None,
        "STORES": plan.stores,
        "SINGLE": plan.single,
        "K": gpu.next_power_of_2(job.topk),
        "SHORT": short,
        "LEVELS": (plan.chunk // short).bit_length(),
        "PROGRAMS": gpu.next_power_of_2(plan.programs),
        "SPLITS": gpu.next_power_of_2(plan.splits),
        "NORMALISED": job.normalised,
        "CHUNK": plan.chunk,
        "LISTED": plan.listed(job.topk),
        "EACH": gpu.next_power_of_2(plan.each),
        "STAGES": TUNING.fused_read_stages,
        "PDL": plan.pdl,
    }


def _reading_warps(plan: _Plan, pages: Pages) -> int:
    """Warps per program of the kernel that reads pages."""
    if plan.each > 1:
        return pages.warps
    if pages.q.shape[0] > TUNING.fused_single_tokens:
        return pages.warps // 2
    return max(
        pages.warps,
        min(TUNING.fused_single_warps, pages.width * pages.keys // TUNING.fused_single_elements),
    )


def _whole(
    job: select_launch.Selection,
    plan: _Plan,
    pages: Pages,
    memory: _Memory,
    arguments: dict[str, Any],
    softmax1: bool,
) -> None:
    """The whole step, including the merge, in one launch."""
    lines = memory.out.shape[0] * job.groups
    round_size = plan.scans + plan.chunks + plan.reads
    # Lag in rounds between the scan of a line and its selection, and again between that and reading
    # its pages.
    abreast = TUNING.fused_abreast * gpu.sm_count(memory.out.device)
    lag = 0 if lines * round_size <= abreast else -(-abreast // round_size)
    step_kernel[((lines + 2 * lag) * round_size,)](
        **gpu.select_arguments(step_kernel, arguments),
        counters=grid_barrier.counters(lines, memory.out.device),
        out=memory.out,
        reads=plan.reads,
        lag=lag,
        lines=lines,
        PARTS=gpu.next_power_of_2(plan.parts),
        AHEAD=pages.ahead,
        SOFTMAX1=softmax1,
        APART=grid_barrier.STRIDE,
        num_warps=4,
        num_stages=TUNING.fused_stages,
        maxnreg=TUNING.fused_registers,
        **pdl_option(plan.pdl),
    )
