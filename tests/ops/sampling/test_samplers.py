"""Samplers against distributions computed in Python: kept tokens, frequencies and generators."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cairn import ops
from cairn.errors import BadArgument
from cairn.ops import (
    gpu,
    min_p_sampling_from_probs,
    sampling_from_probs,
    top_k_renorm_probs,
    top_k_top_p_sampling_from_logits,
    top_k_top_p_sampling_from_probs,
    top_p_renorm_probs,
    top_p_sampling_from_probs,
)
from cairn.ops.registry import force
from cairn.ops.sampling.draw_from_probs import draw_from_probs
from cairn.ops.sampling.top_k_top_p_sampling_from_logits import draw_from_logits

DRAWS = 100_000
WIDTH = 40
Law = Callable[[list[float]], dict[int, float]]
Sampler = Callable[..., Tensor]


def top_k(row: dict[int, float], k: int) -> dict[int, float]:
    least = sorted(row.values(), reverse=True)[min(k, len(row)) - 1]
    return normalised({token: p for token, p in row.items() if p >= least})


def top_p(row: dict[int, float], share: float) -> dict[int, float]:
    kept: dict[int, float] = {}
    for token in sorted(row, key=lambda t: (-row[t], t)):
        if kept and sum(kept.values()) >= share:
            break
        kept[token] = row[token]
    return normalised(kept)


def normalised(row: dict[int, float]) -> dict[int, float]:
    total = math.fsum(row.values())
    return {token: p / total for token, p in row.items()}


def min_p(row: dict[int, float], share: float) -> dict[int, float]:
    best = max(row.values())
    return normalised({token: p for token, p in row.items() if p >= share * best})


def both(row: dict[int, float], k: int, share: float) -> dict[int, float]:
    """Joint: each filter of the original probabilities."""
    kept = top_k(row, k).keys() & top_p(row, share).keys()
    return normalised({token: row[token] for token in kept})


def logits_of(probs: Tensor) -> Tensor:
    return probs.log() + 3.0


def from_logits(probs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return top_k_top_p_sampling_from_logits(logits_of(probs), *args, **kwargs)


JOINT = {"filter_apply_order": "joint"}
SAMPLERS: dict[str, tuple[Sampler, tuple[Any, ...], dict[str, str], Law]] = {
    "plain": (sampling_from_probs, (), {}, dict),
    "top p": (top_p_sampling_from_probs, (0.7,), {}, lambda row: top_p(row, 0.7)),
    "min p": (min_p_sampling_from_probs, (0.2,), {}, lambda row: min_p(row, 0.2)),
    "top k first": (
        top_k_top_p_sampling_from_probs,
        (12, 0.8),
        {},
        lambda row: top_p(top_k(row, 12), 0.8),
    ),
    "joint": (top_k_top_p_sampling_from_probs, (12, 0.6), JOINT, lambda row: both(row, 12, 0.6)),
    "logits": (from_logits, (12, 0.8), {}, lambda row: top_p(top_k(row, 12), 0.8)),
    "joint logits": (from_logits, (12, 0.6), JOINT, lambda row: both(row, 12, 0.6)),
}


def a_row(seed: int, width: int = WIDTH) -> Tensor:
    torch.manual_seed(seed)
    return torch.softmax(2 * torch.randn(1, width), dim=-1)


def chi_square_tail(statistic: float, freedom: int) -> float:
    """Probability that a chi-square number is larger (Wilson and Hilferty 1931)."""
    spread = 2 / (9 * freedom)
    deviation = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    return 0.5 * math.erfc(deviation / math.sqrt(2))


@pytest.mark.parametrize("form", ["rows", "indices"])
@pytest.mark.parametrize("name", SAMPLERS)
def test_frequencies_of_draws(name: str, form: str, device: str) -> None:
    sampler, filters, options, law = SAMPLERS[name]
    row = a_row(3)
    expected = law(dict(enumerate(row[0].tolist())))
    generator = torch.Generator(device).manual_seed(5)
    given, indices = row.expand(DRAWS, -1).contiguous().to(device), None
    if form == "indices":
        # Odd rows would show.
        given = torch.cat((a_row(4), row)).to(device)
        indices = torch.ones(DRAWS, dtype=torch.int32, device=device)
    tokens = sampler(given, *filters, indices=indices, generator=generator, **options)
    assert tokens.dtype == torch.int32 and tokens.shape == (DRAWS,)
    counts = torch.bincount(tokens.cpu(), minlength=WIDTH).tolist()
    assert {token for token, count in enumerate(counts) if count} <= expected.keys()
    statistic = sum((counts[t] - p * DRAWS) ** 2 / (p * DRAWS) for t, p in expected.items())
    assert chi_square_tail(statistic, len(expected) - 1) > 1e-4


@pytest.mark.parametrize("name", SAMPLERS)
def test_one_generator_gives_the_same_draws_alone_and_in_a_batch(name: str, device: str) -> None:
    sampler, filters, options, _ = SAMPLERS[name]
    rows = torch.cat([a_row(seed, 700) for seed in range(5)]).to(device)

    def drawn(given: Tensor) -> list[int]:
        generator = torch.Generator(device).manual_seed(9)
        return sampler(given, *filters, generator=generator, **options).tolist()

    whole = drawn(rows)
    assert whole == drawn(rows)
    assert drawn(rows[:1]) == whole[:1]
    assert drawn(rows[:3]) == whole[:3]
    per_row = [torch.full((5,), value, device=device) for value in filters]
    generator = torch.Generator(device).manual_seed(9)
    assert sampler(rows, *per_row, generator=generator, **options).tolist() == whole


@pytest.mark.parametrize("name", [name for name in SAMPLERS if name != "plain"])
def test_kernels_and_definitions_draw_alike(name: str, device: str) -> None:
    sampler, filters, options, _ = SAMPLERS[name]
    rows = torch.cat([a_row(seed, 2500) for seed in range(6)]).to(device)
    found = []
    for choice in ("", "reference"):
        with force(choice):
            generator = torch.Generator(device).manual_seed(1)
            found.append(sampler(rows, *filters, generator=generator, **options).tolist())
    assert found[0] == found[1]


@pytest.mark.skipif(not gpu.INTERPRETED, reason="needs Triton, and a machine without CUDA")
@pytest.mark.parametrize("joint", [False, True])
def test_every_kept_token_and_no_other_when_interpreted(joint: bool) -> None:
    torch.manual_seed(3)
    draws = 48
    uniform = (torch.arange(draws) + 0.5) / draws
    row = 1 + torch.rand(2500) / 100
    row[::170] += torch.rand(15)
    row[[510, 1360, 1700]] = row.max()
    rows = (row / row.sum()).expand(draws, -1).contiguous()
    k = torch.full((draws,), 9, dtype=torch.int32)
    p = torch.full((draws,), 5.5 / 9) * (rows[0].topk(9).values.sum() if joint else 1.0)
    got = draw_from_probs.using("triton")(rows, uniform, k, p, joint=joint)
    expected = draw_from_probs.reference(rows, uniform, k, p, joint=joint)
    assert got.tolist() == expected.tolist()
    assert len(set(got.tolist())) > 3


@pytest.mark.skipif(not gpu.INTERPRETED, reason="needs Triton, and a machine without CUDA")
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("op", [draw_from_probs, draw_from_logits], ids=lambda op: op.name)
def test_orders_of_the_filters_when_interpreted(op: Any, joint: bool) -> None:
    # The top 3 sum to 0.9. top_p = 0.52 keeps one token of these and two of all; 0.87 keeps two and
    # three.
    row = torch.tensor([0.5, 0.1, 0.3, 0.1 - 1e-4, 1e-4])
    settings = [(3, 0.52), (3, 0.87)]
    uniform = torch.tensor([0.5, 0.9, 0.999]).repeat(2)
    k, p = torch.tensor(settings).repeat_interleave(3, 0).T.contiguous()
    rows = row.repeat(6, 1)
    if op is draw_from_logits:
        rows = logits_of(rows)
    law = both if joint else lambda row, k, p: top_p(top_k(row, k), p)
    expected = []
    for setting, u in zip(settings * 3, [0.5, 0.5, 0.9, 0.9, 0.999, 0.999], strict=True):
        running, kept = 0.0, law(dict(enumerate(row.tolist())), *setting)
        for token in sorted(kept):
            running += kept[token]
            if running > u:
                break
        expected.append(token)
    got = op.using("triton")(rows, uniform, k.int(), p, joint=joint)
    assert got.view(2, 3).T.flatten().tolist() == expected


def test_probabilities_and_logits_draw_alike(device: str) -> None:
    rows = torch.cat([a_row(seed, 1300) for seed in range(20)]).to(device)
    for options in ({}, JOINT):
        generators = [torch.Generator(device).manual_seed(1) for _ in range(2)]
        one = top_k_top_p_sampling_from_probs(rows, 30, 0.9, generator=generators[0], **options)
        other = from_logits(rows, 30, 0.9, generator=generators[1], **options)
        assert one.tolist() == other.tolist()


@pytest.mark.parametrize("width", [1, 7, 63, 100, 1000, 1 << 18])
def test_one_token_kept_is_the_largest(width: int, device: str) -> None:
    torch.manual_seed(width)
    rows = torch.rand(3, width, device=device)
    # By more than the rounding of a logarithm.
    rows.scatter_(1, torch.randint(width, (3, 1), device=device), 2.0)
    rows /= rows.sum(-1, keepdim=True)
    largest = rows.argmax(-1).tolist()
    assert top_k_top_p_sampling_from_probs(rows, 1, 1.0).tolist() == largest
    assert top_k_top_p_sampling_from_logits(logits_of(rows), 1, 1.0).tolist() == largest
    assert top_p_sampling_from_probs(rows, 0.0).tolist() == largest
    assert min_p_sampling_from_probs(rows, 1.0).tolist() == largest


def test_all_mass_on_one_token(device: str) -> None:
    rows = torch.zeros(4, 300, device=device)
    rows[:, 17] = 1.0
    for sampler, filters, options, _ in SAMPLERS.values():
        assert set(sampler(rows, *filters, **options).tolist()) == {17}


def test_empty_batches_and_rows_without_a_law(device: str) -> None:
    nan, inf = math.nan, math.inf
    odd = torch.tensor([[0.0, 0.0], [nan, 1.0], [inf, 1.0], [0.25, 0.75]], device=device)
    assert sampling_from_probs(odd).tolist()[:3] == [-1, -1, -1]
    for sampler, filters, options, _ in SAMPLERS.values():
        assert sampler(odd[:0], *filters, **options).tolist() == []
        none = torch.zeros(0, dtype=torch.int64, device=device)
        assert sampler(odd[3:], *filters, indices=none, **options).tolist() == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_in_half_precision(dtype: torch.dtype, device: str) -> None:
    logits = (3 * torch.randn(50, 700)).to(dtype).to(device)
    generators = [torch.Generator(device).manual_seed(1) for _ in range(2)]
    got = top_k_top_p_sampling_from_logits(logits, 40, 0.9, generator=generators[0])
    wide = top_k_top_p_sampling_from_logits(logits.float(), 40, 0.9, generator=generators[1])
    assert got.tolist() == wide.tolist()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("sampler", [min_p_sampling_from_probs, top_p_sampling_from_probs])
def test_shares_of_any_number_type(sampler: Sampler, dtype: torch.dtype, device: str) -> None:
    generators = [torch.Generator(device).manual_seed(4) for _ in range(2)]
    rows = torch.rand(64, 30, device=device).softmax(-1)
    share = torch.ones(64, dtype=dtype, device=device)
    got = sampler(rows, share, generator=generators[0])
    assert torch.equal(got, sampler(rows, 1.0, generator=generators[1]))
    if sampler is min_p_sampling_from_probs:
        assert torch.equal(got, rows.argmax(-1).int())


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_default_dtype_is_not_looked_at(name: str) -> None:
    sampler, args, kwargs, _ = SAMPLERS[name]
    rows = torch.rand(8, WIDTH).softmax(-1)
    drawn = sampler(rows, *args, **kwargs, generator=torch.Generator().manual_seed(5))
    torch.set_default_dtype(torch.bfloat16)
    try:
        again = sampler(rows, *args, **kwargs, generator=torch.Generator().manual_seed(5))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(again, drawn)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_probabilities_in_half_precision(dtype: torch.dtype, device: str) -> None:
    probs = torch.softmax(2 * torch.randn(5, WIDTH, device=device), -1).to(dtype)
    for sampler, given in (
        (sampling_from_probs, ()),
        (top_p_sampling_from_probs, (0.7,)),
        (min_p_sampling_from_probs, (0.1,)),
        (top_k_top_p_sampling_from_probs, (9, 0.7)),
    ):
        seeded = [torch.Generator(device).manual_seed(3) for _ in range(2)]
        drawn = sampler(probs, *given, generator=seeded[0])
        assert torch.equal(drawn, sampler(probs.float(), *given, generator=seeded[1]))
    for filtered, number in ((top_k_renorm_probs, 9), (top_p_renorm_probs, 0.7)):
        kept = filtered(probs, number)
        assert kept.dtype == torch.float32
        assert torch.equal(kept, filtered(probs.float(), number))


@pytest.mark.parametrize("name", ["top_p", "min_p", "top_k_top_p", "joint", "logits"])
def test_thresholds_of_outputs_or_of_rows(name: str, device: str) -> None:
    """If the numbers of outputs and rows differ, the length of the parameters tells whether they
    are per output or per row."""
    rows = torch.cat([a_row(seed, 300) for seed in range(3)]).to(device)
    which = torch.tensor([2, 0, 2, 1, 0, 2, 2], dtype=torch.int32, device=device)
    p = torch.linspace(0.05, 0.95, 7, device=device)
    k = torch.tensor([1, 300, 2, 9, 40, 3, 120], dtype=torch.int32, device=device)
    sampler, thresholds, options = {
        "top_p": (top_p_sampling_from_probs, (p,), {}),
        "min_p": (min_p_sampling_from_probs, (p,), {}),
        "top_k_top_p": (top_k_top_p_sampling_from_probs, (k, p), {}),
        "joint": (top_k_top_p_sampling_from_probs, (k, 0.5), {"filter_apply_order": "joint"}),
        "logits": (top_k_top_p_sampling_from_logits, (300, p), {}),
    }[name]

    def draws(given: Tensor, *filters: Any, indices: Tensor | None = None) -> list[int]:
        generator = torch.Generator(device).manual_seed(7)
        return sampler(given, *filters, indices=indices, generator=generator, **options).tolist()

    each = rows[which.long()]
    assert draws(rows, *thresholds, indices=which) == draws(each, *thresholds)
    of_rows = [x[:3] if isinstance(x, Tensor) else x for x in thresholds]
    of_each = [x[which.long()] if isinstance(x, Tensor) else x for x in of_rows]
    assert draws(rows, *of_rows, indices=which) == draws(each, *of_each)
    # As many outputs as rows: thresholds are the rows'.
    turned = torch.tensor([1, 2, 0], device=device)
    of_each = [x[turned] if isinstance(x, Tensor) else x for x in of_rows]
    assert draws(rows, *of_rows, indices=turned) == draws(rows[turned], *of_each)


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("indices", [[0, 3], [2, -1, 0]])
def test_indices_of_no_row_are_refused_on_the_cpu(name: str, indices: list[int]) -> None:
    sampler, filters, options, _ = SAMPLERS[name]
    rows, given = torch.rand(3, WIDTH).softmax(-1), torch.tensor(indices)
    wrong = rf"`indices` holds {next(x for x in indices if not 0 <= x < 3)}, not numbers from"
    with pytest.raises(BadArgument, match=wrong):
        sampler(rows, *filters, indices=given, **options)
    if filters:
        # Parameters per output: rows are gathered before sampling.
        each = (torch.full((len(indices),), filters[0]), *filters[1:])
        with pytest.raises(BadArgument, match=wrong):
            sampler(rows, *each, indices=given, **options)


def test_wrong_arguments_are_named() -> None:
    rows = torch.full((3, 4), 0.25)
    with pytest.raises(BadArgument, match="`filter_apply_order` is 'top_p_first'"):
        top_k_top_p_sampling_from_probs(rows, 2, 0.5, filter_apply_order="top_p_first")
    with pytest.raises(BadArgument, match="`probs` is float64"):
        top_p_sampling_from_probs(rows.double(), 0.5)
    with pytest.raises(BadArgument, match="`top_p` is bool"):
        top_p_sampling_from_probs(rows, torch.ones(len(rows), dtype=torch.bool))
    with pytest.raises(BadArgument, match=r"`top_p` has shape \[2\]"):
        top_p_sampling_from_probs(rows, torch.ones(2))
    with pytest.raises(BadArgument, match=r"`top_k` has shape \[3\], not \[5\]"):
        given = torch.ones(3, dtype=torch.int32), torch.ones(5)
        top_k_top_p_sampling_from_probs(rows, *given, torch.zeros(5, dtype=torch.int32))
    with pytest.raises(BadArgument, match="`top_k` is float32"):
        top_k_top_p_sampling_from_logits(rows, torch.ones(3), 0.5)
    with pytest.raises(BadArgument, match="`indices` is float32"):
        sampling_from_probs(rows, indices=torch.ones(2))
    rows[1, 2] = math.nan
    with pytest.raises(BadArgument, match="`probs` holds NaN"):
        min_p_sampling_from_probs(rows, 0.1, check_nan=True)


def test_the_module_has_the_functions_by_the_names_that_peers_have_there():
    names = {name for name in vars(ops) if "sampling_from" in name or "_renorm_prob" in name}
    assert names | {"top_k_mask_logits"} == set(ops.sampling.__all__)
    assert all(getattr(ops.sampling, name) is getattr(ops, name) for name in ops.sampling.__all__)
