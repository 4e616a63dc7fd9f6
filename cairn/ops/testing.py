"""Utilities for testing ops: seeded cases, poisoned memory, tolerances and comparison.

This module does not import pytest: benchmarks and documentation use the cases too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from cairn.ops.cache.quantized import pack
from cairn.ops.call import Call
from cairn.ops.implementation import Implementation
from cairn.ops.quantization.codes import E4M3
from cairn.ops.registry import Op, Tolerance
from cairn.specs.kv_format import FP4_E2M1, FP8_E4M3, KvFormat

TOLERANCES: dict[torch.dtype, Tolerance] = {
    torch.float64: (1e-9, 1e-12),
    torch.float32: (2e-5, 2e-6),
    torch.float16: (1e-3, 1e-3),
    torch.bfloat16: (1.6e-2, 1e-2),
}
"""Dtype of the compared tensor -> (rtol, atol); tensors of other dtypes must be equal."""

_COARSE_FIRST = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Arguments:
    """One call of an op."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def clone(self) -> Arguments:
        """A copy of the call with copied tensors of the same strides. Views of one tensor become
        separate tensors."""
        kwargs = {name: _clone(value) for name, value in self.kwargs.items()}
        return Arguments(tuple(_clone(value) for value in self.args), kwargs)

    def named(self, parameters: Sequence[str]) -> dict[str, Any]:
        """Parameter name -> value, for the arguments given."""
        return {**dict(zip(parameters, self.args, strict=False)), **self.kwargs}

    def bound(self, implementation: Implementation) -> Call:
        """The bound call, as an implementation receives it."""
        return implementation.bind(*self.args, **self.kwargs)

    def __str__(self) -> str:
        words = [_describe(value) for value in self.args]
        return ", ".join(words + [f"{name}={_describe(v)}" for name, v in self.kwargs.items()])


Cases: TypeAlias = Iterator[Arguments | Tensor]


@dataclass(frozen=True)
class Paged:
    """A paged cache whose slots are NaN unless a row has filled them.

    Attributes:
        k_cache, v_cache: [pages, h_kv, S, d].
        page_table: [rows, max_pages] int32; entries beyond a row's pages point to a page of NaN.
        lengths: number of filled slots of each row.
    """

    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor
    lengths: tuple[int, ...]

    @property
    def page_size(self) -> int:
        """Slots per page, S."""
        return self.k_cache.shape[2]

    def quantized(self, form: KvFormat = FP8_E4M3) -> Paged:
        """The quantized cache."""
        caches = (pack(self.k_cache, form), pack(self.v_cache, form))
        return Paged(*caches, self.page_table, self.lengths)

    def queries(self, counts: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """row, slot and location (page * S + slot in the page), [T] int64, of the last counts[i]
        slots of each row i."""
        device = self.page_table.device
        pairs = [
            (row, slot)
            for row, (length, count) in enumerate(zip(self.lengths, counts, strict=True))
            for slot in range(length - count, length)
        ]
        found = torch.tensor(pairs, dtype=torch.int64, device=device).reshape(-1, 2)
        row, slot = found[:, 0].contiguous(), found[:, 1].contiguous()
        page = self.page_table.long()[row, slot // self.page_size]
        return row, slot, page * self.page_size + slot % self.page_size

    def segments(self, counts: Sequence[int]) -> list[int]:
        """Argument `segments` of `dense_attention`: row, first slot and number of queries of each
        row with queries."""
        rows = enumerate(zip(self.lengths, counts, strict=True))
        found = [(row, length - count, count) for row, (length, count) in rows if count]
        return [number for segment in found for number in segment]


class Make:
    """Builds the arguments of cases. They are the same on every run and device.

    Args:
        device: device of the tensors; random numbers are drawn on the CPU.
        seed: of the random generator.
    """

    def __init__(self, device: str = "cpu", seed: int = 0) -> None:
        self.device = device
        self.generator = torch.Generator().manual_seed(seed)

    @property
    def kv_formats(self) -> tuple[KvFormat, ...]:
        """Formats of quantized caches in cases. On the CPU only fp8, because the interpreter takes
        seconds per case; `tests/ops/cache` tests fp4 there."""
        return (FP8_E4M3,) if self.device == "cpu" else (FP8_E4M3, FP4_E2M1)

    def args(self, *args: Any, **kwargs: Any) -> Arguments:
        """A call with these arguments."""
        return Arguments(args, kwargs)

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
        """Normal numbers times scale."""
        drawn = torch.randn(shape, generator=self.generator) * scale
        return drawn.to(dtype).to(self.device)

    def rand(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Uniform numbers in [0, 1)."""
        return torch.rand(shape, generator=self.generator).to(dtype).to(self.device)

    def randint(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Integers low <= x < high."""
        return torch.randint(low, high, shape, generator=self.generator, dtype=dtype).to(
            self.device
        )

    def full(
        self, shape: Sequence[int], value: float, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """A tensor filled with one value."""
        return torch.full(tuple(shape), value, dtype=dtype, device=self.device)

    def tensor(self, values: Any, dtype: torch.dtype = torch.float32) -> Tensor:
        """A tensor of these values."""
        return torch.tensor(values, dtype=dtype, device=self.device)

    def arange(self, end: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """0 .. end - 1."""
        return torch.arange(end, dtype=dtype, device=self.device)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Poisoned memory: NaN, or the largest integer of the dtype; True for bool."""
        if dtype == torch.bool:
            return torch.ones(shape, dtype=dtype, device=self.device)
        poison = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
        return torch.full(shape, poison, dtype=dtype, device=self.device)

    def probs(self, rows: int, vocabulary: int, sharpness: float = 1.0) -> Tensor:
        """Rows of probabilities [rows, vocabulary] float32: softmax of normal numbers."""
        return torch.softmax(self.randn(rows, vocabulary, scale=sharpness), dim=-1)

    def paged(
        self,
        lengths: Sequence[int],
        kv_heads: int,
        page_size: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        spare: int = 2,
    ) -> Paged:
        """A paged cache with pages in random order and NaN in slots that no row has filled.

        Args:
            lengths: number of filled slots of each row; 0: a row without pages.
            kv_heads, page_size, head_dim: h_kv, S, d.
            spare: number of pages without owner, at least 1.
        """
        needed = [-(-length // page_size) for length in lengths]
        pages = sum(needed) + spare
        order = torch.randperm(pages, generator=self.generator).to(torch.int32)
        table = order[-1].repeat(len(lengths), max([*needed, 0]) + 1)
        shape = (pages, kv_heads, page_size, head_dim)
        k_cache = torch.full(shape, float("nan"), dtype=dtype)
        v_cache = torch.full(shape, float("nan"), dtype=dtype)
        taken = 0
        for row, (length, count) in enumerate(zip(lengths, needed, strict=True)):
            table[row, :count] = order[taken : taken + count]
            taken += count
            for logical in range(count):
                filled = min(page_size, length - logical * page_size)
                for cache in (k_cache, v_cache):
                    values = torch.randn(kv_heads, filled, head_dim, generator=self.generator)
                    cache[int(table[row, logical]), :, :filled] = values.to(dtype)
        return Paged(
            k_cache.to(self.device), v_cache.to(self.device), table.to(self.device), tuple(lengths)
        )


def cases_of(op: Op[..., Any], device: str = "cpu", seed: int = 0) -> list[Arguments]:
    """The cases of an op on a device. Raises ValueError if there are none."""
    if op.case_source is None:
        raise ValueError(f"op {op.name} has no cases")
    bundles = op.case_source(Make(device, seed))
    cases = [Arguments((b,)) if isinstance(b, Tensor) else b for b in bundles]
    if not cases:
        raise ValueError(f"op {op.name} has no cases")
    return cases


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Within the block, uninitialised memory (torch.empty and similar) is NaN, or the largest
    integer."""
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def tolerance_of(op: Op[..., Any], arguments: Arguments, dtype: torch.dtype) -> Tolerance:
    """(rtol, atol) of an output of this dtype: the op's own tolerance for the case, or that of
    TOLERANCES.

    If an op gives a tolerance for bfloat16 only, an eighth of it applies to float16, which has
    three more bits. A tolerance for float8 applies to cases with float8 arguments. Outputs in
    float8 must be equal.
    """
    if dtype == E4M3:
        return 0.0, 0.0
    given = [*arguments.args, *arguments.kwargs.values()]
    dtypes = {value.dtype for value in given if isinstance(value, Tensor)} | {dtype}
    if E4M3 in dtypes and E4M3 in op.tolerances:
        return op.tolerances[E4M3]
    coarsest = next((d for d in _COARSE_FIRST if d in dtypes), dtype)
    if dtype.is_floating_point and coarsest in op.tolerances:
        return op.tolerances[coarsest]
    if dtype.is_floating_point and coarsest == torch.float16 and torch.bfloat16 in op.tolerances:
        rtol, atol = op.tolerances[torch.bfloat16]
        return rtol / 8, atol / 8
    return TOLERANCES.get(dtype, (0.0, 0.0))


def compare(actual: Tensor, expected: Tensor, tolerance: Tolerance, what: str) -> None:
    """Raise AssertionError unless shape, dtype and positions of NaN are equal and values are within
    the tolerance."""
    rtol, atol = tolerance
    torch.testing.assert_close(
        actual, expected, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m: f"{what}: {m}"
    )


def run(op: Op[..., Any], name: str, arguments: Arguments) -> tuple[Arguments, tuple[Any, ...]]:
    """Call one implementation with a copy of the arguments and poisoned memory.

    Returns the copy after the call, and the results as a tuple.
    """
    own = arguments.clone()
    with poisoned():
        result = op.using(name)(*own.args, **own.kwargs)
    if result is None:
        return own, ()
    return own, tuple(result) if isinstance(result, tuple | list) else (result,)


def check(op: Op[..., Any], name: str, arguments: Arguments) -> None:
    """Compare one implementation with the definition on one case.

    Raises AssertionError if results or mutated arguments differ by more than the tolerance, if a
    result of the definition contains NaN (it has read poisoned memory), or if another argument
    changed.
    """
    parameters = list(op.__signature__.parameters)
    where = f"{op.name}[{name}]({arguments})"
    before = arguments.named(parameters)
    reference, expected = run(op, "reference", arguments)
    subject, actual = run(op, name, arguments)
    assert len(actual) == len(expected), f"{where}: {len(actual)} results, not {len(expected)}"
    for position, (got, wanted) in enumerate(zip(actual, expected, strict=True)):
        what = f"{where} result {position}"
        if wanted.is_floating_point():
            assert not bool(wanted.isnan().any()), f"{what}: the definition gives NaN"
        compare(got, wanted, tolerance_of(op, arguments, wanted.dtype), what)
    reference_after = reference.named(parameters)
    for parameter, value in subject.named(parameters).items():
        if not isinstance(value, Tensor):
            continue
        what = f"{where} argument {parameter}"
        if parameter == "out" or parameter in op.mutates:
            wanted = reference_after[parameter]
            compare(value, wanted, tolerance_of(op, arguments, wanted.dtype), what)
        else:
            compare(_plain(value), _plain(before[parameter]), (0.0, 0.0), f"{what} changed")


def runnable(
    implementation: Implementation, cases: Iterable[Arguments], device: str
) -> list[Arguments]:
    """The cases that an implementation accepts on a device."""
    if device not in implementation.devices:
        return []
    return [case for case in cases if implementation.accepts(case.bound(implementation))]


def _clone(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.is_mkldnn or value.numel() == 0:
        return value.clone()
    # Keep the strides, with poison between the elements of a strided view.
    extent = sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True)) + 1
    memory = Make(str(value.device)).empty(extent, dtype=value.dtype)
    return memory.as_strided(value.shape, value.stride()).copy_(value)


def _plain(value: Tensor) -> Tensor:
    """A oneDNN tensor as a dense tensor, which can be compared."""
    return value.to_dense() if value.is_mkldnn else value


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)
