"""Launches made again: the same results from other memory, and a plain call where that is not sure.

The interpreter stands for the device: a "compiled" kernel takes addresses, as Triton's does.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cairn.ops import (
    flash_attn_with_kvcache,
    gelu_quick,
    gpu,
    merge_state_v2,
    replay,
    rmsnorm,
    top_k_renorm_probs,
)
from cairn.ops.attention.merge_states import merge_states
from cairn.ops.flash.flash_attention import flash_attention
from cairn.ops.gpu import tl, triton
from cairn.ops.registry import Op, all_ops, force
from cairn.ops.testing import Arguments, cases_of, compare

CHOICES = [
    pytest.param(op, name, id=f"{op.name}-{name}")
    for op in all_ops()
    for name, implementation in op.implementations.items()
    if implementation.replayed
]
INTERPRETED = [choice for choice in CHOICES if choice.values[1] != "gluon"]
"""Gluon is not interpreted."""
VIEWS = {"view", "slice", "select", "unbind", "alias", "detach", "unsqueeze", "expand", "transpose"}
HARMLESS = {"empty", "zeros", *VIEWS}
"""Operators that only make memory and views of it."""


class Compiled:
    """Runs an interpreted kernel on addresses."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, interpret: Callable[..., Any], args: Sequence[Any], options: Any) -> None:
        self._interpret, self._options = interpret, options
        self._dtypes = [getattr(getattr(arg, "base", arg), "dtype", None) for arg in args]

    def run(self, x: int, y: int, z: int, *given: Any) -> None:
        assert given[:6] == ("stream", "function", "metadata", None, None, None)
        args = [
            arg if dtype is None else located(arg, dtype)
            for arg, dtype in zip(given[6:], self._dtypes, strict=True)
        ]
        self._interpret(*args, grid=(x, y, z), warmup=False, **self._options)


def located(arg: Any, dtype: torch.dtype) -> Any:
    """What the interpreter takes for an address, or for a table that knows its address alone."""
    if isinstance(arg, int):
        return tensor_at(arg, dtype)
    return gpu.blocks(
        tensor_at(arg.base.data_ptr(), dtype), arg.shape, arg.strides, arg.block_shape
    )


def tensor_at(address: int, dtype: torch.dtype) -> Tensor:
    if address == 0:
        return torch.empty(0, dtype=dtype)
    memory = (ctypes.c_byte * dtype.itemsize).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


@pytest.fixture
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops choose as on a GPU; kernels are interpreted and give what launches them again."""
    if not gpu.INTERPRETED:
        pytest.skip("needs Triton, and a machine without CUDA")
    interpreter = pytest.importorskip("triton.runtime.interpreter").InterpretedFunction
    interpret = interpreter.run

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Compiled:
        with torch.utils._python_dispatch._disable_current_modes():
            interpret(kernel, *args, grid=grid, warmup=warmup, **options)
        return Compiled(lambda *a, **k: interpret(kernel, *a, **k), args, options)

    def select(op: Op[..., Any], key: Tensor, args: Any, kwargs: Any) -> Any:
        *others, last = op.candidates("cuda")
        return next((i for i in others if i.accepts(args, kwargs)), last)

    monkeypatch.setattr(interpreter, "run", run)
    monkeypatch.setattr(Op, "_select", select)
    monkeypatch.setattr(gpu, "stream_of", lambda device: "stream")


def tensors_of(arguments: Arguments) -> list[Tensor]:
    values = (*arguments.args, *arguments.kwargs.values())
    return [value for value in values if isinstance(value, Tensor)]


def small_case(op: Op[..., Any], name: str) -> Arguments:
    """The first that an implementation accepts with the fewest tokens: the interpreter is slow."""
    halves = (torch.bfloat16, torch.float16)
    found: list[Arguments] = []
    for case in cases_of(op):
        known = all(t.numel() and t.dtype not in halves for t in tensors_of(case))
        if known and op._named(name).accepts(case.args, case.kwargs):
            found.append(case)
    return min(found, key=lambda case: tensors_of(case)[0].numel())


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    if result is None:
        return ()
    return (result,) if isinstance(result, Tensor) else tuple(result)


class Operators(TorchDispatchMode):
    """Notes the operators that write or make numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.numel():
            self.names.add(func._schema.name.partition("::")[2])
        return result


class Calls:
    """Calls of a function by plans of its own."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.plans, self.plain = function, replay.Plans(), 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.plans.run(self._plainly, args, kwargs)

    def _plainly(self, args: Any, kwargs: Any) -> Any:
        self.plain += 1
        return self.function(*args, **kwargs)


@pytest.mark.parametrize("op, name", INTERPRETED)
def test_replays_give_what_a_plain_call_gives(op: Op[..., Any], name: str, as_on_gpu: None) -> None:
    call, case = Calls(op.using(name)), small_case(op, name)
    first, again = case.clone(), case.clone()
    written = [*as_tuple(call(*first.args, **first.kwargs)), *tensors_of(first)]
    expected = [tensor.clone() for tensor in written]
    for tensor in written:
        tensor.zero_()
    got = [*as_tuple(call(*again.args, **again.kwargs)), *tensors_of(again)]
    assert call.plain == 1
    for own, wanted in zip(got, expected, strict=True):
        compare(own, wanted, (0.0, 0.0), f"{op.name}({case})")


@pytest.mark.parametrize("op, name", INTERPRETED)
def test_what_is_replayed_takes_memory_and_launches_and_does_no_more(
    op: Op[..., Any], name: str, as_on_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = pytest.importorskip("triton.runtime.interpreter").InterpretedFunction
    monkeypatch.setattr(kernels, "run", lambda kernel, *args, **_: Compiled(kernel, args, {}))
    others = {other.name for other in all_ops()}
    call, planned = Calls(op.using(name)), 0
    for case in cases_of(op):
        if op._named(name).accepts(case.args, case.kwargs):
            call.plans = replay.Plans()
            with Operators() as operators:
                call(*case.args, **case.kwargs)
            if any(call.plans._plans.values()):
                planned += 1
                assert operators.names - others <= HARMLESS, case
    assert planned


@triton.jit  # type: ignore[untyped-decorator]
def scaled_sum_kernel(x, y, out, factor, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """out = (x + y) * factor."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    both = tl.load(x + at, mask=at < n) + tl.load(y + at, mask=at < n)
    tl.store(out + at, both * factor, mask=at < n)


def scaled_sum(
    x: Tensor, y: Tensor, factor: float, make: Callable[..., Tensor] = gpu.empty
) -> Tensor:
    """(x + y) * factor, by way of memory that is not the result's."""
    n = x.numel()
    between, out = (make((n,), dtype=x.dtype, device=x.device) for _ in range(2))
    scaled_sum_kernel[(-(-n // 16),)](x, y, between, factor, n, 16)
    scaled_sum_kernel[(-(-n // 16),)](between, gpu.zeros((n,), x.dtype, x.device), out, 1, n, 16)
    return out


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape)


def test_a_plan_serves_one_signature(as_on_gpu: None) -> None:
    call, x, y = Calls(scaled_sum), numbers(40), numbers(40)
    for factor in (1, 1.0, 3, 3.5):
        for _ in range(2):
            torch.testing.assert_close(call(x, y, factor), (x + y) * factor)
    assert call.plain == 4
    for other in (x[:24], x.double(), x.view(2, 20).t()):
        call(other, y.to(other.dtype), 2)
    assert call.plain == 7


def test_arguments_in_one_place_are_not_mistaken_for_each_other(as_on_gpu: None) -> None:
    call, x, y = Calls(scaled_sum), numbers(40), numbers(40)
    for a, b in ((x, x), (x, y), (y, y), (y, x)):
        torch.testing.assert_close(call(a, b, 2), (a + b) * 2)
    assert call.plain == 2


def test_pointers_behind_an_argument_are_found_again(as_on_gpu: None) -> None:
    call = Calls(lambda x: scaled_sum(x[0], x[1], 2))
    for _ in range(2):
        x = numbers(2, 16)
        torch.testing.assert_close(call(x), (x[0] + x[1]) * 2)
    assert call.plain == 1


def test_a_plan_serves_addresses_as_far_behind_round_ones(as_on_gpu: None) -> None:
    call, x, y = Calls(scaled_sum), numbers(48), numbers(40)
    for begin, plain in ((0, 1), (1, 2), (4, 2), (5, 2), (2, 3)):
        part = x[begin : begin + 40]
        torch.testing.assert_close(call(part, y, 2), (part + y) * 2)
        assert call.plain == plain


def test_lists_of_numbers_are_told_apart(as_on_gpu: None) -> None:
    call, x = Calls(lambda x, numbers: scaled_sum(x, x, sum(numbers))), numbers(40)
    for factors in ([1, 2], [2, 1], [3], [1, 2]):
        torch.testing.assert_close(call(x, factors), x * 2 * sum(factors))
    assert call.plain == 3


@pytest.mark.parametrize("shared", [0, 160, 512, replay.SHARED_BYTES])
def test_pieces_of_memory_do_not_meet(
    shared: int, as_on_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "SHARED_BYTES", shared)

    def twice(x: Tensor) -> Tensor:
        one, two, three, out = (gpu.empty((40,), x.dtype, x.device) for _ in range(4))
        for source, target in ((x, one), (one, two), (x, three)):
            scaled_sum_kernel[(3,)](source, x, target, 1, 40, 16)
        scaled_sum_kernel[(3,)](one, two, out, 1, 40, 16)
        scaled_sum_kernel[(3,)](out, three, out, 1, 40, 16)
        return out

    call = Calls(twice)
    for _ in range(3):
        x = numbers(40)
        torch.testing.assert_close(call(x), 7 * x)
    assert call.plain == 1


@triton.jit  # type: ignore[untyped-decorator]
def copy_block_kernel(table, out, LINES: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """out [LINES, WIDTH] = a table's first block."""
    at = tl.arange(0, LINES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(out + at, table.load([0, 0]))


def test_tables_are_described_where_they_lie(as_on_gpu: None) -> None:
    def first_block(x: Tensor) -> Tensor:
        out = gpu.empty((8, 16), x.dtype, x.device)
        table = gpu.blocks(x[2:], x[2:].shape, x.stride(), (8, 16))
        copy_block_kernel[(1,)](table, out, 8, 16)
        return out

    call = Calls(first_block)
    for _ in range(3):
        x = numbers(12, 32)
        torch.testing.assert_close(call(x), x[2:10, :16])
    assert call.plain == 1


def test_what_does_more_than_launch_is_run_plainly(
    as_on_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = gelu_quick.implementations
    monkeypatch.setitem(own, "triton", dataclasses.replace(own["triton"], replayed=False))
    x, y = numbers(40), numbers(40)
    memory = Calls(lambda x, y, factor: scaled_sum(x, y, factor, make=torch.empty))
    result = Calls(lambda x, y: scaled_sum(x, y, 2) + 1)
    nested = Calls(lambda x, y: (gelu_quick(y), scaled_sum(x, y, 2))[1])
    for _ in range(3):
        torch.testing.assert_close(memory(x, y, 2), (x + y) * 2)
        torch.testing.assert_close(result(x, y), (x + y) * 2 + 1)
        torch.testing.assert_close(nested(x, y), (x + y) * 2)
    assert (memory.plain, result.plain, nested.plain) == (3, 3, 3)


def test_arguments_of_no_signature_reach_the_call(as_on_gpu: None) -> None:
    call = Calls(lambda x, sides: x.expand(sides))
    for _ in range(2):
        assert call(numbers(1), [3]).shape == (3,)
    assert call.plain == 2


def decode(make: Callable[..., Tensor]) -> Callable[..., Any]:
    """`flash_attn_with_kvcache` of a token a row, through pages."""
    tables = torch.arange(6, dtype=torch.int32).view(2, 3)
    lengths = torch.tensor([5, 11], dtype=torch.int32)
    given = {"cache_seqlens": lengths, "page_table": tables, "causal": True}
    return lambda front: front(
        *(make(2, 1, 4, 16), make(6, 4, 2, 16), make(6, 4, 2, 16)), **given, return_softmax_lse=True
    )


def test_fronts_are_replayed_with_what_they_have_ops_do(as_on_gpu: None) -> None:
    v, s = numbers(5, 2, 16), numbers(5, 2)
    for front, run in (
        (flash_attn_with_kvcache, decode(numbers)),
        (merge_state_v2, lambda front: front(v, s, numbers(5, 2, 16), numbers(5, 2))),
        (top_k_renorm_probs, lambda front: front(numbers(3, 40).abs(), torch.tensor([2, 5, 0]))),
    ):
        call = Calls(front.__wrapped__)
        for seed in (1, 2, 3):
            torch.manual_seed(seed)
            got = as_tuple(run(call))
            torch.manual_seed(seed)
            for a, b in zip(got, as_tuple(run(front)), strict=True):
                compare(a, b, (0.0, 0.0), front.__name__)
        assert call.plain == 1, front


def test_what_launches_nothing_is_run_plainly(as_on_gpu: None) -> None:
    call, x = Calls(lambda x: x.add_(1)), numbers(4)
    for _ in range(3):
        before = x.clone()
        torch.testing.assert_close(call(x), before + 1)
    assert call.plain == 3


def test_plans_are_forgotten_when_the_choice_changes() -> None:
    plans = [rmsnorm._plans, *merge_states._front_plans]
    assert len(plans) == 3
    for one in plans:
        one._plans[("a signature",)] = None
    with force("rmsnorm=reference"):
        assert not any(one._plans for one in plans)


def test_who_hooks_launches_is_told_of_all(as_on_gpu: None) -> None:
    hooks = pytest.importorskip("triton").knobs.runtime.launch_enter_hook
    call, x = Calls(scaled_sum), numbers(40)
    call(x, x, 2)
    hook = lambda metadata: None  # noqa: E731
    hooks.add(hook)
    call(x, x, 2)
    hooks.remove(hook)
    call(x, x, 2)
    assert call.plain == 2


def test_another_triton_is_called_plainly(as_on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest.importorskip("triton"), "__version__", "4.0.0")
    call, x = Calls(scaled_sum), numbers(40)
    for _ in range(2):
        torch.testing.assert_close(call(x, x, 2), x * 4)
    assert call.plain == 2


def test_an_error_ends_a_recording(as_on_gpu: None) -> None:
    with pytest.raises(ZeroDivisionError):
        Calls(lambda x: 1 // 0)(numbers(3))
    assert gpu.watch.by is None


@pytest.mark.parametrize("language", ["triton", "gluon"])
def test_launches_are_told_in_either_language(
    language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if gpu.gl is None:
        pytest.skip("needs Triton 3.6")
    told: list[Any] = []

    class Told:
        def launched(self, *launch: Any) -> None:
            told.append(launch)

    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> str:
        return "compiled"

    kernel = getattr(gpu, language).jit(scaled_sum)
    monkeypatch.setattr(type(kernel), "run", launch)
    monkeypatch.setattr(gpu.watch, "by", Told())
    assert kernel.run(1, 2, grid=(3,), warmup=False, num_warps=4) == "compiled"
    assert kernel.run(1, 2, grid=(3,), warmup=True) == "compiled"
    assert told == [(kernel, "compiled", (3,), (1, 2))]


@pytest.mark.gpu
def test_calls_of_ops_are_replayed_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = replay.Plans()
    monkeypatch.setattr(rmsnorm, "_plans", plans)
    weight = torch.randn(64, device="cuda")
    for rows in (3, 3, 3, 5):
        x = torch.randn(rows, 64, device="cuda")
        wanted = rmsnorm.using("triton")(x, weight, 1e-6)
        compare(rmsnorm(x, weight, 1e-6), wanted, (0.0, 0.0), "rmsnorm")
    assert len(plans._plans) == 2 and all(plans._plans.values())


@pytest.mark.gpu
def test_calls_of_fronts_are_replayed_on_a_gpu() -> None:
    plans = flash_attention._front_plans
    before = [dict(one._plans) for one in plans]
    run = decode(lambda *shape: torch.randn(shape, device="cuda"))
    for _ in range(3):
        torch.manual_seed(1)
        got = run(lambda *args, **kwargs: on_gpu(flash_attn_with_kvcache, args, kwargs))
        torch.manual_seed(1)
        wanted = run(
            lambda *args, **kwargs: on_gpu(flash_attn_with_kvcache.__wrapped__, args, kwargs)
        )
        for a, b in zip(got, wanted, strict=True):
            compare(a, b, (0.0, 0.0), "flash_attn_with_kvcache")
    made = [one._plans.keys() - old.keys() for one, old in zip(plans, before, strict=True)]
    assert sum(map(len, made)) == 1
    assert all(one._plans[key] for one, keys in zip(plans, made, strict=True) for key in keys)


def on_gpu(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A call with its tensors on the GPU."""
    args = [x.cuda() for x in args]
    return function(
        *args, **{n: x.cuda() if isinstance(x, Tensor) else x for n, x in kwargs.items()}
    )


@pytest.mark.gpu
def test_tensors_on_the_host_are_no_ones_plan() -> None:
    x = torch.randn(4, device="cuda")
    assert replay.call_of((x, torch.randn(4)), {}) is None
    assert replay.call_of((x, x + 1), {}) is not None


@pytest.mark.gpu
@pytest.mark.parametrize("op, name", CHOICES)
def test_replays_are_exact_on_a_gpu(op: Op[..., Any], name: str) -> None:
    replayed = 0
    for case in cases_of(op, "cuda"):
        if not op._named(name).accepts(case.args, case.kwargs):
            continue
        call, own, plain = Calls(op.using(name)), case.clone(), case.clone()
        call(*own.args, **own.kwargs)
        again = case.clone()
        got = [*as_tuple(call(*again.args, **again.kwargs)), *tensors_of(again)]
        replayed += call.plain == 1
        wanted = as_tuple(op.using(name)(*plain.args, **plain.kwargs))
        for a, b in zip(got, [*wanted, *tensors_of(plain)], strict=True):
            compare(a, b, (0.0, 0.0), f"{op.name}({case})")
    assert replayed
