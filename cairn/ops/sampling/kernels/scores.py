"""The kernel of maximum, log-sum-exp and rank, of which log-probabilities are made."""

from __future__ import annotations

from cairn.ops.gpu import tl, triton
from cairn.ops.grid_barrier import arrive
from cairn.ops.pdl import await_previous


@triton.jit(early=())
def score_kernel(
    logits, tokens, found, arrivals, largest, log_sum, rank,
    stride, width, chunks, programs,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, APART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """largest [n], log_sum [n], rank [n] of logits [n, width]: see the op. Each program looks at a
    chunk of a row and leaves its maximum, the sum relative to it, and how many logits are larger
    than the token's in found [3, n, chunks]; the last one of a row adds them up."""
    await_previous(PDL)
    number = tl.program_id(0)
    row, chunk = (number // chunks).to(tl.int64), number % chunks
    x = logits + row * stride
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(x + place, mask=place < width, other=float("-inf"))
    own = tl.load(x + tl.load(tokens + row))
    peak = tl.max(value, 0)
    # A chunk of -inf alone has the sum 0, not NaN: other chunks may be finite.
    total = tl.sum(tl.exp(value - tl.where(peak == float("-inf"), 0.0, peak)), 0)
    peak = tl.where(tl.max((value != value).to(tl.int32), 0) > 0, float("nan"), peak)
    larger = tl.sum((value > own).to(tl.int32), 0)
    tl.store(found + number, peak)
    tl.store(found + programs + number, total)
    tl.store(found + 2 * programs + number, larger.to(tl.float32))
    last = True
    if CHUNKS > 1:
        last = arrive(arrivals + row * APART) == chunks - 1
    if last:
        c = tl.arange(0, CHUNKS)
        at, here = row * chunks + c, c < chunks
        # From L2: other multiprocessors have written them.
        peaks = tl.load(found + at, mask=here, other=float("-inf"), cache_modifier=".cg")
        totals = tl.load(found + programs + at, mask=here, other=0.0, cache_modifier=".cg")
        counts = tl.load(found + 2 * programs + at, mask=here, other=0.0, cache_modifier=".cg")
        best = tl.max(peaks, 0)
        best = tl.where(tl.max((peaks != peaks).to(tl.int32), 0) > 0, float("nan"), best)
        scaled = tl.where(here, totals * tl.exp(peaks - best), 0.0)
        tl.store(largest + row, best)
        tl.store(log_sum + row, tl.log(tl.sum(scaled, 0)))
        tl.store(rank + row, tl.sum(counts.to(tl.int64), 0) + 1)
        if CHUNKS > 1:
            tl.store(arrivals + row * APART, 0)
