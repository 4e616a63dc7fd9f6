"""Checks of arguments before anything is launched: one error, which names the argument."""

from __future__ import annotations

import functools
import inspect
import numbers
import reprlib
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from cairn.errors import BadArgument
from cairn.ops.launch_cache.plans import is_traced
from cairn.ops.waiting import waits
from cairn.specs.kv_format import KV_FORMATS

R = TypeVar("R")

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""What models compute in."""
FLOAT32 = (torch.float32,)
INDICES = (torch.int32, torch.int64)
INT32 = (torch.int32,)
INT64 = (torch.int64,)
QUANTIZED = {getattr(torch, form.dtype): form for form in KV_FORMATS.values()}
"""Formats of quantized caches by their dtype."""
CACHED = (*FLOATS, *QUANTIZED)
"""Keys and values in pages, as they are or quantized."""
_KINDS: dict[str, tuple[Any, str]] = {
    "Tensor": (Tensor, "a tensor"),
    "int": ((numbers.Integral, torch.SymInt), "an integer"),
    "float": ((numbers.Real, torch.SymInt, torch.SymFloat), "a number"),
    "bool": ((numbers.Integral, torch.SymBool), "a bool"),
    "str": (str, "a string"),
    "list[int]": ((list, tuple), "a list"),
    "Sequence[int]": ((list, tuple), "a list"),
    "torch.Generator": (torch.Generator, "a generator"),
    "torch.dtype": (torch.dtype, "a dtype"),
    "None": (type(None), "None"),
}
"""Annotation of a parameter -> the types it allows, and their name in messages."""
_OF_THE_DEVICE = (torch.OutOfMemoryError, torch.AcceleratorError)
"""Errors that are not about the type of an argument."""


def expect(
    op: str,
    name: str,
    tensor: Tensor | None,
    shape: Sequence[int | None] | int | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    like: Tensor | None = None,
    dense: int = 0,
) -> None:
    """Raise BadArgument unless a tensor is what an op takes.

    Args:
        op, name: of the op and of its argument, for messages.
        tensor: the argument.
        shape: its sizes, None for any; or their number, which is faster than so many None.
        dtypes: those allowed.
        like: a tensor whose device it must share.
        dense: last dims that must lie side by side; -1: all.
    """
    if not isinstance(tensor, Tensor):
        refuse(op, name, f"is {type(tensor).__name__} {reprlib.repr(tensor)}, not a tensor")
    # The checks that usually pass come first: they take a third of the time.
    if isinstance(shape, int):
        if tensor.dim() != shape:
            _refuse_shape(op, name, tensor, (None,) * shape)
    elif shape is not None and tensor.shape != shape and not _fits(tensor.shape, shape):
        _refuse_shape(op, name, tensor, shape)
    if dtypes is not None and tensor.dtype not in dtypes:
        refuse(op, name, f"is {_short(tensor.dtype)}, not {_any_of(dtypes)}")
    if like is not None and tensor.device != like.device:
        refuse(op, name, f"lies on {tensor.device}, other arguments on {like.device}")
    if dense and not tensor.is_contiguous() and not _is_dense(tensor, dense):
        part = "it" if dense < 0 else f"its last {dense} dims" if dense > 1 else "its last dim"
        refuse(op, name, f"has strides {list(tensor.stride())}: {part} must be contiguous")


def on_host(x: Tensor) -> bool:
    """Whether there are numbers to look at, without waiting for a device that nobody waits for."""
    # While tracing the number of elements may be unknown.
    near = x.device.type == "cpu" or waits(x.device)
    return near and not is_traced(x) and x.numel() > 0


def expect_within(op: str, name: str, x: Tensor, end: int, begin: int | None = 0) -> None:
    """Raise BadArgument unless integers, if they are `on_host`, are begin .. end - 1; None: or less
    than 0."""
    if not on_host(x):
        return
    low, high = (int(number) for number in x.aminmax())
    if high >= end or (begin is not None and low < begin):
        wanted = f"up to {end - 1}" if begin is None else f"from {begin} to {end - 1}"
        refuse(op, name, f"holds {high if high >= end else low}, not numbers {wanted}")


def check_pages(
    op: str,
    page_table: Tensor,
    lengths: Tensor | None,
    size: int,
    pages: int,
    begin: int | None = 0,
) -> None:
    """Raise BadArgument unless a table, if it is `on_host`, names pages of so many that there are.

    Args:
        page_table: [B, n]. Those behind the lengths may be anything.
        lengths: [B], keys of each sequence in pages of `size`; None: all pages hold keys.
        begin: as in `expect_within`.
    """
    if not on_host(page_table):
        return
    low, high = (int(page) for page in page_table.aminmax())
    if low >= 0 and high < pages:
        return
    if lengths is not None:
        first = torch.arange(0, size * page_table.shape[1], size, device=page_table.device)
        page_table = page_table[first < lengths.unsqueeze(1)]
    expect_within(op, "page_table", page_table, pages, begin)


def naming(
    function: Callable[..., R], definition: Callable[..., Any] | None = None
) -> Callable[..., R]:
    """A function whose errors become BadArgument, naming the argument, if an argument is of the
    wrong type. Types are compared only after an error, so correct calls cost nothing more."""

    @functools.wraps(function)
    def named(*args: Any, **kwargs: Any) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            explain(error, definition or function, args, kwargs)
            raise

    return named


def explain(
    error: Exception, definition: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> None:
    """Raise BadArgument in place of an error if an argument is of the wrong type."""
    if isinstance(error, (BadArgument, *_OF_THE_DEVICE)):
        return
    parameters = inspect.signature(definition).parameters
    given = {**dict(zip(parameters, args, strict=False)), **kwargs}
    for name, parameter in parameters.items():
        if name in given:
            _expect_kind(definition.__name__, name, given[name], parameter.annotation)


def _expect_kind(op: str, name: str, value: Any, annotation: Any) -> None:
    """Raise BadArgument if a value is not what an annotation of known kinds says."""
    kinds = annotation.split(" | ") if isinstance(annotation, str) else [""]
    if not all(kind in _KINDS for kind in kinds):
        return
    if not any(isinstance(value, _KINDS[kind][0]) for kind in kinds):
        wanted = " or ".join(_KINDS[kind][1] for kind in kinds)
        refuse(op, name, f"is {type(value).__name__} {reprlib.repr(value)}, not {wanted}")


def check_cache(op: str, cache: Tensor, like: Tensor | None = None) -> tuple[int, int, int, int]:
    """Raise BadArgument unless `k_cache` is [pages, h_kv, S, d], h_kv and S > 0, or quantized.

    Returns its (pages, h_kv, S, d).
    """
    form = QUANTIZED.get(cache.dtype)
    expect(op, "k_cache", cache, 4, CACHED, like, 0 if form is None else -1)
    pages, heads, size, width = cache.shape
    if heads == 0 or size == 0:
        wanted = "[pages, h_kv, S, d], h_kv > 0 and S > 0"
        refuse(op, "k_cache", f"has shape {list(cache.shape)}, not {wanted}")
    dim = width if form is None else form.head_dim(width)
    if dim is None:
        refuse(op, "k_cache", f"is {cache.dtype} with {width} bytes a slot, no quantized head")
    return pages, heads, size, dim


def check_caches(
    op: str, k_cache: Tensor, v_cache: Tensor, like: Tensor
) -> tuple[int, int, int, int]:
    """`check_cache`; and `v_cache` is of the same form, dense if quantized."""
    form, dtype = check_cache(op, k_cache, like), k_cache.dtype
    expect(op, "v_cache", v_cache, k_cache.shape, (dtype,), like, -1 if dtype in QUANTIZED else 0)
    return form


def check_queries(op: str, name: str, q: Tensor, heads: int, dim: int) -> tuple[int, int]:
    """Raise BadArgument unless q is [T, h_q, dim] and h_q > 0 a multiple of `heads`.

    Returns (T, h_q).
    """
    expect(op, name, q, 3, FLOATS)
    tokens, own, width = q.shape
    if not own or own % heads or width != dim:
        wanted = f"[any, n * {heads}, {dim}], as the keys are"
        refuse(op, name, f"has shape {list(q.shape)}, not {wanted}")
    return tokens, own


def check_rows(op: str, tokens: int, row: Tensor, page_table: Tensor, like: Tensor) -> None:
    """Raise BadArgument unless `row` is [tokens] int64 and `page_table` is [rows, max_pages] int32,
    its rows dense."""
    expect(op, "row", row, (tokens,), INT64, like, -1)
    expect(op, "page_table", page_table, 2, INT32, like, 1)


def check_slots(
    op: str, tokens: int, row: Tensor, slot: Tensor, page_table: Tensor, like: Tensor
) -> None:
    """`check_rows`; and `slot` is [tokens] int64, each in a page that the table has."""
    check_rows(op, tokens, row, page_table, like)
    expect(op, "slot", slot, (tokens,), INT64, like, -1)
    if tokens and not page_table.numel():
        refuse(op, "page_table", f"has shape {list(page_table.shape)}: pages for no token")


def check_least(op: str, name: str, number: int, least: int) -> None:
    """Raise BadArgument if a number is smaller than `least`."""
    if number < least:
        refuse(op, name, f"is {number}, not {least} or more")


def check_dtype(op: str, dtype: torch.dtype | None) -> None:
    """Raise BadArgument unless the `dtype` of a result is one of FLOATS, or None."""
    if dtype is not None and dtype not in FLOATS:
        refuse(op, "dtype", f"is {_short(dtype)}, not {_any_of(FLOATS)}")


def refuse(op: str, name: str, problem: str, hint: str | None = None) -> NoReturn:
    """Raise BadArgument: "op: argument `name` problem. hint"."""
    raise BadArgument(f"{op}: argument `{name}` {problem}", hint)


def _refuse_shape(op: str, name: str, tensor: Tensor, shape: Sequence[int | None]) -> NoReturn:
    wanted = ", ".join("any" if size is None else str(size) for size in shape)
    refuse(op, name, f"has shape {list(tensor.shape)}, not [{wanted}]")


def _fits(shape: Sequence[int], wanted: Sequence[int | None]) -> bool:
    if len(shape) != len(wanted):
        return False
    for own, size in zip(shape, wanted, strict=True):
        if size is not None and own != size:
            return False
    return True


def _is_dense(tensor: Tensor, dims: int) -> bool:
    """Of a tensor that is not contiguous."""
    if dims < 0 or tensor.numel() == 0:
        return False
    step = 1
    for size, stride in list(zip(tensor.shape, tensor.stride(), strict=True))[::-1][:dims]:
        if size > 1 and stride != step:
            return False
        step *= size
    return True


def _any_of(dtypes: Sequence[torch.dtype]) -> str:
    return " or ".join(dict.fromkeys(map(_short, dtypes)))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
