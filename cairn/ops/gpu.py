"""Triton, where it is installed. Kernel files import `triton` and `tl` from here, those in its
lower language `gluon`, `gl` and what that knows of Hopper.

Without Triton the definitions serve alone: kernels are then plain functions that nobody calls, and
`DEVICES`, which every Triton implementation registers for, is empty. With TRITON_INTERPRET=1 the
kernels run on CPU tensors, in float32; the generic op test does that where there is no GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

_module: Any = None
_gluon: Any = None
tl: Any = None
gl: Any = None
hopper: Any = None
with contextlib.suppress(ImportError):
    _module = importlib.import_module("triton")
    tl = importlib.import_module("triton.language")
    # Gluon is young: what is written for one release is not for the next.
    if _module.__version__.startswith("3.6."):
        _gluon = importlib.import_module("triton.experimental.gluon")
        gl = importlib.import_module("triton.experimental.gluon.language")
        hopper = importlib.import_module("triton.experimental.gluon.language.nvidia.hopper")

AVAILABLE = tl is not None
DEVICES: tuple[str, ...] = ("cuda",) if AVAILABLE else ()
INTERPRETED = AVAILABLE and os.environ.get("TRITON_INTERPRET") == "1"
WRITES_PTX = AVAILABLE and not INTERPRETED and torch.version.hip is None
"""Whether kernels can hold instructions of NVIDIA's assembler."""
BLOCKS_BYTES = 164 << 10
"""Memory of a program with the most blocks on their way: two pairs of keys and of values of 128."""
H100_RATE = 3.35e12
"""Bytes a second that its memory delivers."""
MOST_PROGRAMS = (1 << 16) - 1
"""Of a launch along its second and along its third axis."""
STREAM = object()
"""Stands for the stream in what `again` gives."""
ONE_SUM = {"enable_fp_fusion": False}
"""Launches kernels in which many threads hold one sum of products. Fused into the first addition a
product goes in unrounded, in each thread another one: their sums would differ in the last bit, and
which of them is stored would be nobody's choice."""


class Watcher(Protocol):
    """Who is told what a call does with the device.

    Attributes:
        launches: whether kernels are launched; else they are compiled, if they are not yet.
    """

    launches: bool

    def took(self, tensor: Tensor, take: Callable[[], Tensor], blank: bool) -> None:
        """Memory was taken, and how more of its kind is; blank: it is not written."""
        ...

    def spoiled(self) -> None:
        """Something else is done."""
        ...

    def launched(self, kernel: Any, compiled: Any, grid: Any, args: Sequence[Any]) -> None:
        """A kernel was launched, or would have been; `compiled` is what Triton ran."""
        ...


class _Watch(threading.local):
    by: Watcher | None = None
    order: Callable[[Any, dict[str, Any]], None] | None = None


watch = _Watch()
"""Who watches this thread: `by` records or compiles launches; `order` is called before each launch
with the kernel and its arguments by name (`launch_order.checked`)."""


class _Triton:
    """Stands for the module in kernel files."""

    @staticmethod
    def jit(
        function: Callable[..., Any] | None = None,
        *,
        early: tuple[str, ...] | None = None,
        **options: Any,
    ) -> Any:
        """As `triton.jit`, and launches are reported to `watch`. Without Triton it has no effect.

        early: of a kernel that calls `pdl.await_previous`, the parameters whose memory it reads
            before that. Such a kernel is launched with PDL where its argument PDL is true.
        """
        if function is None:
            return functools.partial(_Triton.jit, early=early, **options)
        if not AVAILABLE:
            return function
        return _watched(_module.jit(function, **options), early)

    def __getattr__(self, name: str) -> Any:
        return getattr(_module, name)


triton: Any = _Triton()


def constant(value: Any) -> Any:
    """A module's constant, for its kernels."""
    return tl.constexpr(value) if AVAILABLE else value


class _Gluon:
    """Stands for the module in kernel files."""

    @staticmethod
    def jit(
        function: Callable[..., Any] | None = None,
        *,
        early: tuple[str, ...] | None = None,
        **options: Any,
    ) -> Any:
        """As Gluon's `jit`, the rest as of `triton.jit`. Without Gluon it has no effect."""
        if function is None:
            return functools.partial(_Gluon.jit, early=early, **options)
        return function if _gluon is None else _watched(_gluon.jit(function, **options), early)

    @staticmethod
    def also(function: Any) -> Any:
        """What a function of Triton kernels is to those in Gluon."""
        return function if _gluon is None else _gluon.jit(function.fn)


gluon = _Gluon()


def _watched(kernel: Any, early: tuple[str, ...] | None) -> Any:
    kernel.run = functools.partial(_run, kernel)
    kernel.early = early
    return kernel


def _run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    by = watch.by
    if kernel.early is not None and options.get("PDL"):
        # Only devices that support PDL know the option.
        options.setdefault("launch_pdl", True)
    if watch.order is not None and not warmup:
        given = dict(zip(kernel.arg_names, _in_order(kernel, args, options), strict=False))
        watch.order(kernel, {**given, "launch_pdl": options.get("launch_pdl", False)})
    dry = warmup or (by is not None and not by.launches)
    compiled = type(kernel).run(kernel, *args, grid=grid, warmup=dry, **options)
    if by is not None and not warmup:
        by.launched(kernel, compiled, grid, _in_order(kernel, args, options))
    return compiled


def _in_order(kernel: Any, args: Sequence[Any], options: dict[str, Any]) -> tuple[Any, ...]:
    """A kernel's arguments in the order of its parameters, of which some came by name."""
    names = kernel.arg_names[len(args) :]
    return (*args, *(options[name] for name in names if name in options))


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for kernels, not written."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if watch.by is not None:
        watch.by.took(tensor, taking(tensor.shape, tensor.stride(), dtype, device), True)
    return tensor


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for kernels, all 0."""
    tensor = torch.zeros(shape, dtype=dtype, device=device)
    if watch.by is not None:
        take = functools.partial(torch.zeros, tensor.shape, dtype=dtype, device=device)
        watch.by.took(tensor, take, False)
    return tensor


def taking(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Callable[[], Tensor]:
    """What takes memory as `empty` does, on the current device: of the ways to get it, the one
    whose arguments torch reads fastest."""
    # That of torch.compile's code, which takes nothing but tuples.
    quickly = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
    if quickly is not None:
        return functools.partial(quickly, tuple(shape), tuple(strides), dtype)
    return functools.partial(torch.empty_strided, shape, strides, dtype=dtype, device=device)


def again(
    compiled: Any, grid: Sequence[int], args: Sequence[Any]
) -> tuple[Callable[..., None], tuple[Any, ...]] | None:
    """The function that launched a compiled kernel, and its arguments: any may be replaced by one
    that Triton would specialise the kernel on in the same way, tensors by addresses.

    They are those of JITFunction.run in Triton 3.6, less its hooks; None for another Triton.
    """
    if not _module.__version__.startswith("3.6.") or not hasattr(compiled, "packed_metadata"):
        return None
    # Loads the kernel, and with it the function.
    run = compiled.run
    where = (*(*grid, 1, 1)[:3], STREAM, compiled.function)
    rest = (compiled.packed_metadata, None, None, None, *args)
    if getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1):
        return run, (*where, *rest)
    # What that calls where a kernel needs no memory of Triton's.
    options = (run.launch_cooperative_grid, run.launch_pdl, None, None)
    return run.launch, (*where, *options, *rest)


def compiling_beside() -> Any:
    """Triton's mode in which an executor's threads compile kernels; None if it has none. In it a
    kernel that is to be compiled, not launched (`warmup`), is a handle with a `future`."""
    return getattr(_module, "AsyncCompileMode", None)


def loaded(compiled: Any) -> Any:
    """A compiled kernel, on the current device and with what launches it; Triton would see to both
    when it is first launched."""
    _ = compiled.run
    return compiled


def hooked() -> bool:
    """Whether somebody is to be told of every launch, as profilers are."""
    runtime = _module.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def is_current(index: int) -> bool:
    """Whether kernels are launched on the device of this number; -1: the host, which always is."""
    return index < 0 or torch._C._cuda_getDevice() == index


def stream_of(index: int) -> Any:
    """The current stream of the device of this number, as Triton names it."""
    return _module.runtime.driver.active.get_current_stream(index)


def capture_of(device: torch.device) -> int:
    """A number for the graph that the current stream of a device is captured into, another one for
    every graph; 0 if the driver does not tell."""
    ask = _capture_info()
    if ask is None:
        return 0
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    state, number = ctypes.c_int(0), ctypes.c_ulonglong(0)
    failed = ask(stream, ctypes.byref(state), ctypes.byref(number), None, None, None)
    return 0 if failed else number.value


def supports_tma(device: torch.device) -> bool:
    """Whether programs on a device have an engine that copies blocks (TMA), and the memory for
    blocks on their way; interpreted ones do."""
    if device.type != "cuda":
        return INTERPRETED
    able = torch.version.hip is None and _capability(device.index) >= (9, 0)
    return able and _shared_memory(device.index) >= BLOCKS_BYTES


def blocks(base: Tensor, shape: Sequence[int], strides: Sequence[int], block: Sequence[int]) -> Any:
    """A kernel's argument for a table that begins where `base` does, copied in blocks."""
    tools = importlib.import_module("triton.tools.tensor_descriptor")
    return tools.TensorDescriptor(base, list(shape), list(strides), list(block))


def is_table(argument: Any) -> bool:
    """Whether a kernel's argument is what `blocks` or `tiles` gives."""
    return type(argument).__name__ == "TensorDescriptor"


def tiles(table: Any, block: Sequence[int]) -> Any:
    """A table that `blocks` describes, for kernels in Gluon: in blocks that lie in shared memory as
    the tensor cores read them."""
    tools = importlib.import_module("triton.experimental.gluon.nvidia.hopper")
    layout = gl.NVMMASharedLayout(128, 8 * table.base.element_size(), len(block))
    return tools.TensorDescriptor(table.base, table.shape, table.strides, list(block), layout)


def next_power_of_2(number: int) -> int:
    """Smallest power of two >= number, for number >= 1."""
    return 1 << max(0, number - 1).bit_length()


def within_32_bits(*strided: Tensor, dim: int = -2) -> bool:
    """Whether 32 bits hold how far the last line of a dim, with its numbers, lies from the first,
    in each tensor: kernels reckon so with heads, and in 64 bits with tokens."""
    return all((x.shape[dim] - 1) * x.stride(dim) + x.shape[-1] <= 1 << 31 for x in strided)


def warps_for(elements: int) -> int:
    """Warps of a program that handles this many elements at once: 4 to 16 of them a thread."""
    return min(16, max(1, next_power_of_2(elements) // 256))


def supports_pdl(device: torch.device) -> bool:
    """Whether a device can launch a kernel before the one in front is done."""
    return device.type == "cuda" and _capability(device.index) >= (9, 0)


def supports_wgmma(device: torch.device) -> bool:
    """Whether kernels in Gluon run on a device, and four of its warps multiply together (wgmma)."""
    return (
        gl is not None
        and device.type == "cuda"
        and torch.version.hip is None
        and _capability(device.index) == (9, 0)
    )


def knows_e4m3(device: torch.device) -> bool:
    """Whether a device converts numbers to float8 e4m3 by itself."""
    return (
        device.type == "cuda" and torch.version.hip is None and _capability(device.index) >= (8, 9)
    )


def processors(device: torch.device) -> int:
    """Multiprocessors of a device, each of which has place for a program; interpreted: 1."""
    return _processors(device.index) if device.type == "cuda" else 1


def memory_rate(device: torch.device) -> float:
    """Bytes a second that a device's memory delivers, by its clock and width; an H100's where that
    is not known."""
    return _memory_rate(device.index) if device.type == "cuda" else H100_RATE


def program_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program can have; interpreted ones know no bound."""
    return _shared_memory(device.index) if device.type == "cuda" else 1 << 62


@functools.cache
def _capture_info() -> Any:
    """The driver's cuStreamGetCaptureInfo_v2; None without it."""
    with contextlib.suppress(OSError, AttributeError):
        return ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    return None


@functools.cache
def _memory_rate(index: int) -> float:
    properties = torch.cuda.get_device_properties(index)
    kilohertz = getattr(properties, "memory_clock_rate", 0)
    # Twice in a cycle.
    return 2e3 * kilohertz * getattr(properties, "memory_bus_width", 0) / 8 or H100_RATE


@functools.cache
def _shared_memory(index: int) -> int:
    properties = torch.cuda.get_device_properties(index)
    more = getattr(properties, "shared_memory_per_block_optin", 0)
    return max(int(properties.shared_memory_per_block), int(more))


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@functools.cache
def _processors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)
