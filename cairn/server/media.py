"""Images and videos of requests: fetched in a thread, decoded in processes that can be ended."""

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
"""Requests whose images are read at once, or wait for it."""
MAX_HELD = 4 << 30
"""Bytes of the pixels of all requests that have not ended."""


class ChatPrompt(NamedTuple):
    """A conversation as the engine takes it.

    Attributes:
        ids: its tokens.
        media: its images and videos; None: it is text.
    """

    ids: Sequence[int]
    media: PromptMedia | None = None


class MediaPreparer:
    """Reads the images of requests.

    A worker process that takes too long over one ends and is replaced.

    Args:
        reader: of the model.
        longest: tokens that prompts may have.
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
        """A prompt's ids with all placeholders, and what they stand for.

        Raises:
            BadRequest: an image that cannot be read, or has no place in the prompt.
            TooLong: images that no prompt holds.
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
        # The request keeps `media` alive until it has ended.
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
        """End the workers. What waits fails."""
        if self._pool is not None:
            self._pool.close()
