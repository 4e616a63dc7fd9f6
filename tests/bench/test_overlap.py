"""Pages that neighbouring queries share, with and without prompts made for more sharing."""

import torch

from cairn import LLM, SamplingParams, ops
from cairn.bench.overlap import NEIGHBOURS, SelectionWatch
from cairn.bench.session import Subject
from cairn.ops.testing import Make
from tests.specs import hils_of


def selected(make, key, z):
    """Run one layer with 64 queries at the end of 40 pages."""
    paged = make.paged((320,), 1, 8, 16)
    row, slot, _ = paged.queries((64,))
    given = (make.randn(64, 1, 16), z, paged.k_cache, paged.v_cache, key, None)
    return ops.landmark_attention(*given, row, slot, paged.page_table, 8, 4, False)[1]


def test_the_union_of_neighbours_is_counted():
    make = Make()
    key = make.randn(42, 1, 16)
    z = make.randn(64, 1, 16)
    with SelectionWatch() as watch:
        indices = selected(make, key, z)
    blocks = indices.view(-1, NEIGHBOURS * 4)
    expected = [len(block.unique()) for block in blocks]
    assert watch.blocks == 4
    assert watch.union == sum(expected) / 4
    with SelectionWatch() as same:
        selected(make, key, z[:1].expand(64, 1, 16).contiguous())
    assert same.union == 4


def test_nothing_seen_is_none():
    with SelectionWatch() as watch:
        torch.ones(3) + 1
    assert watch.union is None


def test_the_embedded_model_is_seen():
    llm = LLM(max_model_len=2500, dtype="float32")
    with SelectionWatch() as watch:
        llm.generate({"prompt_token_ids": [7, 8, 9] * 800}, SamplingParams(max_tokens=1))
    topk = hils_of(llm.spec).topk
    llm.shutdown()
    assert topk <= watch.union < NEIGHBOURS * topk


def test_prompts_of_a_shape_repeat_a_few_tokens_when_pages_shall_overlap():
    (alike,) = Subject(None, "345m", overlap=True).prompts(1, 2000, 1000, seed=3)
    (random,) = Subject(None, "345m").prompts(1, 2000, 1000, seed=3)
    assert len(alike["prompt_token_ids"]) == 2000
    assert len(set(alike["prompt_token_ids"][:32])) < 8
    assert len(set(random["prompt_token_ids"][:32])) > 28
