"""Launches of the sampling kernels. They depend on the sizes of rows, not on their values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cairn.ops import gpu
from cairn.ops.call import Call
from cairn.ops.sampling.kernels import draw as draw_kernels
from cairn.ops.sampling.kernels import filters as kernels
from cairn.ops.sampling.kernels.collect import collect_kernel
from cairn.ops.sampling.kernels.keep import keep_kernel, limits_kernel
from cairn.ops.sampling.tuning import TUNING

MAX_VOCABULARY = 1 << 19
"""Counts of a row are packed into 20 bits."""
MAX_ROWS = gpu.MAX_GRID_YZ
"""Most rows per launch."""


@dataclass(frozen=True, slots=True)
class Filters:
    """Filters of the rows, [n] each, as in the ops of these names; None: no filter."""

    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    joint: bool = False
    """Whether top-p uses the probabilities before top-k instead of those renormalised after it."""

    def tensors(self) -> dict[str, Tensor | None]:
        """Kernel arguments."""
        return {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}

    @property
    def none(self) -> bool:
        """Whether there is no filter."""
        return all(tensor is None for tensor in self.tensors().values())

    def part(self, at: slice) -> Filters:
        """The filters of some of the rows."""
        own = {name: None if t is None else t[at] for name, t in self.tensors().items()}
        return Filters(**own, joint=self.joint)

    def share(self, softmax: bool) -> int:
        """Argument SHARE of `kernels.limit`, for logits (softmax) or probabilities."""
        if softmax:
            return 1 if self.joint else 2
        return 0 if self.joint or self.top_k is None else 2


@dataclass(frozen=True, slots=True)
class Source:
    """Rows to filter and to sample from.

    Attributes:
        values: [n, V] float32, logits also in half precision; any row stride.
        softmax: whether values are logits; otherwise they are probabilities.
        temperature: [n] float32, for logits; None: 1.
    """

    values: Tensor
    softmax: bool = False
    temperature: Tensor | None = None

    @property
    def chunk(self) -> int:
        """Elements per chunk."""
        return max(TUNING.min_chunk, gpu.next_power_of_2(self.values.shape[1]) // TUNING.chunks)

    @property
    def chunks(self) -> int:
        """Chunks per row."""
        return -(-self.values.shape[1] // self.chunk)

    @property
    def pdl(self) -> bool:
        """Whether kernels are launched with PDL."""
        return self.values.shape[0] <= TUNING.pdl_rows and gpu.supports_pdl(self.values.device)

    @property
    def rows(self) -> dict[str, Any]:
        """Common arguments of the kernels that read the rows."""
        stride, width = self.values.stride(0), self.values.shape[1]
        return {"x": self.values, "stride": stride, "width": width, "PDL": self.pdl}

    @property
    def max_rows(self) -> int:
        """Most rows per launch of kernels that need lists, by the size of the workspace."""
        return min(MAX_ROWS, max(1, TUNING.workspace_bytes // (4 * self.chunk * TUNING.chunks)))

    def list_options(self) -> dict[str, Any]:
        """Arguments and launch options of kernels that list rows."""
        return {
            **self.rows,
            "chunks": self.chunks,
            "num_warps": TUNING.list_warps,
            "maxnreg": TUNING.list_registers,
            "CHUNKS": TUNING.chunks,
            "CHUNK": self.chunk,
            "LINE": TUNING.line,
            "LINES": min(32 * TUNING.list_warps, self.chunk // 4),
            "SAMPLE": TUNING.sample,
            "SURE": TUNING.sure,
            "TRIALS": TUNING.trials,
            "ABREAST": max(1, min(TUNING.abreast, TUNING.ahead // self.chunk)),
            "WIDTH": TUNING.width,
            "MAX_LINES": TUNING.max_lines,
        }

    def part(self, at: slice) -> Source:
        """Some of the rows."""
        temp = self.temperature
        return Source(self.values[at], self.softmax, None if temp is None else temp[at])

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """An uninitialised tensor [n, *shape] on the device of the rows."""
        return gpu.empty((self.values.shape[0], *shape), dtype, self.values.device)


class Survey(NamedTuple):
    """Outputs of `survey_kernel`. masses: for draws and filters; tops: with top-k; arrivals: with
    any filter, counters that the kernel sets to 0."""

    peaks: Tensor
    firsts: Tensor
    masses: Tensor | None
    tops: Tensor | None
    arrivals: Tensor | None


class Lists(NamedTuple):
    """Workspace of kernels that list rows, see `collect_kernel`."""

    counts: Tensor
    weights: Tensor
    sums: Tensor


def takes(call: Call) -> bool:
    """`accepts` for the call of a filter op."""
    return accepts(*call.astuple())


def accepts(
    values: Tensor, *parameters: Tensor, dtypes: Sequence[torch.dtype] = (torch.float32,)
) -> bool:
    """Whether the kernels support these rows and parameters, one value per row."""
    return (
        values.dim() == 2
        and values.dtype in dtypes
        and values.stride(1) == 1
        and 0 < values.shape[1] <= MAX_VOCABULARY
        and all(p.shape == values.shape[:1] and p.is_contiguous() for p in parameters)
    )


def argmax(logits: Tensor) -> Tensor:
    """`argmax_tokens` in two launches."""
    out = gpu.empty(logits.shape[:1], torch.int64, logits.device)
    if logits.shape[0]:
        source = Source(logits)
        found = _survey(source)
        draw_kernels.argmax_kernel[(logits.shape[0],)](
            peaks=found.peaks,
            firsts=found.firsts,
            out=out,
            chunks=source.chunks,
            CHUNKS=TUNING.chunks,
            PDL=source.pdl,
            num_warps=1,
        )
    return out


def draw(
    source: Source, filters: Filters, seed: Tensor | None, index: Tensor, dtype: torch.dtype
) -> Tensor:
    """Sample one token per row [n] with the index-th uniform number of a seed; seed None: with the
    uniform numbers `index` [n] float32. Two launches.
    """
    rows = len(source.values)
    out = gpu.empty((rows,), dtype, source.values.device)
    step = MAX_ROWS if filters.none else source.max_rows
    if rows <= step:
        _draw(source, filters, seed, index, out)
        return out
    for begin in range(0, rows, step):
        at = slice(begin, begin + step)
        seeds = None if seed is None else seed[at]
        _draw(source.part(at), filters.part(at), seeds, index[at], out[at])
    return out


def draw_from(source: Source, rows: Tensor, uniform: Tensor) -> Tensor:
    """Sample one token [n] int32 from each of the rows `rows` [n] of unfiltered probabilities, in
    two launches."""
    out = gpu.empty(rows.shape, torch.int32, rows.device)
    _draw(source, Filters(), None, uniform, out, rows)
    return out


def filter_probs(probs: Tensor, filters: Filters) -> Tensor:
    """Filtered and renormalised probs [n, V], in three launches."""
    out = gpu.empty(probs.shape, probs.dtype, probs.device)
    step = Source(probs).max_rows
    for begin in range(0, len(probs), step):
        at = slice(begin, begin + step)
        _filter(Source(probs[at]), filters.part(at), out[at])
    return out


def _filter(source: Source, filters: Filters, out: Tensor) -> None:
    rows, width = source.values.shape
    survey = _survey(source, filters)._asdict()
    del survey["firsts"]
    limits = {
        "thresholds": source.empty(dtype=torch.int32),
        "lasts": source.empty(dtype=torch.int32),
        "totals": source.empty(dtype=torch.float64),
    }
    limits_kernel[(_list_programs(source), rows)](
        **filters.tensors(),
        **survey,
        **_lists(source)._asdict(),
        **limits,
        **source.list_options(),
        SHARE=filters.share(softmax=False),
    )
    keep_kernel[(-(-width // TUNING.keep_block), rows)](
        **source.rows, **limits, out=out, BLOCK=TUNING.keep_block, num_warps=TUNING.keep_warps
    )


def _list_programs(source: Source) -> int:
    """Programs per row of kernels that list rows."""
    return min(source.chunks, -(-TUNING.programs // len(source.values)))


def _lists(source: Source) -> Lists:
    return Lists(
        source.empty(TUNING.chunks + TUNING.max_lines, dtype=torch.int32),
        source.empty(TUNING.chunks, source.chunk),
        source.empty(2, TUNING.chunks, dtype=torch.float64),
    )


def _warps(source: Source) -> int:
    return max(2, min(8, source.chunk // 512))


def _survey(source: Source, filters: Filters | None = None) -> Survey:
    """Run `survey_kernel`; filters None: for argmax, without masses."""
    masses, filtered = filters is not None, filters is not None and not filters.none
    given = Filters() if filters is None else filters
    found = Survey(
        source.empty(source.chunks),
        source.empty(source.chunks, dtype=torch.int32),
        source.empty(source.chunks, dtype=torch.float64) if masses else None,
        source.empty(source.chunks, source.chunk // TUNING.line)
        if given.top_k is not None
        else None,
        source.empty(dtype=torch.int32) if filtered else None,
    )
    kernels.survey_kernel[(source.chunks, len(source.values))](
        **source.rows,
        temperature=source.temperature,
        **given.tensors(),
        **found._asdict(),
        chunks=source.chunks,
        CHUNK=source.chunk,
        LINE=TUNING.line,
        SOFTMAX=source.softmax,
        num_warps=_warps(source) if masses else min(8, 2 * _warps(source)),
    )
    return found


def _draw(
    source: Source,
    filters: Filters,
    seed: Tensor | None,
    index: Tensor,
    out: Tensor,
    rows: Tensor | None = None,
) -> None:
    if not len(out):
        return
    found = _survey(source, filters)
    numbers = {"seed": seed, "index": index, "uniform": None}
    if seed is None:
        numbers = {"seed": None, "index": None, "uniform": index}
    if not filters.none:
        _draw_filtered(source, filters, numbers, found, out)
        return
    draw_kernels.draw_kernel[(len(out),)](
        **source.rows,
        temperature=source.temperature,
        **numbers,
        rows=rows,
        peaks=found.peaks,
        firsts=found.firsts,
        masses=found.masses,
        out=out,
        chunks=source.chunks,
        CHUNKS=TUNING.chunks,
        CHUNK=source.chunk,
        RUN=TUNING.run,
        SOFTMAX=source.softmax,
        num_warps=TUNING.draw_warps,
    )


def _draw_filtered(
    source: Source,
    filters: Filters,
    numbers: dict[str, Tensor | None],
    found: Survey,
    out: Tensor,
) -> None:
    few: tuple[Tensor | None, ...] = (None, None)
    if filters.top_k is not None:
        few = (source.empty(TUNING.few, dtype=torch.int64), source.empty(TUNING.few))
    collect_kernel[(_list_programs(source), len(out))](
        temperature=source.temperature,
        **filters.tensors(),
        **numbers,
        **found._asdict(),
        **_lists(source)._asdict(),
        few_keys=few[0],
        few_weights=few[1],
        out=out,
        **source.list_options(),
        RUN=TUNING.run,
        FEW=TUNING.few,
        SLICE=TUNING.rivals,
        SOFTMAX=source.softmax,
        SHARE=filters.share(source.softmax),
    )
