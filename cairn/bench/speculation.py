"""`cairn bench speculation`: decode with and without speculation, in one engine.

The last matrix of each mixer and feed-forward part is set to zero, so layers take their usual time
but add nothing to the residual stream, and the output head is a permutation of the embedding: each
token determines the next one, in long cycles. A prompt that ends with a cycle is continued by a
copy of it, which prompt lookup predicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch

from cairn.bench.session import Subject, TokenPrompt, open_engine, random_prompts
from cairn.engine.drafts import Drafter, NgramDrafter
from cairn.engine.pace import Pace
from cairn.engine.request import Request
from cairn.errors import BadRequest
from cairn.layers.linear import Head
from cairn.llm import LLM
from cairn.models.decoder import Decoder
from cairn.types import SamplingParams

TURNS = 3
"""Runs with and without speculation, in turns; the fastest of each is recorded."""
MAX_MATCH = 12
"""Tokens of the longest match of prompt lookup."""
RANDOM_TEMPERATURE = 100.0
"""Temperature for random text; at lower ones the model follows its cycles."""
RANDOM, WRONG = "random text", "wrong guesses"
CASES = ("copying", RANDOM, WRONG)


@dataclass(frozen=True, slots=True)
class SpeculationPlan:
    """Options of the benchmark.

    Attributes:
        subject: folder or shape.
        context: tokens per prompt.
        batches: numbers of sequences.
        output_len: tokens per output.
        drafts: draft tokens per row and step.
        backend: the attention kind.
        options: keywords of LLM.
    """

    subject: Subject
    context: int
    batches: tuple[int, ...]
    output_len: int
    drafts: int
    backend: str
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SpeculationCell:
    """One case.

    Attributes:
        shape: shape or model folder.
        case: one of CASES: the output copies a passage of the prompt; prompt lookup on random text;
            all draft tokens are wrong.
        context, batch, output_len, drafts: as in the plan.
        backend: "hsa" or "dense".
        dtype: of weights and activations.
        plain_ms, ms: mean milliseconds per step without and with speculation.
        plain_tokens_per_s, tokens_per_s: likewise, of all sequences.
        drafted, accepted: number of draft tokens, and of accepted ones.
        phase: "speculation".
    """

    shape: str
    case: str
    context: int
    batch: int
    output_len: int
    drafts: int
    backend: str
    dtype: str
    plain_ms: float
    ms: float
    plain_tokens_per_s: float
    tokens_per_s: float
    drafted: int
    accepted: int
    phase: str = "speculation"


@dataclass(frozen=True, slots=True)
class WrongDrafter:
    """Drafter that replaces each token of prompt lookup by another one."""

    lookup: NgramDrafter
    ahead: ClassVar[int] = 0

    @property
    def drafts(self) -> int:
        """Most draft tokens."""
        return self.lookup.drafts

    def guess(self, request: Request, most: int) -> list[int]:
        """Up to `most` wrong draft tokens."""
        return [token ^ 1 for token in self.lookup.guess(request, most)]


@dataclass(slots=True)
class _Ran:
    outputs: list[list[int]]
    step: float
    tokens_per_s: float
    drafted: int
    accepted: int


def run_speculation(plan: SpeculationPlan) -> Iterator[SpeculationCell]:
    """Yield every case when it is measured."""
    options = {
        "max_model_len": plan.context + plan.output_len + 1,
        "max_num_seqs": max(plan.batches),
        "speculative_algorithm": "NGRAM",
        "speculative_num_draft_tokens": plan.drafts,
    } | dict(plan.options)
    if plan.context <= plan.output_len:
        raise BadRequest(
            f"a prompt of {plan.context} tokens holds no passage as long as {plan.output_len} "
            "tokens of output",
            "Give a longer --context or a shorter --output-len",
        )
    with open_engine(plan.subject, plan.backend, options) as llm:
        follow_cycles(llm, max(1, plan.output_len - MAX_MATCH))
        for batch in plan.batches:
            prompts = random_prompts(batch, plan.context, llm.spec.vocab_size, seed=batch)
            for case in CASES:
                yield _cell(llm, plan, prompts, case)


@torch.no_grad()
def follow_cycles(llm: LLM, period: int) -> None:
    """Change the weights so that each token determines the next one, in cycles of `period`
    tokens."""
    model = cast(Decoder, llm._built.runner.model)
    for name, weight in model.named_parameters():
        if name.endswith((".out.weight", ".down.weight")):
            weight.zero_()
    table = model.embedding.weight[: llm.spec.vocab_size]
    token = torch.arange(len(table), device=table.device)
    place = token % period
    begin = token - place
    before = begin + (place - 1) % (len(table) - begin).clamp(max=period)
    model.head = Head(*table.shape, dtype=table.dtype).to(table.device)
    # The head is padded to whole tiles.
    model.head.weight.zero_()[: len(table)] = table[before]


def with_passages(
    llm: LLM, prompts: Sequence[TokenPrompt], params: SamplingParams
) -> list[TokenPrompt]:
    """Replace the end of each prompt by the model's output for it, which the model then repeats."""
    outputs = _run(llm, prompts, params, None, None).outputs
    return [
        {"prompt_token_ids": [*prompt["prompt_token_ids"][: -len(output)], *output]}
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def _cell(
    llm: LLM, plan: SpeculationPlan, prompts: Sequence[TokenPrompt], case: str
) -> SpeculationCell:
    drawn = SamplingParams(
        temperature=RANDOM_TEMPERATURE, seed=1, max_tokens=plan.output_len, ignore_eos=True
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=plan.output_len, ignore_eos=True)
    params = drawn if case == RANDOM else greedy
    if case != RANDOM:
        prompts = with_passages(llm, prompts, greedy)
    lookup = NgramDrafter(plan.drafts, 2, MAX_MATCH)
    drafter: Drafter = WrongDrafter(lookup) if case == WRONG else lookup
    times = llm.engine.core.times
    plain: list[_Ran] = []
    guessing: list[_Ran] = []
    for turn in range(TURNS + 1):
        variants: tuple[tuple[list[_Ran], Drafter | None], ...]
        variants = ((plain, None), (guessing, drafter))
        for found, some in variants:
            ran = _run(llm, prompts, params, some, Pace(times, plan.drafts))
            # The first turn captures graphs and measures step times for the pace.
            if turn:
                found.append(ran)
    without, best = (max(runs, key=lambda ran: ran.tokens_per_s) for runs in (plain, guessing))
    return SpeculationCell(
        shape=plan.subject.name,
        case=case,
        context=plan.context,
        batch=len(prompts),
        output_len=plan.output_len,
        drafts=plan.drafts,
        backend=plan.backend,
        dtype=llm.engine_config.dtype,
        plain_ms=without.step * 1e3,
        ms=best.step * 1e3,
        plain_tokens_per_s=without.tokens_per_s,
        tokens_per_s=best.tokens_per_s,
        drafted=best.drafted,
        accepted=best.accepted,
    )


def _run(
    llm: LLM,
    prompts: Sequence[TokenPrompt],
    params: SamplingParams,
    drafter: Drafter | None,
    pace: Pace | None,
) -> _Ran:
    """Run the prompts once, with their complete pages cached: one step computes the rest of
    them."""
    scheduler = llm.engine.core.scheduler
    scheduler.drafter, scheduler.pace = drafter, pace
    before = llm.stats()
    results = llm.generate(list(prompts), params, use_tqdm=False)
    after = llm.stats()
    outputs = [list(result.outputs[0].token_ids) for result in results]
    seconds = after.decode_seconds - before.decode_seconds
    steps = after.steps - before.steps - 1
    tokens = after.generated_tokens - before.generated_tokens - len(prompts)
    return _Ran(
        outputs,
        seconds / max(1, steps),
        tokens / seconds,
        after.drafted_tokens - before.drafted_tokens,
        after.accepted_tokens - before.accepted_tokens,
    )
