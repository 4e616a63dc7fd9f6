"""The registry with toy ops, and the generic comparison with wrong implementations."""

from __future__ import annotations

import inspect
import subprocess
import sys
import timeit
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from cairn.errors import BadArgument, BadConfig
from cairn.ops.call import Call
from cairn.ops.checks import refuse
from cairn.ops.listing import table
from cairn.ops.registry import Op, all_ops, check_forced, force, op
from cairn.ops.testing import Cases, Make, Paged, cases_of, check, compare, poisoned, runnable


def toy_scale(input: Tensor, factor: float = 2.0, out: Tensor | None = None) -> Tensor:
    """input * factor."""
    return input * factor


def toy_fill(cache: Tensor, value: Tensor) -> None:
    """cache[:n] = value, in place."""
    cache[: value.shape[0]] = value


@pytest.fixture
def scale() -> Iterator[Op[..., Tensor]]:
    made = op(toy_scale)

    @made.cases
    def _(make: Make) -> Cases:
        yield make.randn(4, 3)
        yield make.args(make.randn(2, dtype=torch.bfloat16), 0.5)

    yield made
    made.unregister()


@pytest.fixture
def fill() -> Iterator[Op[..., None]]:
    made = op(mutates=("cache",))(toy_fill)

    @made.cases
    def _(make: Make) -> Cases:
        yield make.args(make.empty(5, 2), make.randn(3, 2))

    yield made
    made.unregister()


def add(made: Op[..., Tensor], name: str, factor: float = 1.0, **conditions: object) -> list[str]:
    """Register an implementation that logs its name and is wrong by `factor`."""
    calls: list[str] = []

    def function(call: Call) -> Tensor:
        calls.append(name)
        return call.input * (call.factor * factor)

    made.implementation(name, **conditions)(function)  # type: ignore[arg-type]
    return calls


def test_first_fitting_implementation_runs(scale: Op[..., Tensor]) -> None:
    x = torch.ones(3)
    assert scale.choice(x) == "reference"
    gpu = add(scale, "gpu", devices=("cuda",))
    half = add(scale, "half", dtypes=(torch.bfloat16,))
    small = add(scale, "small", when=lambda call: call.input.numel() < 10)
    anything = add(scale, "anything")
    never = add(scale, "never")
    assert scale.choice(x) == "small"
    assert scale.choice(torch.ones(10)) == "anything"
    assert scale.choice(input=torch.ones(10, dtype=torch.bfloat16)) == "half"
    scale(x)
    scale(input=torch.ones(11))
    scale(torch.ones(2).bfloat16(), 3.0)
    assert (gpu, half, small, anything, never) == ([], ["half"], ["small"], ["anything"], [])


def test_using_and_reference_bypass_the_choice(scale: Op[..., Tensor]) -> None:
    calls = add(scale, "fast", factor=5.0)
    x = torch.ones(3)
    assert scale(x)[0] == 10.0
    assert scale.using("reference")(x)[0] == scale.reference(x)[0] == 2.0
    assert scale.using("fast")(x)[0] == 10.0
    assert calls == ["fast", "fast"]
    with pytest.raises(BadConfig, match=r"no implementation 'fsat'.*Did you mean 'fast'"):
        scale.using("fsat")


def test_force(scale: Op[..., Tensor]) -> None:
    add(scale, "fast")
    add(scale, "other")
    add(scale, "gpu", devices=("cuda",))
    add(scale, "large", when=lambda call: call.input.numel() > 10)
    x = torch.ones(3)
    assert scale.choice(x) == "fast"
    with force("reference"):
        assert scale.choice(x) == "reference"
        with force("toy_scale=other"):
            assert scale.choice(x) == "other"
        with force(" reference , toy_scale = other "):
            assert scale.choice(x) == "other"
        assert scale.choice(x) == "reference"
    with force("toy_scale=large"):
        assert scale.choice(torch.ones(11)) == "large"
        assert scale.choice(x) == "reference"
    with force("toy_scale=gpu"), pytest.raises(BadConfig, match="runs on cuda, not cpu"):
        scale(x)
    assert scale.choice(x) == "fast"


@pytest.mark.parametrize(
    "choices, message",
    [
        ("toy_scael=reference", "no op 'toy_scael'.*'toy_scale'"),
        ("toy_scale=refrence", "no implementation 'refrence'.*'reference'"),
        ("refrence", "has 'refrence'.*'reference' or NAME=IMPLEMENTATION"),
    ],
)
def test_force_refuses_unknown_names(scale: Op[..., Tensor], choices: str, message: str) -> None:
    with pytest.raises(BadConfig, match=message), force(choices):
        pass
    check_forced()
    assert scale.choice(torch.ones(1)) == "reference"


def test_variable_is_checked_when_the_library_is_imported() -> None:
    script = "import os; os.environ['CAIRN_OPS'] = 'rmsnrom=reference'; import cairn.ops"
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert "Did you mean 'rmsnorm'" in ran.stderr


def test_out_is_written_whatever_the_implementation_does(scale: Op[..., Tensor]) -> None:
    x = torch.randn(4)

    @scale.implementation("writes")
    def _(call: Call) -> Tensor:
        return torch.mul(call.input, call.factor, out=call.out)

    add(scale, "ignores")
    for name in ("reference", "writes", "ignores"):
        with force(f"toy_scale={name}"):
            for call in (scale, scale.using(name)):
                out = torch.full((4,), float("nan"))
                assert call(x, 3.0, out=out) is out
                torch.testing.assert_close(out, x * 3)
                assert call(x, 3.0, out) is out
            torch.ops.cairn.toy_scale_out(x, 4.0, out=out)
            torch.testing.assert_close(out, x * 4)
            with pytest.raises((ValueError, RuntimeError), match="shape"):
                scale.using("reference")(x, out=torch.empty(2, 4))


def test_torch_sees_a_registered_op(scale: Op[..., Tensor], fill: Op[..., None]) -> None:
    calls = add(scale, "fast")
    with FakeTensorMode():
        assert scale(torch.empty(3, 4)).shape == (3, 4)
        fill(torch.empty(4), torch.empty(2))
    assert scale(torch.empty(3, device="meta")).device.type == "meta"
    assert calls == []

    seen: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():  # type: ignore[no-untyped-call]
        scale(torch.ones(2))
    assert "cairn.toy_scale.default" in seen
    assert calls == ["fast"]

    def step(x: Tensor, cache: Tensor, out: Tensor) -> Tensor:
        fill(cache, scale(x))
        scale(x, 3.0, out=out)
        return scale(cache) + 1

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    x, cache, out = torch.randn(2), torch.zeros(4), torch.zeros(2)
    expected = torch.cat((x * 4, torch.zeros(2))) + 1
    torch.testing.assert_close(compiled(x, cache, out), expected)
    torch.testing.assert_close(out, x * 3)
    torch.testing.assert_close(cache[:2], x * 2)


def test_stated_fake_replaces_the_definition() -> None:
    def toy_count(input: Tensor) -> Tensor:
        """A definition whose output shape depends on data."""
        return input.new_full((4,), float(input.sum().item()))

    made = op(toy_count)

    @made.fake
    def _(call: Call) -> Tensor:
        return call.input.new_empty(4)

    torch.library.opcheck(made.registered, (torch.ones(3),))
    with FakeTensorMode():
        assert made(torch.empty(2)).shape == (4,)
    made.unregister()


def test_a_call_holds_every_argument_and_the_defaults(scale: Op[..., Tensor]) -> None:
    seen: list[dict[str, Any]] = []

    @scale.implementation("seeing")
    def _(call: Call) -> Tensor:
        seen.append(call.asdict())
        other = call.replaced(factor=10.0)
        assert other.input is call.input and call.factor != 10.0
        return scale.reference(*other.astuple())

    x = torch.ones(3)
    assert torch.equal(scale(x, factor=3.0), 10 * x)
    assert torch.equal(scale(x), 10 * x)
    assert seen == [{"input": x, "factor": f, "out": None} for f in (3.0, 2.0)]


def test_arguments_that_do_not_fit_name_the_op(scale: Op[..., Tensor]) -> None:
    for wrong in ({}, {"input": torch.ones(1), "by": 2}):
        with pytest.raises(TypeError, match=r"toy_scale\(\)"):
            scale(**wrong)
    with pytest.raises(TypeError, match=r"toy_scale\(\)"):
        scale(torch.ones(1), 1.0, None, 2)


def test_a_parameter_may_not_hide_a_method_of_the_call() -> None:
    def toy_hides(asdict: Tensor) -> Tensor:
        """Nothing."""
        return asdict

    with pytest.raises(ValueError, match="'asdict'"):
        op(toy_hides)


def test_wrong_declarations_are_refused(scale: Op[..., Tensor]) -> None:
    with pytest.raises(ValueError, match="already defined"):
        op(toy_scale)
    add(scale, "fast")
    with pytest.raises(ValueError, match="already has"):
        add(scale, "fast")
    with pytest.raises(ValueError, match="already has"):
        add(scale, "reference")
    with pytest.raises(ValueError, match="not the bound call"):
        scale.implementation("other")(lambda x, factor: x)
    with pytest.raises(ValueError, match="reason"):
        scale.tolerance({torch.float32: (1.0, 1.0)}, reason="")


def test_table(scale: Op[..., Tensor]) -> None:
    add(scale, "absent", missing="no library")
    add(scale, "triton", devices=("cuda",))
    add(scale, "small", devices=("cpu",), when=lambda call: True)
    row = next(row for row in table() if row.op == "toy_scale")
    assert [i.name for i in row.implementations] == ["absent", "triton", "small"]
    assert [i.conditional for i in row.implementations] == [False, False, True]
    assert [i.missing for i in row.implementations] == ["no library", "", ""]
    assert row.chosen == {"cpu": ("small", "reference"), "cuda": ("triton",)}
    with force("toy_scale=triton"):
        row = next(row for row in table() if row.op == "toy_scale")
    assert row.chosen == {"cpu": (), "cuda": ("triton",)}
    with force("toy_scale=absent"), pytest.raises(BadConfig, match="=absent: no library"):
        scale(torch.ones(3))
    assert scale in all_ops()


@pytest.mark.parametrize("factor", [1.001, float("nan"), 0.0])
def test_comparison_fails_wrong_numbers(scale: Op[..., Tensor], factor: float) -> None:
    add(scale, "right")
    add(scale, "wrong", factor=factor)
    for arguments in cases_of(scale)[:1]:
        check(scale, "right", arguments)
        with pytest.raises(AssertionError, match=r"toy_scale\[wrong\]"):
            check(scale, "wrong", arguments)


def broken(work: Callable[[Tensor, float], Tensor]) -> Callable[..., Tensor]:
    def function(call: Call) -> Tensor:
        return work(call.input, call.factor)

    return function


@pytest.mark.parametrize(
    "work, message",
    [
        (lambda x, f: torch.empty_like(x), "Tensor-likes"),
        (lambda x, f: (x * f).double(), "dtype"),
        (lambda x, f: (x * f)[:1], "shape"),
        (lambda x, f: x.mul_(f), "argument input changed"),
    ],
)
def test_comparison_fails_unwritten_and_changed_memory(
    scale: Op[..., Tensor], work: Callable[[Tensor, float], Tensor], message: str
) -> None:
    scale.implementation("broken")(broken(work))
    with pytest.raises(AssertionError, match=message):
        check(scale, "broken", cases_of(scale)[0])


def test_definition_that_reads_poison_fails() -> None:
    def toy_leak(input: Tensor) -> Tensor:
        """Sums memory beyond its argument."""
        return input.sum() + torch.empty(3).sum()

    made = op(toy_leak)
    made.cases(lambda make: [make.randn(2)])
    with pytest.raises(AssertionError, match="definition gives NaN"):
        check(made, "reference", cases_of(made)[0])
    made.unregister()


def test_nan_mask_of_changed_arguments_must_agree(fill: Op[..., None]) -> None:
    arguments = cases_of(fill)[0]
    check(fill, "reference", arguments)

    @fill.implementation("spills")
    def _(call: Call) -> None:
        call.cache[:] = 0
        call.cache[: call.value.shape[0]] = call.value

    @fill.implementation("misses")
    def _(call: Call) -> None:
        call.cache[: call.value.shape[0] - 1] = call.value[:-1]

    for name in ("spills", "misses"):
        with pytest.raises(AssertionError, match="argument cache"):
            check(fill, name, arguments)


def test_ops_without_cases_are_an_error() -> None:
    made = op(toy_scale)
    with pytest.raises(ValueError, match="no cases"):
        cases_of(made)
    made.cases(lambda make: [])
    with pytest.raises(ValueError, match="no cases"):
        cases_of(made)
    made.unregister()


def test_cases_are_seeded_and_filtered(scale: Op[..., Tensor]) -> None:
    first, again, other = cases_of(scale), cases_of(scale), cases_of(scale, seed=1)
    assert torch.equal(first[0].args[0], again[0].args[0])
    assert not torch.equal(first[0].args[0], other[0].args[0])
    add(scale, "half", dtypes=(torch.bfloat16,))
    add(scale, "gpu", devices=("cuda",))
    assert runnable(scale.implementations["half"], first, "cpu") == first[1:]
    assert runnable(scale.implementations["gpu"], first, "cpu") == []


def test_own_tolerance_holds_for_its_dtype_only(scale: Op[..., Tensor]) -> None:
    add(scale, "loose", factor=1.05)
    scale.tolerance({torch.float32: (0.1, 0.0)}, reason="a test")
    single, half = cases_of(scale)
    check(scale, "loose", single)
    with pytest.raises(AssertionError):
        check(scale, "loose", half)


def test_poison_reaches_fresh_memory_and_leaves_no_trace() -> None:
    before = torch.are_deterministic_algorithms_enabled()
    with poisoned():
        assert torch.empty(3).isnan().all()
        assert torch.empty_like(torch.ones(3, dtype=torch.bfloat16)).isnan().all()
        assert torch.ones(3).new_empty(3).isnan().all()
        assert (torch.empty(3, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()
    assert torch.are_deterministic_algorithms_enabled() == before


def test_copies_of_arguments_keep_strides_and_hide_nothing() -> None:
    make = Make()
    view = make.randn(4, 8)[:, :3]
    own = make.args(view).clone().args[0]
    assert own.stride() == view.stride()
    assert torch.equal(own, view)
    assert own.as_strided((3, 8), (8, 1))[:, 3:].isnan().all()


def test_paged_caches_hold_nan_where_nobody_wrote() -> None:
    lengths = (5, 0, 8, 1)
    paged: Paged = Make(seed=3).paged(lengths, kv_heads=2, page_size=4, head_dim=3)
    assert paged.k_cache.shape == paged.v_cache.shape == (2 + 2 + 1 + 2, 2, 4, 3)
    assert paged.page_table.dtype == torch.int32
    for cache in (paged.k_cache, paged.v_cache):
        written = (~cache.isnan()).all(-1).all(1).sum().item()
        assert written == sum(lengths)
        for row, length in enumerate(lengths):
            pages = cache[paged.page_table[row].long()].transpose(1, 2).flatten(0, 1)
            assert not pages[:length].isnan().any()
            assert pages[length:].isnan().all()
    rows, slot, location = paged.queries((2, 0, 1, 1))
    assert rows.tolist() == [0, 0, 2, 3]
    assert slot.tolist() == [3, 4, 7, 0]
    flat = paged.k_cache.transpose(1, 2).flatten(0, 1)
    assert not flat[location].isnan().any()


def test_an_eager_call_costs_little_more_than_to_bind_its_arguments() -> None:
    """At most 1.5 times `Signature.bind`, measured in turns: other processes slow down both."""

    def toy_identity(input: Tensor) -> Tensor:
        """Returns its argument; only timed, never compiled."""
        return input

    made, bind, x = op(toy_identity), inspect.signature(toy_identity).bind, torch.ones(1)
    calls = (lambda: made(x)), (lambda: bind(x))
    turns = [[timeit.timeit(call, number=500) for call in calls] for _ in range(40)]
    made.unregister()
    own, bound = map(min, zip(*turns, strict=True))
    assert own < 1.5 * bound


def test_comparison_tells_infinities_apart() -> None:
    low, high = torch.tensor([-torch.inf]), torch.tensor([torch.inf])
    compare(low, low.clone(), (0.1, 0.1), "same")
    with pytest.raises(AssertionError, match="what"):
        compare(low, high, (0.1, 0.1), "what")


def test_a_check_runs_before_every_implementation(scale: Op[..., Tensor]) -> None:
    calls = add(scale, "fast")

    @scale.check
    def _(call: Call) -> None:
        if call.input.dim() != 1:
            refuse(scale.name, "input", "is not flat", "Flatten it")

    assert scale(torch.ones(3)).tolist() == [2.0] * 3
    before = len(calls)
    with pytest.raises(BadArgument, match="toy_scale: argument `input` is not flat. Flatten it"):
        scale(torch.ones(3, 1))
    assert len(calls) == before


def test_an_op_is_public_through_its_fronts(scale: Op[..., Tensor]) -> None:
    @scale.front
    def toy_double(input: Tensor | float) -> Tensor:
        """Twice a tensor or a number."""
        return scale(torch.as_tensor(input))

    assert scale.fronts == {"toy_double": toy_double}
    assert toy_double(3.0) == 6.0


def toy_shifted(x: Tensor, out: Tensor | None = None, by: float = 1.0) -> Tensor:
    """x + by."""
    return x + by


def toy_clear(out: Tensor, lengths: Tensor) -> None:
    """out[lengths == 0] = 0, in place."""
    out[lengths == 0] = 0


def test_parameters_after_out_reach_the_registered_forms() -> None:
    made = op(toy_shifted)
    try:
        x = torch.ones(3)
        assert made.registered(x, 4.0).tolist() == [5.0] * 3
        assert made.registered(x, by=4.0).tolist() == [5.0] * 3
        out = torch.empty(3)
        made.registered_out(x, 4.0, out=out)
        assert out.tolist() == [5.0] * 3
        with FakeTensorMode() as mode:
            assert made(mode.from_tensor(x), None, 4.0).shape == (3,)
    finally:
        made.unregister()


def test_an_out_that_an_op_changes_is_an_argument_like_others() -> None:
    made = op(mutates=("out",))(toy_clear)
    try:
        assert made.registered_out is None
        for call in (made, made.registered):
            out = torch.ones(3)
            assert call(out, torch.tensor([1, 0, 2])) is None
            assert out.tolist() == [1.0, 0.0, 1.0]
    finally:
        made.unregister()
