"""Unknown names raise an error that suggests the nearest known one."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from cairn.errors import BadRequest
from cairn.names import checked_keywords, nearest, refuse_unknown


def test_nearest():
    known = ["temperature", "top_p", "top_k"]
    assert nearest("temprature", known) == "temperature"
    assert nearest("topk", known) == "top_k"
    assert nearest("zebra", known) is None
    assert nearest("x", []) is None


def test_refuse_unknown():
    refuse_unknown("it", ["a"], ["a", "b"])
    refuse_unknown("it", [], [])
    with pytest.raises(BadRequest, match="it has no option 'alpa'. Did you mean 'alpha'?"):
        refuse_unknown("it", ["alpa"], ["alpha", "beta"])
    with pytest.raises(BadRequest, match="Known: alpha, beta"):
        refuse_unknown("it", iter(["zzz"]), iter(["beta", "alpha"]))


def test_checked_keywords():
    @checked_keywords
    @dataclass(frozen=True, kw_only=True)
    class Options:
        """An options class with two fields."""

        first: int = 1
        second: int = 2

    assert Options(second=5) == Options(first=1, second=5)
    assert Options.__init__.__name__ == "__init__"
    with pytest.raises(BadRequest, match="Options has no option 'secnd'. Did you mean 'second'?"):
        Options(secnd=3)
