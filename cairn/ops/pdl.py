"""Programmatic dependent launch (PDL): a kernel starts before the kernel in front of it is done.

With the launch attribute `launch_pdl` the device starts a kernel's programs while the kernel in
front is still running, which hides the cost of the launch. The kernel itself must wait
(`await_previous`) before it reads what the kernel in front writes, and before it writes anything.
On an H200 each of 200 norms of one row in a CUDA graph takes 0.97 us so, otherwise 1.30; a decode
step of a thousand kernels, most of which wait for memory, becomes 2% faster.

Some kernels read weights, page summaries or token positions before they wait. They declare them,
`@triton.jit(early=("weight",))`, and must not be launched with PDL behind a kernel that may still
run and writes those: ops that compute positions therefore do not let the next kernel start early
(`launch_next` is not called). A kernel that never calls it, such as a copy into a weight, ends
completely before the next one starts. launch_order.py checks the declarations and the launches.
A kernel with a declaration, which may be empty, is launched with PDL where its argument PDL is
true.

Kernels whose programs fill the device in one long wave are not launched with PDL: their programs
would be placed unevenly beside those of the kernel in front. They only call `launch_next`. Products
with large weights are the exception: one program fills a multiprocessor and has much to read before
it waits.
"""

from __future__ import annotations

import torch

from cairn.ops import gpu
from cairn.ops.gpu import tl, triton

MAX_ROWS, MAX_WARPS = 512, 8192
"""Most rows (or tokens) and warps of a kernel that is launched with PDL. A large device runs this
many warps at once; with more work the launch cost does not matter. Both variants are compiled:
warm-up runs steps with more than MAX_ROWS tokens too."""


@triton.jit
def launch_next(PDL: tl.constexpr):
    """With PDL, allow the next kernel to start once every program of this one has called this. The
    next kernel still waits for all writes of this one."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def await_previous(PDL: tl.constexpr, NEXT: tl.constexpr = True):
    """With PDL, wait until the kernel in front has finished its writes; with NEXT, then allow the
    next kernel to start."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        if NEXT:
            tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch_l2(at):
    """Prefetch the cache lines of the addresses `at` into L2, without waiting."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], tl.int32, is_pure=False, pack=1
    )


def uses_pdl(device: torch.device, rows: int, warps: int) -> bool:
    """Whether a kernel with this many rows, and warps for each row, is launched with PDL."""
    few = rows <= MAX_ROWS and rows * warps <= MAX_WARPS
    return few and gpu.supports_pdl(device)


def pdl_option(pdl: bool) -> dict[str, bool]:
    """The launch option for kernels that call `await_previous`; empty without PDL, since only
    devices that support it know the option."""
    return {"launch_pdl": True} if pdl else {}
