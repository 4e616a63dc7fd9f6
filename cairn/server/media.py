"""Images and videos of requests: fetched in threads, decoded in worker processes with time
limits."""

from __future__ import annotations

import asyncio
import signal
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from cairn.engine.media.given import Given, files_of
from cairn.engine.media.pixels import Prepared
from cairn.engine.media.reader import MediaReader
from cairn.errors import BadRequest, Busy, TooLong
from cairn.runner.media import PromptMedia
from cairn.server.media_worker import Answer, Files, Refused, Setting
from cairn.server.workers import Ended, WorkerPool
from cairn.specs.vision import IMAGE

WORKERS = 2
SECONDS = 10.0
MEMORY = 2 << 30
MAX_WAITING = 64
"""Maximum number of requests whose images are being read or wait for it."""
MAX_HELD = 4 << 30
"""Maximum bytes of decoded pixels of all unfinished requests."""


class ChatPrompt(NamedTuple):
    """An encoded conversation.

    Attributes:
        ids: its token ids.
        media: its images and videos; None if there are none.
    """

    ids: Sequence[int]
    media: PromptMedia | None = None


class MediaPreparer:
    """Decodes the images and videos of requests in worker processes.

    A worker that exceeds its time limit is replaced.

    Args:
        reader: the model's image reader.
        longest: maximum prompt length in tokens.
    """

    def __init__(self, reader: MediaReader, longest: int) -> None:
        self.reader, self._longest = reader, longest
        self._waiting = self._held = 0
        self._pool: WorkerPool | None = None
        if reader.media is not None:
            first = msgspec.msgpack.encode(Setting(reader.media, reader.limits))
            self._pool = WorkerPool(
                "cairn.server.media_worker",
                lambda: first,
                workers=WORKERS,
                seconds=SECONDS,
                memory=MEMORY,
            )

    async def placed(self, ids: Sequence[int], given: Sequence[Given]) -> ChatPrompt:
        """Expand the placeholders of a prompt to one token per image embedding.

        Raises:
            BadRequest: an image cannot be read, or the prompt has no placeholder for it.
            TooLong: the images exceed the maximum prompt length.
            Busy: too many requests wait.
        """
        if not given:
            return ChatPrompt(ids)
        if self._waiting >= MAX_WAITING:
            raise Busy(
                f"{self._waiting} requests wait for their images", "Try again later", retry_after=2
            )
        self._waiting += 1
        items: list[Prepared] = []
        try:
            for one in given:
                items.append(await self._prepared(one))
                self._held += len(items[-1].item.pixels)
                self._check(items, one)
            ids, media = await asyncio.to_thread(self.reader.place, ids, items)
        except BaseException:
            self._release(sum(len(item.item.pixels) for item in items))
            raise
        finally:
            self._waiting -= 1
        # The request holds a reference to `media` until it ends.
        weakref.finalize(media, self._release, sum(len(item.pixels) for item in media.items))
        return ChatPrompt(ids, media)

    def _check(self, items: Sequence[Prepared], last: Given) -> None:
        tokens = sum(item.tokens for item in items)
        if tokens > self._longest:
            raise TooLong(
                f"{last.name}: the images up to here have {tokens} tokens, but "
                f"{self._longest} are the most that fit",
                "Send fewer or smaller ones",
            )
        if self._held > MAX_HELD:
            raise Busy(
                "images of other requests take the memory that there is for them",
                "Try again later",
                retry_after=2,
            )

    def _release(self, count: int) -> None:
        self._held -= count

    async def _prepared(self, given: Given) -> Prepared:
        assert self._pool is not None
        data = await asyncio.to_thread(files_of, given, self.reader.limits)
        if given.modality == IMAGE and len(data) != 1:
            raise BadRequest(f"{given.name} holds {len(data)} files", "Send it as video_url")
        message = msgspec.msgpack.encode(Files(given.modality, data, given.name))
        try:
            found = await self._pool.ask(message)
        except Ended as ended:
            late = ended.signal == signal.SIGALRM
            what = f"more than {SECONDS:g} seconds" if late else "too much memory"
            raise BadRequest(
                f"{given.name}: to decode it takes {what}", "Send a smaller one"
            ) from None
        answer: Answer = await asyncio.to_thread(msgspec.msgpack.decode, found, type=Answer)
        if isinstance(answer, Refused):
            raise BadRequest(answer.message, answer.hint)
        return answer.item

    def close(self) -> None:
        """Stop the workers. Waiting requests fail."""
        if self._pool is not None:
            self._pool.close()
