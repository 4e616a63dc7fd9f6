"""An engine client without an engine, which generates scripted outputs through the real
Submission."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from cairn.engine import admission
from cairn.engine.admission import CoreShape
from cairn.engine.messages import Delta, Position, Positions, Ready, Stats, Timing
from cairn.engine.submission import Submission
from cairn.errors import BadRequest, Busy, EngineDead
from cairn.types import KvTransferParams, LayerSelection, LogprobColumns, SamplingParams

VOCAB = 256
LAYERS = (1, 3)
WORDS = "Eight 🐘s walk over the bridge — slowly. ".encode()


@dataclass
class Asked:
    """A request to the engine."""

    prompt: list[int]
    params: SamplingParams
    priority: int
    id: str
    media: object = None
    transfer: object = None


@dataclass
class FakeClient:
    """Token ids are bytes. Output `index` of a prompt is `answer(prompt, params, index)`.

    Attributes:
        answer: what to say.
        failure: the delta that comes instead of continuation 0's second one.
        hold: the first token waits for it.
        busy: there is no room.
        kept: what the last token of a continuation says of pages that are kept for another engine.
        submitted, aborted: what was asked.
    """

    tokenizer: object
    max_model_len: int = 4096
    vocab: int = VOCAB
    layers: tuple[int, ...] = LAYERS
    bound: int = 64
    live: int = 0
    answer: Callable[[list[int], SamplingParams, int], bytes] = lambda *_: WORDS
    failure: dict | None = None
    hold: asyncio.Event | None = None
    busy: bool = False
    kept: KvTransferParams | None = None
    dead: EngineDead | None = None
    down: dict = field(default_factory=dict)
    step_age: float = 0.0
    stats: Stats = field(default_factory=Stats)
    phases: dict = field(default_factory=dict)
    submitted: list[Asked] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)

    def __post_init__(self):
        self._tasks: dict[str, asyncio.Task] = {}
        self._submissions: list[Submission] = []
        self.info = Ready(
            vocab_size=self.vocab,
            max_model_len=self.max_model_len,
            eos_ids=(),
            page_size=64,
            landmarks=bool(self.layers),
            selecting_layers=self.layers,
            num_pages=100,
            max_num_seqs=16,
            has_tokenizer=self.tokenizer is not None,
            choices=(),
            memory=(),
        )

    @property
    def load(self):
        return self.live, self.bound

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        shape = CoreShape(self.vocab, self.max_model_len, (), 0, bool(self.layers))
        admission.check(prompt, params, shape, self.tokenizer is not None)

    def submit(self, prompt, params, priority=0, request_id=None, media=None, transfer=None):
        if self.dead is not None:
            raise self.dead
        self.check(prompt, params)
        if self.busy or self.live + params.n > self.bound:
            raise Busy("64 outputs are running or waiting, of at most 64", retry_after=7)
        if request_id in self._tasks:
            raise BadRequest(f"request id {request_id!r} is in use")
        self.submitted.append(Asked(list(prompt), params, priority, request_id, media, transfer))
        self.live += params.n
        submission = Submission(self, request_id, params.n)
        self._submissions.append(submission)
        self._tasks[request_id] = asyncio.create_task(self._run(submission, prompt, params))
        return submission

    def abort(self, request_id):
        self.aborted.append(request_id)
        self._tasks[request_id].cancel()

    def die(self, reason):
        """End as if the engine process had ended."""
        self.dead = EngineDead(reason)
        for submission in self._submissions:
            self._tasks[submission.id].cancel()
            submission.fail(self.dead)

    async def _run(self, submission, prompt, params):
        try:
            if self.hold is not None:
                await self.hold.wait()
            runs = [self._deltas(submission.id, prompt, params, i) for i in range(params.n)]
            while runs:
                await asyncio.sleep(0)
                for run in list(runs):
                    delta = next(run, None)
                    if delta is None:
                        runs.remove(run)
                    else:
                        submission.take(delta)
        finally:
            self.live -= params.n

    def _deltas(self, request_id, prompt, params, index):
        answer = self.answer(list(prompt), params, index)
        room = self.max_model_len - len(prompt)
        count = min(len(answer), room if params.max_tokens is None else params.max_tokens, room)
        if count == 0:
            yield Delta(
                request_id,
                index,
                prompt_logprobs=self._prompt_logprobs(prompt, params) if index == 0 else None,
                cached_tokens=len(prompt) // 2,
                finish_reason="length",
                timing=Timing(0.1, 0.2, 0.0),
            )
            return
        stream = self.tokenizer.detokenizer(prompt) if self.tokenizer else None
        for i, token in enumerate(answer[:count]):
            last = i == count - 1
            if i == 1 and index == 0 and self.failure is not None:
                yield Delta(request_id, index, **self.failure)
                return
            text = stream.push(token) if stream else ""
            yield Delta(
                request_id,
                index,
                text=text + (stream.flush() if stream and last else ""),
                token_ids=(token,),
                logprobs=() if params.logprobs is None else (position(token, params.logprobs),),
                selection=(reads(i, self.layers),) if params.selection else (),
                prompt_logprobs=self._prompt_logprobs(prompt, params) if i + index == 0 else None,
                cached_tokens=len(prompt) // 2 if i == 0 else None,
                finish_reason=("stop" if count == len(answer) else "length") if last else None,
                timing=Timing(0.1, 0.2, 0.3) if last else None,
                transfer=self.kept if last else None,
            )

    def _prompt_logprobs(self, prompt, params):
        if params.prompt_logprobs is None:
            return None
        half = len(prompt) // 2 + 1
        tokens = prompt[1:half], prompt[half:]
        return tuple(positions(part, params.prompt_logprobs) for part in tokens if part)


def position(token: int, count: int) -> Position:
    """Token 0 is the likeliest, then 1, ...; token t has rank t + 1."""
    ids = [*range(count), *([token] if token >= count else [])]
    return Position(tuple(ids), tuple(-0.5 * (i + 1) for i in ids), tuple(i + 1 for i in ids))


def positions(tokens: Sequence[int], count: int) -> Positions:
    """The same for several tokens, as columns."""
    ids = np.array([[*range(count), token] for token in tokens], dtype=np.int64)
    return Positions.of(LogprobColumns(ids, -0.5 * (ids + 1), ids[:, -1] + 1))


def reads(i: int, layers: Sequence[int]) -> tuple[LayerSelection, ...]:
    """The selection of generated token `i`."""
    return tuple(LayerSelection(layer, (i, i + 2), (0.5, 0.25), 0.125) for layer in layers)
