"""Whole engines whose steps are graphs, also with drafts; the CPU acts as a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cairn.cache.pools import CachePools
from cairn.engine.build import Built
from cairn.runner.executor import InProcessExecutor
from cairn.runner.graphs import Ending
from cairn.runner.runner import Runner
from tests.engine.fakes import FakeDrafter
from tests.engine.harness import text
from tests.engine.test_draft_head import STEPS, Mixed, Seen, drafting, plain
from tests.engine.test_draft_head import serve as serve_drafting
from tests.engine.test_families import build
from tests.engine.test_speculation import DRAWN, PLAIN, assert_told_alike, serve
from tests.support import shows

ASKED = ({}, {"logprobs": 2}, {"repetition_penalty": 1.2})
"""Outputs of graphs: tokens, reports, logits."""
LONGEST = 100
"""Tokens of a sequence, because the definitions of ops in a graph read as many slots."""


def in_graphs(built: Built, drafts: int, overlap: bool) -> Built:
    """The same engine with graphs for decode steps, as on a GPU. Reports are not copied on a CPU,
    so steps with reports may not overlap."""
    before = built.runner
    pools = CachePools(before.pools.schema, before.pools.sizes, "cpu", spare=True)
    shape = replace(before.shape, drafts=drafts)
    runner = Runner(before.model, built.spec.mixers, pools, shape, torch.device("cpu"))
    assert runner.graphs is not None
    runner.prefill_graphs, built.core.executor = None, InProcessExecutor(runner)
    built.core.overlap, built.core.scheduler.pace = overlap, None
    return replace(built, runner=runner)


@shows("hils glm_moe_dsa qwen3_next", "speculation")
@pytest.mark.parametrize("family", ["landmarks and windows", "recurrent"])
def test_verify_steps(no_gpu, family: str) -> None:
    """Right and wrong guesses, greedy and sampled, with other requests' features in some rows."""
    cold = build(family)
    prompts = [text(n, length, cold.spec.vocab_size) for n, length in enumerate((3, 20, 33))]
    params = [
        replace(DRAWN if n % 2 else PLAIN, max_tokens=16, **asked) for n, asked in enumerate(ASKED)
    ]
    built = in_graphs(build(family, max_model_len=LONGEST), 5, overlap=False)
    for each in ([0, 2], [0], [1]):
        some, asked = [prompts[n] for n in each], [params[n] for n in each]
        wanted = serve(cold, some, asked)
        drafter = built.core.scheduler.drafter = FakeDrafter(3, 0.8, most=5)
        for prompt, output in zip(some, wanted, strict=True):
            drafter.knows(prompt, output.token_ids)
        for found, output in zip(serve(built, some, asked), wanted, strict=True):
            assert_told_alike(found, output)
    totals = built.core.scheduler.drafts
    assert 10 < totals.accepted < totals.drafted
    kinds = built.runner.graphs._captured
    endings = {kind.ending for kind in kinds if kind.guessing}
    # With states the graph samples the tokens itself, to know which ones are accepted.
    logits = set() if family == "recurrent" else {Ending.LOGITS}
    assert endings == {Ending.GREEDY, Ending.REPORT} | logits


@pytest.mark.parametrize("family", ["latent, shared selections", "recurrent"])
def test_a_draft_layer_guesses_in_graphs_what_it_guesses_outside(no_gpu, family: str) -> None:
    seen = Seen()
    eager, built = (
        drafting(family, max_model_len=LONGEST),
        in_graphs(drafting(family, max_model_len=LONGEST), STEPS, True),
    )
    prompts = [text(n, length, eager.spec.vocab_size) for n, length in enumerate((5, 66))]
    params = [replace(DRAWN if n == 1 else PLAIN, max_tokens=12) for n in range(2)]
    wanted = serve_drafting(plain(family), prompts, params)
    for engine, right in ((eager, 0.5), (built, 0.5)):
        engine.core.scheduler.pace = None
        drafter = engine.core.scheduler.drafter = Mixed(seen, right)
        for prompt, output in zip(prompts, wanted, strict=True):
            drafter.knows(prompt, output.token_ids)
        before = seen.count
        found = serve_drafting(engine, prompts, params)
        assert [one.token_ids for one in found] == [one.token_ids for one in wanted]
    # Guesses after the same text were compared.
    assert seen.count > before and built.core.scheduler.drafts.accepted > 3
    assert any(kind.guessing for kind in built.runner.graphs._captured)
