"""The choice of a replica for a prompt."""

import pytest

from cairn.cache.radix import Mark
from cairn.engine.routing import Router
from cairn.errors import BadRequest

PAGE = 4


def router(balance="auto", pages=(100, 100)):
    return Router(balance, PAGE, pages)


def prompt(pages, first=0):
    return [*range(first, first + pages * PAGE)]


def test_keys_are_of_whole_pages_in_powers_of_two():
    one = router()
    counts = {0: 0, 3: 0, 4: 1, 8: 2, 15: 2, 16: 3, 31: 3, 32: 4}
    assert {n: len(one.keys([7] * n)) for n in counts} == counts
    long, short = one.keys(prompt(9)), one.keys(prompt(5))
    assert long[:3] == short and len({*long}) == 4
    changed = [*prompt(9)]
    changed[13] += 1
    assert [a == b for a, b in zip(one.keys(changed), long, strict=True)] == [1, 1, 0, 0]
    # The same ids, but an image in the second page.
    assert [
        a == b for a, b in zip(one.keys(prompt(2), [Mark(5, 6, b"cat")]), long, strict=False)
    ] == [1, 0]
    with pytest.raises(BadRequest, match="32 bits"):
        one.keys([2**40] * PAGE)


def test_the_longest_known_prefix_wins_and_then_the_least_load():
    one = router(pages=(100, 100, 100))
    shared, longer = one.keys(prompt(2)), one.keys(prompt(8))
    one.note(0, shared)
    one.note(1, longer)
    assert one.choose(longer, {0: 0, 1: 1, 2: 0}) == 1
    assert one.choose(one.keys(prompt(3)), {0: 1, 1: 0, 2: 0}) == 1
    assert one.choose(one.keys(prompt(3)), {0: 0, 1: 1, 2: 0}) == 0
    assert one.choose(one.keys(prompt(3, first=90)), {0: 1, 1: 1, 2: 0}) == 2
    # Only replicas with room are candidates.
    assert one.choose(longer, {0: 3, 2: 3}) == 0


@pytest.mark.parametrize(("least", "most"), [(0, 1), (4, 6), (40, 51)])
def test_a_known_prefix_does_not_count_beyond_a_bound_of_load(least, most):
    one = router()
    keys = one.keys(prompt(4))
    one.note(0, keys)
    assert one.choose(keys, {0: most, 1: least}) == 0
    assert one.choose(keys, {0: most + 1, 1: least}) == 1


def test_equals_take_turns():
    for balance in ("auto", "shortest_queue", "round_robin"):
        one, chosen = router(balance, (9, 9, 9)), []
        for i in range(6):
            keys = one.keys(prompt(1, first=100 * i))
            chosen.append(one.choose(keys, {0: 0, 1: 0, 2: 0}))
            one.note(chosen[-1], keys)
        assert chosen == [0, 1, 2, 0, 1, 2], balance
    assert router("round_robin").choose([], {0: 9, 1: 0}) == 0
    assert router("shortest_queue").choose([], {0: 9, 1: 0}) == 1
    assert router("shortest_queue").keys(prompt(9)) == []


def test_remembered_prefixes_are_bounded_and_forgotten_with_the_cache():
    one = router(pages=(3, 100))
    old, new = one.keys(prompt(2)), one.keys(prompt(2, first=50))
    one.note(0, old)
    one.note(0, new)
    one.note(1, [])
    # Two keys each and room for three: the shorter prefix of the older prompt is left.
    assert one.choose(old[1:], {0: 1, 1: 0}) == 1
    assert one.choose(old[:1], {0: 1, 1: 0}) == one.choose(new, {0: 1, 1: 0}) == 0
    one.forget(0)
    assert one.choose(new, {0: 1, 1: 0}) == 1
