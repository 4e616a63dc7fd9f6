"""Replayed calls of ops and fronts equal eager calls, and do only replayable work."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cairn.ops import flash_attn_with_kvcache, merge_state_v2, rmsnorm, top_k_renorm_probs
from cairn.ops.flash_attn.flash_attention import flash_attention
from cairn.ops.launch_cache.plans import Plans
from cairn.ops.registry import Op, all_ops
from cairn.ops.testing import Arguments, cases_of, compare
from tests.ops.arguments import as_tuple, tensors_of
from tests.ops.replays import Calls, Compiled

CHOICES = [
    pytest.param(op, name, id=f"{op.name}-{name}")
    for op in all_ops()
    for name, implementation in op.implementations.items()
    if implementation.replayed
]
INTERPRETED = [choice for choice in CHOICES if not choice.values[1].startswith("gluon")]
"""The interpreter does not support Gluon."""
VIEWS = {
    "view",
    "slice",
    "select",
    "unbind",
    "alias",
    "detach",
    "unsqueeze",
    "expand",
    "transpose",
    "t",
}
HARMLESS = {"empty", "zeros", *VIEWS}
"""Operators that only allocate or create views."""


def small_case(op: Op[..., Any], name: str) -> Arguments:
    """The accepted case with the fewest tokens, because the interpreter is slow."""
    halves = (torch.bfloat16, torch.float16)
    found: list[Arguments] = []
    for case in cases_of(op):
        known = all(t.numel() and t.dtype not in halves for t in tensors_of(case))
        if known and op.accepts(name, *case.args, **case.kwargs):
            found.append(case)
    return min(found, key=lambda case: tensors_of(case)[0].numel())


class Operators(TorchDispatchMode):
    """Records the operators that write or compute."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.numel():
            self.names.add(func._schema.name.partition("::")[2])
        return result


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
def test_replayed_implementations_only_allocate_and_launch(
    op: Op[..., Any], name: str, as_on_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = pytest.importorskip("triton.runtime.interpreter").InterpretedFunction
    monkeypatch.setattr(kernels, "run", lambda kernel, *args, **_: Compiled(kernel, args, {}))
    others = {other.name for other in all_ops()}
    call, planned = Calls(op.using(name)), 0
    for case in cases_of(op):
        if op.accepts(name, *case.args, **case.kwargs):
            call.plans = Plans()
            with Operators() as operators:
                call(*case.args, **case.kwargs)
            if any(call.plans._plans.values()):
                planned += 1
                assert operators.names - others <= HARMLESS, case
    assert planned


def decode(make: Callable[..., Tensor]) -> Callable[..., Any]:
    """`flash_attn_with_kvcache` with one query per row and a page table."""
    tables = torch.arange(6, dtype=torch.int32).view(2, 3)
    lengths = torch.tensor([5, 11], dtype=torch.int32)
    given = {"cache_seqlens": lengths, "page_table": tables, "causal": True}
    return lambda front: front(
        *(make(2, 1, 4, 16), make(6, 4, 2, 16), make(6, 4, 2, 16)), **given, return_softmax_lse=True
    )


def test_fronts_are_replayed_with_what_they_have_ops_do(as_on_gpu: None) -> None:
    v, s = torch.randn(5, 2, 16), torch.randn(5, 2)
    for front, run in (
        (flash_attn_with_kvcache, decode(torch.randn)),
        (merge_state_v2, lambda front: front(v, s, torch.randn(5, 2, 16), torch.randn(5, 2))),
        (
            top_k_renorm_probs,
            lambda front: front(torch.randn(3, 40).abs(), torch.tensor([2, 5, 0])),
        ),
    ):
        call = Calls(front.__wrapped__)
        for seed in (1, 2, 3):
            torch.manual_seed(seed)
            got = as_tuple(run(call))
            torch.manual_seed(seed)
            for a, b in zip(got, as_tuple(run(front)), strict=True):
                compare(a, b, (0.0, 0.0), front.__name__)
        assert call.plain == 1, front


@pytest.mark.gpu
def test_calls_of_ops_are_replayed_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = Plans()
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
    plain = flash_attn_with_kvcache.__wrapped__

    def named(q: Tensor, k: Tensor, v: Tensor, **kwargs: Any) -> Any:
        return flash_attn_with_kvcache(q=q, k_cache=k, v_cache=v, **kwargs)

    for front in (flash_attn_with_kvcache, named):
        for _ in range(3):
            results = []
            for function in (front, plain):
                torch.manual_seed(1)
                results.append(run(functools.partial(on_gpu, function)))
            for own, wanted in zip(*results, strict=True):
                compare(own, wanted, (0.0, 0.0), "flash_attn_with_kvcache")
    made = [one._plans.keys() - old.keys() for one, old in zip(plans, before, strict=True)]
    assert sum(map(len, made)) == 2
    assert all(one._plans[key] for one, keys in zip(plans, made, strict=True) for key in keys)


def on_gpu(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A copy of a call with its tensors on the GPU."""
    moved = {name: x.cuda() if isinstance(x, Tensor) else x for name, x in kwargs.items()}
    return function(*(x.cuda() for x in args), **moved)


@pytest.mark.gpu
@pytest.mark.parametrize("op, name", CHOICES)
def test_replays_are_exact_on_a_gpu(op: Op[..., Any], name: str) -> None:
    replayed = 0
    for case in cases_of(op, "cuda"):
        if not op.accepts(name, *case.args, **case.kwargs):
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
