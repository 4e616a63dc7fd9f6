"""The grammar checker with hostile grammars: real worker processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cairn.errors import BadRequest, Busy, CairnError
from cairn.server.grammars import GrammarChecker
from cairn.types import Grammar
from tests.server.running import worker_pids


class Table:
    """A tokenizer of single bytes."""

    special_ids: frozenset[int] = frozenset()

    def token_bytes(self, token: int) -> bytes:
        return bytes([token])


GOOD = Grammar("regex", "[a-z]+ (yes|no)")
CHAIN = Grammar(
    "ebnf", "\n".join(["start: a0", *(f"a{i}: a{i + 1}" for i in range(20_000)), 'a20000: "x"'])
)
REFERENCES = Grammar(
    "json_schema",
    json.dumps(
        {
            "$ref": "#/$defs/d0",
            "$defs": {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(9000)}
            | {"d9000": {}},
        }
    ),
)
SLOW = Grammar(
    "ebnf", "\n".join(f'{"root" if i == 0 else f"a{i}"} ::= a{i + 1} "x"' for i in range(9000))
    + '\na9000 ::= "y"'
)  # fmt: skip


@pytest.fixture
def checkers() -> Iterator[Callable[..., GrammarChecker]]:
    """Creates ready checkers and closes them at the end."""
    made: list[GrammarChecker] = []

    def make(**options: Any) -> GrammarChecker:
        checker = GrammarChecker(**options)
        checker.open(Table(), 256)
        made.append(checker)
        return checker

    yield make
    for checker in made:
        checker.close()


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    checker = GrammarChecker()
    checker.open(Table(), 256)
    yield checker
    checker.close()


def verdict(checker: GrammarChecker, grammar: Grammar) -> str:
    """The reason of a refusal; empty if the grammar is accepted."""
    try:
        asyncio.run(checker.check(grammar))
    except BadRequest as error:
        return str(error)
    return ""


def test_good_and_wrong_grammars(checker: GrammarChecker) -> None:
    assert verdict(checker, GOOD) == ""
    assert "unclosed group" in verdict(checker, Grammar("regex", "("))
    assert "Invalid type" in verdict(checker, Grammar("json_schema", '{"type": "text"}'))
    assert "only an empty output" in verdict(checker, Grammar("regex", "$+"))
    assert verdict(checker, Grammar("regex", "a?")) == ""


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (CHAIN, "nested too deeply"),
        (REFERENCES, "nested too deeply"),
        (SLOW, "takes more than 1.5 seconds"),
        (Grammar("regex", "((a{1,1000}){1,1000}){1,1000}"), "too complex"),
        (Grammar("json_schema", '{"items":' * 100_000 + "{}" + "}" * 100_000), "too deeply"),
        (Grammar("regex", "a" * (1 << 21)), "characters, more than"),
        (Grammar("regex", "\udc00"), "surrogate"),
    ],
    ids=["rules", "references", "slow", "complex", "deep", "long", "surrogate"],
)
def test_a_bomb_is_refused_and_the_next_grammar_passes(
    checker: GrammarChecker, grammar: Grammar, reason: str
) -> None:
    assert reason in verdict(checker, grammar)
    assert verdict(checker, GOOD) == ""


def test_good_grammars_pass_beside_a_bomb(checkers: Callable[..., GrammarChecker]) -> None:
    checker = checkers()

    async def both() -> tuple[float, float]:
        await checker.check(GOOD)
        began = time.monotonic()
        bomb = asyncio.create_task(checker.check(SLOW))
        await asyncio.sleep(0)
        for i in range(20):
            await checker.check(Grammar("regex", f"a{{1,{i + 2}}}"))
        good = time.monotonic() - began
        with pytest.raises(BadRequest):
            await bomb
        return good, time.monotonic() - began

    good, bomb = asyncio.run(both())
    assert good < bomb


def test_too_much_memory_is_refused(checkers: Callable[..., GrammarChecker]) -> None:
    checker = checkers(memory=200 << 20, seconds=20)
    assert verdict(checker, GOOD) == ""
    words = "|".join(f"w{i}x{i * 7919}" for i in range(60_000))
    assert "too much memory" in verdict(checker, Grammar("regex", words))
    assert verdict(checker, GOOD) == ""


def test_a_worker_that_was_killed_or_stopped_is_replaced(
    checkers: Callable[..., GrammarChecker],
) -> None:
    before = worker_pids("grammar_worker")
    checker = checkers(workers=1, seconds=0.5)
    assert verdict(checker, GOOD) == ""
    (first,) = worker_pids("grammar_worker") - before
    os.kill(first, signal.SIGKILL)
    assert verdict(checker, Grammar("regex", "b")) == ""
    (second,) = worker_pids("grammar_worker") - before - {first}
    os.kill(second, signal.SIGSTOP)
    assert "takes more than" in verdict(checker, Grammar("regex", "c" * 500_000))
    assert verdict(checker, Grammar("regex", "d")) == ""
    assert second not in worker_pids("grammar_worker")


def test_verdicts_are_remembered(checkers: Callable[..., GrammarChecker]) -> None:
    checker = checkers()
    wrong = Grammar("regex", "(")
    first = verdict(checker, wrong)
    assert verdict(checker, GOOD) == ""
    checker.close()
    assert first and verdict(checker, wrong) == first
    assert verdict(checker, GOOD) == ""


def test_too_many_at_once_are_told_to_come_back(checkers: Callable[..., GrammarChecker]) -> None:
    checker = checkers(max_waiting=3)

    async def crowd() -> list[Any]:
        grammars = [Grammar("regex", f"a{i}") for i in range(8)]
        return await asyncio.gather(*map(checker.check, grammars), return_exceptions=True)

    results = asyncio.run(crowd())
    assert results[:3] == [None] * 3
    assert all(isinstance(result, Busy) and result.retry_after >= 1 for result in results[3:])
    assert verdict(checker, GOOD) == ""


def test_closing_ends_the_workers(checkers: Callable[..., GrammarChecker]) -> None:
    before = worker_pids("grammar_worker")
    checker = checkers()
    assert verdict(checker, GOOD) == ""
    assert worker_pids("grammar_worker") - before
    checker.close()
    assert worker_pids("grammar_worker") == before


def test_a_model_without_a_tokenizer_takes_no_grammar() -> None:
    checker = GrammarChecker()
    assert "no tokenizer" in verdict(checker, GOOD)
    checker.close()


def test_a_worker_that_cannot_start_is_the_servers_fault(
    checkers: Callable[..., GrammarChecker],
) -> None:
    checker = checkers(memory=10 << 20)
    with pytest.raises(CairnError, match="cannot be started") as caught:
        asyncio.run(checker.check(GOOD))
    assert caught.value.http_status == 500


def test_modules_of_the_working_directory_are_not_run(
    checkers: Callable[..., GrammarChecker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server may run in a folder with untrusted files."""
    for name in ("msgspec", "numpy", "resource"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w')")
    monkeypatch.chdir(tmp_path)
    asyncio.run(checkers().check(GOOD))
    assert not (tmp_path / "ran").exists()
