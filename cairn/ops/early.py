"""Kernels that are launched before the one in front of them is done.

What a launch takes passes beside the kernel in front; for a small kernel that is most of its time.
The kernel waits itself, for what it reads and before it writes. Some read weights, summaries and
where tokens lie before they wait: what is launched early right in front of them writes none of
these. So ops on positions let no kernel be launched before they are done. Other kernels in front,
such as a copy into a weight, let nothing be launched before their programs have ended.

Kernels whose programs run long and all at once, one wave of them, are not launched early: beside
programs of the kernel in front they would come to lie unevenly on the multiprocessors, and the
device waits for the fullest of these. They let the next kernel be launched, no more. Products with
large weights are the exception: one program fills a multiprocessor, and has much to read before it
waits.
"""

from __future__ import annotations

import torch

from cairn.ops import gpu
from cairn.ops.gpu import tl, triton

MOST_ROWS, MOST_WARPS = 512, 8192
"""Rows, or tokens, and warps of a kernel that is launched early because it is small. A large device
runs so many warps at once; beside what more of them do, a launch takes little. Either way of being
launched is a kernel to be compiled: first steps are of more tokens than MOST_ROWS too."""


@triton.jit
def launch_next(EARLY: tl.constexpr):
    """With EARLY the next kernel may be launched as soon as all programs have come here. It waits
    for all that this one writes, and so for what this one itself waits for."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def await_previous(EARLY: tl.constexpr, NEXT: tl.constexpr = True):
    """Begin a kernel: with EARLY it was launched before the one in front of it was done, and waits
    here for what that one writes; then the next one may be launched, if NEXT."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        if NEXT:
            tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def ask_for(at):
    """Bring the lines of the addresses `at` into the cache; nobody waits for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], tl.int32, is_pure=False, pack=1
    )


def early_for(device: torch.device, rows: int, warps: int) -> bool:
    """Whether a kernel of rows, with so many warps for each, is launched early."""
    few = rows <= MOST_ROWS and rows * warps <= MOST_WARPS
    return few and gpu.launches_early(device)


def early_option(early: bool) -> dict[str, bool]:
    """What launches a kernel before the one in front of it is done: for kernels that wait for it
    themselves. Only devices that know it are given the option."""
    return {"launch_pdl": True} if early else {}
