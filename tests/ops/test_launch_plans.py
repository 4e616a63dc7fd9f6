"""Which calls are recorded and replayed."""

from __future__ import annotations

import pytest
import torch

from cairn.ops import gpu, rmsnorm
from cairn.ops.attention.merge_states import merge_states
from cairn.ops.launch_cache import plans
from cairn.ops.registry import force
from tests.ops.replays import Calls, numbers, scaled_sum


def test_signatures_that_do_not_recur_are_not_recorded(as_on_gpu: None) -> None:
    call = Calls(scaled_sum)
    made = call.plans._plans

    def sums(length: int) -> None:
        x = numbers(length)
        torch.testing.assert_close(call(x, x, 2), x * 4)

    for length in range(20, 30):
        sums(length)
    assert len(made) == 1
    sums(25)
    assert len(made) == 2
    # After a plan was replayed, the next signature is recorded at its first call.
    for length in (25, 41, 41):
        sums(length)
    assert len(made) == 3 and call.plain == 12


def test_shapes_of_which_no_plan_comes_are_looked_at_once(
    as_on_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, looks, look = Calls(lambda x, y, n: (x + y) * n), [], plans.call_of
    monkeypatch.setattr(plans, "call_of", lambda *args: looks.append(args) or look(*args))
    for length, factor, looked in (
        (4, 2, 1),
        (4, 3, 1),
        (4, 4, 1),
        (5, 2, 2),
        (5, 2, 3),
        (5, 2, 3),
    ):
        x, y = numbers(length), numbers(length)
        torch.testing.assert_close(call(x, y, factor), (x + y) * factor)
        assert len(looks) == looked
    assert call.plain == 6


def test_plans_are_forgotten_when_the_choice_changes() -> None:
    every = [rmsnorm._plans, *merge_states._front_plans]
    assert len(every) == 3
    for one in every:
        one._plans[("a signature",)] = None
    with force("rmsnorm=reference"):
        assert not any(one._plans for one in every)


def test_launch_hooks_see_every_launch(as_on_gpu: None) -> None:
    hooks = pytest.importorskip("triton").knobs.runtime.launch_enter_hook
    call, x = Calls(scaled_sum), numbers(40)
    call(x, x, 2)
    hook = lambda metadata: None  # noqa: E731
    hooks.add(hook)
    call(x, x, 2)
    hooks.remove(hook)
    call(x, x, 2)
    assert call.plain == 2


def test_an_error_ends_a_recording(as_on_gpu: None) -> None:
    with pytest.raises(ZeroDivisionError):
        Calls(lambda x: 1 // 0)(numbers(3))
    assert gpu.watch.observer is None
