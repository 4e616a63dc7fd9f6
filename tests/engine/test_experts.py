"""Expert parallelism gives the results of one rank, for any placement of experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cairn.config import EngineOptions, Machine, resolve
from cairn.distributed.groups import Group
from cairn.errors import BadConfig
from cairn.models.registry import load_spec
from tests.engine import dsv4, ranked
from tests.engine.harness import assert_same, greedy, run, text
from tests.engine.test_families import FAMILIES
from tests.support import shows

SHARED = {"enable_expert_parallel": True}
CASES = {
    "experts": {"ep_num_redundant_experts": 1},
    "recurrent with experts": {},
    "latent, shared selections": {"ep_num_redundant_experts": 3},
    "latent in 8 bits": {},
    "compressed": {},
}


def built(family: str, size: int, folder: Path, **options):
    path = FAMILIES[family]
    if path is None:
        (folder / "config.json").write_text(json.dumps(dsv4.CONFIG), encoding="utf-8")
        path, options = folder, options | {"load_format": "random", "page_size": dsv4.PAGE}
    return ranked.engine(path, size, **options)


@shows("qwen3_moe qwen3_next deepseek_v32 glm_moe_dsa deepseek_v4", "EP")
@pytest.mark.parametrize("family", CASES)
def test_two_ranks_share_experts(family: str, tmp_path: Path) -> None:
    one, two = (
        built(family, size, tmp_path, **more)
        for size, more in ((1, {}), (2, SHARED | CASES[family]))
    )
    prompts = [text(1, 70, one.spec.vocab_size), text(2, 3, one.spec.vocab_size)]
    found, wanted = (
        run(each, prompts, greedy(3, True), [50], poisoned=False) for each in (two, one)
    )
    for mine, its in zip(found, wanted, strict=True):
        assert_same(mine, its)


@pytest.mark.slow
def test_experts_that_four_ranks_cannot_share_evenly(tmp_path: Path) -> None:
    one, four = (built("experts", size, tmp_path, **SHARED) for size in (1, 4))
    assert four.spec.layers[1].ffn.placement == (0, 1, 2, 3, 4, 5, 0, 1)
    prompts = [text(1, 70, one.spec.vocab_size)]
    found, wanted = (run(each, prompts, greedy(3, True), poisoned=False) for each in (four, one))
    assert_same(found[0], wanted[0])


class Full:
    """A rank's group, and the rank has no memory to receive experts."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def least(self, fits: int, device: torch.device) -> int:
        return self._group.least(0, device)


def test_experts_move_while_requests_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    often = {"eplb_rebalance_num_iterations": 2, "eplb_rebalance_layers_per_chunk": 1}
    one = built("latent, shared selections", 1, tmp_path)
    two = built("latent, shared selections", 2, tmp_path, enable_eplb=True, **SHARED, **often)
    balance = two.runner.experts
    mixtures = [places for _, places in balance._mixtures]
    before = [places.placement.tolist() for places in mixtures]
    prompts = [text(3, 40, one.spec.vocab_size), [7] * 20]
    # Where a move fails all stays as it is, and is tried again later.
    with monkeypatch.context() as patch:
        patch.setattr(balance, "_group", Full(balance._group))
        (mine,), (its,) = (
            run(each, prompts[1:], greedy(5, True), poisoned=False) for each in (two, one)
        )
    assert_same(mine, its)
    assert "no memory to move experts" in caplog.text
    assert [places.placement.tolist() for places in mixtures] == before
    found, wanted = (
        run(each, prompts, greedy(8, True), [20], poisoned=False) for each in (two, one)
    )
    for mine, its in zip(found, wanted, strict=True):
        assert_same(mine, its)
    assert any(
        places.placement.tolist() != old for places, old in zip(mixtures, before, strict=True)
    )
    # The counts start at the last placement.
    assert all(0 < int(places.loads.sum()) < 80 * 4 for places in mixtures)


def test_options_of_experts(tmp_path: Path) -> None:
    machine, experts = Machine(False, True, 1 << 30), load_spec(FAMILIES["experts"])

    def resolved(spec=experts, size=2, **options):
        given = EngineOptions(tensor_parallel_size=size, **options)
        return resolve(given, spec, machine)

    placed = resolved(eplb_config='{"num_redundant_experts": 2, "step_interval": 7}', **SHARED)
    layers = [layer.ffn for layer in placed.model.layers if hasattr(layer.ffn, "placement")]
    assert layers[0].placement == (0, 1, 2, 3, 4, 5, 0, 1)
    assert placed.balance is None
    balance = resolved(enable_eplb=True, eplb_config={"step_interval": 7}, **SHARED).balance
    assert balance is not None and (balance.every, balance.chunk) == (7, 4)
    file = tmp_path / "places.json"
    wanted = [[5, 4, 3, 2, 1, 0] for _ in layers]
    file.write_text(json.dumps({"physical_to_logical_map": wanted}), encoding="utf-8")
    placed = resolved(init_expert_location=str(file), **SHARED)
    assert placed.model.layers[1].ffn.placement == (5, 4, 3, 2, 1, 0)
    file.write_text(json.dumps({"physical_to_logical_map": wanted[1:]}), encoding="utf-8")
    for message, options in (
        ("places .* layers with experts of", SHARED | {"init_expert_location": str(file)}),
        ("cannot be read.*Use trivial", SHARED | {"init_expert_location": "/nowhere"}),
        ("at most 6", SHARED | {"ep_num_redundant_experts": 7}),
        ("ep_size is 4.*Use 2", SHARED | {"ep_size": 4}),
        ("enable_eplb is True.*--enable-expert-parallel", {"enable_eplb": True}),
        ("moe_a2a_backend is deepep, which is not built. Use none", {"moe_a2a_backend": "deepep"}),
        ("eplb_config has 'x'. Known: num_redundant", {"eplb_config": {"x": 1}}),
        ("eplb_rebalance_num_iterations must be", {"eplb_rebalance_num_iterations": 0}),
        ("no experts", SHARED | {"spec": load_spec(FAMILIES["landmarks"])}),
    ):
        with pytest.raises(BadConfig, match=message):
            resolved(**options)
