"""Runs a StepPlan: lays out the rows, runs the model, samples. No scheduling policy.

On a GPU a step is only launched here; its tokens stay on the device for the next step, and the host
waits for them when it reads the result.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from cairn import ops
from cairn.attention.page_reads import PageReads
from cairn.attention.registry import Backends
from cairn.attention.step import Step
from cairn.cache.landmarks import SlotMap
from cairn.cache.pools import CachePools
from cairn.distributed.groups import ALONE, Group
from cairn.ops.checks import skip_checks
from cairn.runner.draft_head import DraftHead, DraftModel, Ends
from cairn.runner.drafts import Drafts, Entries, Guessed
from cairn.runner.encoding import EncoderCache
from cairn.runner.experts import ExpertBalance
from cairn.runner.graphs import DecodeGraphs, Ending, Place, Replayed, Sampling
from cairn.runner.logprobs import MAX_GRAPH_LOGPROBS, Reported
from cairn.runner.prefill_graphs import PrefillGraphs
from cairn.runner.prompt_scores import PromptScores
from cairn.runner.rows import Layout, Rows
from cairn.runner.sampler import Choice, Picks, Report, Sampler
from cairn.runner.selection import selections
from cairn.runner.staging import Arriving, Trip, send
from cairn.runner.step import (
    NO_MASKS,
    Ints,
    Launched,
    Masks,
    Ready,
    RowWork,
    StateCopy,
    StepPlan,
    StepResult,
)
from cairn.runner.trees import Tree
from cairn.specs.model import MixerSpec
from cairn.types import Alternatives, LayerSelection

log = logging.getLogger(__name__)


class StepModel(Protocol):
    """The interface of a model that the runner needs."""

    def __call__(self, step: Step) -> Tensor:
        """Hidden states [T, hidden] of every slot of the step."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] -> [n, V] float32 over the user vocabulary."""

    def encode(self, pixels: Tensor) -> Tensor:
        """An image or video [frames, height, width, 3] uint8 -> [n, hidden]; only for models with
        an encoder."""

    def abridged(self, backends: Sequence[str]) -> contextlib.AbstractContextManager[None]:
        """Context manager in which steps run one block of each kind, with these backends by layer:
        they launch every kernel of the model, with meaningless results."""


@dataclass(frozen=True, slots=True)
class RunnerShape:
    """Sizes that are fixed when the runner is built.

    Attributes:
        num_rows: requests that run at once.
        max_pages: pages of the longest sequence.
        vocab_size: user vocabulary; the first id after it fills slots that hold no user token.
        slots: slot arithmetic.
        graph_slots: largest step with prefills, in slots, that runs as a graph.
        drafts: guesses of a row at a time.
        branches: alternative chains of guesses per row.
        encoder_bytes: size of the cache of image embeddings; None: the model has no encoder.
        image_sides: sides of square images for warm-up, ascending.
        axes: rotary positions per token.
    """

    num_rows: int
    max_pages: int
    vocab_size: int
    slots: SlotMap
    graph_slots: int
    drafts: int = 0
    branches: int = 1
    encoder_bytes: int | None = None
    image_sides: tuple[int, ...] = ()
    axes: int = 1


class _Chosen(NamedTuple):
    """The outputs of a step.

    Attributes:
        arriving: the sampled tokens, being copied to the host.
        report: their log-probabilities.
        selection: pages that the queries of some works selected.
        prompts: prompt log-probabilities.
        seconds: host time in the model.
        drafts: the guesses that it verified.
        guesses: new guesses after its tokens.
        tree: its branches.
    """

    arriving: Arriving | Trip
    report: Report = Report()
    selection: Mapping[int, tuple[LayerSelection, ...]] = MappingProxyType({})
    prompts: tuple[PromptScores, ...] = ()
    seconds: float = 0.0
    drafts: Drafts | None = None
    guesses: Guessed | None = None
    tree: Tree | None = None


class LaunchedStep:
    """A launched step whose results have not been read.

    Args:
        plan: its plan.
        choose: launches the sampling after the model.
    """

    def __init__(self, plan: StepPlan, choose: Callable[[Masks], _Chosen]) -> None:
        self._plan = plan
        self._choose = choose
        self._chosen: _Chosen | None = None if plan.constrained else choose(NO_MASKS)

    def choose(self, masks: Masks) -> None:
        """Sample, with masks for the constrained tokens."""
        self._chosen = self._choose(masks)

    def result(self) -> StepResult:
        """Wait for the tokens."""
        chosen = self._chosen
        assert chosen is not None, "a step chooses before it is waited for"
        began = time.perf_counter()
        tokens = chosen.arriving.tokens()
        seconds = chosen.seconds + time.perf_counter() - began
        logprobs: Mapping[int, Alternatives] = chosen.report.logprobs()
        selection, prompts = chosen.selection, tuple(p.logprobs() for p in chosen.prompts)
        counts = None
        if chosen.drafts is not None:
            drafts, counts = chosen.drafts, chosen.drafts.counts(tokens)
            if chosen.tree is not None:
                drafts, counts = drafts.among(chosen.tree.best(counts), counts)
            tokens = drafts.kept(tokens, counts)
            logprobs = drafts.renumbered(logprobs, counts)
            selection = drafts.renumbered(selection, counts)
        guesses = others = None
        if chosen.guesses is not None:
            guesses = chosen.guesses.rows(counts, chosen.drafts)
            others = chosen.guesses.first()
        return StepResult(
            self._plan.step_id,
            tokens,
            logprobs,
            selection,
            prompts,
            seconds,
            counts,
            guesses,
            others,
        )


class _Run(NamedTuple):
    """The model's outputs of a step that did not run as a decode graph.

    Attributes:
        logits: [n, V] float32 of the rows that sample; None: none does.
        row: [n] on the device, these rows.
        behind: [n] on the device, index in the step of the slot after which each samples.
        draws: their sampling parameters; None: all are greedy.
        watched: indices of rows whose queries report their selections.
        step: the step that the model ran; None if it ran as a prefill graph.
        states: inputs of a draft layer; None: there is none.
        prompts: what is reported of prompts.
        seconds: host time.
    """

    logits: Tensor | None
    row: Tensor | None
    behind: Tensor | None
    draws: Sequence[Tensor] | None
    watched: list[int]
    step: Step | None
    states: Tensor | None
    prompts: tuple[PromptScores, ...]
    seconds: float


class Runner:
    """Owns the model, the pools and the rows on one device."""

    def __init__(
        self,
        model: StepModel,
        mixers: tuple[MixerSpec, ...],
        pools: CachePools,
        shape: RunnerShape,
        device: torch.device,
        group: Group = ALONE,
    ) -> None:
        self.model, self.pools, self.shape, self._group = model, pools, shape, group
        self.backends = Backends(mixers, pools)
        groups, num_rows = len(pools.schema.groups), shape.num_rows * shape.branches
        sizes = (num_rows, shape.max_pages, shape.slots, shape.vocab_size)
        self.rows = Rows(*sizes, device, groups, shape.axes)
        self.rows.num_requests = shape.num_rows
        self.encoder: EncoderCache | None = None
        if shape.encoder_bytes is not None:
            self.encoder = EncoderCache(model.encode, shape.encoder_bytes, device, group)
        self.sampler = Sampler(shape.vocab_size, shape.num_rows, device, group)
        self._on_cpu, self._mixers = device.type == "cpu", mixers
        self.experts: ExpertBalance | None = None
        self.forget_reads()
        self.draft_head: DraftHead | None = None
        if getattr(model, "draft", None) is not None:
            self.draft_head = DraftHead(cast(DraftModel, model), self.backends, pools, self.rows)
        self.graphs: DecodeGraphs | None = None
        self.prefill_graphs: PrefillGraphs | None = None
        if pools.spare_pages is not None:
            place = Place(self.backends, self.rows, pools.spare_pages, group)
            head, drafts = self.draft_head, shape.drafts
            self.graphs = DecodeGraphs(model, place, shape.num_rows, drafts, head)
            self.prefill_graphs = PrefillGraphs(self.graphs, shape.graph_slots)

    @property
    def front_slots(self) -> list[int]:
        """Slots of a row from which on attention uses other kernels; ascending."""
        return [front.slots for front in self.backends.cutter.limits]

    def forget_reads(self) -> None:
        """Reset the counts of selected pages and of chosen experts."""
        self.reads = PageReads(self._mixers, self.shape.slots)
        if self.experts is not None:
            self.experts.forget()

    def launch(self, plan: StepPlan) -> Launched:
        """Start one step. The plan's pages must be granted and its rows open."""
        for row in plan.closed:
            self.sampler.close(row)
            self.rows.close(row)
        for opened in plan.opened:
            self.sampler.open(opened)
            self.rows.open(opened.row, opened.media)
        if not (plan.work or len(plan.decode.row)):
            return Ready(StepResult(plan.step_id, ()))
        if log.isEnabledFor(logging.DEBUG):
            rows = [work.row for work in plan.row_by_row()]
            log.debug("step %d: rows %s", plan.step_id, rows)
        if plan.restored:
            self._copy_states(plan.restored, restore=True)
        tree = Tree.of(plan, self.rows)
        plan = plan if tree is None else tree.plan
        picks = Picks.of(plan)
        if tree is not None:
            picks = picks._replace(row=picks.row % self.shape.num_rows)
        replayed = self._replayed(plan, picks) if tree is None else None
        if replayed is not None:
            if plan.kept:
                self._copy_states(plan.kept, restore=False)
            return replayed
        layout = self.rows.lay_out(plan)
        if tree is not None:
            tree.begin(self.pools)
        self.reads.add(layout.slot)
        run = self._run(plan, layout, picks)
        if plan.kept:
            # Only rows without guesses; the states of the others advance when their guesses are
            # verified.
            self._copy_states(plan.kept, restore=False)
        choose = functools.partial(self._choose, run, picks, plan, tree)
        return LaunchedStep(plan, choose)

    def run(self, plan: StepPlan) -> StepResult:
        """Launch a step and wait for it; constrained tokens are sampled without masks."""
        launched = self.launch(plan)
        if plan.constrained:
            every = np.full(-(-self.shape.vocab_size // 32), -1, dtype=np.int32)
            launched.choose(dict.fromkeys(plan.constrained, every))
        return launched.result()

    def rehearse(self, plans: Sequence[StepPlan]) -> None:
        """Run the steps of all graphs on padding, and plans without graphs, with one block of each
        kind: every kernel is launched once, and results are dropped."""
        graphs = self.graphs, self.prefill_graphs
        with self.model.abridged(self.backends.names):
            for some in graphs:
                if some is not None:
                    some.rehearse()
            self.graphs = self.prefill_graphs = None
            try:
                for plan in plans:
                    self.run(plan)
            finally:
                self.graphs, self.prefill_graphs = graphs

    @torch.inference_mode()
    def _run(self, plan: StepPlan, layout: Layout, picks: Picks) -> _Run:
        """Run the model on a step of any kind."""
        began, last = time.perf_counter(), self._choosing(plan, layout)
        watched = self.sampler.watched(picks)
        hidden, step = self._hidden(layout, last[watched])
        logits = row = behind = draws = states = None
        if self.draft_head is not None:
            step = self.step_of(layout) if step is None else step
            states = self.draft_head.begin(plan.opened, layout, step, hidden)
        if len(last):
            drawn = self.sampler.draws(picks)
            behind, row, *sent = send((last, picks.row, *(drawn or ())), hidden.device)
            draws = None if drawn is None else sent
            logits = self.model.logits(ops.take_rows(hidden, behind))
        prompts = tuple(
            self._prompt(hidden, work, int(layout.start[i]))
            for i, work in enumerate(plan.work, len(plan.decode.row))
            if len(work.prompt_targets)
        )
        seconds = time.perf_counter() - began
        return _Run(logits, row, behind, draws, watched, step, states, prompts, seconds)

    def _choosing(self, plan: StepPlan, layout: Layout) -> Ints:
        """Index in the batch of the slot after which each token is sampled."""
        if not plan.work:
            return layout.last
        slots, found = self.shape.slots, [layout.last[: len(plan.decode.row)]]
        for i, work in enumerate(plan.work, len(plan.decode.row)):
            token = work.first + work.num_tokens - work.choices + np.arange(work.choices)
            behind = slots.slot_of(token) - slots.slot_of(work.first + work.num_tokens - 1)
            found.append(layout.last[i] + behind)
        return np.concatenate(found)

    @torch.inference_mode()
    def _copy_states(self, copies: Sequence[StateCopy], restore: bool) -> None:
        """Copy states of rows from snapshots, or to them."""
        first = self.pools.first_snapshot
        row = np.array([copy.row for copy in copies], dtype=np.int64)
        snapshot = np.array([first + copy.snapshot for copy in copies], dtype=np.int64)
        rows, snapshots = send((row, snapshot), self.rows.device)
        self.pools.copy_states(*((snapshots, rows) if restore else (rows, snapshots)))

    @torch.inference_mode()
    def _choose(
        self, run: _Run, picks: Picks, plan: StepPlan, tree: Tree | None, masks: Masks
    ) -> _Chosen:
        """Sample the rows of a step from the model's outputs."""
        began, drafts, guesses = time.perf_counter(), Drafts.of(plan), None
        choice = Choice(torch.empty(0, dtype=torch.int64, device=self.sampler.device))
        if run.logits is not None and run.row is not None:
            choice = self.sampler.sample(run.logits, picks, run.draws, masks, drafts)
            row, tokens, last = run.row, choice.tokens, None
            if drafts is not None:
                last, counts = drafts.accept(tokens)
                if not self.sampler.plain(picks):
                    self.sampler.count(tokens, picks, drafts.counted(last))
                if tree is not None:
                    last, counts = tree.end(last, counts, self.pools)
                row, tokens = row[last], tokens[last]
                if run.step is not None and self.backends.settles:
                    by_row = torch.zeros_like(self.rows.last_token)
                    run.step.settle(by_row.scatter_(0, row, counts))
            self.rows.remember(row, tokens)
            guesses = self._guess(run, plan, row, tokens, last)
        reads = run.step.reads() if run.watched and run.step is not None else []
        read = selections(reads, len(run.watched), self._group) if run.watched else []
        return _Chosen(
            Arriving(choice.tokens),
            choice.report,
            dict(zip(run.watched, read, strict=True)),
            run.prompts,
            run.seconds + time.perf_counter() - began,
            drafts,
            guesses,
            tree,
        )

    def _guess(
        self, run: _Run, plan: StepPlan, row: Tensor, tokens: Tensor, last: Tensor | None
    ) -> Guessed | None:
        """The draft layer's guesses after the tokens [n] of the rows [n]; last: indices of these
        among all sampled tokens of the step; None: all of them."""
        if self.draft_head is None or run.behind is None:
            return None
        assert run.step is not None and run.states is not None
        # The works of branches follow those of rows.
        ahead, branches = plan.ahead[: len(row)], self.shape.branches
        at = run.behind if last is None else run.behind[last]
        ends, others = Ends(row, at, tokens, ahead), branches if branches > 1 else 0
        found = self.draft_head.guess(run.step, run.states, ends, others)
        return Guessed(Arriving(found), ahead, others)

    def _hidden(self, layout: Layout, watched: Ints) -> tuple[Tensor, Step | None]:
        """Run the model on a step, as a graph if there is one; returns hidden states [T, hidden]
        and, without a graph, the step.

        Args:
            watched: indices of queries whose selections are reported.
        """
        unsettled = layout.rows.drafts is not None and self.backends.settles
        if self.prefill_graphs is not None and not (len(watched) or unsettled):
            hidden = self.prefill_graphs.run(layout)
            if hidden is not None:
                return hidden, None
        step = self.step_of(layout, watched if len(watched) else None)
        with skip_checks() if self._on_cpu else contextlib.nullcontext():
            return self.model(step), step

    def step_of(self, layout: Layout, watched: Ints | None = None) -> Step:
        """The model's input for a step outside of graphs; `watched`: see `Rows.batch`."""
        inserted = None
        if layout.inserts:
            assert self.encoder is not None
            inserted = self.encoder.inserted(layout.inserts)
        batch = self.rows.batch(layout, watched, inserted)
        cuts = self.backends.cuts(layout.rows, self._on_cpu)
        return self.backends.step(batch, cuts, layout.rows)

    def _replayed(self, plan: StepPlan, picks: Picks) -> LaunchedStep | None:
        """Run a decode-only step (possibly with guesses) as a graph; None if it needs more than a
        graph does."""
        if self.graphs is None:
            return None
        entries = Entries.of(plan)
        if entries is None or self.sampler.watched(picks):
            return None
        reporting, counts = self.sampler.reports(picks)
        sampling = self._sampling(picks, counts)
        grants = self.rows.grant(plan)
        work, given, ahead = entries
        if self.draft_head is not None and plan.opened:
            first = self.shape.slots.slots_for(work.first)
            self.draft_head.resume(plan.opened, work.row, first)
        replayed = self.graphs.run(work, grants, sampling, given, ahead)
        if replayed is None:
            return None
        self.reads.add_decoding(work.first)
        drafts, guesses = None if given is None else Drafts.of(plan), None
        if given is not None and self.draft_head is not None:
            guesses = Guessed(replayed.trip, plan.ahead)
        if sampling.ending is Ending.LOGITS:
            choose = functools.partial(self._choose_replayed, self.graphs, replayed, picks, drafts)
            return LaunchedStep(plan, choose)
        report = Report()
        if sampling.ending is Ending.REPORT:
            report = Report(reporting, Reported.of_lines(replayed.output, reporting, counts))
        return LaunchedStep(
            plan, lambda _: _Chosen(replayed.trip, report, drafts=drafts, guesses=guesses)
        )

    def _sampling(self, picks: Picks, counts: Sequence[int]) -> Sampling:
        """How much of the rows' sampling a graph can do; counts: of `Sampler.reports`."""
        beyond = not self.sampler.plain(picks) or max(counts, default=0) > MAX_GRAPH_LOGPROBS
        if beyond or not self.sampler.alone:
            return Sampling(Ending.LOGITS, self.sampler.draws(picks))
        if counts:
            return Sampling(Ending.REPORT, self.sampler.draws(picks, always=True))
        draws = self.sampler.draws(picks)
        return Sampling(Ending.DRAW if draws else Ending.GREEDY, draws)

    @torch.inference_mode()
    def _choose_replayed(
        self,
        graphs: DecodeGraphs,
        replayed: Replayed,
        picks: Picks,
        drafts: Drafts | None,
        masks: Masks,
    ) -> _Chosen:
        """`_choose` for a step that ran as a graph."""
        choice = self.sampler.sample(replayed.output, picks, replayed.draws, masks, drafts)
        graphs.answer(replayed, choice.tokens)
        if drafts is not None and not self.sampler.plain(picks):
            last, _ = drafts.accept(choice.tokens)
            self.sampler.count(choice.tokens, picks, drafts.counted(last))
        return _Chosen(replayed.trip, choice.report, drafts=drafts)

    def _prompt(self, hidden: Tensor, work: RowWork, start: int) -> PromptScores:
        """Log-probabilities of the work's targets."""
        wanted = self.sampler.params(work.row).prompt_logprobs
        assert wanted is not None
        slot = self.shape.slots.slot_of(work.first + np.arange(len(work.prompt_targets)))
        index = start + slot - self.shape.slots.slots_for(work.first)
        vocab_size = self.shape.vocab_size
        return PromptScores.of(self.model.logits, hidden, work, index, wanted, vocab_size)
