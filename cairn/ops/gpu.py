"""Triton, if it is installed and there is a GPU. Kernel files import `triton` and `tl` from here,
and Gluon kernels `gluon`, `gl` and its Hopper module `hopper`.

Without Triton only the definitions run: kernels are plain functions that are never called, and
`DEVICES`, the devices of all Triton implementations, is empty. On a machine without a GPU, Triton
is imported only if TRITON_INTERPRET is set, because it takes half of the import time of the ops.
With TRITON_INTERPRET=1 kernels are interpreted on CPU tensors, in float32, which the generic op
test does on such machines; with TRITON_INTERPRET=0 they can be compiled and listed."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

_module: Any = None
_gluon: Any = None
tl: Any = None
gl: Any = None
hopper: Any = None
with contextlib.suppress(ImportError):
    if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
        raise ImportError
    _module = importlib.import_module("triton")
    tl = importlib.import_module("triton.language")
    # Gluon changes between releases; the kernels are written for this one.
    if _module.__version__.startswith("3.6."):
        _gluon = importlib.import_module("triton.experimental.gluon")
        gl = importlib.import_module("triton.experimental.gluon.language")
        hopper = importlib.import_module("triton.experimental.gluon.language.nvidia.hopper")

AVAILABLE = tl is not None
DEVICES: tuple[str, ...] = ("cuda",) if AVAILABLE else ()
INTERPRETED = AVAILABLE and os.environ.get("TRITON_INTERPRET") == "1"
WRITES_PTX = AVAILABLE and not INTERPRETED and torch.version.hip is None
"""Whether kernels may contain inline PTX."""
TMA_SHARED_BYTES = 164 << 10
"""Shared memory that the largest program with TMA needs: two pairs of key and value tiles of 128
slots."""
H100_RATE = 3.35e12
"""Memory bandwidth of an H100, bytes per second."""
MAX_GRID_YZ = (1 << 16) - 1
"""Largest size of a grid along its second and third axis."""
STREAM = object()
"""Placeholder for the stream in the arguments that `relaunch` returns."""
NO_FP_FUSION = {"enable_fp_fusion": False}
"""Launch option of kernels in which several threads compute the same sum of products. With FMA each
thread may fuse a different product into its first addition, unrounded, so the copies of the sum may
differ in the last bit; which copy is stored is undefined."""


class Observer(Protocol):
    """Receives the allocations and launches of a call.

    Attributes:
        launches: whether kernels are launched; False: they are only compiled.
    """

    launches: bool

    def allocated(self, tensor: Tensor, allocate: Callable[[], Tensor], blank: bool) -> None:
        """A tensor was allocated; `allocate` returns another like it; blank: it is
        uninitialised."""
        ...

    def not_replayable(self) -> None:
        """The call does other work on the device than allocations and launches."""
        ...

    def launched(self, kernel: Any, compiled: Any, grid: Any, args: Sequence[Any]) -> None:
        """A kernel was launched, or only compiled; `compiled` is the result of JITFunction.run."""
        ...


class _Watch(threading.local):
    observer: Observer | None = None
    order: Callable[[Any, dict[str, Any]], None] | None = None


watch = _Watch()
"""Hooks of this thread: `observer` records launches or compiles ahead; `order` is called before
each launch with the kernel and its arguments by name (`pdl_checks.checked`)."""


class _Triton:
    """Stands for the module `triton` in kernel files."""

    @staticmethod
    def jit(
        function: Callable[..., Any] | None = None,
        *,
        early: tuple[str, ...] | None = None,
        **options: Any,
    ) -> Any:
        """`triton.jit` whose launches are reported to `watch`. Without Triton it does nothing.

        early: for kernels that call `pdl.await_previous`: parameters whose memory the kernel reads
            before that. Such a kernel is launched with PDL if its argument PDL is true.
        """
        if function is None:
            return functools.partial(_Triton.jit, early=early, **options)
        if not AVAILABLE:
            return function
        return _observed(_module.jit(function, **options), early)

    def __getattr__(self, name: str) -> Any:
        return getattr(_module, name)


triton: Any = _Triton()


def constant(value: Any) -> Any:
    """A constant of a module that its kernels may use."""
    return tl.constexpr(value) if AVAILABLE else value


class _Gluon:
    """Stands for the module `gluon` in kernel files."""

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
        return function if _gluon is None else _observed(_gluon.jit(function, **options), early)

    @staticmethod
    def also(function: Any) -> Any:
        """A jitted Triton function for kernels in Gluon."""
        return function if _gluon is None else _gluon.jit(function.fn)


gluon = _Gluon()


def _observed(kernel: Any, early: tuple[str, ...] | None) -> Any:
    kernel.run = functools.partial(_run, kernel)
    kernel.early = early
    return kernel


def _run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    observer = watch.observer
    if kernel.early is not None and options.get("PDL"):
        # Only devices that support PDL know the option.
        options.setdefault("launch_pdl", True)
    if watch.order is not None and not warmup:
        given = dict(zip(kernel.arg_names, _in_order(kernel, args, options), strict=False))
        watch.order(kernel, {**given, "launch_pdl": options.get("launch_pdl", False)})
    dry = warmup or (observer is not None and not observer.launches)
    compiled = type(kernel).run(kernel, *args, grid=grid, warmup=dry, **options)
    if observer is not None and not warmup:
        observer.launched(kernel, compiled, grid, _in_order(kernel, args, options))
    return compiled


def _in_order(kernel: Any, args: Sequence[Any], options: dict[str, Any]) -> tuple[Any, ...]:
    """Positional and keyword arguments of a kernel in the order of its parameters."""
    names = kernel.arg_names[len(args) :]
    return (*args, *(options[name] for name in names if name in options))


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor, reported to `watch`."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if watch.observer is not None:
        watch.observer.allocated(
            tensor, allocator(tensor.shape, tensor.stride(), dtype, device), True
        )
    return tensor


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of zeros, reported to `watch`."""
    tensor = torch.zeros(shape, dtype=dtype, device=device)
    if watch.observer is not None:
        again = functools.partial(torch.zeros, tensor.shape, dtype=dtype, device=device)
        watch.observer.allocated(tensor, again, False)
    return tensor


def allocator(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Callable[[], Tensor]:
    """A function that allocates an uninitialised tensor on the current device, by the torch
    function with the least overhead."""
    # The function that code generated by torch.compile calls; it accepts only tuples.
    fast = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
    if fast is not None:
        return functools.partial(fast, tuple(shape), tuple(strides), dtype)
    return functools.partial(torch.empty_strided, shape, strides, dtype=dtype, device=device)


def relaunch(
    compiled: Any, grid: Sequence[int], args: Sequence[Any]
) -> tuple[Callable[..., None], tuple[Any, ...]] | None:
    """The launcher of a compiled kernel and its arguments. An argument may be replaced by another
    one with the same specialization, and tensors by addresses.

    Calling it is equivalent to JITFunction.run of Triton 3.6 without hooks; None for other
    versions."""
    if not _module.__version__.startswith("3.6.") or not hasattr(compiled, "packed_metadata"):
        return None
    # Access to `run` loads the kernel and sets `function`.
    run = compiled.run
    where = (*(*grid, 1, 1)[:3], STREAM, compiled.function)
    rest = (compiled.packed_metadata, None, None, None, *args)
    if getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1):
        return run, (*where, *rest)
    # A kernel without scratch memory can call the C launcher directly.
    options = (run.launch_cooperative_grid, run.launch_pdl, None, None)
    return run.launch, (*where, *options, *rest)


def async_compile_mode() -> Any:
    """Triton's AsyncCompileMode, or None if this version has none. In this mode the threads of an
    executor compile kernels, and `warmup` returns a handle with a `future`."""
    return getattr(_module, "AsyncCompileMode", None)


def cache_folder() -> Path | None:
    """Folder of Triton's compile cache; None without Triton."""
    folder = getattr(getattr(getattr(_module, "knobs", None), "cache", None), "dir", None)
    return None if folder is None else Path(folder)


def version() -> str:
    """Version of Triton; empty without Triton."""
    return getattr(_module, "__version__", "")


def load(compiled: Any) -> Any:
    """Load a compiled kernel onto the current device, build its launcher, and return it. Triton
    would do so at the first launch."""
    _ = compiled.run
    return compiled


def has_launch_hooks() -> bool:
    """Whether Triton's launch hooks are set, as profilers do."""
    runtime = _module.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


def is_current(index: int) -> bool:
    """Whether a device index is the current device; True for -1, the host."""
    return index < 0 or torch._C._cuda_getDevice() == index


def stream_of(index: int) -> Any:
    """The current stream of a device index, as Triton passes it to launchers."""
    return _module.runtime.driver.active.get_current_stream(index)


def capture_of(device: torch.device) -> int:
    """Id of the CUDA graph capture of a device's current stream; 0 if the driver does not provide
    it."""
    capture_info = _capture_info()
    if capture_info is None:
        return 0
    stream = ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)
    state, number = ctypes.c_int(0), ctypes.c_ulonglong(0)
    failed = capture_info(stream, ctypes.byref(state), ctypes.byref(number), None, None, None)
    return 0 if failed else number.value


def supports_tma(device: torch.device) -> bool:
    """Whether a device has TMA and TMA_SHARED_BYTES of shared memory; True for the interpreter."""
    if device.type != "cuda":
        return INTERPRETED
    hopper_or_later = torch.version.hip is None and _capability(device.index) >= (9, 0)
    return hopper_or_later and _shared_memory(device.index) >= TMA_SHARED_BYTES


def tensor_descriptor(
    base: Tensor, shape: Sequence[int], strides: Sequence[int], block: Sequence[int]
) -> Any:
    """A TMA tensor descriptor of memory at `base`, as an argument of Triton kernels."""
    tools = importlib.import_module("triton.tools.tensor_descriptor")
    return tools.TensorDescriptor(base, list(shape), list(strides), list(block))


def is_descriptor(argument: Any) -> bool:
    """Whether a kernel's argument is a TMA tensor descriptor, of Triton or of Gluon."""
    return type(argument).__name__ == "TensorDescriptor"


def gluon_descriptor(descriptor: Any, block: Sequence[int]) -> Any:
    """A descriptor of `tensor_descriptor` as an argument of Gluon kernels. Blocks arrive in shared
    memory in the swizzled layout that wgmma reads."""
    tools = importlib.import_module("triton.experimental.gluon.nvidia.hopper")
    layout = gl.NVMMASharedLayout(128, 8 * descriptor.base.element_size(), len(block))
    fields = descriptor.base, descriptor.shape, descriptor.strides
    return tools.TensorDescriptor(*fields, list(block), layout)


def select_arguments(kernel: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments, by name, that a kernel has parameters for."""
    return {name: arguments[name] for name in kernel.arg_names if name in arguments}


def next_power_of_2(number: int) -> int:
    """Smallest power of two >= number; number >= 1."""
    return 1 << max(0, number - 1).bit_length()


def within_32_bits(*strided: Tensor, dim: int = -2) -> bool:
    """Whether element offsets along `dim` (of heads) and along the last dim fit in 32 bits, in each
    tensor. Kernels compute these offsets in 32 bits and those of tokens in 64."""
    return all((x.shape[dim] - 1) * x.stride(dim) + x.shape[-1] <= 1 << 31 for x in strided)


def warps_for(elements: int) -> int:
    """Number of warps of a program with this many elements: 4 to 16 elements per thread."""
    return min(16, max(1, next_power_of_2(elements) // 256))


def supports_pdl(device: torch.device) -> bool:
    """Whether a device supports programmatic dependent launch (pdl.py)."""
    return device.type == "cuda" and _capability(device.index) >= (9, 0)


def supports_wgmma(device: torch.device) -> bool:
    """Whether a device has wgmma and the installed Triton has the required version of Gluon."""
    return (
        gl is not None
        and device.type == "cuda"
        and torch.version.hip is None
        and _capability(device.index) == (9, 0)
    )


def supports_e4m3(device: torch.device) -> bool:
    """Whether a device has instructions that convert to float8 e4m3."""
    return (
        device.type == "cuda" and torch.version.hip is None and _capability(device.index) >= (8, 9)
    )


def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors (SMs) of a device; 1 for the interpreter."""
    return _sm_count(device.index) if device.type == "cuda" else 1


def memory_rate(device: torch.device) -> float:
    """Memory bandwidth of a device in bytes per second, from its clock and bus width; that of an
    H100 if they are not known."""
    return _memory_rate(device.index) if device.type == "cuda" else H100_RATE


def max_shared_memory(device: torch.device) -> int:
    """Most bytes of shared memory that a program can use; no limit for the interpreter."""
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
    # DDR: two transfers a clock.
    return 2e3 * kilohertz * getattr(properties, "memory_bus_width", 0) / 8 or H100_RATE


@functools.cache
def _shared_memory(index: int) -> int:
    properties = torch.cuda.get_device_properties(index)
    opt_in = getattr(properties, "shared_memory_per_block_optin", 0)
    return max(int(properties.shared_memory_per_block), int(opt_in))


@functools.cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@functools.cache
def _sm_count(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)
