"""Benchmark points of ops: sizes of published models' layers, and arguments drawn on the device.

    @rmsnorm.bench
    def _(draw: Draw) -> Points:
        for layer, rows in draw.rows():
            x, weight = draw.randn(rows, layer.hidden), draw.randn(layer.hidden)
            yield Point(f"{layer.name}: {rows} x {layer.hidden}", draw.args(x, weight), ...)

`cairn bench ops` times the chosen implementation, the op's other implementations and the
alternatives of a point.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from cairn.ops.registry import Op
from cairn.ops.testing import Arguments, Make


@dataclass(frozen=True, slots=True)
class Step:
    """Batch of one step of an attention layer.

    Attributes:
        batch: number of sequences.
        context: slots per sequence, including those of this step.
        tokens: query tokens per sequence; 1: a decode step.
        ordered: whether a sequence's pages are consecutive in the cache, as in a fresh pool.
    """

    batch: int
    context: int
    tokens: int = 1
    ordered: bool = False

    def __str__(self) -> str:
        if self.tokens == 1:
            order = ", pages in order" if self.ordered else ""
            return f"decode {short(self.context)} x {self.batch}{order}"
        return f"prefill {short(self.tokens)} of {short(self.context)}"


@dataclass(frozen=True, slots=True)
class Layer:
    """Sizes of a model's layer, and the steps that it is timed with.

    Attributes:
        name: of the model.
        hidden, intermediate, vocabulary: widths.
        heads, kv_heads, head_dim: h_q, h_kv, d.
        page_size, window, topk: S, W in slots, K in pages.
        rows: numbers of tokens, for ops on rows; the largest moves at least 64 MB.
        steps: for attention.
    """

    name: str
    hidden: int
    intermediate: int
    vocabulary: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    window: int
    topk: int
    rows: tuple[int, ...]
    steps: tuple[Step, ...]


K = 1024
COMPILED = "compiled"
"""Name of alternatives under torch.compile, which take seconds to compile."""
SIZES: dict[str, tuple[Layer, ...]] = {
    "full": (
        Layer(
            "345m",
            1024,
            4096,
            100278,
            16,
            2,
            64,
            64,
            512,
            32,
            (1,),
            steps=(
                Step(1, 8 * K),
                Step(1, 128 * K),
                Step(8, 128 * K),
                Step(8, 128 * K, ordered=True),
                Step(64, 8 * K),
                Step(64, 8 * K, ordered=True),
                Step(1, 8 * K, 8 * K),
                Step(1, 128 * K, 8 * K),
            ),
        ),
        Layer(
            "7b",
            4096,
            11008,
            100278,
            32,
            32,
            128,
            64,
            512,
            32,
            (16384,),
            steps=(Step(1, 128 * K), Step(1, 128 * K, 2 * K)),
        ),
    ),
    "tiny": (
        Layer(
            "tiny",
            64,
            96,
            300,
            4,
            2,
            16,
            8,
            24,
            4,
            (1, 5),
            steps=(Step(2, 96), Step(2, 96, ordered=True), Step(1, 128, 64)),
        ),
    ),
}

SAMPLED = {"full": (1, 256), "tiny": (1, 5)}
"""Rows of logits that are sampled; the largest is 100 MB of float32."""

PRODUCTS = {"full": (1, 4, 16, 64), "tiny": ()}
"""Numbers of tokens of decode steps, for products with weights, in addition to `Layer.rows`."""

CORRELATED = {1: 0.25, 4: 0.25, 16: 0.3, 64: 0.4, 256: 1.0}
"""Number of adjacent tokens -> weight of the query component that they share. With 1024 candidate
pages with random summaries, 4 / 8 / 16 / 64 adjacent queries then select 55 / 76 / 101 / 191
distinct pages, 32 each; those of a trained 7B model at 64K select 57 / 76 / 102 / 182."""


def short(number: int) -> str:
    """A size in units of 1024 where it is a multiple, as in 8K."""
    return f"{number // K}K" if number >= K and number % K == 0 else str(number)


@dataclass(frozen=True, slots=True)
class Alternative:
    """A function from outside the op that is timed beside it.

    Attributes:
        name: as printed.
        call: the function.
        arguments: its arguments; None: the op's own.
    """

    name: str
    call: Callable[..., Any]
    arguments: Arguments | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """One size that an op is timed at.

    Attributes:
        size: description.
        arguments: of the op.
        bytes: least number of bytes to read and write.
        flops: floating-point operations.
        alternatives: functions from outside the op.
        definition: whether the op's definition, eager and compiled, is an alternative too.
    """

    size: str
    arguments: Arguments
    bytes: int
    flops: float = 0.0
    alternatives: tuple[Alternative, ...] = ()
    definition: bool = False


Points: TypeAlias = Iterator[Point]


@dataclass(frozen=True, slots=True)
class PagedStep:
    """A step's queries and the paged cache of one layer.

    Attributes:
        layer, step: the sizes.
        q: [T, h_q, d].
        k_cache, v_cache: [pages, h_kv, S, d].
        row, slot: [T] int64.
        page_table: [batch, pages of a sequence] int32.
    """

    layer: Layer
    step: Step
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    row: Tensor
    slot: Tensor
    page_table: Tensor

    def __str__(self) -> str:
        return f"{self.layer.name}: {self.step}"

    @property
    def slot_bytes(self) -> int:
        """Bytes of the key and value of one slot."""
        return 2 * self.layer.kv_heads * self.layer.head_dim * self.q.element_size()

    @property
    def segments(self) -> list[int]:
        """Argument `segments` of `dense_attention`: row, first slot and number of tokens of each
        sequence."""
        tokens, first = self.step.tokens, self.step.context - self.step.tokens
        return [n for row in range(self.step.batch) for n in (row, first, tokens)]

    @property
    def candidates(self) -> int:
        """Number of pages before the window of the last query."""
        return max(0, (self.step.context - self.layer.window) // self.layer.page_size)

    @property
    def window_bytes(self) -> int:
        """Bytes of the keys and values in the windows."""
        slots = min(self.step.context, self.step.tokens + self.layer.window)
        return self.step.batch * slots * self.slot_bytes

    @property
    def selected_bytes(self) -> int:
        """Bytes of the keys and values of selected pages, each page counted once."""
        pages = min(self.step.tokens * self.layer.topk, self.candidates)
        return self.step.batch * pages * self.layer.page_size * self.slot_bytes

    @property
    def summary_bytes(self) -> int:
        """Bytes of the summaries of all candidates: a key and a bias per query head."""
        per_page = self.layer.heads * (self.layer.head_dim * self.q.element_size() + 4)
        return self.step.batch * self.candidates * per_page

    @property
    def score_flops(self) -> float:
        """Operations of the scores of all queries with the summaries of their candidates."""
        pages = (self.slot.double() - self.layer.window + 1).clamp(min=0) / self.layer.page_size
        return 2.0 * self.layer.heads * self.layer.head_dim * float(pages.sum())

    def pairs(self, window: int | None = None) -> float:
        """Number of (query, key) pairs of causal attention, over a window or (None) all slots."""
        keys = self.slot.double() + 1
        return float((keys if window is None else keys.clamp(max=window)).sum())

    def attend_flops(self, pairs: float) -> float:
        """Operations of attention for this number of pairs per query head."""
        return 4.0 * self.layer.heads * self.layer.head_dim * pairs

    def dense(self) -> tuple[Alternative, ...]:
        """Dense attention by torch and FlashInfer on the same keys, contiguous instead of paged."""
        layer, step = self.layer, self.step
        shape = (step.batch, step.context, layer.kv_heads, layer.head_dim)
        k, v = (
            cache[self.page_table.long()].transpose(2, 3).reshape(shape).transpose(1, 2)
            for cache in (self.k_cache, self.v_cache)
        )
        q = self.q.view(step.batch, step.tokens, layer.heads, layer.head_dim).transpose(1, 2)
        call = _sdpa
        names = ["CUDNN_ATTENTION", "FLASH_ATTENTION"] if q.is_cuda else ["FLASH_ATTENTION"]
        if 1 < step.tokens < step.context:
            # Only flash attention on a GPU has the causal mask aligned to the last key.
            call, names = _sdpa_lower_right, names[1:]
            k, v = (x.repeat_interleave(layer.heads // layer.kv_heads, 1) for x in (k, v))
        found = [
            Alternative(f"sdpa {name[:5].lower()}", partial(call, name=name), Arguments((q, k, v)))
            for name in names
        ]
        if step.batch == 1:
            found += self._flashinfer(*(x[0].transpose(0, 1).contiguous() for x in (k, v)))
        return tuple(found)

    def _flashinfer(self, k: Tensor, v: Tensor) -> tuple[Alternative, ...]:
        """FlashInfer's attention of one sequence, k and v [context, heads, d]."""
        if self.step.tokens == 1:
            name, given = "decode.single_decode_with_kv_cache", Arguments((self.q[0], k, v))
        else:
            name = "prefill.single_prefill_with_kv_cache"
            given = Arguments((self.q, k, v), {"causal": True})
        return tuple(replace(one, name="flashinfer single") for one in flashinfer(name, given))

    def sdpa_window(self) -> tuple[Alternative, ...]:
        """SDPA over the window, with contiguous keys: each block of `window` queries is a batch
        entry."""
        layer, step = self.layer, self.step
        block = min(layer.window, step.tokens)
        blocks = step.tokens // block
        shape = (step.batch * blocks, layer.heads, layer.window + block - 1, layer.head_dim)
        # The values do not matter. Heads are expanded: SDPA with a mask has no GQA kernel.
        k, v = (torch.randn(shape, dtype=self.q.dtype, device=self.q.device) for _ in range(2))
        q = self.q[: step.batch * blocks * block].view(-1, block, layer.heads, layer.head_dim)
        mask: Tensor | None = None
        if block > 1:
            query = torch.arange(block, device=q.device).unsqueeze(1)
            behind = query + layer.window - 1 - torch.arange(shape[2], device=q.device)
            mask = (behind >= 0) & (behind < layer.window)
        call = torch.nn.functional.scaled_dot_product_attention
        return (Alternative("sdpa", call, Arguments((q.transpose(1, 2), k, v, mask))),)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, name: str) -> Tensor:
    """SDPA by one backend; causal if there is more than one query."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(getattr(SDPBackend, name)):
        o: Tensor = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=q.shape[2] > 1, enable_gqa=q.shape[1] != k.shape[1]
        )
    return o


def _sdpa_lower_right(q: Tensor, k: Tensor, v: Tensor, name: str) -> Tensor:
    """SDPA by one backend, with a causal mask aligned to the last key."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    mask: Any = causal_lower_right(q.shape[2], k.shape[2])
    with sdpa_kernel(getattr(SDPBackend, name)):
        o: Tensor = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return o


class Draw(Make):
    """Builds the arguments of points, as Make does, but draws them on the device.

    Args:
        device: a torch device.
        dtype: of weights, activations and cache.
        sizes: a key of SIZES.
        seed: of the random generator.
    """

    def __init__(
        self,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        sizes: str = "full",
        seed: int = 0,
    ) -> None:
        super().__init__(device, seed)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.dtype = dtype
        self.sizes = sizes
        self.layers = SIZES[sizes]
        self.sampled = SAMPLED[sizes]

    def rows(self) -> Iterator[tuple[Layer, int]]:
        """(layer, number of tokens) of ops on rows."""
        return ((layer, rows) for layer in self.layers for rows in layer.rows)

    def products(self) -> Iterator[tuple[Layer, int]]:
        """(layer, number of tokens) of products with weights."""
        for layer in self.layers:
            for rows in sorted({*PRODUCTS[self.sizes], *layer.rows}):
                yield layer, rows

    def matrices(self) -> Iterator[tuple[str, int, int]]:
        """(description, rows, width) of the activations of each layer."""
        for layer, rows in self.rows():
            yield f"{layer.name}: {rows} x {layer.hidden}", rows, layer.hidden

    def randn(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        """Normal numbers times scale; dtype None: that of the layers."""
        options: dict[str, Any] = {"generator": self.generator, "device": self.device}
        return torch.randn(shape, dtype=dtype or self.dtype, **options) * scale

    def rand(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Uniform numbers in [0, 1)."""
        return torch.rand(shape, generator=self.generator, dtype=dtype, device=self.device)

    def randint(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Integers low <= x < high."""
        options: dict[str, Any] = {"generator": self.generator, "device": self.device}
        drawn: Tensor = torch.randint(low, high, shape, dtype=dtype, **options)
        return drawn

    def probs(self, rows: int, vocabulary: int, sharpness: float = 1.0) -> Tensor:
        """Rows of probabilities [rows, vocabulary] float32: softmax of normal numbers."""
        logits = self.randn(rows, vocabulary, dtype=torch.float32, scale=sharpness)
        return torch.softmax(logits, dim=-1)

    def correlated(self, tokens: int, *shape: int) -> Tensor:
        """[tokens, *shape] normal numbers, correlated between adjacent tokens as trained queries
        are."""
        total = torch.zeros((tokens, *shape), device=self.device)
        for length, weight in CORRELATED.items():
            part = self.randn(-(-tokens // length), *shape, dtype=torch.float32)
            total += weight * part.repeat_interleave(length, dim=0)[:tokens]
        return (total / math.hypot(*CORRELATED.values())).to(self.dtype)

    def logits(self) -> Iterator[tuple[int, int]]:
        """(rows, vocabulary) of logits that are sampled."""
        return ((rows, self.layers[0].vocabulary) for rows in self.sampled)

    def summaries(self, job: PagedStep) -> tuple[Tensor, Tensor]:
        """Summaries of pages: key [pages, h_q, d] and bias [pages, h_q] float32."""
        pages, layer = job.k_cache.shape[0], job.layer
        key = self.randn(pages, layer.heads, layer.head_dim)
        return key, self.rand(pages, layer.heads)

    def landmark_queries(self, job: PagedStep) -> Iterator[tuple[str, Tensor]]:
        """(suffix of the size, landmark queries [T, h_q, d]).

        A prefill has two variants: independent queries, and correlated ones that select mostly
        the same pages.
        """
        shape = tuple(job.q.shape)
        if job.step.tokens == 1:
            yield "", self.randn(*shape)
            return
        yield ", random pages", self.randn(*shape)
        yield ", shared pages", self.correlated(*shape)

    def by_torch(
        self, function: Callable[..., Any], name: str = "definition"
    ) -> tuple[Alternative, ...]:
        """A torch function as an alternative, eager and, on a GPU, compiled by torch.compile."""
        plain = Alternative(name, function)
        if self.device == "cpu":
            return (plain,)
        return plain, Alternative(COMPILED, torch.compile(function, dynamic=False))

    def attention(self) -> Iterator[PagedStep]:
        """All steps of all layers, each with its own cache."""
        for layer in self.layers:
            for step in layer.steps:
                yield self._paged_step(layer, step)

    def _paged_step(self, layer: Layer, step: Step) -> PagedStep:
        per_row = -(-step.context // layer.page_size)
        pages = step.batch * per_row
        order = (
            torch.arange(pages, device=self.device)
            if step.ordered
            else torch.randperm(pages, generator=self.generator, device=self.device)
        )
        shape = (pages, layer.kv_heads, layer.page_size, layer.head_dim)
        row = torch.arange(step.batch, device=self.device).repeat_interleave(step.tokens)
        slot = torch.arange(step.context - step.tokens, step.context, device=self.device)
        return PagedStep(
            layer,
            step,
            q=self.randn(step.batch * step.tokens, layer.heads, layer.head_dim),
            k_cache=self.randn(*shape),
            v_cache=self.randn(*shape),
            row=row,
            slot=slot.repeat(step.batch),
            page_table=order.to(torch.int32).view(step.batch, per_row),
        )


def points_of(op: Op[..., Any], draw: Draw) -> Points:
    """Benchmark points of an op, with the definition among the alternatives of points that ask for
    it."""
    assert op.bench_source is not None
    for point in op.bench_source(draw):
        own = draw.by_torch(op.reference) if point.definition else ()
        yield replace(point, alternatives=(*point.alternatives, *own))


def moved(*tensors: Tensor | None) -> int:
    """Total bytes of tensors; pass a tensor that is read and written twice."""
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def flashinfer(name: str, arguments: Arguments | None = None) -> tuple[Alternative, ...]:
    """A function of FlashInfer as an alternative; empty if FlashInfer is not installed.

    Args:
        name: without the package, as in "norm.rmsnorm".
        arguments: of the function; None: the op's own.
    """
    module, _, function = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(f"flashinfer.{module}"), function)
    except (ImportError, AttributeError):
        return ()
    return (Alternative("flashinfer", found, arguments),)
