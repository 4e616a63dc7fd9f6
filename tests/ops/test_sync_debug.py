"""With CAIRN_SYNC_OPS an error on the device names the op that caused it."""

from __future__ import annotations

import pytest
import torch

from cairn.errors import BadArgument, CairnError
from cairn.ops import rmsnorm, select_topk
from cairn.ops.sync_debug import mode


@pytest.fixture
def synchronous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mode, "enabled", True)


def test_an_error_that_arrives_behind_an_op_names_it(
    synchronous: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(device: torch.device) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr("cairn.ops.sync_debug.synchronizes", lambda device: True)
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    with pytest.raises(CairnError, match="op rmsnorm failed on cpu: an illegal memory access"):
        rmsnorm(torch.ones(2, 8), torch.ones(8), 1e-6)


def test_results_are_the_same(synchronous: None, device: str) -> None:
    x, weight = torch.randn(3, 64, device=device), torch.rand(64, device=device)
    found = rmsnorm(x, weight, 1e-6)
    mode.enabled = False
    assert torch.equal(rmsnorm(x, weight, 1e-6), found)


@pytest.mark.gpu
def test_indices_are_checked_on_the_device(synchronous: None) -> None:
    logits = torch.zeros(2, 64, device="cuda")
    count = torch.full((2,), 64, device="cuda", dtype=torch.int32)
    table = torch.zeros(3, 4, device="cuda", dtype=torch.int32)
    row = torch.tensor([0, 7], device="cuda")
    with pytest.raises(BadArgument, match="`row` holds 7, not numbers from 0 to 2"):
        select_topk(logits, count, 16, None, table, row, 16)
