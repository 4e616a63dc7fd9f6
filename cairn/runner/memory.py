"""Measures the memory of steps on a GPU beside weights and pages, by running the largest ones.

All rows share a few temporary pages, so the results are meaningless. The memory of a step depends
on its number of slots and on the width of the page table, which are those of the engine.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch

from cairn.attention.registry import cache_schema
from cairn.cache.pools import CachePools, PoolSizes
from cairn.cache.schema import PageFormat
from cairn.errors import BadModel, OutOfMemory
from cairn.ops.compile_ahead import compile_ahead
from cairn.ops.compile_cache import cache_path
from cairn.runner.first_steps import FirstSteps
from cairn.runner.runner import Runner, RunnerShape, StepModel
from cairn.runner.step import NO_ROWS, DecodeWork, PageGrant, RowOpen, RowWork, StepPlan
from cairn.specs.model import MixerSpec, ModelSpec
from cairn.types import SamplingParams

PAGES = 8
"""Pages of the temporary pool."""
FRAMED = 64
"""Queries whose pages fit into the frames of the temporary pool together."""
CONTEXT = 1 << 16
"""Longest context of measured steps: memory does not grow beyond it, but time would."""
FRAGMENTS = 32 << 20
"""Bytes added to the activations: measured steps use free blocks between the weights that small
tensors of the page pools break up later."""
MAX_KEPT = 1 << 30
"""Bytes of kernels and libraries' workspaces, at most: if more has gone, or some has come, another
process changed what was measured."""
SMALL = 6
"""How many of the smallest prefill graphs are captured to measure what one takes."""
TARGETS = 256
"""Prompt log-probabilities that the largest prefill step reports."""

DRAWN = SamplingParams(temperature=0.5, top_k=10, top_p=0.9, min_p=0.01)
"""Uses every sampling parameter that a graph supports."""
REPORTED = replace(DRAWN, logprobs=1)
EVERYTHING = replace(REPORTED, repetition_penalty=1.1, logit_bias={0: 1.0}, prompt_logprobs=1)


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps to measure.

    Attributes:
        slots: slots of a prefill step.
        longest: user tokens of the longest sequence.
        graphs: whether steps run as CUDA graphs.
    """

    slots: int
    longest: int
    graphs: bool


@dataclass(frozen=True, slots=True)
class Measured:
    """Device memory of steps, in bytes.

    Attributes:
        activations: the most that torch held while the steps ran, a little more than their tensors,
            and FRAGMENTS. The allocator may later hold more for other steps, and frees that when
            needed.
        graphs: memory of all graphs, including changes by other processes during the measurement.
        kept: memory that stays in use outside of torch's allocator, such as kernels.
    """

    activations: int = 0
    graphs: int = 0
    kept: int = 0


NO_STEPS = Measured()


def measured(
    model: StepModel,
    spec: ModelSpec,
    shape: RunnerShape,
    steps: Steps,
    form: PageFormat,
    device: torch.device,
) -> Measured:
    """`measure`, or its result of an earlier run with the same arguments, sources, versions and
    kind of device, cached in a file beside the compiled kernels; `kept` then covers what is not
    loaded yet. Measurements that another process disturbed are not cached."""
    cached = cache_path((spec, shape, steps, form), device)
    with contextlib.suppress(OSError, ValueError, TypeError):
        if cached is not None:
            return Measured(**json.loads(cached.read_text()))
    free = _free(device)
    found = measure(model, spec.mixers, shape, steps, form, device)
    kept = free - _free(device)
    if cached is not None and 0 <= kept <= MAX_KEPT:
        with contextlib.suppress(OSError):
            cached.write_text(json.dumps(asdict(replace(found, kept=kept))))
    return found


def measure(
    model: StepModel,
    mixers: tuple[MixerSpec, ...],
    shape: RunnerShape,
    steps: Steps,
    form: PageFormat,
    device: torch.device,
) -> Measured:
    """Measure the memory of steps. `kept` is 0, because it is in use already.

    Args:
        model: on the device, loaded.
        mixers: specs of the model's mixers.
        shape: sizes of the future runner.
        steps: sizes of the largest steps.
        form: storage format of the pages.
        device: a GPU.

    Raises:
        OutOfMemory: the largest step does not fit beside the weights.
        BadModel: the logits are not numbers.
    """
    try:
        schema = cache_schema(mixers, form)
        pages = (PAGES,) * len(schema.groups)
        sizes = PoolSizes(pages, shape.num_rows, frames=FRAMED * schema.selected)
        pools = CachePools(schema, sizes, device, steps.graphs)
        for tensor in (*pools.tensors(), *pools.states()):
            # Zeroed: NaN in the temporary pages would give invalid token ids.
            tensor.zero_()
        runner = Runner(model, mixers, pools, shape, device)
        plans = _largest(shape, steps)
        compile_ahead(functools.partial(runner.rehearse, [*plans, *_first(runner, steps)]))
        # The memory of CUDA graphs is measured separately.
        runner.graphs = runner.prefill_graphs = None
        _reserved(device)
        torch.cuda.reset_peak_memory_stats(device)
        for plan in plans:
            _run(runner, plan)
        if runner.encoder is not None:
            runner.encoder.rehearse(shape.image_sides[-1:])
        peak = torch.cuda.max_memory_reserved(device)
        del runner
        # Memory kept now stays in use after the pages below are freed, and counts as use by others.
        activations = peak - _reserved(device) + FRAGMENTS + (shape.encoder_bytes or 0)
        graphs = 0
        graphing = Runner(model, mixers, pools, shape, device)
        if graphing.graphs is not None:
            graphs = _graph_bytes(graphing, steps, device)
    except (torch.OutOfMemoryError, OutOfMemory) as error:
        what, hint = f"a step of {steps.slots} slots", "Lower chunked_prefill_size"
        hint += " (--chunked-prefill-size)"
        if shape.image_sides:
            what += f" or an image of {shape.image_sides[-1]} x {shape.image_sides[-1]}"
            hint += ", or size.longest_edge of preprocessor_config.json"
        raise OutOfMemory(f"{what} does not fit beside the weights: {error}", hint) from error
    return Measured(activations, graphs)


def _first(runner: Runner, steps: Steps) -> list[StepPlan]:
    """The steps of the later warm-up."""
    shape, guesses = runner.shape, runner.draft_head is not None
    chunk = int(shape.slots.tokens_in(steps.slots))
    # Window pages are granted also to models without such layers, which ignore them.
    first = FirstSteps(shape, PAGES, PAGES, steps.longest, chunk, runner.front_slots, guesses)
    every = (*first.prompts(on_gpu=True), *first.rows(), *first.guesses())
    return [plan for some in every for plan in some.without_decode()]


def _largest(shape: RunnerShape, steps: Steps) -> list[StepPlan]:
    """The largest steps of every kind. A step of fewer slots can take more memory, as kernels for
    few tokens have larger workspaces; so can one of many rows."""
    plans = [prefill_step(shape, steps, targets=TARGETS)]
    for halved in range(steps.slots.bit_length()):
        part = replace(steps, slots=steps.slots >> halved)
        plans += [prefill_step(shape, part, spread=spread) for spread in (False, True)]
    return [*plans, decode_step(shape, steps.longest, eager=True)]


def prefill_step(
    shape: RunnerShape, steps: Steps, *, spread: bool = False, targets: int = 0
) -> StepPlan:
    """A prefill of `steps.slots` slots that end the longest sequences, in as few rows as possible.

    Args:
        shape: of the runner.
        steps: number of slots, and the longest sequence.
        spread: divide them among all rows instead.
        targets: prompt log-probabilities to report, at most.
    """
    slots, longest = shape.slots, min(steps.longest, max(CONTEXT, steps.slots))
    works: list[RowWork] = []
    left = steps.slots
    most = -(-left // shape.num_rows) if spread else left
    for row in range(shape.num_rows):
        count = min(longest, max(1, slots.tokens_in(min(left, most))))
        told = [0] * (0 if works else min(count - 1, targets))
        works.append(RowWork(row, longest - count, [0] * count, sample=True, prompt_targets=told))
        left -= slots.slots_for(longest) - slots.slots_for(longest - count)
        if left <= 0:
            break
    return _plan(shape, works, longest, EVERYTHING)


def decode_step(
    shape: RunnerShape,
    longest: int,
    *,
    eager: bool,
    rows: int | None = None,
    params: SamplingParams = DRAWN,
) -> StepPlan:
    """One token in every row.

    Args:
        shape: of the runner.
        longest: user tokens of the longest sequence.
        eager: rows are sampled by EVERYTHING, which graphs do not support.
        rows: number of rows, none of which fills a page; None: all rows, each of which fills its
            page.
        params: sampling parameters of rows in a graph.
    """
    slots, longest = shape.slots, min(longest, CONTEXT)
    end = max(1, longest // slots.tokens_per_page * slots.tokens_per_page)
    numbers = range(shape.num_rows if rows is None else rows)
    last = end - 1 if rows is None else max(0, end - 2)
    if eager:
        works = [RowWork(row, last, [0], True, 1) for row in numbers]
        return _plan(shape, works, longest, EVERYTHING)._replace(constrained=numbers)
    decode = DecodeWork.of(numbers, [last] * len(numbers), [1] * len(numbers))
    return _plan(shape, (), longest, params, decode)


def verify_steps(runner: Runner, longest: int, most: int) -> list[StepPlan]:
    """A step of rows with the largest number of guesses, in up to `most` slots; none without
    speculation, or if rows are too short."""
    shape, longest = runner.shape, min(longest, CONTEXT)
    each, ahead = shape.drafts + 1, shape.drafts if runner.draft_head is not None else 0
    first = longest - each - ahead
    if not shape.drafts or first < 0:
        return []
    rows = range(max(1, min(shape.num_rows, most // (each + 1))))
    works = [
        RowWork(row, first, [0] * each, True, 1, drafts=shape.drafts, ahead=ahead) for row in rows
    ]
    return [_plan(shape, works, longest, DRAWN)]


def _plan(
    shape: RunnerShape,
    works: Sequence[RowWork],
    longest: int,
    params: SamplingParams,
    decode: DecodeWork = NO_ROWS,
) -> StepPlan:
    """The plan of these works, in rows that are sampled by `params`."""
    pages = tuple(i % PAGES for i in range(shape.slots.pages_for(longest)))
    rows = [*decode.row.tolist(), *(work.row for work in works)]
    opened = (RowOpen(row, "profile", params, seed=0, history=(0,), num_prompt=1) for row in rows)
    # Also for window layers; ignored by models without them.
    grants = (PageGrant(row, 0, pages, pages) for row in rows)
    return StepPlan(-1, (), tuple(opened), tuple(grants), tuple(works), decode)


def _run(runner: Runner, plan: StepPlan) -> None:
    result = runner.run(plan)
    if any(token < 0 for token in result.tokens):
        raise BadModel(
            "the model's logits are NaN or infinite", "Check the weights, or try --dtype float32"
        )


def _graph_bytes(runner: Runner, steps: Steps, device: torch.device) -> int:
    """Bytes that all graphs keep. They share a pool: the largest graph of each kind (prefill,
    guesses, draws, reports) adds its own memory, every other graph as much as a small one."""
    decoding, prefilling = runner.graphs, runner.prefill_graphs
    assert decoding is not None and prefilling is not None
    free = [_free(device)]
    kinds = prefilling.kinds()
    # Capture the largest graph and several of the smallest: CUDA allocates in large blocks, so one
    # small graph alone may show no growth.
    prefilling.prepare(kinds[0])
    free.append(_free(device))
    for kind in kinds[-SMALL:]:
        prefilling.prepare(kind)
    free.append(_free(device))
    shape, longest = runner.shape, steps.longest
    decodes = [
        *verify_steps(runner, longest, decoding.buckets[-1]),
        decode_step(shape, longest, eager=False),
        decode_step(shape, longest, eager=False, params=REPORTED),
        decode_step(shape, longest, eager=False, rows=1),
    ]
    for plan in decodes:
        _run(runner, plan)
        free.append(_free(device))
    prefill, small, *large, one = (max(0, a - b) for a, b in itertools.pairwise(free))
    return (
        prefill
        + small * len(kinds) // SMALL
        + sum(large)
        + one * max(0, len(decoding.kinds()) - len(large))
    )


def _reserved(device: torch.device) -> int:
    """Bytes that torch's allocator holds after freeing its unused blocks."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device)


def _free(device: torch.device) -> int:
    _reserved(device)
    return torch.cuda.mem_get_info(device)[0]
