"""Replayed launches give the same results on other memory; calls that cannot be replayed run
normally."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from cairn.ops import gelu_quick, gpu
from cairn.ops.gpu import tl, triton
from cairn.ops.launch_cache import recording
from tests.ops.replays import Calls, numbers, scaled_sum, scaled_sum_kernel


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
    for a, b in ((x, x), (x, x), (x, y), (y, y), (y, x)):
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
    for begin, plain in ((0, 1), (4, 1), (1, 2), (5, 2), (0, 2), (2, 3), (6, 3)):
        part = x[begin : begin + 40]
        torch.testing.assert_close(call(part, y, 2), (part + y) * 2)
        assert call.plain == plain


def test_numbers_that_are_equal_but_not_the_same_are_told_apart() -> None:
    x = numbers(4)
    calls = [recording.call_of((x, zero), {}) for zero in (0, 0.0, -0.0, False, None)]
    assert len({call.signature for call in calls if call is not None}) == 5


def test_lists_of_numbers_are_told_apart(as_on_gpu: None) -> None:
    call, x = Calls(lambda x, numbers: scaled_sum(x, x, sum(numbers))), numbers(40)
    for factors in ([1, 2], [2, 1], [3], [1, 2]):
        torch.testing.assert_close(call(x, factors), x * 2 * sum(factors))
    assert call.plain == 3


@pytest.mark.parametrize(
    ("shared", "taken"), [(0, 4), (160, 4), (511, 4), (672, 3), (recording.SHARED_BYTES, 2)]
)
def test_pieces_of_memory_do_not_meet(
    shared: int, taken: int, as_on_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "SHARED_BYTES", shared)
    allocator, allocations = gpu.allocator, []
    counted = lambda allocate: lambda: (allocations.append(allocate), allocate())[1]  # noqa: E731
    monkeypatch.setattr(gpu, "allocator", lambda *args: counted(allocator(*args)))

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
    assert len(allocations) == 2 * taken


@triton.jit  # type: ignore[untyped-decorator]
def copy_block_kernel(table, out, LINES: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """out [LINES, WIDTH] = the first block of a descriptor."""
    at = tl.arange(0, LINES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(out + at, table.load([0, 0]))


def test_tables_are_described_where_they_lie(as_on_gpu: None) -> None:
    def first_block(x: Tensor) -> Tensor:
        out = gpu.empty((8, 16), x.dtype, x.device)
        table = gpu.tensor_descriptor(x[2:], x[2:].shape, x.stride(), (8, 16))
        copy_block_kernel[(1,)](table, out, 8, 16)
        return out

    call = Calls(first_block)
    for _ in range(3):
        x = numbers(12, 32)
        torch.testing.assert_close(call(x), x[2:10, :16])
    assert call.plain == 1


def test_calls_that_do_more_than_launch_are_not_replayed(
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
    call = Calls(lambda x, sides: x.expand(sides[-1]))
    for sides in ([[3]], (1, [3])):
        for _ in range(2):
            assert call(numbers(1), sides).shape == (3,)
    assert call.plain == 4


def test_calls_without_launches_are_not_replayed(as_on_gpu: None) -> None:
    call, x = Calls(lambda x: x.add_(1)), numbers(4)
    for _ in range(3):
        before = x.clone()
        torch.testing.assert_close(call(x), before + 1)
    assert call.plain == 3


def test_another_triton_is_called_plainly(as_on_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest.importorskip("triton"), "__version__", "4.0.0")
    call, x = Calls(scaled_sum), numbers(40)
    for _ in range(2):
        torch.testing.assert_close(call(x, x, 2), x * 4)
    assert call.plain == 2


@pytest.mark.parametrize("language", ["triton", "gluon"])
def test_launches_are_told_in_either_language(
    language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if gpu.gl is None:
        pytest.skip("needs Triton 3.6")
    told: list[Any] = []

    class Told:
        launches = True

        def launched(self, *launch: Any) -> None:
            told.append(launch)

    def launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> str:
        return "compiled"

    kernel = getattr(gpu, language).jit(scaled_sum)
    monkeypatch.setattr(type(kernel), "run", launch)
    monkeypatch.setattr(gpu.watch, "observer", Told())
    assert kernel.run(1, 2, grid=(3,), warmup=False, num_warps=4) == "compiled"
    assert kernel.run(1, 2, grid=(3,), warmup=True) == "compiled"
    assert told == [(kernel, "compiled", (3,), (1, 2))]


def test_memory_is_taken_without_what_torch_keeps_to_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    like = numbers(3, 4)
    for _ in range(2):
        taken = gpu.allocator(like.shape, like.stride(), torch.float64, like.device)()
        assert (taken.shape, taken.dtype, taken.is_contiguous()) == ((3, 4), torch.float64, True)
        monkeypatch.delattr(torch._C._dynamo.guards, "_empty_strided_cpu", raising=False)


@pytest.mark.gpu
def test_tensors_on_the_host_are_no_ones_plan() -> None:
    x = torch.randn(4, device="cuda")
    assert recording.call_of((x, torch.randn(4)), {}) is None
    assert recording.call_of((x, x + 1), {}) is not None
