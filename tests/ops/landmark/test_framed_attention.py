"""framed_attention is bitwise equal to landmark_attention on the same pages."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from cairn.ops.landmark.framed_attention import framed_attention
from cairn.ops.landmark.landmark_attention import landmark_attention
from cairn.ops.landmark.tuning import TUNING
from cairn.ops.testing import Arguments, cases_of, run
from tests.ops.tables import Tuned

PLAIN = "q lmk_q k_cache v_cache summary_key summary_bias row slot page_table window topk softmax1"


def with_frames(case: Arguments, share: float) -> tuple[Arguments, Arguments]:
    """The same attention over pages partly in frames, and over pages only."""
    named = case.clone().named(list(framed_attention.__signature__.parameters))
    heads, pages = named["frame_of"].shape
    head, page = (named["frame_of"] >= 0).nonzero(as_tuple=True)
    frame = named["frame_of"][head, page].long()
    order = torch.arange(pages, device=frame.device).flip(0)
    held = order < share * pages
    named["frame_of"] = torch.where(held, order, -1).int().repeat(heads, 1)
    plain = {name: named[name] for name in PLAIN.split()}
    for name, frames in (("k_cache", "k_frames"), ("v_cache", "v_frames")):
        named[name][page, head] = named[frames][frame, head]
        plain[name] = named[name].clone()
        named[frames] = named[name][order].contiguous()
        named[name][held] = 0
    more = {name: named[name] for name in ("strategy", "store_summaries") if name in named}
    return Arguments(kwargs=named), Arguments(kwargs=plain | more)


@pytest.mark.gpu
def test_frames_change_no_bit(tuned: Tuned) -> None:
    """Both take the same launches, unless one launch does the whole step, which reads no frames."""
    tuned(TUNING, fused_whole=math.inf)
    for case, share in itertools.product(cases_of(framed_attention, "cuda"), (0, 0.5, 1)):
        framed, plain = with_frames(case, share)
        left, found = run(framed_attention, "triton", framed)
        right, wanted = run(landmark_attention, "triton_few", plain)
        summaries = left.kwargs["summary_key"], right.kwargs["summary_key"]
        for one, other in (summaries, *zip(found, wanted, strict=True)):
            assert torch.equal(one, other)
