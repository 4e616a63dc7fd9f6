"""Errors for unknown names, which suggest the nearest known name."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from cairn.errors import BadRequest

T = TypeVar("T", bound=type)


def nearest(name: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """The known name most similar to `name`, or None if no similarity reaches `likeness` (0 to
    1)."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=likeness)
    return found[0] if found else None


def suggestion(name: str, known: Iterable[str]) -> str:
    """The hint for an unknown name: the most similar known name, or all known names."""
    known = list(known)
    close = nearest(name, known)
    return f"Did you mean {close!r}?" if close else f"Known: {', '.join(sorted(known))}"


def refuse_unknown(owner: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise BadRequest for the first name in `given` that is not in `known`."""
    known = list(known)
    for name in given:
        if name not in known:
            raise BadRequest(f"{owner} has no option {name!r}", suggestion(name, known))


def checked_keywords(cls: T) -> T:
    """Class decorator: an unknown keyword of the constructor raises BadRequest with a
    suggestion."""
    original: Callable[..., None] = cls.__init__  # type: ignore[misc]
    known = [n for n in inspect.signature(original).parameters if n != "self"]

    @functools.wraps(original)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        refuse_unknown(cls.__name__, kwargs, known)
        original(self, *args, **kwargs)

    cls.__init__ = checked  # type: ignore[misc]
    return cls
