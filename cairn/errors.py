"""Exceptions. Each class has an HTTP status; an instance may carry a hint what to do."""

from __future__ import annotations


class CairnError(Exception):
    """Base of everything this engine raises on purpose.

    Args:
        message: what was wrong, with the offending value.
        hint: what the user can do about it; appended to the text.
    """

    http_status = 500
    param: str | None = None
    """The field of the request at fault, where there is one."""
    retry_after: int | None = None
    """Seconds after which trying again makes sense, at least 1; None: it does not."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        self.message = message
        self.hint = hint
        super().__init__(f"{message}. {hint}" if hint else message)


class BadRequest(CairnError, ValueError):
    """A request that can never be served: out of range, contradictory or unknown."""

    http_status = 400


class TooLong(BadRequest):
    """A prompt (with its output) that fits neither the model nor the page pool."""


class Busy(CairnError):
    """The engine is full for the moment; the same request may succeed later.

    Args:
        message, hint, retry_after: as in CairnError.
    """

    http_status = 429

    def __init__(self, message: str, hint: str | None = None, retry_after: int = 1) -> None:
        self.retry_after = retry_after
        super().__init__(message, hint)


class BadModel(CairnError, ValueError):
    """A model folder that cannot be served: a config, a weight or a tokenizer that is wrong."""

    http_status = 500


class BadConfig(CairnError, ValueError):
    """An engine option that is impossible for this model or machine."""


class BadArgument(CairnError, ValueError):
    """An argument of an op: a shape, dtype, device, layout or value that the op does not take."""


class OutOfMemory(CairnError, MemoryError):
    """The memory plan does not fit; the hint names the one option to change."""


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
    """An internal bookkeeping rule was broken: a bug, never the user's fault."""


class PeerFailed(CairnError):
    """Another engine did not give what a request needs of it."""

    http_status = 503


class EngineDead(CairnError, RuntimeError):
    """The engine stopped; no request can be served until it is started again.

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
        """The same error for one more reader; a shared one would collect every traceback."""
        return EngineDead(self.message, self.hint, self.retry_after)
