"""Loops compiled by Numba, where it is installed, for ops on few elements on a CPU.

In a decode step each layer's weights evict the caches, so that each of torch's many small calls
runs cold; one compiled loop replaces them. Loops are in files named `loops.py`, which import `jit`
and the helpers from here. Without Numba their functions stay plain Python and are never called,
because `DEVICES`, for which such implementations register, is empty.

Compiled code is cached beside the source files, or in the user's cache folder.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_module: Any = None
_types: Any = None
_ir: Any = None
_intrinsic: Any = None
_caching: Any = None
with contextlib.suppress(ImportError):
    if "numba" not in sys.modules:  # it looks at this once
        os.environ.setdefault("NUMBA_NUM_THREADS", str(torch.get_num_threads()))
    _module = importlib.import_module("numba")
    _types = _module.types
    _ir = importlib.import_module("llvmlite.ir")
    _intrinsic = importlib.import_module("numba.extending").intrinsic
    _caching = importlib.import_module("numba.core.caching")

AVAILABLE = _module is not None
DEVICES: tuple[str, ...] = ("cpu",) if AVAILABLE else ()

# Sums may be reordered; infinities and NaN keep their meaning.
FAST = ("reassoc", "contract", "nsz", "arcp")
_STORED_AS = {torch.bfloat16: torch.uint16, torch.float16: torch.int16}


def _shares_threads() -> bool:
    """Whether torch has several OpenMP threads, and Numba can run loops on them.

    A second pool would compete with torch's threads, which spin for milliseconds after each call. A
    loop for a single thread compiles in half of the time.
    """
    if not AVAILABLE or torch.get_num_threads() == 1:
        return False
    try:
        importlib.import_module("numba.np.ufunc.omppool")
    except ImportError:
        return False
    _module.config.THREADING_LAYER = "omp"
    return True


PARALLEL = _shares_threads()
prange: Any = _module.prange if AVAILABLE else range


def jit(function: Callable[..., Any] | None = None, *, threads: bool = False) -> Any:
    """Compile a function at its first call with arguments of new types; without Numba return it
    unchanged.

    Args:
        threads: `prange` in it runs on several threads. Only such functions may be called from
            Python; the others are called from compiled functions.
    """
    if function is None:
        return functools.partial(jit, threads=threads)
    if not AVAILABLE:
        return function
    # error_model numpy: division by zero gives an infinity or NaN. Wrappers for callers in Python
    # and C are left out where possible: each takes as long to compile as a small function.
    options: dict[str, Any] = {
        "fastmath": set(FAST),
        "error_model": "numpy",
        "no_cfunc_wrapper": True,
    }
    if not threads:
        return _InnerLoop(_module.njit(function, **options, no_cpython_wrapper=True))
    compiled = _module.njit(function, **options, nogil=True, parallel=PARALLEL)
    compiled.compile = functools.partial(_compile, compiled.compile)
    # Without a writable cache folder, each process compiles for itself.
    with contextlib.suppress(RuntimeError, AttributeError):
        compiled.enable_caching()
        # Numba invalidates its cache by this file's time stamp alone; the loop also calls functions
        # of other files, so stamp it with all sources. Loops for one thread have their own files.
        own, name = compiled._cache, compiled._cache._impl.filename_base
        name = name if PARALLEL else f"{name}.one-thread"
        own._cache_file = _caching.IndexDataCacheFile(own.cache_path, name, _sources())
    return compiled


def _compile(compile_for: Callable[..., Any], signature: Any) -> Any:
    """What Numba does at the first call with arguments of a kind, with private copies."""
    codegen = importlib.import_module("numba.core.registry").cpu_target.target_context.codegen()
    with importlib.import_module("numba.core.compiler_lock").global_compiler_lock:
        library = codegen._library_class
        codegen._library_class = _private_copies(library)
        try:
            return compile_for(signature)
        finally:
            codegen._library_class = library


@functools.cache
def _private_copies(library: Any) -> Any:
    """A kind of Numba's code libraries that gives the same numbers in every process.

    A loop contains copies of the functions that it calls, optimised together with it, which changes
    the order of sums. Numba makes them weak symbols, and a process uses the first definition that
    it loads: the function by itself where the loop is compiled, another loop's copy where loops
    come from disk. Of internal symbols a loop uses its own.
    """

    class Library(library):  # type: ignore[misc]  # found at run time
        def _optimize_final_module(self) -> None:
            module = self._final_module
            linked = (other._get_module_for_linking() for other in self._linking_libraries)
            copied = {function.name for other in linked for function in other.functions}
            for function in module.functions:
                if function.name in copied and not function.is_declaration:
                    function.linkage = "internal"
            super()._optimize_final_module()

    return Library


class _InnerLoop:
    """A function that only other loops call. It has no Python wrapper; calling it from Python would
    crash the process, so this class raises instead."""

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled
        # Numba recognises a function that a loop calls by this type.
        self._numba_type_ = _types.Dispatcher(compiled)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = self.compiled.__name__
        raise TypeError(f"{name} is called by other loops: decorate it with @jit(threads=True)")


def mark_of(loop: Any, kind: str) -> Path | None:
    """A marker file beside a loop's cached code, which says that all loops of a kind are cached in
    their current form; None where nothing is cached."""
    folder = getattr(loop._cache, "cache_path", None)
    if folder is None:
        return None
    processor = importlib.import_module("llvmlite.binding").get_host_cpu_name()
    now = repr((_sources(), _module.__version__, processor, PARALLEL)).encode()
    return Path(folder) / f"cairn-{kind}-{hashlib.sha256(now).hexdigest()[:16]}"


@functools.cache
def _sources() -> tuple[tuple[float, int], ...]:
    """Time stamps and sizes of all files with loops and of the files that they are built from."""
    folder = Path(__file__).parent
    parts = folder.glob("*.py")
    states = (path.stat() for path in sorted((*parts, *folder.parent.glob("*/*loops.py"))))
    return tuple((state.st_mtime, state.st_size) for state in states)


def as_array(tensor: Tensor) -> NDArray[Any]:
    """A NumPy view of a tensor for loops; bfloat16 as uint16, float16 as int16.

    Loops have no gradient, like the GPU kernels.
    """
    other, own = _STORED_AS.get(tensor.dtype), tensor.detach() if tensor.requires_grad else tensor
    array: NDArray[Any] = (own if other is None else own.view(other)).numpy()
    return array


def line(tensor: Tensor) -> NDArray[Any]:
    """A flat view [n] of the memory from a tensor's first element to its last, gaps included."""
    if tensor.is_contiguous():
        return as_array(tensor.view(-1))
    span = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return as_array(tensor.as_strided((span if tensor.numel() else 0,), (1,)))


def array_or_empty(tensor: Tensor | None, dtype: torch.dtype, dims: int) -> NDArray[Any]:
    """`as_array`; for None an empty array of that dtype's kind and number of dims."""
    return _none(dtype, dims) if tensor is None else as_array(tensor)


@functools.cache
def _none(dtype: torch.dtype, dims: int) -> NDArray[Any]:
    return as_array(torch.empty((0,) * dims, dtype=dtype, device="cpu"))


def _build_wide(context: Any, number: Any) -> Any:
    def of_bfloat16(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.zext(args[0], _ir.IntType(32))
        return builder.bitcast(builder.shl(bits, _word(16)), _ir.FloatType())

    def of_float16(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], _ir.HalfType()), _ir.FloatType())

    def of_float32(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return args[0]

    ways = {_types.uint16: of_bfloat16, _types.int16: of_float16, _types.float32: of_float32}
    return _types.float32(number), ways[number]


def _build_narrow(context: Any, number: Any, like: Any) -> Any:
    def to_bfloat16(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        bits = builder.bitcast(args[0], _ir.IntType(32))
        odd = builder.and_(builder.lshr(bits, _word(16)), _word(1))
        rounded = builder.add(builder.add(bits, _word(0x7FFF)), odd)
        is_nan = builder.fcmp_unordered("uno", args[0], args[0])
        kept = builder.select(is_nan, _word(0x7FC00000), rounded)
        return builder.trunc(builder.lshr(kept, _word(16)), _ir.IntType(16))

    def to_float16(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], _ir.HalfType()), _ir.IntType(16))

    def to_float32(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return args[0]

    ways = {_types.uint16: to_bfloat16, _types.int16: to_float16, _types.float32: to_float32}
    return like(_types.float32, like), ways[like]


def _build_power_of_2(context: Any, exponent: Any) -> Any:
    def power(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        biased = builder.add(args[0], _word(127))
        return builder.bitcast(builder.shl(biased, _word(23)), _ir.FloatType())

    return _types.float32(_types.int32), power


def _build_bits(context: Any, number: Any) -> Any:
    def bits(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], _ir.IntType(32))

    return _types.int32(_types.float32), bits


def _word(number: int) -> Any:
    return _ir.Constant(_ir.IntType(32), number)


wide: Any = _intrinsic and _intrinsic(_build_wide)
"""wide(x): an array element as float32."""
narrow: Any = _intrinsic and _intrinsic(_build_narrow)
"""narrow(x, like): a float32 rounded to the kind of `like`; to the nearest, ties to even."""
bits: Any = _intrinsic and _intrinsic(_build_bits)
"""bits(x): the bits of a float32, as int32."""
_power_of_2: Any = _intrinsic and _intrinsic(_build_power_of_2)
"""2 ** n as float32, for an int32 n from -126 to 127."""

_LOG2_E = np.float32(1.4426950408889634)
# ln 2 as a sum of two parts; the first has trailing zeros, so that its product with n is exact.
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_LEAST = np.float32(-87.0)


def _exp(x: Any) -> Any:
    """e ** x for a float32 x <= 88, to 2 units in the last place; 0 for less than -87.

    Loops with it can be vectorised, which a call of the C library's function would prevent. 2 ** n
    times Cephes' expf polynomial of the remainder.
    """
    least = x if x > _LEAST else _LEAST
    n = np.floor(least * _LOG2_E + np.float32(0.5))
    r = least - n * _LN2_HIGH - n * _LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    y = (p * r * r + r + np.float32(1)) * _power_of_2(np.int32(n))
    return y if x > _LEAST else (np.float32(0) if x <= _LEAST else x)


exp: Any = jit(_exp)
