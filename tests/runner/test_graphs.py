"""Decode steps as CUDA graphs against the same steps run operation by operation."""

import itertools
import random

import pytest
import torch

from cairn import LLM, SamplingParams
from cairn.runner.graphs import buckets_up_to

gpu = pytest.mark.gpu
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("most", [1, 2, 3, 9, 64, 72, 73, 500])
def test_buckets_reach_and_waste_little(most):
    found = buckets_up_to(most)
    assert list(found) == sorted(set(found)) and found[0] == 1
    assert found[-1] >= most
    assert all(b <= most for b in found[:-1])
    assert all(b <= max(2 * a, a + 8, a * 5 // 4) for a, b in itertools.pairwise(found))


def prompts(rng, count, longest):
    """Lengths around page borders, shorter than the window and with many candidate pages."""
    edges = [1, 62, 63, 64, 126, 127, 256, 257, 700]
    lengths = [rng.choice(edges) if rng.random() < 0.5 else rng.randrange(1, longest)
               for _ in range(count)]  # fmt: skip
    return [{"prompt_token_ids": [rng.randrange(256) for _ in range(n)]} for n in lengths]


def answers(llm, given, params):
    found = llm.generate(given, params, use_tqdm=False)
    return [
        (one.outputs[0].token_ids, [p[t].logprob for p, t in zip(
            one.outputs[0].logprobs, one.outputs[0].token_ids, strict=True)])
        for one in found
    ]  # fmt: skip


@gpu
@needs_cuda
@pytest.mark.parametrize("rows", [1, 3, 8, 21])
def test_graphs_give_what_eager_steps_give(rows):
    llm = LLM(device="cuda", dtype="float32", max_num_seqs=rows, max_model_len=8192,
              enable_prefix_caching=False)  # fmt: skip
    runner = llm.engine.runner
    graphs = runner.graphs
    assert graphs is not None
    rng = random.Random(rows)
    params = SamplingParams(temperature=0, max_tokens=140, ignore_eos=True, logprobs=0)
    for longest in (300, 1500, 5000):
        given = prompts(rng, rows, longest)
        runner.graphs = graphs
        replayed = answers(llm, given, params)
        assert graphs._captured, "no step was replayed"
        runner.graphs = None
        for got, wanted in zip(replayed, answers(llm, given, params), strict=True):
            assert got[0] == wanted[0]
            assert got[1] == pytest.approx(wanted[1], abs=1e-3)


@gpu
@needs_cuda
def test_counts_are_those_of_eager_steps():
    counted = []
    for with_graphs in (True, False):
        llm = LLM(device="cuda", max_num_seqs=2, max_model_len=4096)
        if not with_graphs:
            llm.engine.runner.graphs = None
        given = prompts(random.Random(5), 2, 3000)
        llm.generate(given, SamplingParams(temperature=0, max_tokens=70), use_tqdm=False)
        counted.append((llm.stats().queries, llm.stats().pages_read, llm.stats().pages_held))
    assert counted[0] == counted[1]


@gpu
@needs_cuda
def test_sampling_and_masks_work_on_replayed_logits():
    llm = LLM(device="cuda", dtype="float32", max_num_seqs=4, max_model_len=2048)
    given = prompts(random.Random(6), 4, 900)
    params = [
        SamplingParams(temperature=0.7, seed=1, top_p=0.9, max_tokens=40),
        SamplingParams(temperature=0, repetition_penalty=1.2, max_tokens=40),
        SamplingParams(temperature=0, logit_bias={5: 100.0}, max_tokens=40),
        SamplingParams(temperature=1.0, top_k=5, min_p=0.01, seed=2, max_tokens=40),
    ]
    replayed = [r.outputs[0].token_ids for r in llm.generate(given, params, use_tqdm=False)]
    llm.engine.runner.graphs = None
    eager = [r.outputs[0].token_ids for r in llm.generate(given, params, use_tqdm=False)]
    assert replayed[2] == [5] * 40
    assert replayed == eager
