"""Compiles kernel launches for Hopper, also on machines without a GPU.

As a script it prints a line of JSON with facts from the compiler for every launch of the calls
below. The interpreter supports neither Gluon nor timing, so this is all that can be tested without
a GPU."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction

from cairn.ops import gpu
from cairn.ops.attention import cutlass_mla_decode, launch
from cairn.ops.attention.cases import latents
from cairn.ops.attention.tuning import TUNING as ATTENTION_TUNING
from cairn.ops.flash_attn.flash_attention import drawn, flash_attention
from cairn.ops.flash_attn.tuning import TUNING as FLASH_ATTN_TUNING
from cairn.ops.landmark import select_launch
from cairn.ops.landmark.select_pages import _selection, select_pages
from cairn.ops.linear import wgmma_launch as products
from cairn.ops.sparse_mla.sparse_mla import sparse_mla
from cairn.ops.sparse_mla.tuning import TUNING as SPARSE_MLA_TUNING
from cairn.ops.testing import Make

TARGET = GPUTarget("cuda", 90, 32)
PTXAS = triton.knobs.nvidia.ptxas.path
TYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}
ALIGNED = [["tt.divisibility", 16]]
OPTIONS = ("num_warps", "maxnreg", "launch_pdl")


def type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype]
    if isinstance(value, TensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype]}{value.block_shape},{value.layout!r}>"
    return "fp32" if isinstance(value, float) else "i32" if abs(value) < 1 << 31 else "i64"


def compiled(kernel: Any, *args: Any, grid: Any, warmup: bool, **rest: Any) -> None:
    """Replaces the launch of a kernel."""
    options = {name: rest.pop(name) for name in OPTIONS if name in rest}
    values = dict(zip([p.name for p in kernel.params], args, strict=False)) | rest
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        one = type(value) is int and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or one:
            signature[parameter.name], constants[(place,)] = "constexpr", value
            continue
        signature[parameter.name] = type_of(value)
        if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[(place,)] = ALIGNED
    kind = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = kind(kernel, signature, constants, attributes)
    made = triton.compile(source, target=TARGET, options=options)
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(made.asm["ptx"])
        file.flush()
        command = [PTXAS, "-v", "-arch=sm_90a", file.name, "-o", "/dev/null"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    found = re.findall(r"Used (\d+) registers", said)
    spilt = re.findall(r"(\d+) bytes spill stores", said)
    told = {
        "kernel": kernel.fn.__name__,
        "shared": made.metadata.shared,
        "registers": int(found[0]),
        "spilt": int(spilt[0]),
        "serialized": "wgmma.mma_async instructions are serialized" in said,
    }
    print(json.dumps(told), flush=True)


def main() -> None:
    JITFunction.run = GluonJITFunction.run = compiled
    gpu.sm_count = lambda device: 132
    gpu.max_shared_memory = lambda device: 227 << 10
    gpu.supports_wgmma = lambda device: True
    gpu.supports_tma = lambda device: True
    ATTENTION_TUNING.tma_min_flops = 0
    FLASH_ATTN_TUNING.wgmma_full = 0
    launch.merge = lambda *args, **kwargs: None
    make, dtype = Make("cpu"), torch.bfloat16
    given = latents(make, [300, 64], 100, 64, (512, 64), dtype)
    cutlass_mla_decode.using("gluon")(*given.args)
    q, cache = make.randn(3, 128, 576, dtype=dtype), make.randn(4, 64, 576, dtype=dtype)
    cells, length = make.randint(0, 256, 3, 64, dtype=torch.int32), make.randint(0, 64, 3)
    with SPARSE_MLA_TUNING.replaced(group_programs=1):
        sparse_mla.using("triton")(q, cache, cells, length.int(), 0.1, 512, dtype=dtype)
    for width, page, sinks in ((64, 64, True), (128, -1, False), (256, 64, False)):
        shape = {"queries": (140, 131), "keys": (300, 131), "heads": (4, 2)}
        options = {**shape, "widths": (width, width), "page": page, "sinks": sinks}
        given = drawn(make, dtype, **options, right=0)
        flash_attention.using("gluon")(*given.args)
    for heads, groups, width in ((16, 2, 64), (2, 1, 128), (2, 2, 128)):
        z, key = (
            torch.empty(256, heads, width, dtype=dtype),
            torch.empty(512, heads, width, dtype=dtype),
        )
        lse, slot = torch.empty(256, heads), torch.arange(256)
        where = (slot, slot, torch.empty(1, 512, dtype=torch.int32), 64, 512, 32)
        given = (z, key, torch.empty(512, heads), lse, *where)
        job = _selection(select_pages.bind(*given, num_kv_heads=groups))
        assert select_launch.in_groups(job)
        tops = torch.empty(256, groups, 32)
        select_launch._score_in_groups(job, lse, torch.empty(256, groups, 512), tops)
    x, weight = torch.empty(40, 1032, dtype=dtype), torch.empty(512, 1032, dtype=dtype)
    products.multiply(x, weight, torch.empty(40, 256, dtype=dtype), gated=True)
    products.multiply(x[:5], weight, torch.empty(5, 512))
    products.multiply_parts(x[:20], weight)


if __name__ == "__main__":
    main()
