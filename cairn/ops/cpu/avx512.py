"""AVX-512 vectors of 16 float32 lanes for loops compiled by `cpu.jit`.

Compilers vectorise simple loops, but not a softmax over 16 columns. `+ - *` work lane by lane;
`spread` broadcasts a scalar. Memory operands are arrays of 4-byte elements, addressed by the index
of the first element in the flattened array.
"""

from __future__ import annotations

import importlib
import operator
from typing import Any

import numpy as np

from cairn.ops.cpu import AVAILABLE, FAST, jit

LANES = 16
LOG2_E = np.float32(1.4426950408889634)


def _pairs_in_one() -> bool:
    """Whether the CPU has AVX512-BF16, which multiplies and adds pairs of bfloat16."""
    if not AVAILABLE:
        return False
    binding = importlib.import_module("llvmlite.binding")
    return bool(binding.get_host_cpu_features().get("avx512bf16"))


PAIRS = _pairs_in_one()

_extending: Any = importlib.import_module("numba.extending") if AVAILABLE else None
_types: Any = importlib.import_module("numba.types") if AVAILABLE else None
_ir: Any = importlib.import_module("llvmlite.ir") if AVAILABLE else None
_utils: Any = importlib.import_module("numba.core.cgutils") if AVAILABLE else None
_intrinsic: Any = _extending and _extending.intrinsic

if AVAILABLE:
    _NUMBER, _WORD = _ir.FloatType(), _ir.IntType(32)
    _NUMBERS, _WORDS = _ir.VectorType(_NUMBER, LANES), _ir.VectorType(_WORD, LANES)

    class _BFloat(_ir.Type):  # type: ignore[misc]
        """LLVM's bfloat type, which llvmlite lacks."""

        def _to_string(self) -> str:
            return "bfloat"

    _HALF, _HALVES = _ir.VectorType(_BFloat(), LANES), _ir.VectorType(_BFloat(), 2 * LANES)

    class _Lanes(_types.Type):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="lanes")

    @_extending.register_model(_Lanes)
    class _Model(_extending.models.PrimitiveModel):  # type: ignore[misc]
        def __init__(self, manager: Any, kind: Any) -> None:
            super().__init__(manager, kind, _NUMBERS)

    _lanes = _Lanes()


def _words(number: int) -> Any:
    return _ir.Constant(_WORDS, [number] * LANES)


def call(builder: Any, name: str, result: Any, *args: Any) -> Any:
    """Emit a call of the LLVM intrinsic of this name, with its result type."""
    kind = _ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(_utils.get_or_insert_function(builder.module, kind, name), args)


def _pointer(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """A pointer to 16 elements of the array in the first argument, from the index in the second
    on."""
    data = context.make_array(signature.args[0])(context, builder, args[0]).data
    return builder.bitcast(builder.gep(data, [args[1]]), _NUMBERS.as_pointer())


def _first(builder: Any, count: Any) -> Any:
    """The mask of the first `count` lanes."""
    counts = _splat(builder, builder.trunc(count, _WORD))
    return builder.icmp_signed("<", _ir.Constant(_WORDS, list(range(LANES))), counts)


def _splat(builder: Any, number: Any) -> Any:
    none = _ir.Constant(_ir.VectorType(number.type, LANES), _ir.Undefined)
    one = builder.insert_element(none, number, _ir.Constant(_WORD, 0))
    return builder.shuffle_vector(one, none, _words(0))


def _build_spread(context: Any, number: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _splat(builder, args[0])

    return _lanes(_types.float32), emit


def _build_load(context: Any, array: Any, at: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        loaded = builder.load(_pointer(context, builder, signature, args))
        loaded.align = 4
        return loaded

    return _lanes(array, _types.int64), emit


def _build_store(context: Any, array: Any, at: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store(args[2], _pointer(context, builder, signature, args)).align = 4
        return context.get_dummy_value()

    return _types.void(array, _types.int64, _lanes), emit


def _build_load_some(context: Any, array: Any, at: Any, count: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place, zero = _pointer(context, builder, signature, args), _ir.Constant(_NUMBERS, None)
        name = "llvm.masked.load.v16f32.p0"
        four = _ir.Constant(_WORD, 4)
        return call(builder, name, _NUMBERS, place, four, _first(builder, args[2]), zero)

    return _lanes(array, _types.int64, _types.int64), emit


def _build_store_some(context: Any, array: Any, at: Any, count: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        place, four = _pointer(context, builder, signature, args), _ir.Constant(_WORD, 4)
        name, mask = "llvm.masked.store.v16f32.p0", _first(builder, args[2])
        call(builder, name, _ir.VoidType(), args[3], place, four, mask)
        return context.get_dummy_value()

    return _types.void(array, _types.int64, _types.int64, _lanes), emit


def _build_store_pairs(context: Any, array: Any, at: Any, even: Any, odd: Any) -> Any:
    mixed = [n // 2 + n % 2 * LANES for n in range(2 * LANES)]
    order = _ir.Constant(_ir.VectorType(_WORD, 2 * LANES), mixed)
    name = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        rounded = call(builder, name, _HALVES, args[3], args[2])
        pairs = builder.shuffle_vector(rounded, _ir.Constant(_HALVES, _ir.Undefined), order)
        place = _pointer(context, builder, signature, args)
        builder.store(builder.bitcast(pairs, _NUMBERS), place).align = 4
        return context.get_dummy_value()

    return _types.void(array, _types.int64, _lanes, _lanes), emit


def _build_widened(context: Any, array: Any, at: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(array)(context, builder, args[0]).data
        return _widen(builder, builder.gep(data, [args[1]]), array.dtype)

    return _lanes(array, _types.int64), emit


def _build_store_rounded(context: Any, array: Any, at: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(array)(context, builder, args[0]).data
        place = builder.bitcast(builder.gep(data, [args[1]]), _HALF.as_pointer())
        rounded = call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", _HALF, args[2])
        builder.store(rounded, place).align = 2
        return context.get_dummy_value()

    signature = _types.void(array, _types.int64, _lanes)
    return (signature, emit) if array.dtype == _types.uint16 else None


def _build_add_products(context: Any, total: Any, a: Any, i: Any, b: Any, j: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        sums, *places = args
        both = [
            builder.gep(context.make_array(kind)(context, builder, array).data, [at])
            for kind, array, at in zip(signature.args[1::2], places[::2], places[1::2], strict=True)
        ]
        if a.dtype == _types.uint16 and PAIRS:
            pairs = [_take(builder, place, _HALVES) for place in both]
            return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", _NUMBERS, sums, *pairs)
        for begin in (0, LANES):
            at = _ir.Constant(_WORD, begin)
            x, y = (_widen(builder, builder.gep(place, [at]), a.dtype) for place in both)
            sums = builder.fadd(sums, builder.fmul(x, y, flags=FAST), flags=FAST)
        return sums

    same = isinstance(a, _types.Array) and isinstance(b, _types.Array) and a.dtype == b.dtype
    signature = _lanes(_lanes, a, _types.int64, b, _types.int64)
    return (signature, emit) if same else None


def _take(builder: Any, place: Any, kind: Any) -> Any:
    """Load a value of this type from an address that is aligned to its elements only."""
    loaded = builder.load(builder.bitcast(place, kind.as_pointer()))
    loaded.align = 2
    return loaded


def _widen(builder: Any, place: Any, dtype: Any) -> Any:
    """Sixteen numbers of an array as float32, see `cpu.as_array`."""
    if dtype == _types.float32:
        return _take(builder, place, _NUMBERS)
    if dtype == _types.int16:
        return builder.fpext(_take(builder, place, _ir.VectorType(_ir.HalfType(), LANES)), _NUMBERS)
    bits = builder.zext(_take(builder, place, _ir.VectorType(_ir.IntType(16), LANES)), _WORDS)
    return builder.bitcast(builder.shl(bits, _words(16)), _NUMBERS)


def _build_total(context: Any, x: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = _ir.FunctionType(_NUMBER, [_NUMBER, _NUMBERS])
        name = "llvm.vector.reduce.fadd.v16f32"
        reduce = _utils.get_or_insert_function(builder.module, kind, name)
        return builder.call(reduce, [_ir.Constant(_NUMBER, -0.0), args[0]], fastmath=FAST)

    return _types.float32(_lanes), emit


def _build_highest(context: Any, a: Any, b: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return _lanes(_lanes, _lanes), emit


def _build_choose(context: Any, x: Any, least: Any, value: Any, other: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_unordered(">=", *args[:2]), *args[2:])

    return _lanes(_lanes, _lanes, _lanes, _lanes), emit


def _build_halves(context: Any, a: Any, b: Any) -> Any:
    order = _ir.Constant(_WORDS, [n if n < LANES // 2 else n + LANES for n in range(LANES)])

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.shuffle_vector(*args, order)

    return _lanes(_lanes, _lanes), emit


def _build_above_floor(context: Any, x: Any) -> Any:
    # Rounding mode: floor, exceptions suppressed.
    downwards = _ir.Constant(_WORD, 9)

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _masked(builder, "llvm.x86.avx512.mask.reduce.ps.512", args[0], downwards)

    return _lanes(_lanes), emit


def _build_times_power(context: Any, x: Any, exponent: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _masked(builder, "llvm.x86.avx512.mask.scalef.ps.512", *args)

    return _lanes(_lanes, _lanes), emit


def _masked(builder: Any, name: str, *args: Any) -> Any:
    """Emit an instruction with a mask (all lanes) and a rounding mode (the current one)."""
    none, every = _ir.Constant(_NUMBERS, None), _ir.Constant(_ir.IntType(16), 0xFFFF)
    return call(builder, name, _NUMBERS, *args, none, every, _ir.Constant(_WORD, 4))


def _register(sign: Any, name: str) -> None:
    """Implement an operator on lanes by an LLVM instruction."""

    def typer(context: Any) -> Any:
        return lambda a, b: _lanes if a == b == _lanes else None

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return getattr(builder, name)(*args, flags=FAST)

    _extending.type_callable(sign)(typer)
    _extending.lower_builtin(sign, _Lanes, _Lanes)(emit)


if AVAILABLE:
    _register(operator.add, "fadd")
    _register(operator.sub, "fsub")
    _register(operator.mul, "fmul")
    _register(operator.truediv, "fdiv")

spread: Any = _intrinsic and _intrinsic(_build_spread)
"""spread(x): a float32 in all lanes."""
load: Any = _intrinsic and _intrinsic(_build_load)
"""load(array, at)."""
store: Any = _intrinsic and _intrinsic(_build_store)
"""store(array, at, value)."""
load_some: Any = _intrinsic and _intrinsic(_build_load_some)
"""load_some(array, at, count): load the first `count` lanes; the others are 0 and their memory is
not read."""
store_some: Any = _intrinsic and _intrinsic(_build_store_some)
"""store_some(array, at, count, value): store the first `count` lanes only."""
store_pairs: Any = _intrinsic and _intrinsic(_build_store_pairs)
"""store_pairs(array, at, even, odd): store both as bfloat16, interleaved; to the nearest, ties to
even. Needs AVX512-BF16, which CPUs with AMX have."""
widened: Any = _intrinsic and _intrinsic(_build_widened)
"""widened(array, at): sixteen elements of an array of any kind, see `cpu.as_array`."""
store_rounded: Any = _intrinsic and _intrinsic(_build_store_rounded)
"""store_rounded(array, at, value): store as bfloat16; to the nearest, ties to even. Needs
AVX512-BF16."""
add_products: Any = _intrinsic and _intrinsic(_build_add_products)
"""add_products(total, a, i, b, j): total plus the products of 32 elements of a from i on with 32 of
b from j on, two products per lane."""
total: Any = _intrinsic and _intrinsic(_build_total)
"""total(x): the sum over the lanes."""
highest: Any = _intrinsic and _intrinsic(_build_highest)
"""highest(a, b): the maximum per lane; b where one is NaN."""
choose: Any = _intrinsic and _intrinsic(_build_choose)
"""choose(x, least, value, other): value where x >= least or one of them is NaN, else other."""
halves: Any = _intrinsic and _intrinsic(_build_halves)
"""halves(a, b): the first eight lanes of a, then the last eight of b."""
_above_floor: Any = _intrinsic and _intrinsic(_build_above_floor)
"""_above_floor(x): x - floor(x); 0 for an infinity."""
_times_power: Any = _intrinsic and _intrinsic(_build_times_power)
"""_times_power(x, exponent): x * 2 ** floor(exponent)."""


def _scratch(lines: Any) -> Any:
    """Uninitialised [lines, 16] float32; each row is one cache line."""
    numbers = np.empty((lines + 1) * LANES, np.float32)
    first = -numbers.ctypes.data // 4 % LANES
    return numbers[first : first + lines * LANES].reshape(lines, LANES)


scratch: Any = jit(_scratch)


def _exp2(x: Any) -> Any:
    """2 ** x per lane, with a relative error of 3e-6, exact for integers; 0 for -inf.

    2 ** floor(x) times the minimax polynomial of 2 ** r, 0 <= r < 1, that is 1 at r = 0.
    """
    r = _above_floor(x)
    p = spread(np.float32(1.3426747e-2))
    p = p * r + spread(np.float32(5.2242373e-2))
    p = p * r + spread(np.float32(2.4128025e-1))
    p = p * r + spread(np.float32(6.9304484e-1))
    return _times_power(p * r + spread(np.float32(1)), x)


exp2: Any = jit(_exp2)
