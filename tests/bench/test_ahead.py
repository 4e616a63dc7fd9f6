"""Processes that compile kernels before ops are timed."""

import logging
from importlib import import_module

import pytest
import torch

from cairn.bench import ahead
from cairn.bench.ops import chosen_ops
from cairn.ops.bench_points import COMPILED, Alternative, Draw, Point


@pytest.fixture
def norm(monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", "/nowhere")
    (op,) = chosen_ops(["rmsnorm"])
    return op


def test_every_size_and_what_is_compiled_beside_it_runs_once(norm, monkeypatch):
    called = []

    def source(draw):
        for rows in (3, 4):
            x, weight = draw.randn(rows, 8), draw.randn(8)
            compiled = Alternative(COMPILED, lambda x, weight: called.append(len(x)))
            plain = Alternative("plain", lambda x, weight: pytest.fail("takes no compiling"))
            yield Point(str(rows), draw.args(x, weight), 1, alternatives=(plain, compiled))

    monkeypatch.setattr(norm, "bench_source", source)
    before = torch.get_num_threads()
    ahead._run_sizes("rmsnorm", "cpu", torch.float32, "tiny")
    assert called == [3, 4]
    assert torch.get_num_threads() == before


def test_failures_are_left_to_the_measurement(norm, monkeypatch):
    called = []

    def broken(x, weight):
        raise RuntimeError("no compiler")

    def source(draw):
        given = draw.args(draw.randn(2, 8), draw.randn(7))
        alternatives = (Alternative(COMPILED, broken),)
        yield Point("wrong", given, 1, alternatives=alternatives)
        called.append("went on")

    monkeypatch.setattr(norm, "bench_source", source)
    ahead._run_sizes("rmsnorm", "cpu", torch.float32, "tiny")
    assert called == ["went on"]


@pytest.mark.slow
def test_processes_take_all_ops(monkeypatch, caplog):
    monkeypatch.setattr(ahead.os, "sched_getaffinity", lambda pid: range(4))
    monkeypatch.setattr(ahead, "MIN_OPS", 2)
    with caplog.at_level(logging.INFO, "cairn"):
        ahead.compile_ahead(chosen_ops(["norm"]), Draw("cpu", torch.float32, "tiny"))
    assert ", 0 ops left" in caplog.text


def test_few_ops_are_compiled_when_measured(norm, monkeypatch):
    monkeypatch.setattr(ahead.multiprocessing, "get_context", pytest.fail)
    ahead.compile_ahead([norm], Draw("cpu", torch.float32, "tiny"))


@pytest.mark.usefixtures("norm")
def test_a_function_is_compiled_at_all_sizes_of_an_op():
    sizes = []

    def traced(graph, inputs):
        sizes.append(len(inputs))
        return graph.forward

    config = import_module("torch._dynamo.config")
    doubled = torch.compile(lambda x: 2 * x, dynamic=False, backend=traced)
    with config.patch(recompile_limit=2):
        ahead._set_up_compilers()
        for rows in range(1, 21):
            doubled(torch.ones(rows))
    assert len(sizes) == 20
    torch.compiler.reset()
