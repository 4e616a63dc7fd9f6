"""Messages between the API process and the engine process: msgspec structs in MessagePack.

Nothing is pickled. Every message is one frame; its tag says which struct it is. Token ids travel
as the bytes of little-endian int32.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Self

import msgspec
import numpy as np

from cairn.config import EngineOptions
from cairn.runner.media import PromptMedia
from cairn.specs.vision import MediaSpec
from cairn.types import KvTransferParams, LayerSelection, LogprobColumns, SamplingParams

TO_ENGINE, FROM_ENGINE = "to-engine", "from-engine"
"""Names of the two sockets in their private folder; the client binds both."""

UNPACKED_AT_ONCE = 256
"""Positions decoded at once, so that a consumer that takes them one by one does not wait for
all."""

HEARTBEAT_SECONDS = 0.5
"""Time between two heartbeats of the engine process."""


class Launch(msgspec.Struct, frozen=True):
    """The engine process's start-up message, JSON on its standard input.

    Attributes:
        model: the model folder.
        options: the user's options.
        parent: process id of the client; the engine does not outlive it.
        log_level: level of the `cairn` logger; None: from the environment.
        replica, replicas: number of this engine among those that share the machine, from 0, and how
            many they are.
        meeting: rendezvous file of replicas that share experts; None: each replica has all experts.
        listener: descriptor of the socket at which other nodes report, which the process inherits;
            None: it binds the address in its options.
    """

    model: str
    options: EngineOptions
    parent: int
    log_level: str | None = None
    replica: int = 0
    replicas: int = 1
    meeting: str | None = None
    listener: int | None = None


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Run a prompt. Its `params.n` continuations are named by (id, index).

    Attributes:
        id: unique among the live ones.
        prompt: user token ids, packed by `pack_ids`.
        params: how to sample.
        priority: smaller goes first.
        media: images and videos of the prompt.
        transfer: which engine prefills the prompt and which decodes; None: this engine does both.
    """

    id: str
    prompt: bytes
    params: SamplingParams
    priority: int = 0
    media: PromptMedia | None = None
    transfer: KvTransferParams | None = None


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Abort requests in any state. Unknown ids are ignored: the request may just have ended."""

    ids: list[str]


class Call(msgspec.Struct, frozen=True, tag=True):
    """Call an engine method other than serving; answered by a `Reply` with the same number.

    Attributes:
        number: chosen by the caller.
        method: "flush_cache", "cache" or "profile".
        arguments: by name.
    """

    number: int
    method: str
    arguments: dict[str, Any] = {}


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the process; running requests are aborted."""


ToEngine = Submit | Abort | Call | Stop


class Phase(msgspec.Struct, frozen=True, tag=True):
    """Report that a phase of the start-up has ended.

    Attributes:
        name: "import", "weights", "profile" (on a GPU), "pages", "tokenizer" or "warmup".
        seconds: how long it took.
    """

    name: str
    seconds: float


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine serves from now on.

    Attributes:
        vocab_size: user vocabulary.
        max_model_len: longest prompt with its output, in user tokens.
        eos_ids: ids that end an output.
        page_size: slots of a page.
        landmarks: whether every page ends in a landmark slot, which holds no user token.
        selecting_layers: layers that select the pages that they read.
        num_pages: number of pages of the pool.
        max_num_seqs: requests that run at once.
        has_tokenizer: whether text outputs, stop strings and grammars are supported.
        choices: every automatic choice with its reason, a line each.
        memory: (what, bytes) lines of the memory table.
        memory_flag: the option that changes how many pages there are.
        selecting_window: slots of their local window, 0 without such layers.
        media: how images and videos enter prompts; None: the model reads text alone.
    """

    vocab_size: int
    max_model_len: int
    eos_ids: tuple[int, ...]
    page_size: int
    landmarks: bool
    selecting_layers: tuple[int, ...]
    num_pages: int
    max_num_seqs: int
    has_tokenizer: bool
    choices: tuple[str, ...]
    memory: tuple[tuple[str, int], ...]
    memory_flag: str = "--kv-cache-memory SIZE"
    selecting_window: int = 0
    media: MediaSpec | None = None


class Position(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position, most likely first; the token itself always among them."""

    ids: tuple[int, ...]
    values: tuple[float, ...]
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, *columns: Any) -> Self:
        """Build it from ids, values and ranks as sequences or arrays."""
        return cls(*(tuple(each.tolist() if hasattr(each, "tolist") else each) for each in columns))


class Positions(msgspec.Struct, frozen=True, array_like=True):
    """`LogprobColumns` as bytes: a struct for each of a million positions would take too long.
    Numbers are little-endian: ids and ranks int32, values float32."""

    ids: bytes
    values: bytes
    ranks: bytes

    @classmethod
    def of(cls, columns: LogprobColumns) -> Self:
        """Pack them."""
        return cls(
            columns.ids.astype(np.int32).tobytes(),
            columns.values.astype(np.float32).tobytes(),
            columns.ranks.astype(np.int32).tobytes(),
        )

    def __iter__(self) -> Iterator[Position]:
        ranks = np.frombuffer(self.ranks, dtype=np.int32)
        ids = np.frombuffer(self.ids, dtype=np.int32).reshape(len(ranks), -1)
        values = np.frombuffer(self.values, dtype=np.float32).reshape(ids.shape)
        columns = LogprobColumns(ids, values, ranks)
        for begin in range(0, len(columns), UNPACKED_AT_ONCE):
            for _, *lists in columns.positions(begin, begin + UNPACKED_AT_ONCE):
                yield Position.of(*lists)


class Timing(msgspec.Struct, frozen=True, array_like=True):
    """Where a request's time went, in seconds.

    Attributes:
        queue: from arrival in the engine to its first step.
        prefill: from there to its first token.
        decode: from there to its last token.
    """

    queue: float
    prefill: float
    decode: float


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a step, or several, added to one continuation.

    Attributes:
        id: the request.
        index: the continuation, 0 .. n-1.
        text: new text, which is final.
        token_ids: new tokens. Their text may come later (stop strings, unfinished characters).
        logprobs: one entry per new token, empty unless asked for.
        selection: one entry per new token, empty unless asked for.
        prompt_logprobs: those of all prompt tokens but the first, part by part; on continuation
            0's first delta.
        cached_tokens: prompt tokens taken from the prefix cache; on continuation 0's first delta.
        finish_reason: "stop", "length", "abort" or "error" on the last delta.
        stop_reason: the stop string or stop id that ended it.
        timing: on the last delta.
        error: what went wrong, where `finish_reason` is "error" and the cause is known.
        status: HTTP status that goes with `error`.
        transfer: for the decoding engine; on continuation 0's last delta.
    """

    id: str
    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Position, ...] = ()
    selection: tuple[tuple[LayerSelection, ...], ...] = ()
    prompt_logprobs: tuple[Positions, ...] | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    timing: Timing | None = None
    error: str | None = None
    status: int = 500
    transfer: KvTransferParams | None = None


def joined(deltas: Sequence[Delta]) -> Delta:
    """Join the deltas of one continuation from several steps into one."""
    last = deltas[-1]
    if len(deltas) == 1:
        return last
    return msgspec.structs.replace(
        last,
        text="".join([delta.text for delta in deltas]),
        token_ids=tuple(chain.from_iterable([delta.token_ids for delta in deltas])),
        logprobs=tuple(chain.from_iterable([delta.logprobs for delta in deltas])),
        selection=tuple(chain.from_iterable([delta.selection for delta in deltas])),
        prompt_logprobs=deltas[0].prompt_logprobs,
        cached_tokens=deltas[0].cached_tokens,
    )


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """All deltas of one step."""

    deltas: list[Delta]


class Stats(msgspec.Struct, frozen=True, omit_defaults=True):
    """The engine's totals since its start and its gauges of now. Seconds are wall clock.

    Attributes:
        running, waiting: continuations in each state.
        pages_total, pages_free, pages_cached: of the pool; cached pages can be evicted.
        pages_leaked: pages that are neither free, cached nor leased; counted when idle.
        window_pages_total, window_pages_free, window_pages_cached: the same for the window layers'
            own pool; all 0 without such layers.
        host_pages_total, host_pages_kept: places for pages in host memory, and pages there.
        host_records_stored, host_records_loaded, host_records_damaged: moved into host memory, out
            of it, and found damaged there.
        load_failures: requests whose records did not all come from another engine, by reason.
        prefix_queries, prefix_hits: prompt tokens looked up in and taken from the prefix cache.
        prompt_tokens, generated_tokens: of all requests.
        preemptions: requests that were retracted because pages ran out.
        draft_runs, drafted_tokens, accepted_tokens: number of times that a row ran guesses, guesses
            run, and guesses accepted.
        steps: forward passes.
        model_seconds, host_seconds: inside the model and outside of it.
        decode_stall_seconds: how long rows that decode waited for prefill of others in their step.
        selecting_queries, pages_selected: queries of layers that select, and the pages that they
            selected.
        frame_hits, frame_misses, frame_bytes: selected pages of a head that were in frames, those
            that were fetched from host memory, and the bytes of these.
    """

    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_cached: int = 0
    pages_leaked: int = 0
    window_pages_total: int = 0
    window_pages_free: int = 0
    window_pages_cached: int = 0
    host_pages_total: int = 0
    host_pages_kept: int = 0
    host_records_stored: int = 0
    host_records_loaded: int = 0
    host_records_damaged: int = 0
    load_failures: dict[str, int] = {}
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    draft_runs: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    steps: int = 0
    model_seconds: float = 0.0
    host_seconds: float = 0.0
    decode_stall_seconds: float = 0.0
    selecting_queries: int = 0
    pages_selected: float = 0.0
    frame_hits: int = 0
    frame_misses: int = 0
    frame_bytes: int = 0


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Sent twice a second by a separate thread as a sign of life.

    Attributes:
        step_age: seconds since the step in flight began; 0 when none runs.
        stats: totals and gauges.
    """

    step_age: float
    stats: Stats


class Reading(msgspec.Struct, frozen=True, tag=True):
    """Progress of prompts that are being prefilled.

    Attributes:
        read: by request, number of prompt tokens that are computed or cached.
    """

    read: dict[str, int]


class Reply(msgspec.Struct, frozen=True, tag=True):
    """Answer to a `Call`: a value, or an error with its HTTP status."""

    number: int
    value: Any = None
    error: str | None = None
    status: int = 500


class Fatal(msgspec.Struct, frozen=True, tag=True):
    """The engine's last message: it ends.

    Attributes:
        reason: cause and remedy, one line.
        kind: name of the class in `cairn.errors`.
        exit_code: 2 for user errors (a bad model or option), 1 otherwise.
    """

    reason: str
    kind: str = "EngineDead"
    exit_code: int = 1


FromEngine = Phase | Ready | Outputs | Heartbeat | Reading | Reply | Fatal


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as the bytes of little-endian int32."""
    return array("i", ids).tobytes()


def unpack_ids(data: bytes) -> array[int]:
    """Inverse of `pack_ids`. An array, because building a list of a million numbers would delay
    streams."""
    ids = array("i")
    ids.frombytes(data)
    return ids
