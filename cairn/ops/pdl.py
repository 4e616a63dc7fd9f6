"""Programmatic dependent launch (PDL): a kernel starts before the previous kernel has finished.

With the launch option `launch_pdl` the device starts a kernel's programs while the previous kernel
is still running, which hides launch latency. The kernel must call `await_previous` before it reads
what the previous kernel writes, and before it writes anything. On an H200, in a CUDA graph of 200
norms of one row, each takes 0.97 us with PDL and 1.30 us without; a decode step of a thousand
kernels, most of them bound by memory, is 2% faster.

Some kernels read weights, page summaries or token positions before they wait. They declare these
arguments, as in `@triton.jit(early=("weight",))`, and must not be launched with PDL after a kernel
that writes them and may still run. Kernels that compute positions therefore never call
`launch_next`: the next kernel starts after they have finished. pdl_checks.py checks declarations
and launches. A kernel with a declaration, which may be empty, is launched with PDL if its argument
PDL is true.

Kernels whose programs fill the device in one long wave are not launched with PDL, because the
scheduler would distribute their programs unevenly beside those of the previous kernel. They only
call `launch_next`. Products with large weights are an exception: one program occupies a whole SM
and reads much of the weight before it waits.
"""

from __future__ import annotations

import torch

from cairn.ops import gpu
from cairn.ops.gpu import tl, triton

MAX_ROWS, MAX_WARPS = 512, 8192
"""Most rows (or tokens) and warps of a kernel that is launched with PDL. A large device runs this
many warps at once; with more, launch latency is negligible. Warm-up compiles both variants: it also
runs steps with more than MAX_ROWS tokens."""


@triton.jit
def launch_next(PDL: tl.constexpr):
    """With PDL, allow the next kernel to start once every program of this one has called this
    function. `await_previous` in the next kernel still waits for all writes of this one."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def await_previous(PDL: tl.constexpr, NEXT: tl.constexpr = True):
    """With PDL, wait until the writes of the previous kernel are visible. With NEXT, then allow the
    next kernel to start."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        if NEXT:
            tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch_l2(at):
    """Prefetch the cache lines of the addresses `at` into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], tl.int32, is_pure=False, pack=1
    )


def uses_pdl(device: torch.device, rows: int, warps: int) -> bool:
    """Whether a kernel with this many rows, and warps per row, is launched with PDL."""
    small = rows <= MAX_ROWS and rows * warps <= MAX_WARPS
    return small and gpu.supports_pdl(device)


def pdl_option(pdl: bool) -> dict[str, bool]:
    """Launch option of kernels that call `await_previous`; empty without PDL, because devices that
    do not support PDL reject the option."""
    return {"launch_pdl": True} if pdl else {}
