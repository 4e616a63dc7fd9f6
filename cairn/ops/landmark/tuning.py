"""Tuning constants of this family's launches, measured on an H100."""

from __future__ import annotations

from dataclasses import dataclass, field

from cairn.ops.tuning import Tuning


@dataclass(slots=True)
class LandmarkTuning(Tuning):
    """Tuning constants of this family's launches; tests replace them by `replaced`."""

    fused_early_tokens: int = 64
    """Most tokens of a step whose kernels are launched with PDL: with more, waiting programs would
    occupy multiprocessors that working ones need."""
    fused_early_reads: int = 8
    """Most tokens for which the kernel that reads pages is launched with PDL: more tokens fill the
    device."""
    fused_programs: int = 512
    """Programs that fill a large device in one wave; few tokens are scored by several programs
    each, up to this number."""
    fused_max_programs: int = 256
    """Most programs that score a token for one KV head; one program merges their results."""
    fused_min_programs: int = 4
    fused_chunk: int = 512
    fused_long_row: int = 2560
    """Candidates per chunk, from which one program selects; twice as many in rows of more than
    `fused_long_row` pages, and more if there would be too many chunks."""
    fused_short_chunk: int = 256
    """Smallest tile of candidates in a partial chunk."""
    fused_single_tokens: int = 1
    """With more tokens, half as many warps read a page. Chosen by engine step time; in isolation
    the op is faster with one warp at every size."""
    fused_single_elements: int = 1024
    fused_single_warps: int = 4
    """Elements of a page's keys per warp that reads it for a single token, and most warps; also
    chosen by step time."""
    fused_max_listed: int = 384
    fused_max_chunk: int = 2048
    """Pages that all chunks of a token list for one KV head: chunks grow to list no more, up to
    fused_max_chunk. A program holds the scores of a chunk by every head of a group."""
    fused_whole: float = 12e-6
    """Least seconds of memory reads of a step for one launch, which hide the programs' waiting for
    each other. A shorter step is faster as four launches with PDL."""
    fused_abreast: int = 8
    """Programs per multiprocessor between a program and those that it waits for: more than run at
    once, so that it never waits for one that has not started."""
    fused_registers: int = 128
    """Registers per thread of the one launch, such that four programs fit on a multiprocessor."""
    fused_window_programs: int = 264
    """Programs for the windows in the one launch."""
    fused_stages: int = 3
    fused_read_stages: int = 2
    """num_stages of the loops of scanning and of reading programs."""
    fused_warp_numbers: int = 1024
    """Scores per warp of a selecting program."""
    fused_tile_numbers: int = 4096
    """Elements of summaries per iteration of scoring; as many more are prefetched."""
    page_sharing_tokens: int = 256
    """From this many tokens on, pages are likely to be shared, and (token, page) pairs are sorted
    by page."""
    page_split_programs: int = 512
    """Programs that saturate a large device's memory; pages of few tokens are split over this
    many."""
    page_unit_programs: int = 4224
    page_unit_pairs: int = 256
    page_unit_lines: int = 512
    """Most tokens, or most tokens times heads, per page that one program processes at a time."""
    page_unit_rows: int = 64
    """Rows of a tile (tokens times heads of a group)."""
    page_merged: int = 8192
    page_max_ahead: int = 16
    """Elements of parts that a row's last program sums at a time, and most parts: each is an
    unrolled load."""
    page_parts_bytes: int = 1 << 30
    """Approximate workspace of one round of sorted pairs."""
    page_block: int = 256
    page_apart: int = 8
    """Elements between two counters: atomics in one cache sector serialise."""
    select_few_tokens: int = 256
    """Up to this many tokens, every head's scores are stored."""
    select_programs: int = 528
    """Programs that fill a large device; fewer tokens are scored by more programs each."""
    select_min_programs: int = 8
    """Fewest programs that score a token for one KV head."""
    select_workspace_bytes: int = 640 << 20
    """Most bytes of scores; more tokens are processed in several rounds."""
    select_many_pages: int = 512
    """From this many pages on, scores of many tokens are computed in wider tiles (always for wide
    heads)."""
    select_tile_numbers: int = 8192
    """Elements of summaries per iteration of scoring."""
    select_tokens: int = 128
    select_tile: int = 128
    select_stages: int = 4
    """Of the warp-group kernel: tokens per program, pages per iteration, and stages of key
    tiles."""
    select_max_heads: dict[int, int] = field(default_factory=lambda: {64: 8, 128: 2})
    """Most heads per group whose queries it can hold, by head dim."""
    select_min_pages: int = 32
    select_min_scale: float = 1e-6
    """Fewest pages per head for which it is used; smallest scale by which biases may be divided."""
    select_a_warp: int = 256
    select_registers: int = 64
    select_listed: int = 4
    """Blocks of candidates that one warp selects from (two warps for more), its registers, and
    listed candidates per selected one."""
    select_min_blocks: int = 128
    """Smallest number of blocks that is searched."""
    select_max_numbers: int = 1 << 15
    """Most scores in a selecting program."""
    short_tokens: int = 64
    """Tokens per program that scores all pages."""
    short_max_bytes: int = 1 << 15
    short_max_pages: int = 128
    """Most bytes of a page's keys, or of a row's summaries, in a program; and most pages."""
    cpu_tile_rows: tuple[int, int] = (512, 64)
    """Query rows (queries x G) of the page-major tiles; the smaller tiles are for the remainder."""
    cpu_span: int = 128
    """Most consecutive tokens that are computed against all pages that any of them selects."""
    cpu_waste: float = 1.6
    """Most computed (token, page) pairs of a span per selected pair; otherwise page by page."""
    select_cpu_tile: int = 256
    """Tokens of one row that share a gather of its summaries."""


TUNING = LandmarkTuning()
