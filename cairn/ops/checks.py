"""Checks of arguments before a launch; they raise BadArgument with the argument's name.

On a CPU the checks of an op take as long as a matrix product of a decode step. The runner passes
arguments that follow from the model's config and its own tables, so it skips them (`skip_checks`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import numbers
import reprlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from cairn.errors import BadArgument
from cairn.ops.launch_cache.plans import is_traced
from cairn.ops.sync_debug import synchronizes
from cairn.specs.kv_format import KV_FORMATS

R = TypeVar("R")

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of activations."""
FLOAT32 = (torch.float32,)
INDICES = (torch.int32, torch.int64)
INT32 = (torch.int32,)
INT64 = (torch.int64,)
QUANTIZED = {getattr(torch, form.dtype): form for form in KV_FORMATS.values()}
"""Formats of quantized caches by their dtype."""
CACHED = (*FLOATS, *QUANTIZED)
"""Dtypes of paged caches, quantized ones included."""
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
"""Annotation of a parameter -> allowed types, and their name in messages."""
_OF_THE_DEVICE = (torch.OutOfMemoryError, torch.AcceleratorError)
"""Errors that are not about the type of an argument."""


class _State(threading.local):
    """Whether the ops that this thread calls check their arguments."""

    enabled = True


state = _State()


@contextlib.contextmanager
def skip_checks() -> Iterator[None]:
    """Within the block, ops that this thread calls do not check their arguments."""
    before = state.enabled
    state.enabled = False
    try:
        yield
    finally:
        state.enabled = before


def expect(
    op: str,
    name: str,
    tensor: Tensor | None,
    shape: Sequence[int | None] | int | None = None,
    dtypes: Sequence[torch.dtype] | None = None,
    like: Tensor | None = None,
    dense: int = 0,
) -> None:
    """Raise BadArgument unless a tensor has the shape, dtype, device and layout that an op takes.

    Args:
        op, name: names of the op and of its argument, for messages.
        tensor: the argument.
        shape: its sizes, None for any size; an integer: its number of dims.
        dtypes: allowed dtypes; None: any.
        like: a tensor whose device it must share.
        dense: number of last dims that must be contiguous; -1: all.
    """
    if not isinstance(tensor, Tensor):
        refuse(op, name, f"is {type(tensor).__name__} {reprlib.repr(tensor)}, not a tensor")
    # The fastest comparisons come first; the others run only if those fail.
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
    """Whether a tensor has elements whose values can be read without an extra synchronization."""
    # While tracing the number of elements may be unknown.
    near = x.device.type == "cpu" or synchronizes(x.device)
    return near and not is_traced(x) and x.numel() > 0


def expect_within(op: str, name: str, x: Tensor, end: int, begin: int | None = 0) -> None:
    """Raise BadArgument unless integers are begin .. end - 1, or at most end - 1 for a begin of
    None. Tensors that are not `on_host` are not checked."""
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
    """Raise BadArgument unless the entries of a page table are less than `pages`. A table that is
    not `on_host` is not checked.

    Args:
        page_table: [B, n]; entries beyond the lengths may have any value.
        lengths: [B], number of keys of each sequence, in pages of `size`; None: all pages hold
            keys.
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
    """Wrap a function: if it raises and an argument has the wrong type, raise BadArgument with the
    name of that argument. Types are compared only after an error, so correct calls cost nothing."""

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
    """Raise BadArgument instead of an error if an argument has the wrong type."""
    if isinstance(error, (BadArgument, *_OF_THE_DEVICE)):
        return
    parameters = inspect.signature(definition).parameters
    given = {**dict(zip(parameters, args, strict=False)), **kwargs}
    for name, parameter in parameters.items():
        if name in given:
            _expect_kind(definition.__name__, name, given[name], parameter.annotation)


def _expect_kind(op: str, name: str, value: Any, annotation: Any) -> None:
    """Raise BadArgument unless a value has a type that the annotation allows. Annotations with
    other types than those of `_KINDS` are ignored."""
    kinds = annotation.split(" | ") if isinstance(annotation, str) else [""]
    if not all(kind in _KINDS for kind in kinds):
        return
    if not any(isinstance(value, _KINDS[kind][0]) for kind in kinds):
        wanted = " or ".join(_KINDS[kind][1] for kind in kinds)
        refuse(op, name, f"is {type(value).__name__} {reprlib.repr(value)}, not {wanted}")


def check_cache(op: str, cache: Tensor, like: Tensor | None = None) -> tuple[int, int, int, int]:
    """Raise BadArgument unless `k_cache` is [pages, h_kv, S, d] with h_kv and S > 0; d counts bytes
    if it is quantized. Returns its (pages, h_kv, S, head_dim).
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
    """`check_cache`, and raise BadArgument unless `v_cache` has the same shape and dtype, and is
    contiguous if quantized."""
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
    """Raise BadArgument unless `row` is [tokens] int64 and `page_table` is [rows, max_pages] int32
    with contiguous rows."""
    expect(op, "row", row, (tokens,), INT64, like, -1)
    expect(op, "page_table", page_table, 2, INT32, like, 1)


def check_slots(
    op: str, tokens: int, row: Tensor, slot: Tensor, page_table: Tensor, like: Tensor
) -> None:
    """`check_rows`, and raise BadArgument unless `slot` is [tokens] int64."""
    check_rows(op, tokens, row, page_table, like)
    expect(op, "slot", slot, (tokens,), INT64, like, -1)
    if tokens and not page_table.numel():
        refuse(op, "page_table", f"has shape {list(page_table.shape)}: pages for no token")


def check_min(op: str, name: str, number: int, minimum: int) -> None:
    """Raise BadArgument if a number is smaller than `minimum`."""
    if number < minimum:
        refuse(op, name, f"is {number}, not {minimum} or more")


def check_dtype(op: str, dtype: torch.dtype | None) -> None:
    """Raise BadArgument unless the argument `dtype`, of a result, is one of FLOATS or None."""
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
    """Whether the last `dims` dims of a non-contiguous tensor are contiguous."""
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
