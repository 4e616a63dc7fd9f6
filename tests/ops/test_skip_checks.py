"""Within `skip_checks` ops do not check their arguments."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cairn.errors import BadArgument
from cairn.ops.call import Call
from cairn.ops.checks import refuse, skip_checks
from cairn.ops.registry import op


@pytest.fixture
def picky():
    """An op whose check refuses all arguments."""

    @op
    def picky_for_the_test(input: Tensor) -> Tensor:
        """input twice."""
        return input * 2

    @picky_for_the_test.check
    def _(call: Call) -> None:
        refuse("picky_for_the_test", "input", "is never right")

    yield picky_for_the_test
    picky_for_the_test.unregister()


def test_checks_are_skipped_inside_the_block_and_run_after_it(picky):
    one = torch.ones(())
    with pytest.raises(BadArgument):
        picky(one)
    with skip_checks():
        assert picky(one) == 2
        with skip_checks():
            assert picky(one) == 2
        assert picky(one) == 2
    with pytest.raises(BadArgument):
        picky(one)


def test_an_error_within_ends_it(picky):
    with pytest.raises(KeyError), skip_checks():
        raise KeyError
    with pytest.raises(BadArgument):
        picky(torch.ones(()))
