"""FlashInfer behind dense attention: its calls by a double of its wrapper on the CPU, and itself on
a GPU that has it."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from cairn.ops.attention import flashinfer
from cairn.ops.attention.dense_attention import dense_attention
from cairn.ops.attention.flashinfer import Kind, Wrapper, attend, wrappers
from cairn.ops.attention.launch import SPLIT_TOKENS, Task
from cairn.ops.testing import Make, compare

BF16 = torch.bfloat16


class Double:
    """BatchPrefillWithPagedKVCacheWrapper, as FlashInfer documents it, by our definition."""

    plans = 0
    fails = ""
    made: ClassVar[list[Double]] = []
    ran: ClassVar[list[Double]] = []

    def __init__(self, workspace, kv_layout, backend):
        self.backend = backend
        Double.made.append(self)
        assert kv_layout == "HND"
        assert not workspace.any()
        if self.fails:
            raise RuntimeError(self.fails)

    def plan(self, qo_indptr, kv_indptr, kv_indices, last_page_len, *sizes, **options):
        Double.plans += 1
        assert options["causal"]
        assert options["q_data_type"] == options["kv_data_type"] == BF16
        assert all(x.dtype == torch.int32 for x in (qo_indptr, kv_indptr, kv_indices))
        *_, size = sizes
        pages = kv_indptr.diff()
        lengths = (pages - 1) * size + last_page_len
        assert ((last_page_len >= 1) & (last_page_len <= size)).all()
        assert lengths.tolist() == options["seq_lens"].tolist()
        assert int(kv_indptr[-1]) == kv_indices.numel()
        self.sizes, self.scale = sizes, options["sm_scale"]
        self.bounds, self.pages = kv_indptr.tolist(), kv_indices
        self.lengths, self.counts = lengths.tolist(), qo_indptr.diff().tolist()

    def run(self, q, caches, out, lse, return_lse):
        assert return_lse
        assert (q.shape[1], *caches[0].shape[1:2], q.shape[2], caches[0].shape[2]) == self.sizes
        lines = [self.pages[a:b] for a, b in zip(self.bounds, self.bounds[1:], strict=False)]
        table = torch.nn.utils.rnn.pad_sequence(lines, batch_first=True)
        row = torch.arange(len(lines)).repeat_interleave(torch.tensor(self.counts))
        slot = torch.cat(
            [torch.arange(n - m, n) for n, m in zip(self.lengths, self.counts, strict=True)]
        )
        o, logs = dense_attention.reference(q, *caches, row, slot, table, self.scale)
        out.copy_(o)
        lse.copy_(logs / math.log(2))


@pytest.fixture
def double(monkeypatch):
    """FlashInfer's place taken, and what of CUDA its wrapper needs."""
    library = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=Double, __version__="0")
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None)
    monkeypatch.setattr(flashinfer.importlib, "import_module", lambda name: library)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    for name, value in (("plans", 0), ("made", []), ("ran", [])):
        monkeypatch.setattr(Double, name, value)
    wrappers.cache_clear()
    yield Double
    wrappers.cache_clear()


KIND = Kind(torch.device("cpu"), 0, BF16, 8, 2, 64, 64)


def step(
    lengths: tuple[int, ...] = (9, 0, 300, 64, 129),
    counts: tuple[int, ...] = (1, 0, 40, 64, 2),
    device: str = "cpu",
    scale: float | None = None,
) -> tuple[Task, list[int]]:
    """A decode row, a row that sits out, two chunks and a row of two, unless said."""
    make = Make(device)
    paged = make.paged(lengths, 2, 64, 64, dtype=BF16)
    row, slot, _ = paged.queries(counts)
    q = make.randn(sum(counts), 8, 64, dtype=BF16)
    task = Task(q, paged.k_cache, paged.v_cache, row, slot, paged.page_table, scale=scale)
    return task, paged.stretches(counts)


def shuffle(task: Task) -> None:
    """Bring the pages into another order."""
    order = torch.randperm(len(task.k_cache)).to(task.q.device)
    for cache in (task.k_cache, task.v_cache):
        cache[order] = cache.clone()
    task.page_table.copy_(order[task.page_table.long()])


def agree(result, task: Task) -> None:
    expected = dense_attention.reference(*task.inputs(), task.scale)
    for got, wanted in zip(result, expected, strict=True):
        compare(got, wanted, (1.6e-2, 1e-2), "FlashInfer")


@pytest.mark.parametrize("scale", [None, 0.3])
def test_calls_say_what_the_stretches_do(double, scale):
    task, stretches = step(scale=scale)
    agree(Wrapper(KIND, "fa2").run(task, tuple(stretches)), task)


def test_a_step_is_planned_once_and_pages_are_read_every_time(double):
    task, stretches = step()
    wrapper = Wrapper(KIND, "fa2")  # plans once by itself
    with torch.inference_mode():
        agree(wrapper.run(task, tuple(stretches)), task)
    shuffle(task)
    agree(wrapper.run(task, tuple(stretches)), task)
    assert double.plans == 2
    last = replace(task, q=task.q[-2:], row=task.row[-2:], slot=task.slot[-2:])
    agree(wrapper.run(last, (4, 127, 2)), last)
    assert double.plans == 3


def test_what_cannot_be_had_is_refused_with_the_reason(double, monkeypatch, caplog):
    monkeypatch.setattr(Double, "fails", "no nvcc")
    with caplog.at_level(logging.INFO, "cairn"):
        assert wrappers(KIND) is None
    assert "no FlashInfer for dense attention (bfloat16, heads 8/2 of 64): no nvcc" in caplog.text


def test_both_kernels_are_made_at_once_and_said(double, caplog):
    with caplog.at_level(logging.INFO, "cairn"):
        assert wrappers(KIND) is wrappers(KIND) is not None
    assert [made.backend for made in double.made] == ["fa2", "auto"]
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith("dense attention (bfloat16, heads 8/2 of 64) by FlashInfer 0: ")


@pytest.mark.parametrize(
    "lengths, counts, backend",
    [
        ((2_100,), (2_048,), "auto"),
        ((2_100,), (2_047,), "fa2"),
        ((64,) * 20, (64,) * 20, "fa2"),
        ((128,) * 20, (128,) * 20, "auto"),
        ((300, 500), (1, 1), "fa2"),
    ],
)
def test_the_kernel_follows_from_tokens_and_heads(double, monkeypatch, lengths, counts, backend):
    monkeypatch.setattr(flashinfer, "_kind", lambda q, k_cache: KIND)
    task, stretches = step(lengths, counts)
    monkeypatch.setattr(Double, "run", lambda self, *given, **named: double.ran.append(self))
    attend(task, stretches)
    assert [one.backend for one in double.ran] == [backend]


def test_a_cpu_is_refused():
    task, stretches = step()
    given = (task.q, task.k_cache, task.v_cache, task.page_table)
    assert not flashinfer.accepts(*given, stretches, False)


@pytest.mark.gpu
@pytest.mark.skipif(bool(flashinfer.MISSING), reason=flashinfer.MISSING)
def test_itself_reads_the_pages_of_every_call():
    task, stretches = step(device="cuda")
    run = dense_attention.using("flashinfer")
    agree(run(*task.inputs(), stretches=stretches), task)
    shuffle(task)
    agree(run(*task.inputs(), stretches=stretches), task)


@pytest.mark.gpu
@pytest.mark.skipif(bool(flashinfer.MISSING), reason=flashinfer.MISSING)
def test_who_takes_a_call():
    task, stretches = step((700, 300), (SPLIT_TOKENS, 1), device="cuda")
    given = task.inputs()
    assert dense_attention.choice(*given, stretches=stretches) == "flashinfer"
    assert dense_attention.choice(*given) != "flashinfer"
    masked = dense_attention.choice(*given, mask_landmarks=True, stretches=stretches)
    assert masked != "flashinfer"
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        captured = dense_attention.choice(*given, stretches=stretches)
    assert captured != "flashinfer"
    few, stretches = step((700,), (SPLIT_TOKENS,), device="cuda")
    assert dense_attention.choice(*few.inputs(), stretches=stretches) == "triton_splits"


@pytest.mark.gpu
@pytest.mark.skipif(bool(flashinfer.MISSING), reason=flashinfer.MISSING)
def test_a_planned_call_can_be_captured_by_who_asks_for_it():
    task, stretches = step(device="cuda")
    run = dense_attention.using("flashinfer")
    expected = run(*task.inputs(), stretches=stretches)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(*task.inputs(), stretches=stretches)
    graph.replay()
    for replayed, eager in zip(got, expected, strict=True):
        assert torch.equal(replayed, eager)
