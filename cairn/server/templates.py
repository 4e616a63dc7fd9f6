"""Renders chat templates in worker processes with limits on time and memory."""

from __future__ import annotations

import asyncio
import signal

from cairn.engine.chat_template import TemplateInput
from cairn.errors import BadRequest, Busy
from cairn.server.template_worker import packed, unpacked
from cairn.server.workers import Ended, WorkerPool

WORKERS = 2
SECONDS = 3.0
MEMORY = 2 << 30
MAX_WAITING = 1024


class TemplateRenderer:
    """Renders conversations in worker processes.

    A worker that exceeds its time limit is replaced.

    Args:
        workers: maximum number of processes.
        seconds: time limit of one conversation.
        memory: address space of a worker in bytes.
        max_waiting: maximum number of conversations that wait or are being rendered.
    """

    def __init__(
        self,
        *,
        workers: int = WORKERS,
        seconds: float = SECONDS,
        memory: int = MEMORY,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._seconds = seconds
        self._max_waiting = max_waiting
        self._waiting = 0
        self._pool = WorkerPool(
            "cairn.server.template_worker",
            bytes,
            workers=workers,
            seconds=seconds,
            memory=memory,
        )

    async def open(self) -> None:
        """Start a worker for the first conversation. Raises CairnError if it does not start."""
        await self._pool.ready()

    async def render(self, given: TemplateInput) -> str:
        """Render a conversation.

        Raises:
            BadRequest: the template refuses the messages, or exceeds its limits on them.
            BadModel: the template is broken.
            Busy: too many conversations wait.
        """
        if self._waiting >= self._max_waiting:
            raise Busy(
                f"{self._waiting} conversations wait for their chat template",
                "Try again later",
                retry_after=2,
            )
        self._waiting += 1
        try:
            message = await asyncio.to_thread(_packed, given)
            return unpacked(await self._pool.ask(message))
        except Ended as ended:
            late = ended.signal == signal.SIGALRM
            what = f"more than {self._seconds:g} seconds" if late else "too much memory"
            raise BadRequest(
                f"the model's chat template takes {what} for the messages",
                "Send fewer or shorter ones, or correct the template in the model's folder",
            ) from None
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """Stop the workers. Waiting requests fail."""
        self._pool.close()


def _packed(given: TemplateInput) -> bytes:
    try:
        return packed(given)
    except RecursionError:
        raise BadRequest("the messages are nested too deeply for a chat template") from None
