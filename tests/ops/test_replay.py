"""Launches made again: the same results from other memory, and a plain call where that is not sure.

The interpreter stands for the device: a "compiled" kernel takes addresses, as Triton's does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cairn.ops import gelu_quick, gpu, replay, rmsnorm
from cairn.ops.gpu import tl, triton
from cairn.ops.registry import Op, all_ops
from cairn.ops.testing import Arguments, cases_of, compare

CHOICES = [
    pytest.param(op, name, id=f"{op.name}-{name}")
    for op in all_ops()
    for name, implementation in op.implementations.items()
    if implementation.replayed
]
HARMLESS = {"empty", "zeros", "view", "slice", "select", "unbind", "alias", "detach"}
"""Operators that only make memory and views of it."""


class Compiled:
    """Runs an interpreted kernel on addresses."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, interpret: Callable[..., Any], args: Sequence[Any], options: Any) -> None:
        self._interpret, self._options = interpret, options
        self._dtypes = [arg.dtype if isinstance(arg, Tensor) else None for arg in args]

    def run(self, x: int, y: int, z: int, *given: Any) -> None:
        assert given[:6] == ("stream", "function", "metadata", None, None, None)
        args = [
            arg if dtype is None else tensor_at(arg, dtype)
            for arg, dtype in zip(given[6:], self._dtypes, strict=True)
        ]
        self._interpret(*args, grid=(x, y, z), warmup=False, **self._options)


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


@pytest.mark.parametrize("op, name", CHOICES)
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


@pytest.mark.parametrize("op, name", CHOICES)
def test_what_is_replayed_takes_memory_and_launches_and_does_no_more(
    op: Op[..., Any], name: str, as_on_gpu: None
) -> None:
    case = small_case(op, name)
    with Operators() as operators:
        op.using(name)(*case.args, **case.kwargs)
    others = {other.name for other in all_ops()}
    assert operators.names - others <= HARMLESS


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


def test_addresses_that_are_not_round_are_run_plainly(as_on_gpu: None) -> None:
    call, x, y = Calls(scaled_sum), numbers(44), numbers(40)
    call(x[:40], y, 2)
    torch.testing.assert_close(call(x[1:41], y, 2), (x[1:41] + y) * 2)
    torch.testing.assert_close(call(x[4:], y, 2), (x[4:] + y) * 2)
    assert call.plain == 2


def test_what_does_more_than_launch_is_run_plainly(as_on_gpu: None) -> None:
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
