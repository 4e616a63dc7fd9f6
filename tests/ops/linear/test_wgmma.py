"""The wgmma kernel of products of few tokens with a large weight."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from cairn import ops
from cairn.ops import gpu
from cairn.ops.linear import skinny_gemm_panel, wgmma_launch
from cairn.ops.linear.tuning import TUNING
from cairn.ops.registry import Op
from cairn.ops.testing import Arguments, Make, cases_of, check, run
from tests.ops.tables import Tuned

on_hopper = pytest.mark.skipif(
    not (torch.cuda.is_available() and gpu.supports_wgmma(torch.device("cuda", 0))),
    reason="needs Hopper's tensor cores and Triton 3.6",
)
TOKENS = [3, 8, 16, 17, 32, 33, 63, 64]
SIZES = [(256, 128), (4096, 1024), (500, 1032), (70, 8), (1026, 2000)]
"""Rows and columns of a weight: whole blocks and parts, others, and less than one of either."""


@pytest.fixture
def small(tuned: Tuned) -> None:
    """Within the block, small weights count as large ones."""
    names = ("wgmma_min_bytes", "wgmma_filled", "wgmma_wide_filled", "wgmma_wide_split_bytes")
    tuned(TUNING, **dict.fromkeys(names, 0))


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device="cuda").mul(scale).to(dtype)


def given_to(
    op: Op[..., object], tokens: int, rows: int, columns: int, **kwargs: object
) -> Arguments:
    x, weight = (
        drawn(tokens, columns, **kwargs),
        drawn(rows, columns, scale=columns**-0.5, **kwargs),
    )
    norm = drawn(columns, **kwargs)
    if op is ops.linear:
        return Arguments((x, weight, None, norm, 1e-5, torch.float32), {})
    if op is ops.gated_linear:
        return Arguments((x, weight, norm, 1e-5), {})
    residual = drawn(tokens, rows, **kwargs)
    if op is ops.linear_add:
        return Arguments((x, residual, weight), {})
    return Arguments((x, residual, weight, drawn(rows, **kwargs)), {})


PLAIN, ADDING = [ops.linear, ops.gated_linear], [ops.linear_add, ops.linear_add_rmsnorm]
EVERY = [*PLAIN, *ADDING]
every = pytest.mark.parametrize("op", EVERY, ids=lambda op: op.name)


@every
def test_cases_of_a_gpu_reach_it(op: Op[..., object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Generic tests use the cases; this one, on a CPU, ensures that some select the kernel."""
    monkeypatch.setattr(gpu, "supports_wgmma", lambda _device: True)
    monkeypatch.setattr(gpu, "sm_count", lambda _device: 132)
    assert op.case_source is not None
    given = [case for case in op.case_source(Make("meta")) if isinstance(case, Arguments)]
    assert any(op.accepts("gluon", *case.args, **case.kwargs) for case in given)
    assert not any(op.accepts("gluon", *c.args, **c.kwargs) for c in cases_of(op, "cpu"))


@pytest.mark.gpu
@on_hopper
@every
@pytest.mark.parametrize("tokens", TOKENS)
def test_products_of_all_sizes(op: Op[..., object], tokens: int, small: None) -> None:
    torch.manual_seed(tokens)
    for rows, columns in SIZES:
        check(op, "gluon", given_to(op, tokens, rows, columns))
    check(op, "gluon", given_to(op, tokens, 384, 512, dtype=torch.float16))
    x, *rest = given_to(op, tokens, 384, 512).args
    cut = [torch.cat([x, x], 1)[:, :512], *rest]
    if op in ADDING:
        cut[1] = torch.cat([rest[0], rest[0]], 1)[:, 3:387]
    check(op, "gluon", Arguments(tuple(cut), {}))


@pytest.mark.gpu
@on_hopper
@every
def test_large_weights_use_wgmma(op: Op[..., object]) -> None:
    torch.manual_seed(0)
    columns, rows = (4096, 16384) if op in PLAIN else (11008, 4096)
    for tokens, wanted in ((2, False), (3, True), (64, True), (65, False)):
        given = given_to(op, tokens, rows, columns)
        assert (op.choice(*given.args) == "gluon") == wanted
        if wanted:
            check(op, "gluon", given)


@pytest.mark.gpu
@on_hopper
@every
def test_the_same_every_time_and_in_any_company(op: Op[..., object], small: None) -> None:
    """A token's results do not depend on other tokens, nor on their number within a power of two;
    NaN stays in its row."""
    torch.manual_seed(0)
    given = given_to(op, 30, 4096, 2048)
    torch.cuda.synchronize()
    results = [run(op, "gluon", given) for _ in range(30)]
    first = _numbers(results[0])
    for one in results:
        assert torch.equal(_numbers(one), first)
    fewer = _some(op, given, slice(3, 20))
    assert torch.equal(_numbers(run(op, "gluon", fewer)), first[3:20])
    given.args[0][7, 5] = torch.nan
    spoilt = _numbers(run(op, "gluon", given))
    assert spoilt[7].isnan().all()
    assert torch.equal(spoilt[8:], first[8:])


def _numbers(result: tuple[Arguments, tuple[Tensor, ...]]) -> Tensor:
    """Results and changed arguments of a call, [T, .]."""
    own, outputs = result
    changed = [own.args[1]] if own.args[0].shape[0] == own.args[1].shape[0] else []
    return torch.cat([x.float() for x in (*changed, *outputs)], 1)


def _some(op: Op[..., object], given: Arguments, tokens: slice) -> Arguments:
    """The same arguments for some of the tokens."""
    count = 2 if op in ADDING else 1
    return Arguments((*(x[tokens] for x in given.args[:count]), *given.args[count:]), {})


@pytest.mark.gpu
@on_hopper
def test_in_a_graph_behind_what_writes_its_input(small: None) -> None:
    """The weight is prefetched before the previous kernel has finished; tokens are not."""
    torch.manual_seed(0)
    x, residual = drawn(48, 1024), drawn(48, 1024)
    up, down = drawn(2 * 2048, 1024, scale=1 / 32), drawn(1024, 2048, scale=1 / 64)
    norm = drawn(1024)

    def layers(x: Tensor, residual: Tensor) -> Tensor:
        for _ in range(8):
            x = ops.linear_add_rmsnorm(ops.gated_linear(x, up), residual, down, norm)
        return x

    assert ops.gated_linear.choice(x, up) == "gluon"
    middle = drawn(48, 2048)
    assert ops.linear_add_rmsnorm.choice(middle, residual, down, norm) == "gluon"
    own = residual.clone()
    torch.cuda.synchronize()
    wanted = layers(x, own)
    again = residual.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = layers(x, again)
    for _ in range(20):
        again.copy_(residual)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, wanted)
        assert torch.equal(again, own)


TAKING = [
    wgmma_launch.accepts,
    functools.partial(wgmma_launch.accepts, gated=True),
    wgmma_launch.accepts_split,
    wgmma_launch.accepts_added,
]


def blank(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def moved(x: Tensor) -> Tensor:
    """The same values at an address that is not aligned to 16 bytes."""
    return x.new_empty(x.numel() + 1)[1:].view_as(x)


REFUSED = {
    "few tokens": lambda x, w: (x[:2], w),
    "many tokens": lambda x, w: (blank(65, 4096), w),
    "leading dims": lambda x, w: (x[None], w),
    "float32": lambda x, w: (x.float(), w.float()),
    "unlike dtypes": lambda x, w: (x.half(), w),
    "a small weight": lambda x, w: (x, w[:2048]),
    "rows apart": lambda x, w: (x, blank(8192, 4096)[::2]),
    "columns apart": lambda x, w: (blank(10, 8192)[:, ::2], w),
    "rows of an odd length": lambda x, w: (blank(10, 4104)[:, :4100], blank(4096, 4100)),
    "lines at odd places": lambda x, w: (blank(10, 4097)[:, :-1], w),
    "one line many times": lambda x, w: (x[:1].expand(10, -1), w),
    "tokens at an odd place": lambda x, w: (moved(x), w),
    "a weight at an odd place": lambda x, w: (x, moved(w)),
}


@pytest.mark.parametrize("why", REFUSED)
def test_unsupported_calls_go_to_other_implementations(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "supports_wgmma", lambda device: True)
    monkeypatch.setattr(gpu, "sm_count", lambda device: 64)
    x, weight = blank(10, 4096), blank(4096, 4096)
    for accepts in TAKING:
        assert accepts(x, weight)
    given = REFUSED[why](x, weight)
    for accepts in TAKING:
        assert not accepts(*given)


@pytest.mark.parametrize(
    "tokens, rows, columns, wanted",
    [
        (16, 4096, 16384, "split added"),
        (16, 8192, 8192, "plain gated split added"),
        (64, 12288, 4096, "gated split"),
        (64, 16384, 4096, "plain gated split"),
        (64, 4096, 4096, "split"),
        (64, 4096, 8192, "split added"),
        (4, 4096, 2048, ""),
        (4, 100_352, 1024, "plain gated"),
    ],
)
def test_sizes_that_use_wgmma(
    tokens: int, rows: int, columns: int, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "supports_wgmma", lambda device: True)
    monkeypatch.setattr(gpu, "sm_count", lambda device: 132)
    x, weight = blank(tokens, columns), blank(rows, columns)
    taking = zip(("plain", "gated", "split", "added"), TAKING, strict=True)
    assert [name for name, accepts in taking if accepts(x, weight)] == wanted.split()


def test_a_bias_and_columns_apart_are_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "supports_wgmma", lambda device: True)
    monkeypatch.setattr(gpu, "sm_count", lambda device: 64)
    x, weight, bias = blank(10, 8192), blank(4096, 8192), blank(4096)
    residual, apart = blank(10, 4096), blank(10, 8192)[:, ::2]

    def takes(op: Op[..., object], *args: object) -> bool:
        implementation = op.implementations["gluon"]
        assert implementation.when is not None
        return implementation.when(op.bind(*args))

    assert takes(ops.linear, x, weight)
    assert takes(ops.linear, x, weight, None, blank(8192), 1e-5, torch.float32)
    assert not takes(ops.linear, x, weight, bias)
    assert takes(ops.linear_add, x, residual, weight)
    assert not takes(ops.linear_add, x, residual, weight, bias)
    assert not takes(ops.linear_add, x, apart, weight)
    assert takes(ops.linear_add_rmsnorm, x, residual, weight, bias)
    assert not takes(ops.linear_add_rmsnorm, x, residual, weight, bias, bias)
    assert not takes(ops.linear_add_rmsnorm, x, apart, weight, bias)


def test_a_stream_is_normed_behind_sums_that_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "supports_wgmma", lambda device: True)
    meta = {"dtype": torch.bfloat16, "device": "meta"}
    x, weight = torch.empty(10, 5000, **meta), torch.empty(4096, 5000, **meta)
    assert skinny_gemm_panel.linear_fuses_norm(x, weight, None)
    assert not skinny_gemm_panel.linear_fuses_norm(x, weight, weight[:, 0])
    assert not skinny_gemm_panel.linear_fuses_norm(x, weight[:64], None)
    assert not skinny_gemm_panel.linear_fuses_norm(x[:2], weight, None)


def test_whether_is_known_without_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers call it while torch.compile traces them."""
    monkeypatch.setattr(gpu, "supports_wgmma", lambda device: True)
    monkeypatch.setattr(Tensor, "data_ptr", pytest.fail)
    assert skinny_gemm_panel.linear_fuses_norm(blank(10, 4096), blank(4096, 4096), None)
