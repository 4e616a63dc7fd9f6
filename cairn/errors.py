"""Exceptions. Each class has an HTTP status; an instance may have a hint."""

from __future__ import annotations


class CairnError(Exception):
    """Base class of all exceptions that cairn raises intentionally.

    Args:
        message: what was wrong, with the offending value.
        hint: what the user can do; appended to the text.
    """

    http_status = 500
    param: str | None = None
    """Path of the invalid request field, if there is one."""
    retry_after: int | None = None
    """Seconds to wait before a retry, at least 1; None if a retry is pointless."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        self.message = message
        self.hint = hint
        super().__init__(f"{message}. {hint}" if hint else message)


class BadRequest(CairnError, ValueError):
    """An invalid request: a value that is out of range, contradictory or unknown."""

    http_status = 400


class TooLong(BadRequest):
    """A prompt that, with its output, exceeds the model's context or the page pool."""


class Busy(CairnError):
    """The queue is full; the same request may succeed later.

    Args:
        message, hint, retry_after: as in CairnError.
    """

    http_status = 429

    def __init__(self, message: str, hint: str | None = None, retry_after: int = 1) -> None:
        self.retry_after = retry_after
        super().__init__(message, hint)


class BadModel(CairnError, ValueError):
    """A model folder with an invalid or unsupported config, weights or tokenizer."""

    http_status = 500


class BadConfig(CairnError, ValueError):
    """An option that is invalid for this model or machine."""


class BadArgument(CairnError, ValueError):
    """An argument of an op with an unsupported shape, dtype, device, layout or value."""


class OutOfMemory(CairnError, MemoryError):
    """The memory plan does not fit; the hint names the option to change."""


def short_of_memory(error: BaseException) -> OutOfMemory | None:
    """What a failed allocation of host or device memory means; None: it is another error."""
    if isinstance(error, OutOfMemory):
        return error
    what = " ".join(f"{type(error).__name__}: {error}".split())
    # torch has a class of its own for devices, and only a text for the host.
    signs = "OutOfMemoryError", "can't allocate memory", "out of memory"
    if not isinstance(error, MemoryError) and not any(sign in what for sign in signs):
        return None
    return OutOfMemory(
        f"the memory does not hold the model and its pages ({what})",
        "Lower kv_cache_memory (--kv-cache-memory), or use a machine with more memory",
    )


class InvariantError(CairnError, AssertionError):
    """An internal invariant is violated: a bug."""


class PeerFailed(CairnError):
    """Another engine failed to provide what a request needs, such as the pages of its prompt."""

    http_status = 503


class EngineDead(CairnError, RuntimeError):
    """The engine has stopped and has to be restarted.

    Args:
        message, hint, retry_after: as in CairnError.
    """

    http_status = 503

    def __init__(
        self, message: str, hint: str | None = None, retry_after: int | None = None
    ) -> None:
        self.retry_after = retry_after
        super().__init__(message, hint)

    def again(self) -> EngineDead:
        """A copy to raise elsewhere. A shared instance would accumulate tracebacks."""
        return EngineDead(self.message, self.hint, self.retry_after)
