"""Every op under torch.compile in one graph, and every kernel in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cairn.ops import (
    FusedSetKVBufferArg,
    apply_rope_with_cos_sin_cache_inplace,
    apply_token_bitmask_inplace_cuda,
    copy_to_gpu_no_ce,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    merge_state_v2,
    min_p_sampling_from_probs,
    sparse_attn_func,
    top_k_mask_logits,
    top_k_renorm_probs,
    top_k_top_p_sampling_from_logits,
    top_k_top_p_sampling_from_probs,
    top_p_renorm_probs,
    top_p_sampling_from_probs,
    transfer_kv_per_layer,
)
from cairn.ops.implementation import REFERENCE
from cairn.ops.registry import Op, all_ops
from cairn.ops.testing import Arguments, cases_of, compare, tolerance_of

CAPTURED_CASES = 3
"""Most cases per op, because each compiles kernels and captures a graph."""


def has_kernel(op: Op[..., Any]) -> bool:
    return any(name.startswith("triton") for name in op.implementations)


OPS = [pytest.param(op, id=op.name) for op in all_ops()]
WITH_KERNELS = [pytest.param(op, id=op.name) for op in all_ops() if has_kernel(op)]


def is_plain(arguments: Arguments) -> bool:
    """Whether there is something to compute, and no tensor of oneDNN's, which has no storage."""
    values = [*arguments.args, *arguments.kwargs.values()]
    tensors = [value for value in values if isinstance(value, Tensor)]
    return not any(t.is_mkldnn for t in tensors) and all(t.numel() for t in tensors)


def some_cases(op: Op[..., Any], device: str, count: int) -> list[Arguments]:
    """The first cases; on a GPU those that a kernel accepts."""
    plain = [case for case in cases_of(op, device) if is_plain(case)]
    if device == "cuda":
        plain = [case for case in plain if op.choice(*case.args, **case.kwargs) != REFERENCE]
    return plain[:count]


def assert_same(op: Op[..., Any], arguments: Arguments, call: Callable[..., Any]) -> None:
    """`call` has the same results and mutations as the op, on a copy of the arguments."""
    own, other = arguments.clone(), arguments.clone()
    expected = op(*own.args, **own.kwargs)
    assert_result(op, arguments, (own, expected), (other, call(*other.args, **other.kwargs)))


def assert_result(
    op: Op[..., Any],
    arguments: Arguments,
    expected: tuple[Arguments, Any],
    got: tuple[Arguments, Any],
) -> None:
    """Arguments and result of two calls agree."""

    def tensors(call: tuple[Arguments, Any]) -> list[Tensor]:
        after, result = call
        results = result if isinstance(result, tuple | list) else (result,)
        values = [*after.args, *after.kwargs.values(), *results]
        return [value for value in values if isinstance(value, Tensor)]

    for one, other in zip(tensors(got), tensors(expected), strict=True):
        compare(one, other, tolerance_of(op, arguments, other.dtype), f"{op.name}({arguments})")


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a line of its log Dynamo measures each graph's guards with empty caches: 50 ms."""
    measuring = "torch._dynamo.guards.profile_guard_manager"
    monkeypatch.setattr(measuring, lambda *given: 0.0, raising=False)


def compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    torch._dynamo.reset()

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    result: Callable[..., Any] = torch.compile(call, fullgraph=True, backend=backend, dynamic=False)
    return result


@pytest.mark.parametrize("op", OPS)
def test_compiles_in_one_graph(op: Op[..., Any]) -> None:
    for arguments in some_cases(op, "cpu", 1):
        assert_same(op, arguments, compiled(op, "aot_eager"))


@pytest.mark.gpu
@pytest.mark.parametrize("op", WITH_KERNELS)
def test_kernel_compiles_in_one_graph(op: Op[..., Any]) -> None:
    cases = some_cases(op, "cuda", CAPTURED_CASES)
    assert cases, f"no case of {op.name} reaches a kernel"
    for arguments in cases:
        assert_same(op, arguments, compiled(op, "inductor"))


@pytest.mark.gpu
@pytest.mark.parametrize("op", WITH_KERNELS)
def test_kernel_is_captured(op: Op[..., Any]) -> None:
    for arguments in some_cases(op, "cuda", CAPTURED_CASES):
        own, warm, still = (arguments.clone() for _ in range(3))
        expected = op(*own.args, **own.kwargs)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            op(*warm.args, **warm.kwargs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = op(*still.args, **still.kwargs)
        graph.replay()
        torch.cuda.synchronize()
        assert_result(op, arguments, (own, expected), (still, result))


def fronts(device: str) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Fronts, which also create tensors from scalars and draw random numbers."""
    probs = torch.softmax(torch.randn(4, 50, device=device), dim=-1)
    positions = torch.arange(4, device=device)
    q, k, v = (torch.randn(4, 16, device=device) for _ in range(3))
    store = FusedSetKVBufferArg(v, k.clone(), v.clone(), cache_loc=positions)
    rope = (positions, q, k, 8, torch.randn(9, 8, device=device), True, store)
    each = torch.tensor([1, 3, 0, 50], device=device)
    heads = q.view(2, 2, 2, 8)
    ends = torch.tensor([0, 1, 4], device=device).int()
    lists = (torch.ones(2, 2, 1, device=device).int(), torch.zeros(2, 2, 1, 1, device=device).int())
    words = torch.tensor([[5], [-1], [0], [7]], device=device).int()
    slots = positions.flip(0)
    return {
        "top_k_renorm_probs": (top_k_renorm_probs, (probs, 5)),
        "top_p_renorm_probs": (top_p_renorm_probs, (probs, 0.5)),
        "top_k_mask_logits": (top_k_mask_logits, (probs, each)),
        "top_p_sampling": (top_p_sampling_from_probs, (probs, 0.0)),
        "min_p_sampling": (min_p_sampling_from_probs, (probs, 1.0)),
        "top_k_top_p_sampling": (top_k_top_p_sampling_from_probs, (probs, 1, 0.9)),
        "logits": (top_k_top_p_sampling_from_logits, (probs.log(), 1, 0.9)),
        "merge_state_v2": (merge_state_v2, (heads[0], q[0, :4].view(2, 2)) * 2),
        "flash_attn_with_kvcache": (flash_attn_with_kvcache, (heads, heads, heads)),
        "flash_attn_varlen_func": (flash_attn_varlen_func, (*(q.view(4, 2, 8),) * 3, ends, ends)),
        "sparse_attn_func": (sparse_attn_func, (heads, heads, heads, *lists, *lists)),
        "apply_token_bitmask": (apply_token_bitmask_inplace_cuda, (probs, words)),
        "copy_to_gpu_no_ce": (copy_to_gpu_no_ce, (torch.arange(3).int(), ends)),
        "transfer_kv_per_layer": (
            transfer_kv_per_layer,
            (q, k, v, v.clone(), positions, slots, 64),
        ),
        "rope": (apply_rope_with_cos_sin_cache_inplace, rope),
    }


@pytest.mark.parametrize("name", fronts("cpu"))
def test_functions_over_ops_compile_in_one_graph(name: str, device: str) -> None:
    function, args = fronts(device)[name]
    expected = function(*args)
    again = compiled(function, "eager" if device == "cpu" else "inductor")(*args)
    if expected is not None:
        # The order of float sums may differ between calls.
        torch.testing.assert_close(again, expected, rtol=1e-5, atol=1e-6)
