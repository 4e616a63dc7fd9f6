"""Conversion between tokens and slots, compared with inserting landmarks one by one."""

from __future__ import annotations

import bisect

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cairn.cache.landmarks import SlotMap

LANDMARK = -1
MAPS = [SlotMap(size, landmarks) for size in (2, 4, 16, 64) for landmarks in (True, False)]


def inserted(slots: SlotMap, n_tokens: int) -> list[int]:
    """Token numbers with landmarks inserted, built one token at a time."""
    sequence: list[int] = []
    for token in range(n_tokens):
        sequence.append(token)
        if slots.landmarks and len(sequence) % slots.page_size == slots.page_size - 1:
            sequence.append(LANDMARK)
    return sequence


def positions(sequence: list[int]) -> list[int]:
    """A landmark has the position of the next user token."""
    tokens_before = 0
    result = []
    for entry in sequence:
        result.append(tokens_before)
        tokens_before += entry != LANDMARK
    return result


def verify(slots: SlotMap, n_tokens: int) -> None:
    sequence = inserted(slots, n_tokens)
    size = slots.page_size
    assert slots.slots_for(n_tokens) == len(sequence)
    assert slots.tokens_in(len(sequence)) == n_tokens
    assert slots.pages_for(n_tokens) == len([sequence[i] for i in range(0, len(sequence), size)])
    filled = [sequence[i : i + size] for i in range(0, len(sequence), size)]
    assert slots.complete_pages(n_tokens) == sum(len(page) == size for page in filled)
    assert slots.complete_pages(n_tokens) == n_tokens // slots.tokens_per_page
    for slot, (entry, position) in enumerate(zip(sequence, positions(sequence), strict=True)):
        assert slots.is_landmark(slot) is (entry == LANDMARK)
        assert slots.position_of(slot) == position
        assert slots.page_of(slot) == slot // size
        assert slots.token_at(slot) == position
        assert slots.tokens_in(slot) == sum(e != LANDMARK for e in sequence[:slot])
        if entry != LANDMARK:
            assert slots.token_at(slot) == entry
            assert slots.slot_of(entry) == slot


@pytest.mark.parametrize("slots", MAPS, ids=str)
def test_table_of_short_sequences(slots: SlotMap) -> None:
    for n_tokens in range(201):
        verify(slots, n_tokens)


@given(size=st.integers(2, 300), landmarks=st.booleans(), n_tokens=st.integers(0, 1500))
def test_any_page_size(size: int, landmarks: bool, n_tokens: int) -> None:
    verify(SlotMap(size, landmarks), n_tokens)


def test_the_documented_example() -> None:
    slots = SlotMap(4, True)
    assert [slots.position_of(s) for s in range(9)] == [0, 1, 2, 3, 3, 4, 5, 6, 6]
    assert [s for s in range(9) if slots.is_landmark(s)] == [3, 7]
    assert [slots.slot_of(t) for t in range(7)] == [0, 1, 2, 4, 5, 6, 8]


@given(size=st.integers(2, 70), token=st.integers(-(10**7), 10**7))
def test_division_rounds_down_left_of_the_start(size: int, token: int) -> None:
    slots = SlotMap(size, True)
    slot = slots.slot_of(token)
    assert not slots.is_landmark(slot)
    assert slots.token_at(slot) == token
    # Shifting by whole pages shifts all results by whole pages, also across zero.
    assert slots.slot_of(token + 3 * (size - 1)) == slot + 3 * size
    assert slots.page_of(slot) * size <= slot < (slots.page_of(slot) + 1) * size


def test_slots_before_the_sequence() -> None:
    slots = SlotMap(4, True)
    assert [slots.page_of(s) for s in (-5, -4, -1, 0)] == [-2, -1, -1, 0]
    assert slots.is_landmark(-1)
    assert slots.slot_of(-1) == -2


@pytest.mark.parametrize("slots", MAPS, ids=str)
def test_arrays_and_tensors_agree_with_integers(slots: SlotMap) -> None:
    numbers = list(range(-200, 400))
    for name in (
        "slot_of",
        "token_at",
        "is_landmark",
        "position_of",
        "slots_for",
        "tokens_in",
        "pages_for",
        "complete_pages",
        "page_of",
    ):
        function = getattr(slots, name)
        expected = [function(n) for n in numbers]
        array = function(np.array(numbers, dtype=np.int32))
        assert isinstance(array, np.ndarray)
        assert array.tolist() == expected, name
        for dtype in (torch.int32, torch.int64):
            tensor = function(torch.tensor(numbers, dtype=dtype))
            assert tensor.dtype == (torch.bool if name == "is_landmark" else dtype)
            assert tensor.tolist() == expected, name


@pytest.mark.parametrize("slots", MAPS, ids=str)
def test_tokens_that_fit_bring_no_landmark_beyond(slots: SlotMap) -> None:
    lengths = [len(inserted(slots, n)) for n in range(4 * slots.page_size + 4)]
    for first in range(2 * slots.page_size + 1):
        for room in range(2 * slots.page_size + 2):
            most = bisect.bisect_right(lengths, lengths[first] + room) - 1 - first
            assert slots.fitting(first, room) == most, (first, room)


@pytest.mark.parametrize(("size", "landmarks"), [(1, True), (0, True), (0, False), (-4, False)])
def test_a_page_without_room_is_refused(size: int, landmarks: bool) -> None:
    with pytest.raises(ValueError, match="holds no token"):
        SlotMap(size, landmarks)
