"""Tuning constants of this family's launches, measured on an H100."""

from __future__ import annotations

from dataclasses import dataclass, field

from cairn.ops.tuning import Tuning


@dataclass(slots=True)
class LandmarkTuning(Tuning):
    """Tuning constants of this family's launches; tests replace them by `replaced`."""

    fused_early_tokens: int = 64
    """Most tokens of a step whose kernels are launched with PDL: with more, waiting programs would
    take the places of working ones."""
    fused_early_reads: int = 8
    """Most tokens for which the kernel that reads pages is: those of more fill the device."""
    fused_programs: int = 512
    """Programs that fill a large device exactly: a few more would need a second wave. Few tokens
    are scored by several programs each."""
    fused_most_programs: int = 256
    """Most programs that score a token for one KV head; one program merges their results."""
    fused_least_programs: int = 4
    fused_chunk: int = 512
    fused_long_row: int = 2560
    """Candidates of a chunk, from which one program chooses; twice as many in rows of more than
    `fused_long_row` pages, and more where there would be too many chunks."""
    fused_short_chunk: int = 256
    """Smallest tile of candidates that a program chooses from, where its chunk is not full."""
    fused_lone_tokens: int = 1
    """With more tokens, half as many warps read a page. Chosen by the time of an engine's steps;
    the op by itself is faster with one warp at every size."""
    fused_lone_numbers: int = 1024
    fused_lone_warps: int = 4
    """Elements of a page's keys for each warp that reads it for a single token, and the most warps;
    chosen likewise."""
    fused_most_listed: int = 384
    fused_most_chunk: int = 2048
    """Pages that all chunks of a token list for one KV head: chunks grow to list no more, up to
    fused_most_chunk. A program holds the scores of a chunk by every head of a group."""
    fused_whole: float = 12e-6
    """Least seconds of memory reads of a step that is one launch: programs that wait for others are
    then hidden behind reads. A shorter step is faster as four launches with PDL."""
    fused_abreast: int = 8
    """Programs for each multiprocessor between a program and those of its line that it waits for:
    more than run at once, so that it never waits for one that has not started."""
    fused_registers: int = 128
    """Registers of a thread of the one launch: four programs fit a multiprocessor."""
    fused_window_programs: int = 264
    """Programs that share the windows in the one launch, beside those of other kinds."""
    fused_stages: int = 3
    fused_read_stages: int = 2
    """Of the loops of scanning and of reading programs."""
    fused_warp_numbers: int = 1024
    """Scores that a warp of a choosing program holds."""
    fused_tile_numbers: int = 4096
    """Elements of the summaries that a program scores at once; as many more are on their way."""
    page_sharing_tokens: int = 256
    """From this many tokens on they are likely to share pages, and their pages are sorted."""
    page_split_programs: int = 512
    """Programs that keep a large device's memory busy; a few tokens' pages are split among them."""
    page_unit_programs: int = 4224
    page_unit_pairs: int = 256
    page_unit_lines: int = 512
    """What one program takes on a page at a time: at most so many tokens, or so many of all
    heads."""
    page_unit_rows: int = 64
    """Rows of a tile of them, tokens times the heads of a group."""
    page_merged: int = 8192
    page_most_ahead: int = 16
    """Elements of the parts of a line that its last program adds up at a time, and parts: each is a
    load of its own in the kernel's code."""
    page_parts_bytes: int = 1 << 30
    """Workspace of one round of sorted pairs, about."""
    page_block: int = 256
    page_apart: int = 8
    """Numbers between two counters: those in one sector of the cache wait for each other."""
    select_few_tokens: int = 256
    """At most this many tokens are worth holding every head's scores."""
    select_programs: int = 528
    """Programs that fill a large device; fewer tokens are scored by more programs each."""
    select_least_programs: int = 8
    """As many programs score a token for one KV head, however many tokens there are."""
    select_workspace_bytes: int = 640 << 20
    """Scores are held for so many tokens at a time."""
    select_many_pages: int = 512
    """Beyond them many tokens' scores are computed in wider tiles, those of wide heads always."""
    select_tile_numbers: int = 8192
    """Elements of the summaries that a program scores at once."""
    select_tokens: int = 128
    select_tile: int = 128
    select_stages: int = 4
    """Tokens of a program that works in groups of warps, pages that it scores at once, and tiles of
    keys that it holds or that are on their way."""
    select_most_heads: dict[int, int] = field(default_factory=lambda: {64: 8, 128: 2})
    """Heads of a group of which it can hold the queries, by their width."""
    select_least_pages: int = 32
    select_least_scale: float = 1e-6
    """Pages for each of these heads that pay for it; the least scale by which biases are
    divided."""
    select_a_warp: int = 256
    select_registers: int = 64
    select_listed: int = 4
    """Blocks of candidates that one warp chooses from, of more two do; its registers; and
    candidates for each that is wanted, so many of which it has room to list."""
    select_least_blocks: int = 128
    """Blocks that are always searched as a whole."""
    select_most_numbers: int = 1 << 15
    """Scores that a choosing program can hold."""
    short_tokens: int = 64
    """Tokens that a program scores all pages for."""
    short_most_bytes: int = 1 << 15
    short_most_pages: int = 128
    """Of a page's keys, or of all summaries of a row, that a program holds at a time; and pages."""
    cpu_tile_rows: tuple[int, int] = (512, 64)
    """Query rows (queries x G) of the page-major tiles; the smaller ones take what is left over."""
    cpu_span: int = 128
    """Consecutive tokens that may be computed against all pages any of them selects."""
    cpu_waste: float = 1.6
    """Most (token, page) pairs of a span to compute per selected pair; beyond, page by page."""
    select_cpu_tile: int = 256
    """Tokens of one row that share a gather of its summaries."""


TUNING = LandmarkTuning()
