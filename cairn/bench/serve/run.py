"""`cairn bench serve`: sends requests to a server and reports latencies."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace
from pathlib import Path

from cairn.bench.serve.client import Server, ServerAddress
from cairn.bench.serve.datasets import Dataset, DatasetOptions, Item, open_dataset
from cairn.bench.serve.exchange import Outcome, Request
from cairn.bench.serve.lengths import Lengths, open_lengths
from cairn.bench.serve.load import Leavers, Pace, drive
from cairn.bench.serve.progress import progress_bar
from cairn.bench.serve.report import Report, summarize
from cairn.errors import BadConfig

PREPARED_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class ServePlan:
    """Options of the load.

    Attributes:
        address: of the server.
        dataset: source of the prompts.
        pace: arrival process. With a count the prompts are made before the load starts; without
            one, while it runs and by measured proportion, so that counting does not load the
            server.
        chat: /v1/chat/completions instead of /v1/completions.
        ignore_eos: outputs run to their full length.
        temperature: of sampling.
        abort_fraction: share of the clients that leave at a random moment.
        tokenizer: folder that counts tokens; None: the server does.
    """

    address: ServerAddress
    dataset: DatasetOptions
    pace: Pace
    chat: bool = False
    ignore_eos: bool = False
    temperature: float = 0.0
    abort_fraction: float = 0.0
    tokenizer: Path | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.abort_fraction <= 1.0:
            raise BadConfig(f"the abort fraction must be in [0, 1], not {self.abort_fraction}")

    def request(self, item: Item) -> Request:
        """The request of a prompt."""
        return Request(
            prompt=item.prompt,
            input_len=item.input_len,
            output_len=item.output_len,
            chat=self.chat,
            ignore_eos=self.ignore_eos,
            temperature=self.temperature,
        )


@dataclass(frozen=True, slots=True)
class ServeResult:
    """Result of a load: the model's name, all outcomes and the report."""

    model: str
    outcomes: list[Outcome]
    report: Report


async def run_serve(plan: ServePlan) -> ServeResult:
    """Send the load and wait for its answers.

    Raises:
        BadConfig: no server, no way to tell lengths, or a dataset that cannot be read.
    """
    async with Server(plan.address) as server:
        lengths = await open_lengths(server, plan.tokenizer)
        count = plan.pace.count
        if count is None:
            lengths = replace(lengths, exact=False)
        dataset = await open_dataset(plan.dataset, lengths, count)
        ready = [] if count is None else await _prepare(dataset, count)
        # One request before measuring: the first one may initialise the server.
        await server.send(replace(plan.request(await dataset.item(0)), prompt="Hi", output_len=2))

        outcomes: list[Outcome] = []
        leavers = Leavers(plan.abort_fraction, plan.pace.seed)
        running = 0

        async def work(index: int, due: float) -> None:
            nonlocal running
            item = ready[index] if count is not None else await dataset.item(index)
            leave = leavers.leave_after("")
            running += 1
            try:
                outcome = await server.send(plan.request(item), Outcome(due=due), leave)
            finally:
                running -= 1
            leavers.learn(outcome, leave)
            outcomes.append(outcome)

        def view() -> tuple[float, str]:
            failed = sum(x.error is not None for x in outcomes)
            note = f"{running} running" + (f", {failed} failed" if failed else "")
            done = len(outcomes) if count is not None else time.perf_counter() - began
            return done, note

        began = time.perf_counter()
        total = count if count is not None else plan.pace.duration
        async with progress_bar("requests" if count is not None else "seconds", total, view):
            await drive(plan.pace, work)
        await _count_what_is_missing(outcomes, lengths)
        return ServeResult(server.model, outcomes, summarize(outcomes))


async def _prepare(dataset: Dataset, count: int) -> list[Item]:
    """The first prompts, made a few at a time."""
    places = asyncio.Semaphore(PREPARED_AT_ONCE)
    made = 0

    async def make(index: int) -> Item:
        nonlocal made
        async with places:
            item = await dataset.item(index)
        made += 1
        return item

    async with progress_bar("prompts", count, lambda: (made, "")):
        return list(await asyncio.gather(*map(make, range(count))))


async def _count_what_is_missing(outcomes: list[Outcome], lengths: Lengths) -> None:
    """Output tokens of a server that sends no usage, from the text that came."""
    for outcome in outcomes:
        if outcome.complete and not outcome.counted:
            outcome.output_tokens = await lengths.measure(outcome.text) if outcome.text else 0
            outcome.text = ""
