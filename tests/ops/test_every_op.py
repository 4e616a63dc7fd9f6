"""Every implementation of every op against its definition on all cases, with poisoned memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import cairn.ops
from cairn.ops import gpu
from cairn.ops.implementation import REFERENCE
from cairn.ops.registry import Op, all_ops, force
from cairn.ops.testing import Arguments, Make, cases_of, check, compare, run, runnable, tolerance_of
from cairn.train import sequence
from tests.ops.arguments import as_tuple, tensors_of
from tests.ops.launches import as_if_pdl


def of_gpu(op: Op[..., Any], name: str) -> bool:
    return op._named(name).devices == ("cuda",)


def has_half(arguments: Arguments) -> bool:
    """The interpreter's products of half precision are wrong."""
    halves = (torch.bfloat16, torch.float16)
    return any(tensor.dtype in halves for tensor in tensors_of(arguments))


def size_of(arguments: Arguments) -> int:
    return sum(tensor.numel() for tensor in tensors_of(arguments))


def smallest_of(arguments: Arguments) -> int:
    return min(tensor.numel() for tensor in tensors_of(arguments))


INTERPRETED_CASES = 2
"""Most cases per interpreted implementation, because the interpreter is slow."""
OPCHECKED_CASES = 2
"""Most cases per op, because opcheck traces each several times."""
FEW_CASES = 3
DEFAULT_DEVICE_CASES = 6
FLOAT32_FAMILIES = ("sampling", "speculative", "top_k")
"""Families on probabilities and scores."""
NOT_INTERPRETED = {"gluon"}
"""Triton's interpreter does not support Gluon."""
ALWAYS_FLOAT32 = ("page_weights", "rotary_cos_sin", "select_topk")
"""Ops whose arguments are float32 in every model: attention weights, angles, index scores."""
OPS = [pytest.param(op, id=op.name) for op in all_ops()]
CHOICES = [
    pytest.param(op, name, id=f"{op.name}-{name}")
    for op in all_ops()
    for name in (REFERENCE, *op.implementations)
]


def without_out(arguments: Arguments) -> Arguments:
    own = arguments.clone()
    return Arguments(own.args, {k: v for k, v in own.kwargs.items() if k != "out"})


def poison_like(result: Tensor) -> Tensor:
    return Make(result.device.type).empty(*result.shape, dtype=result.dtype)


@pytest.mark.parametrize(
    "op, name", [p for p in CHOICES if torch.cuda.is_available() or not of_gpu(*p.values)]
)
def test_implementation_agrees_with_definition(op: Op[..., Any], name: str, device: str) -> None:
    implementation = op._named(name)
    if implementation.missing or device not in implementation.devices:
        pytest.skip(implementation.missing or f"runs on {', '.join(implementation.devices)}")
    if name.startswith("gluon") and not gpu.supports_wgmma(torch.device(device, 0)):
        pytest.skip("needs Hopper's tensor cores")
    accepted = runnable(implementation, cases_of(op, device), device)
    assert accepted, f"no case of {op.name} reaches {name}: it is never tested"
    for arguments in accepted:
        check(op, name, arguments)


@pytest.mark.parametrize("op, name", [p for p in CHOICES if not of_gpu(*p.values)])
def test_the_default_device_is_not_looked_at(op: Op[..., Any], name: str) -> None:
    implementation = op._named(name)
    if implementation.missing:
        pytest.skip(implementation.missing)
    for arguments in runnable(implementation, cases_of(op), "cpu")[:DEFAULT_DEVICE_CASES]:
        own = arguments.clone()
        with torch.device("meta"):
            results = as_tuple(op.using(name)(*own.args, **own.kwargs))
        assert all(result.is_cpu for result in results)


def test_cases_know_bfloat16_where_they_know_float32() -> None:
    for op in all_ops():
        known = {
            value if isinstance(value, torch.dtype) else value.dtype
            for case in cases_of(op)
            for value in (*case.args, *case.kwargs.values())
            if isinstance(value, Tensor | torch.dtype)
        }
        exempt = op.family in FLOAT32_FAMILIES or op.name in ALWAYS_FLOAT32
        assert exempt or torch.float32 not in known or torch.bfloat16 in known, op.name


def in_float16(arguments: Arguments) -> Arguments:
    """The same call with float16 wherever it has bfloat16."""

    def half(value: Any) -> Any:
        if isinstance(value, Tensor) and value.dtype == torch.bfloat16:
            return value.to(torch.float16)
        return torch.float16 if value is torch.bfloat16 else value

    kwargs = {name: half(value) for name, value in arguments.kwargs.items()}
    return Arguments(tuple(half(value) for value in arguments.args), kwargs)


@pytest.mark.gpu
@pytest.mark.parametrize("op, name", [p for p in CHOICES if of_gpu(*p.values)])
def test_kernel_agrees_with_definition_in_float16(op: Op[..., Any], name: str) -> None:
    halves = [in_float16(case) for case in cases_of(op, "cuda") if has_half(case)]
    for arguments in runnable(op._named(name), halves, "cuda"):
        check(op, name, arguments)


@pytest.mark.skipif(not gpu.INTERPRETED, reason="needs Triton, and a machine without CUDA")
@pytest.mark.parametrize(
    "op, name",
    [p for p in CHOICES if of_gpu(*p.values) and not NOT_INTERPRETED.intersection(p.values)],
)
def test_kernel_agrees_with_definition_when_interpreted(
    op: Op[..., Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    implementation = op._named(name)
    cases = [case for case in cases_of(op) if not has_half(case) and smallest_of(case)]
    accepted = [case for case in cases if implementation.accepts(case.bound(implementation))]
    assert accepted, f"no case of {op.name} reaches {name}: it is never tested"
    smallest, *larger = sorted(accepted, key=size_of)[:INTERPRETED_CASES]
    for arguments in larger or [smallest]:
        check(op, name, arguments)
    # PDL changes the order of a kernel's first instructions, for any arguments.
    as_if_pdl(monkeypatch)
    check(op, name, smallest)


@pytest.mark.parametrize("op, name", [p for p in CHOICES if not of_gpu(*p.values)])
def test_the_default_dtype_is_not_looked_at(op: Op[..., Any], name: str) -> None:
    cases = [case for case in runnable(op._named(name), cases_of(op), "cpu") if smallest_of(case)]
    for arguments in sorted(cases, key=size_of)[:FEW_CASES]:
        wanted = written(*run(op, name, arguments))
        torch.set_default_dtype(torch.float16)
        try:
            got = written(*run(op, name, arguments))
        finally:
            torch.set_default_dtype(torch.float32)
        for mine, expected in zip(got, wanted, strict=True):
            compare(mine, expected, (0.0, 0.0), f"{op.name} {name} with float16 as the default")


def written(arguments: Arguments, results: tuple[Any, ...]) -> list[Tensor]:
    """Tensors that a call may write, as comparable tensors."""
    return [x for x in (*tensors_of(arguments), *results) if not x.is_mkldnn]


def test_the_choice_is_the_same_for_arguments_by_name() -> None:
    for op in all_ops():
        parameters = list(op.__signature__.parameters)
        for case in cases_of(op):
            named = case.named(parameters)
            for implementation in op.implementations.values():
                accepted = implementation.accepts(op.bind(*case.args, **case.kwargs))
                again = implementation.accepts(op.bind(**named))
                assert again == accepted, f"{op.name}: {implementation.name}"
            if op._check is not None:
                op._check(op.bind(**named))


def test_all_are_documented_and_exported() -> None:
    for op in all_ops():
        assert op.__doc__, f"op {op.name} has no docstring"
        for name, public in (op.fronts or {op.name: op}).items():
            assert public.__doc__, f"{name} has no docstring"
            package = cairn.ops if op.__module__.startswith("cairn.ops.") else sequence
            assert getattr(package, name) is public
            assert name in package.__all__, name
        assert f".{op.family}." in op.__module__, op.name


FAKES = ("test_faketensor",)
OPCHECKS = (*FAKES, "test_autograd_registration")
TRACED = ("test_aot_dispatch_static", "test_aot_dispatch_dynamic")
"""With shapes as they are, which test_capture.py sees too, and as symbols, which takes up to 8 s an
op."""


def opchecks(*tensors: Tensor) -> tuple[str, ...]:
    """The parts of opcheck that support the arguments: its schema check multiplies tensors, which
    float8 does not support."""
    eighths = any(t.is_floating_point() and t.itemsize == 1 for t in tensors)
    return OPCHECKS if eighths else (*OPCHECKS, "test_schema")


def readable(op: Op[..., Any]) -> list[Arguments]:
    """Cases that opcheck can read: an opaque oneDNN tensor has no storage."""
    plain = [case for case in cases_of(op) if not any(t.is_mkldnn for t in tensors_of(case))]
    assert plain, f"op {op.name} has no case that opcheck can read"
    return plain


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
def test_traces(op: Op[..., Any]) -> None:
    own = without_out(readable(op)[0])
    torch.library.opcheck(op.registered, own.args, own.kwargs, test_utils=TRACED)


@pytest.mark.parametrize("op", OPS)
def test_opcheck(op: Op[..., Any]) -> None:
    for number, arguments in enumerate(readable(op)[:OPCHECKED_CASES]):
        own, tensors = without_out(arguments), tensors_of(arguments)
        # For later cases check only shapes and dtypes of results.
        parts = FAKES if number else opchecks(*tensors)
        torch.library.opcheck(op.registered, own.args, own.kwargs, test_utils=parts)
        if op.registered_out is not None:
            out = torch.empty_like(op(*own.args, **own.kwargs))
            kwargs, parts = {**own.kwargs, "out": out}, parts if number else opchecks(*tensors, out)
            torch.library.opcheck(op.registered_out, own.args, kwargs, test_utils=parts)


@pytest.mark.parametrize("op", OPS)
def test_registered_form_and_out_give_the_same(op: Op[..., Any]) -> None:
    for arguments in cases_of(op):
        own, again, into = (without_out(arguments) for _ in range(3))
        expected = as_tuple(op(*own.args, **own.kwargs))
        for got, wanted in zip(
            as_tuple(op.registered(*again.args, **again.kwargs)), expected, strict=True
        ):
            compare(got, wanted, (0.0, 0.0), f"{op.registered}({arguments})")
        if op.registered_out is not None:
            wanted, out = expected[0], poison_like(expected[0])
            if arguments.kwargs.get("out") is not None:
                # Elements of `out` that an op does not write are part of its result.
                first, second = arguments.clone(), arguments.clone()
                wanted, out = op(*first.args, **first.kwargs), second.kwargs["out"]
            assert op(*into.args, **into.kwargs, out=out) is out
            compare(out, wanted, (0.0, 0.0), f"{op.name}({arguments}) into out")


@pytest.mark.parametrize("op", OPS)
def test_forced_choice_is_taken(op: Op[..., Any]) -> None:
    arguments = cases_of(op)[0]
    with force(REFERENCE):
        assert op.choice(*arguments.args, **arguments.kwargs) == REFERENCE
        own = arguments.clone()
        got = as_tuple(op(*own.args, **own.kwargs))
    _, expected = run(op, REFERENCE, arguments)
    for result, wanted in zip(got, expected, strict=True):
        tolerance = tolerance_of(op, arguments, wanted.dtype)
        compare(result, wanted, tolerance, f"{op.name} forced")
    for name, implementation in op.implementations.items():
        accepted = runnable(implementation, cases_of(op), "cpu")
        if accepted:
            with force(f"{op.name}={name}"):
                assert op.choice(*accepted[0].args, **accepted[0].kwargs) == name
