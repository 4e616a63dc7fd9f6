"""AMX instructions for loops compiled by `cpu.jit`: products of bfloat16 tiles with float32 sums.

There are eight tile registers of 16 rows of 64 bytes. `tile_dot(c, a, b)` adds to the float32 [16,
16] in tile c the product of a, bfloat16 [16, 32], and b [32, 16], stored as [16, 16, 2]: each tile
row interleaves two rows of the matrix.

oneDNN, which computes torch's matrix products, keeps its tile configuration loaded in a thread:
loops save it before they load their own, and restore it at the end.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cairn.ops import cpu
from cairn.ops.cpu.avx512 import call

_types: Any = importlib.import_module("numba.types") if cpu.AVAILABLE else None
_ir: Any = importlib.import_module("llvmlite.ir") if cpu.AVAILABLE else None
_extending: Any = importlib.import_module("numba.extending") if cpu.AVAILABLE else None
_intrinsic: Any = _extending and _extending.intrinsic


def _missing() -> str:
    """Why AMX cannot be used here (compiler, CPU, torch or system)."""
    if not cpu.AVAILABLE:
        return "Numba is not installed"
    features = importlib.import_module("llvmlite.binding").get_host_cpu_features()
    begin = getattr(torch.cpu, "_init_amx", None)
    if not (features.get("amx-bf16") and features.get("amx-tile")):
        return "this CPU has no AMX"
    if begin is None:
        return "this torch does not ask the system for AMX"
    return "" if begin() else "the system lets no process use AMX"


MISSING = _missing()
AVAILABLE = not MISSING


@functools.cache
def shapes() -> NDArray[np.uint8]:
    """The configuration for `load_shapes` in which all eight tiles have full size."""
    config = np.zeros(64, np.uint8)
    config[0] = 1
    config[16:32:2], config[48:56] = 64, 16
    return config


def _address(context: Any, builder: Any, kind: Any, array: Any, at: Any = None) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    place = data if at is None else builder.gep(data, [at])
    return builder.bitcast(place, _ir.IntType(8).as_pointer())


def _literal(*tiles: Any) -> bool:
    """Whether tile indices are compile-time constants, as the instruction needs."""
    return all(isinstance(tile, _types.IntegerLiteral) for tile in tiles)


def _indices(*tiles: Any) -> list[Any]:
    return [_ir.Constant(_ir.IntType(8), tile.literal_value) for tile in tiles]


def _build_dot(context: Any, c: Any, a: Any, b: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        call(builder, "llvm.x86.tdpbf16ps", _ir.VoidType(), *_indices(c, a, b))
        return context.get_dummy_value()

    return (_types.void(c, a, b), emit) if _literal(c, a, b) else None


def _build_zero(context: Any, tile: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        call(builder, "llvm.x86.tilezero", _ir.VoidType(), *_indices(tile))
        return context.get_dummy_value()

    return (_types.void(tile), emit) if _literal(tile) else None


def _between_memory(name: str) -> Any:
    def build(context: Any, tile: Any, array: Any, at: Any, stride: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            place = _address(context, builder, array, args[1], args[2])
            size = _ir.Constant(_ir.IntType(64), array.dtype.bitwidth // 8)
            arguments = (*_indices(tile), place, builder.mul(args[3], size))
            call(builder, name, _ir.VoidType(), *arguments)
            return context.get_dummy_value()

        signature = _types.void(tile, array, _types.int64, _types.int64)
        return (signature, emit) if _literal(tile) else None

    return _intrinsic and _intrinsic(build)


def _with_shapes(name: str) -> Any:
    def build(context: Any, config: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            call(builder, name, _ir.VoidType(), _address(context, builder, config, args[0]))
            return context.get_dummy_value()

        return _types.void(config), emit

    return _intrinsic and _intrinsic(build)


tile_dot: Any = _intrinsic and _intrinsic(_build_dot)
"""tile_dot(c, a, b): c += a b; tile indices are literals at the call, as in all of these
functions."""
tile_zero: Any = _intrinsic and _intrinsic(_build_zero)
"""tile_zero(tile)."""
tile_load: Any = _between_memory("llvm.x86.tileloadd64")
"""tile_load(tile, array, at, stride): 16 rows from element `at` of the flattened array on, `stride`
elements apart."""
tile_store: Any = _between_memory("llvm.x86.tilestored64")
"""tile_store(tile, array, at, stride)."""
load_shapes: Any = _with_shapes("llvm.x86.ldtilecfg")
"""load_shapes(config): load a thread's tile configuration, uint8 [64]; the contents of the tiles
are lost."""
save_shapes: Any = _with_shapes("llvm.x86.sttilecfg")
"""save_shapes(config): write the current tile configuration to uint8 [64]."""
