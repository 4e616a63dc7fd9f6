"""`cairn bench ops` at tiny sizes on the CPU, and checks of what ops declare."""

import dataclasses
import itertools

import pytest
import torch

from cairn.bench import ops as bench
from cairn.bench import timing
from cairn.bench.ops import OpsPlan, run_ops
from cairn.bench.roofline import Roofline
from cairn.bench.timing import Timing
from cairn.errors import BadConfig, CairnError
from cairn.ops import cpu
from cairn.ops.bench_points import COMPILED, Alternative, Draw, Point
from cairn.ops.registry import all_ops
from cairn.ops.testing import Arguments

LINE = Roofline(bandwidth=1e10, gemm=1e11, dtype="float32", device="cpu")


@pytest.fixture
def line(monkeypatch):
    monkeypatch.setattr(bench, "measure", lambda dtype, device: LINE)
    monkeypatch.setattr(bench, "measure_copy", lambda device: 5e9)
    monkeypatch.setitem(bench.SECONDS, "tiny", 0.0)
    # The minimum number of calls for a median.
    monkeypatch.setattr(timing, "REPEATS", (1, 1))
    monkeypatch.setitem(timing.COPIES, "cpu", 2)


def plan(*names, dtype="float32"):
    return OpsPlan(names, dtype, "cpu", "tiny")


def tensors(value):
    return (value,) if isinstance(value, torch.Tensor) else tuple(value or ())


def test_every_op_is_timed_at_every_size_it_declares(line):
    found = list(run_ops(plan()))
    rows = [row for row, _ in found]
    assert all(used is LINE for _, used in found)
    assert {row.op for row in rows} == {op.name for op in all_ops()}
    for row in rows:
        assert row.ms > 0
        assert row.timed == "clock"
        assert row.launches is None and row.host_ms is None and row.least_host is None
        assert row.bytes > 0, row
        floor = max(row.bytes / LINE.bandwidth, row.flops / LINE.gemm) * 1e3
        assert row.floor_ms == pytest.approx(floor)
        assert row.fraction == pytest.approx(floor / row.ms)
        assert row.gb_s == pytest.approx(row.bytes / row.ms / 1e6)
        assert row.of_copy == pytest.approx(row.gb_s / 5)
        if row.bytes / LINE.bandwidth >= row.flops / LINE.gemm:
            assert row.of_alike == pytest.approx(row.alike_ms / row.ms)
        else:
            assert row.alike_ms is None and row.of_alike is None
    assert len({(row.op, row.size) for row in rows}) == len(rows)


def test_the_alternative_is_the_fastest_from_outside(line, monkeypatch):
    """Each measurement is slower than the one before, and the op's own implementations are
    first."""
    clock = itertools.count(1.0)
    monkeypatch.setattr(bench, "measure_calls", lambda *_: Timing(next(clock), "clock"))
    for row, _ in run_ops(plan("rmsnorm", "page_attention")):
        if row.op == "rmsnorm":
            assert row.implementation == ("numba" if cpu.AVAILABLE else "torch")
            outside = [name for name in row.others if name != "torch"]
            assert set(outside) == {"rms_norm", "definition"}
            assert row.alternative == outside[0]
            assert row.alternative_ms == row.others[row.alternative]
            assert row.speedup == pytest.approx(row.alternative_ms / row.ms)
        else:
            # The definition is the chosen implementation, or too slow to compare.
            assert row.alternative is None
            assert row.fields()["speedup"] is None


def test_an_op_and_the_best_alternative_are_measured_in_turns(line, monkeypatch):
    (norm,) = bench.chosen_ops(["rmsnorm"])
    slow, fast = object(), object()
    # A device whose speed falls from one measurement to the next.
    took = {None: 1.0, slow: 9.0, fast: 1.0}
    measured = []

    def measure(calls, device, budget):
        measured.append(calls)
        return Timing(took[calls] + len(measured) / 100, "clock")

    def source(draw):
        others = tuple(Alternative(str(took[one]), one) for one in (slow, fast))
        yield Point("2 x 8", draw.args(draw.randn(2, 8), draw.randn(8)), 160, alternatives=others)

    monkeypatch.setattr(norm, "bench_source", source)
    monkeypatch.setattr(bench, "rotated", lambda call, *_: call if call in took else None)
    monkeypatch.setattr(bench, "measure_calls", measure)
    ((row, _),) = run_ops(plan("rmsnorm"))
    *turns, _copy = measured[-2 * bench.TURNS - 1 :]
    assert turns == [None, fast] * bench.TURNS
    assert row.alternative == "1.0"
    assert row.alternative_ms - row.ms == pytest.approx(10.0)


def test_a_copy_moves_as_much_as_the_op(line, monkeypatch):
    copies = []

    def measured(calls, device, budget):
        return Timing(float(calls[0] is copies), "clock")

    def rotated(function, arguments, touched):
        if function is not torch.Tensor.copy_:
            return [None]
        target, source = arguments.args
        assert target.data_ptr() != source.data_ptr()
        assert touched - 1 <= target.nbytes + source.nbytes <= touched
        return [copies]

    monkeypatch.setattr(bench, "rotated", rotated)
    monkeypatch.setattr(bench, "measure_calls", measured)
    rows = [row for row, _ in run_ops(plan("silu_and_mul", "rmsnorm"))]
    assert rows and all(row.alike_ms == 1e3 and row.ms == 0 for row in rows)


def test_an_op_has_the_same_numbers_whatever_is_timed_with_it(line, monkeypatch):
    drawn = []

    def source(draw):
        drawn.append(draw.randn(2, 8))
        yield Point("2 x 8", draw.args(drawn[-1]), 64)

    names = ("gelu_quick", "gelu_tanh_and_mul")
    for op in bench.chosen_ops(names):
        monkeypatch.setattr(op, "bench_source", source)
    list(run_ops(plan(*names)))
    assert torch.equal(*drawn)


def test_the_host_is_timed_by_calls_of_the_op_and_of_those_beside_it(line, monkeypatch):
    (norm,) = bench.chosen_ops(["rmsnorm"])
    took = {"definition": 3e-6, "waits": None, "fast": 2e-6, "rmsnorm": 1e-6}

    def source(draw):
        others = tuple(Alternative(name, lambda *_, name=name: name) for name in took)
        given = draw.args(draw.randn(2, 8), draw.randn(8))
        yield Point("2 x 8", given, 160, alternatives=others)

    def host_seconds(call):
        result = call()
        return took[result] if isinstance(result, str) else 8e-6

    monkeypatch.setattr(norm, "bench_source", source)
    monkeypatch.setattr(norm, "choice", lambda *_: "reference")
    monkeypatch.setattr(bench, "host_seconds", host_seconds)
    monkeypatch.setattr(bench, "kernels_of", lambda *_: 1)
    nothing = Arguments((torch.empty(1), torch.empty(1)))
    monkeypatch.setattr(bench, "_copied", lambda *_: nothing)
    seconds = 1e-4
    monkeypatch.setattr(bench, "measure_calls", lambda *_: Timing(seconds, "graph"))
    on_gpu = dataclasses.replace(plan("rmsnorm"), device="cuda")
    draw = Draw("cpu", torch.float32, "tiny")
    (row,) = bench._rows(norm, draw, on_gpu, LINE, 5.0)
    assert (row.host_ms, row.least_host, row.least_host_ms) == (8e-3, "rmsnorm", 1e-3)
    seconds = bench.MAX_HOSTED
    (row,) = bench._rows(norm, draw, on_gpu, LINE, 5.0)
    assert (row.host_ms, row.least_host, row.least_host_ms) == (None, None, None)


def test_an_alternative_that_cannot_run_is_left_out(line, monkeypatch, caplog):
    (norm,) = bench.chosen_ops(["rmsnorm"])

    def source(draw):
        given = draw.args(draw.randn(2, 8), draw.randn(8))
        broken = Arguments((torch.ones(3),))
        yield Point("2 x 8", given, 160, alternatives=(other(torch.linalg.inv, broken),))

    def other(call, arguments):
        return Alternative("inverse", call, arguments)

    monkeypatch.setattr(norm, "bench_source", source)
    ((row, _),) = run_ops(plan("rmsnorm"))
    assert row.alternative is None
    assert "inverse cannot run" in caplog.text


def test_a_size_that_fails_does_not_stop_the_others(line, monkeypatch):
    (norm,) = bench.chosen_ops(["rmsnorm"])

    def source(draw):
        yield Point("wrong", draw.args(draw.randn(2, 8), draw.randn(7)), 160)
        yield Point("right", draw.args(draw.randn(2, 8), draw.randn(8)), 160)
        raise RuntimeError("no more memory")

    monkeypatch.setattr(norm, "bench_source", source)
    found, rows = run_ops(plan("rmsnorm")), []
    with pytest.raises(CairnError, match="2 sizes could not be timed"):
        rows.extend(row for row, _ in found)
    wrong, right, end = rows
    assert wrong.size == "wrong" and "shape" in wrong.error
    assert right.size == "right" and right.ms > 0
    assert end.fields() == {
        "op": "rmsnorm",
        "family": "norm",
        "size": None,
        "dtype": "float32",
        "error": "no more memory",
    }


def test_families_names_and_mistakes():
    found = bench.chosen_ops(["norm", "silu_and_mul"])
    assert {op.family for op in found} == {"activation", "norm"}
    names = [op.name for op in found]
    assert names[0] == "silu_and_mul" and {"fused_add_rmsnorm", "rmsnorm"} <= set(names[1:])
    (sampler,) = bench.chosen_ops(["top_p_sampling_from_probs"])
    assert sampler.name == "draw_from_probs"
    with pytest.raises(BadConfig, match="rmsnorm"):
        bench.chosen_ops(["rmsnor"])
    with pytest.raises(BadConfig, match=r"'zz' is neither an op nor a family.*Known: .*rmsnorm"):
        bench.chosen_ops(["zz"])
    with pytest.raises(BadConfig, match="cpu"):
        list(run_ops(OpsPlan((), "float32", "cuda", "tiny")))


@pytest.mark.parametrize(
    "name, alternative",
    [
        ("select_pages", "topk"),
        ("dense_attention", "sdpa flash"),
        ("linear", "rms_norm, linear"),
    ],
)
def test_alternatives_compute_the_same(name, alternative):
    [op] = [op for op in all_ops() if op.name == name]
    compared = 0
    for point in op.bench_source(Draw("cpu", torch.float32, "tiny")):
        for other in point.alternatives:
            if other.name != alternative:
                continue
            given = other.arguments or point.arguments
            got = tensors(other.call(*given.args, **given.kwargs))[0]
            wanted = tensors(op(*point.arguments.args, **point.arguments.kwargs))[0]
            if name == "dense_attention":
                got = got.transpose(1, 2).reshape(wanted.shape)
            torch.testing.assert_close(got.to(wanted.dtype), wanted, rtol=2e-5, atol=2e-6)
            compared += 1
    assert compared


def test_alternatives_take_the_arguments_of_their_op():
    called = 0
    for op in all_ops():
        if op.bench_source is None:
            continue
        for point in op.bench_source(Draw("cpu", torch.float32, "tiny")):
            for other in point.alternatives:
                if other.name == COMPILED:
                    continue
                given = (other.arguments or point.arguments).clone()
                other.call(*given.args, **given.kwargs)
                called += 1
    assert called > 100


def test_pages_lie_in_order_where_the_size_says_so():
    jobs = list(Draw("cpu", torch.float32, "tiny").attention())
    in_order = {str(job): bool((job.page_table.flatten().diff() == 1).all()) for job in jobs}
    assert len(in_order) == len(jobs)
    assert {size for size, ordered in in_order.items() if ordered} == {
        "tiny: decode 96 x 2, pages in order"
    }


def test_correlated_queries_are_near_their_neighbours():
    z = Draw("cpu", torch.float32, "tiny").correlated(4096, 8)
    near = torch.cosine_similarity(z[:-1], z[1:]).mean()
    far = torch.cosine_similarity(z[:-600], z[600:]).mean()
    assert near > 0.9
    assert abs(far) < 0.1
    assert z.std() == pytest.approx(1.0, rel=0.1)
