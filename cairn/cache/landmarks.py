"""The only arithmetic between tokens, slots, pages, landmarks and rotary positions.

A *token* is what the user sees; a *slot* is a place in the engine's sequence; a page is `page_size`
consecutive slots. With landmarks the last slot of each page holds the landmark of that page and no
token:

    page_size 4     slot      0  1  2  3  4  5  6  7  8
                    token     0  1  2  -  3  4  5  -  6
                    position  0  1  2  3  3  4  5  6  6

Every function takes an int, a signed numpy array or a signed torch tensor and gives back the same
kind. Division rounds towards minus infinity everywhere, so the formulas also hold left of the
sequence's start (a window that reaches before slot 0).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, overload


class Whole(Protocol):
    """Signed integers: an int, a numpy array, a torch tensor."""

    def __add__(self, other: Any, /) -> Any: ...
    def __sub__(self, other: Any, /) -> Any: ...
    def __neg__(self) -> Any: ...
    def __mod__(self, other: Any, /) -> Any: ...
    def __floordiv__(self, other: Any, /) -> Any: ...


W = TypeVar("W", bound=Whole)


@dataclass(frozen=True, slots=True)
class SlotMap:
    """How the tokens of a sequence are laid out in slots and pages.

    Attributes:
        page_size: slots in a page, S.
        landmarks: the last slot of each page is a landmark; without, slot = token = position.

    Raises ValueError for a page size that leaves no slot for a token.
    """

    page_size: int
    landmarks: bool

    def __post_init__(self) -> None:
        if self.tokens_per_page < 1:
            kind = "with" if self.landmarks else "without"
            raise ValueError(f"page_size {self.page_size} {kind} landmarks holds no token")

    @property
    def tokens_per_page(self) -> int:
        """User tokens in a complete page: S - 1 with landmarks, else S."""
        return self.page_size - 1 if self.landmarks else self.page_size

    def slot_of(self, token: W) -> W:
        """The slot that holds user token number `token`."""
        if not self.landmarks:
            return token
        slot: W = token + token // (self.page_size - 1)
        return slot

    def token_at(self, slot: W) -> W:
        """The number of the user token in `slot`; for a landmark slot, of the next user token."""
        if not self.landmarks:
            return slot
        token: W = slot - slot // self.page_size
        return token

    @overload
    def is_landmark(self, slot: int) -> bool: ...
    @overload
    def is_landmark(self, slot: W) -> W: ...
    def is_landmark(self, slot: Any) -> Any:
        """True where `slot` holds a landmark (booleans of the same shape)."""
        # Without landmarks: compare with -1, which no remainder equals.
        return slot % self.page_size == (self.page_size - 1 if self.landmarks else -1)

    def position_of(self, slot: W) -> W:
        """The rotary position of `slot`; a landmark has the position of the next user token."""
        return self.token_at(slot)

    def slots_for(self, n_tokens: W) -> W:
        """Slots that `n_tokens` tokens take once the landmark of every filled page has been run."""
        return self.slot_of(n_tokens)

    def tokens_in(self, n_slots: W) -> W:
        """User tokens among the first `n_slots` slots."""
        return self.token_at(n_slots)

    def fitting(self, n_tokens: int, slots: int) -> int:
        """Number of user tokens after the first `n_tokens` that fit into `slots` slots, with the
        landmarks of the pages that they fill."""
        end = self.slots_for(n_tokens) + slots
        last = self.tokens_in(end)
        # If the landmark does not fit, the token before it is left for the next step too.
        return last - (self.slots_for(last) > end) - n_tokens

    def pages_for(self, n_tokens: W) -> W:
        """Pages needed for `n_tokens` tokens and the landmarks of the pages that they fill."""
        pages: W = -(-self.slots_for(n_tokens) // self.page_size)
        return pages

    def complete_pages(self, n_tokens: W) -> W:
        """Pages that `n_tokens` tokens fill."""
        pages: W = self.slots_for(n_tokens) // self.page_size
        return pages

    def page_of(self, slot: W) -> W:
        """The logical page that holds `slot`."""
        page: W = slot // self.page_size
        return page
