"""The scheduler: from requests and free pages to a StepPlan. No tensors.

Order is (priority, arrival) everywhere. A step first serves the rows that decode, then the rows
that prefill, then admits; all share the step's budget of slots. When pages run out, the last
request in order is retracted: its pages are freed and it waits again. The first in order always
makes progress, so the schedule cannot stall.
"""

from __future__ import annotations

import bisect
from array import array
from collections.abc import Sequence

from cairn.cache.landmarks import SlotMap
from cairn.cache.paged import PageCache
from cairn.engine.budget import StepTimes
from cairn.engine.drafts import Drafter, DraftTotals, Guesses
from cairn.engine.pace import Pace, learn
from cairn.engine.planned_step import Limits, PlannedStep, chunk, decoded_border
from cairn.engine.promises import Promises
from cairn.engine.queue import WaitingQueue
from cairn.engine.request import Lockstep, Phases, Request, RowCounts, State
from cairn.engine.run_ahead import began_right, go_back, tokens_ahead
from cairn.engine.sharing import Computing, Duplicates
from cairn.engine.trees import Trees
from cairn.runner.step import RowWork, StepPlan


class Scheduler:
    """Owns the requests and, through their leases, the pages.

    Args:
        limits: rows and slots of a step.
        cache: the pages.
        slots: slot arithmetic.
        times: estimates of step times; used only if the limits have `step_seconds`.
        drafter: guesses the next tokens of rows that decode; None: each runs one token a step.
    """

    def __init__(
        self,
        limits: Limits,
        cache: PageCache,
        slots: SlotMap,
        times: StepTimes,
        drafter: Drafter | None = None,
    ) -> None:
        self.limits = limits
        self.drafter = drafter
        self.drafts = DraftTotals()
        self.pace: Pace | None = None
        self.trees: Trees | None = None
        self.times = times
        self.cache = cache
        self.slots = slots
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self.preemptions = 0
        self.cached_prompt_tokens = 0
        self.looked_up_prompt_tokens = 0
        # Slots that a token takes if it fills a page.
        self._closing_slots = 2 if slots.landmarks else 1
        self._counts = RowCounts(limits.max_rows)
        self._free_rows = list(range(limits.max_rows))
        self._closed: list[int] = []
        self._in_flight: dict[int, PlannedStep] = {}
        self._step_id = 0
        # Requests of the step in flight that have ended and are released when it retires.
        self._doomed = 0
        self._known_phases: Phases | None = None
        self._computing = Computing(slots.tokens_per_page)
        self._promises = Promises(cache, slots)
        self._duplicates = Duplicates(cache)
        # The last request not admitted for lack of pages, and the pages available then.
        self._refused: tuple[Request, int] | None = None

    def add(self, request: Request) -> None:
        """Queue a request. The caller has checked that it fits the pool by itself."""
        self.waiting.push(request)

    @property
    def has_work(self) -> bool:
        """Whether some request is not finished."""
        return bool(self.waiting or self.running)

    def finish(self, request: Request) -> None:
        """End a request; its pages are freed now, or when the step in flight retires."""
        if request.state is State.FINISHED:
            return
        if any(request in flight.requests for flight in self._in_flight.values()):
            self._doomed += not request.doomed
            request.doomed = True
            self._known_phases = None
            return
        waited = request.state is State.WAITING
        self._release(request)
        request.state = State.FINISHED
        if waited:
            self.waiting.forget_finished()

    def can_look_ahead(self) -> bool:
        """Whether the next step can be planned before the one in flight has retired.

        False if pages would have to be taken from running rows: those in flight keep theirs until
        their step retires.
        """
        available, per_page = self.cache.available, self.slots.tokens_per_page
        if len(self.running) + self.limits.step_slots // per_page < available:
            return True
        phases = self._phases()
        rows = phases.decoding
        growing = [rows.requests[i] for i in rows.starting()]
        needed = 0
        for request in (*growing, *phases.prefilling):
            reach = request.planned + min(request.pending, self.limits.step_slots)
            capacity = int(self._counts.capacity[request.row])
            needed += max(0, -((capacity - reach) // per_page))
        return needed <= available

    def schedule(self) -> StepPlan | None:
        """Plan the next step, or None when nothing can run.

        A step may be planned while another is in flight if `can_look_ahead` says so: the tokens
        that are being chosen then count as known, and rows go on from them.
        """
        draft = PlannedStep(self.limits.step_slots)
        phases, drafting = self._phases(), dict[Request, list[int]]()
        if self.drafter is not None:
            phases, drafting = self._draft(self.drafter, draft.budget // self._closing_slots)
        if phases.decoding.requests:
            self._schedule_decode(phases, draft)
        for request, tokens in drafting.items():
            self._schedule_drafts(request, tokens, draft)
        for request in phases.prefilling:
            # Making room for one request may have retracted a later one.
            if request.state is State.RUNNING:
                self._schedule_prefill(request, draft)
        self._admit(draft)
        if not draft.requests:
            return None
        self._duplicates.announce(draft)
        plan = draft.plan(self._step_id, self._closed)
        self._closed.clear()
        self._in_flight[plan.step_id] = draft
        self._step_id += 1
        return plan

    def retire(
        self,
        plan: StepPlan,
        counts: Sequence[int] | None = None,
        guesses: Sequence[Sequence[int]] | None = None,
        others: Sequence[Sequence[int]] | None = None,
    ) -> Sequence[Request | None]:
        """Account for a finished step. Returns the requests of its tokens, in order (read-only);
        requests that finished while it ran are released here and take no token. None: the step ran
        ahead of wrong guesses, and its tokens are dropped.

        Args:
            counts: tokens that each of these got; None: one each.
            guesses, others: see `StepResult`.
        """
        requests = self._in_flight.pop(plan.step_id).requests
        decode = plan.decode
        for i in decode.full or ():
            self._commit(requests[i], int(decode.first[i]) + 1)
        sampled: Sequence[Request | None] = requests
        if plan.work:
            decoding = len(decode.row)
            sampled = list[Request | None](requests[:decoding])
            for request, work in zip(requests[decoding:], plan.work, strict=True):
                last = request.verifying is work
                if not began_right(request, work):
                    self.drafts.add(work.drafted, 0)
                    if last:
                        go_back(request, self._counts)
                        self._known_phases = None
                    sampled.append(None)
                    continue
                computed = work.first + work.num_tokens
                if work.drafts and counts is not None:
                    accepted = counts[len(sampled)] - 1
                    self.drafts.add(work.drafted, accepted)
                    learn(request, work.drafts, accepted)
                    # Right guesses count as computed; slots of wrong ones are overwritten.
                    computed += accepted - work.drafts
                if last:
                    request.verifying, self._known_phases = None, None
                    self._counts.planned[request.row] = computed
                self._counts.computed[request.row] = computed
                # Right guesses are among the request's tokens when it has taken them.
                self._commit(request, min(computed, len(request.tokens)))
                if work.sample:
                    self._computing.remove(request)
                    request.guesses = guesses[len(sampled)] if guesses else ()
                    request.others = others[len(sampled)] if others else ()
                    sampled.append(request)
        if self._doomed:
            for request in requests:
                if request.doomed:
                    self._doomed -= 1
                    request.doomed = False
                    self.finish(request)
        return sampled

    def in_flight(self, plan: StepPlan) -> PlannedStep:
        """The PlannedStep of a plan in flight."""
        return self._in_flight[plan.step_id]

    def cancel(self, plan: StepPlan) -> list[Request]:
        """Handle a failed step: its results are lost and its requests end. Returns them."""
        requests = self._in_flight.pop(plan.step_id).requests
        for request in requests:
            self._doomed -= request.doomed
            request.doomed, request.failed = False, True
            self.finish(request)
        return requests

    def _phases(self) -> Phases:
        """The running requests by phase; cached until they change."""
        if self._known_phases is None:
            per_page = self.slots.tokens_per_page
            self._known_phases = Phases.of(self.running, self._counts, per_page)
        return self._known_phases

    def _schedule_decode(self, phases: Phases, draft: PlannedStep) -> None:
        """Add the last chosen tokens of all decoding rows to the draft at once: most steps only
        decode, and planning must take less time than running them."""
        rows = phases.decoding
        starting = rows.starting()
        if starting:
            left_out = self._extend([rows.requests[i] for i in starting], draft)
            if left_out or phases is not self._known_phases:
                self._known_phases = None
                stay = [r for r in rows.requests if r.state is State.RUNNING and r not in left_out]
                rows = Lockstep(stay, self._counts, self.slots.tokens_per_page)
        draft.load.rows = len(rows.requests)
        draft.load.rows_context = rows.context
        draft.decode, draft.constrained = rows.step(), rows.constrained
        if self.cache.states is not None:
            for i in draft.decode.full or ():
                end = int(draft.decode.first[i]) + 1
                draft.keep_state(rows.requests[i], end, self.cache)
        if rows.left <= 0:
            self._known_phases = None
        more = phases.prefilling or self.waiting
        draft.requests = rows.requests.copy() if more else rows.requests
        draft.budget -= len(rows.requests)
        if self.slots.landmarks and draft.decode.full:
            draft.budget -= len(draft.decode.full)

    def _draft(self, drafter: Drafter, budget: int) -> tuple[Phases, dict[Request, list[int]]]:
        """The rows that run explicit tokens (the last token and guesses) within the step's
        `budget`, and the phases of the other rows."""
        verifying = [r for r in self.running if r.verifying is not None and not r.doomed]
        for request in verifying:
            if not began_right(request):
                go_back(request, self._counts)
                self._known_phases = None
        phases, border = self._phases(), decoded_border(self.cache)
        rows = phases.decoding.requests
        guesses = Guesses.by(drafter, phases.decoding, budget, border, self.pace)
        ahead = {}
        # Another branch may be right, and states advance by verified tokens only.
        if not (drafter.ahead or self.trees is not None or self.cache.states is not None):
            verifying = [r for r in verifying if r.verifying is not None]
            ahead = tokens_ahead(drafter, verifying, budget - len(rows), self.pace)
        if guesses or ahead:
            self._known_phases = None
            stay = [request for request in rows if request not in guesses]
            alone = Lockstep(stay, self._counts, self.slots.tokens_per_page)
            phases = Phases(alone, phases.prefilling)
        return phases, guesses.of | ahead

    def _schedule_drafts(self, request: Request, tokens: list[int], draft: PlannedStep) -> None:
        """Add a row's last token and as many of its guesses as fit to the draft."""
        if request.state is not State.RUNNING:
            return
        first = request.planned
        fitting = self.slots.tokens_per_page * self.cache.available + int(
            self._counts.capacity[request.row]
        )
        tokens = tokens[: max(1, fitting - first)]
        guesses, end = tokens[1:], first + len(tokens)
        if request.verifying is not None and not self._grow(request, self.slots.pages_for(end)):
            return
        if not self._make_room(request, end, draft):
            return
        branches = self.trees.branches(request, guesses, draft.budget) if self.trees else []
        if branches and not self._grow(request, int(self.slots.pages_for(end)) + len(branches)):
            branches = []
        ahead = self._look_ahead(request, end)
        draft.announce(request, self.cache)
        draft.constrain(request)
        work = RowWork(request.row, first, tokens, True, request.num_output, drafts=len(guesses))
        work = work._replace(ahead=ahead, branches=branches)
        draft.work.append(work)
        draft.count(request, end, self.slots)
        if not guesses:
            draft.keep_state(request, end, self.cache)
        self._counts.planned[request.row] = end
        request.verifying, request.stale = work, False

    def _look_ahead(self, request: Request, end: int) -> int:
        """Number of guesses that a draft layer should make after a request's first `end` tokens:
        limited by its pages, which grow if pages are free, and by its maximum length."""
        if self.drafter is None or not self.drafter.ahead:
            return 0
        most = min(self.drafter.ahead, request.most_computed - end)
        self._grow(request, int(self.slots.pages_for(end + max(0, most))))
        return max(0, min(most, int(self._counts.capacity[request.row]) - end))

    def _extend(self, requests: Sequence[Request], draft: PlannedStep) -> list[Request]:
        """Make room for one more token of each request; returns those without a page for it."""
        left_out = []
        for request in requests:
            # Making room for one may have taken the pages of another one that comes later.
            if request.state is not State.RUNNING:
                continue
            if self._make_room(request, request.planned + 1, draft):
                draft.announce(request, self.cache)
            else:
                left_out.append(request)
        return left_out

    def _schedule_prefill(self, request: Request, draft: PlannedStep) -> None:
        room = draft.room(request.planned, self.limits, self.times, self.slots)
        if room == 0:
            return
        count = chunk(request, room, self.cache)
        if self._make_room(request, request.planned + count, draft):
            self._append(request, draft, count)

    def _make_room(self, request: Request, num_tokens: int, draft: PlannedStep) -> bool:
        """Grow the lease to hold `num_tokens`; retracts the last requests if it must."""
        pages = int(self.slots.pages_for(num_tokens))
        while not self._grow(request, pages):
            if self._duplicates.free(self._idle()):
                continue
            victim = self._victim(draft)
            # Later rows of this step are retracted when they need a page themselves.
            waits = victim is request and any(r.order > request.order for r in draft.requests)
            if victim is None or waits:
                return False
            self._retract(victim)
            if victim is request:
                return False
        return True

    def _grow(self, request: Request, pages: int) -> bool:
        """Make the request's lease `pages` long if the cache can."""
        assert request.lease is not None
        grown = self.cache.grow(request.lease, pages)
        capacity = len(request.lease.pages) * self.slots.tokens_per_page
        self._counts.capacity[request.row] = capacity
        return grown

    def _idle(self) -> list[Request]:
        """The running requests that no step in flight runs."""
        busy = {id(r) for flight in self._in_flight.values() for r in flight.requests}
        return [request for request in self.running if id(request) not in busy]

    def _victim(self, draft: PlannedStep) -> Request | None:
        """The last request in order that is neither in a step in flight nor in this draft."""
        drafted = {id(request) for request in draft.requests}
        free = [r for r in self._idle() if id(r) not in drafted and not r.doomed]
        return max(free, key=lambda request: request.order, default=None)

    def _append(self, request: Request, draft: PlannedStep, count: int) -> None:
        """Add `count` tokens of a prefilling request to the draft."""
        begin, end = request.planned, request.planned + count
        samples = count == request.pending
        ahead = self._look_ahead(request, end) if samples else 0
        draft.announce(request, self.cache)
        targets: array[int] | tuple[()] = ()
        if request.params.prompt_logprobs is not None and begin < request.num_prompt:
            targets = request.tokens[begin + 1 : min(end + 1, request.num_prompt)]
        if samples:
            draft.constrain(request)
        work = RowWork(
            row=request.row,
            first=begin,
            tokens=request.tokens[begin:end],
            sample=samples,
            output_index=request.num_output,
            prompt_targets=targets,
            ahead=ahead,
        )
        draft.work.append(work)
        draft.count(request, end, self.slots)
        draft.keep_state(request, end, self.cache)
        self._counts.planned[request.row] = end
        if samples:
            request.decoding = True
            self._known_phases = None

    def _admit(self, draft: PlannedStep) -> None:
        """Admit waiting requests while rows, budget and pages last."""
        held = []
        self._promises.forget()
        while self.waiting and self._free_rows:
            if draft.room(0, self.limits, self.times, self.slots) == 0:
                break
            request = self.waiting.first
            if request.state is State.FINISHED:
                self.waiting.pop()
            elif self._shares(request) and self._computing.holds(request):
                held.append(self.waiting.pop())
            elif self._open(request):
                self.waiting.pop()
                before = self.preemptions
                if not self._start(request, draft):
                    break
                if self.preemptions != before:
                    self._promises.forget()
                else:
                    self._promises.add(request)
            else:
                break
        for request in held:
            self.waiting.push(request)

    def _shares(self, request: Request) -> bool:
        """Whether the request may use cached pages."""
        return self.cache.prefix_caching and request.caches_prefix

    def _open(self, request: Request) -> bool:
        """Lease the cached prefix if the rest of the known tokens fits beside the running rows."""
        spare, refused = self.cache.spare, self._refused
        if self.running and refused and refused[0] is request and spare <= refused[1]:
            return False
        reusable = int(self.slots.slot_of(len(request.tokens) - 1)) // self.slots.page_size
        most = reusable if request.caches_prefix else 0
        self.cache.load(request.tokens, most, request.marks)
        lease = self.cache.open(request.tokens, most, request.marks)
        known = min(len(request.tokens) + 1, request.most_computed)
        needed = int(self.slots.pages_for(known)) - len(lease.pages)
        if self.running:
            step_pages = self.limits.step_slots // self.slots.page_size + 1
            growth = self.cache.growth(lease, needed) + self._promises.of_all(self.running)
            if not self.cache.fits(growth, step_pages):
                self.cache.close(lease)
                self._refused = request, spare
                return False
        request.lease = lease
        return True

    def _start(self, request: Request, draft: PlannedStep) -> bool:
        """Assign an admitted request its row and its first chunk; False: it had to wait again."""
        assert request.lease is not None
        request.state = State.RUNNING
        request.row = self._free_rows.pop()
        computed = request.lease.cached_pages * self.slots.tokens_per_page
        self._counts.start(request, computed)
        request.granted = 0
        request.opened = False
        if request.cached is None:
            request.cached = computed
            self.cached_prompt_tokens += computed
            if self._shares(request):
                self.looked_up_prompt_tokens += request.num_prompt
        bisect.insort(self.running, request, key=lambda other: other.order)
        if self.cache.prefix_caching:
            self._computing.add(request)
        self._known_phases = None
        self._schedule_prefill(request, draft)
        return request.state is State.RUNNING

    def _commit(self, request: Request, computed: int) -> None:
        """Add the pages filled by `computed` tokens to the prefix cache."""
        assert request.lease is not None
        if not request.failed and self.slots.complete_pages(computed) > request.lease.committed:
            self.cache.commit(request.lease, request.tokens, computed)

    def _retract(self, request: Request) -> None:
        """Free a request's pages; it waits again at its old position, with all its tokens."""
        self._release(request)
        request.state = State.WAITING
        request.held_by = None
        request.retractions += 1
        self.preemptions += 1
        self.waiting.push(request)

    def _release(self, request: Request) -> None:
        if request.state is not State.RUNNING:
            return
        assert request.lease is not None
        self.cache.close(request.lease)
        request.lease = None
        self.running.remove(request)
        self._computing.remove(request)
        # The pages reserved for its growth are available again, even if it held few.
        self._known_phases = self._refused = None
        self._free_rows.append(request.row)
        if request.opened:
            self._closed.append(request.row)
        request.row, request.counts = -1, None
        request.decoding = request.stale = False
        request.verifying = None
