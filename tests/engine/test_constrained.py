"""Outputs with grammars on a small byte-level model, checked by other parsers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from cairn.config import EngineOptions, default_model_path
from cairn.engine.build import Built, build
from cairn.engine.continuation import Continuation
from cairn.engine.grammar import GrammarState
from cairn.engine.planned_step import Limits
from cairn.runner.executor import Executor
from cairn.runner.step import Launched, Masks, StepPlan, StepResult
from cairn.types import CompletionOutput, Grammar, SamplingParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 18, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", "green", 'b"l']}, "maxItems": 3},
        "at": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/point"}]},
    },
    "required": ["name", "age", "tags", "at"],
    "additionalProperties": False,
    "$defs": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "number", "minimum": 0, "maximum": 9}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
PATTERN = r"(Mr|Ms)\. [A-Z][a-z]{2,9} (was|is) (not )?\d{1,3}% [éü]{1,3}x"
SUMS = """
root ::= sum
sum ::= term ([+*] term){1,4}
term ::= [1-9] [0-9]? | "(" sum ")"
"""
LARK = """
start: "let" WS name "=" value ";"
name: /[a-z]{1,6}/
value: %json {"type": "array", "items": {"type": "boolean"}, "maxItems": 4}
WS: / {1,2}/
"""


def is_person(text: str) -> bool:
    value: dict[str, Any] = json.loads(text)
    assert list(value) == ["name", "age", "tags", "at"]
    assert isinstance(value["name"], str) and 1 <= len(value["name"]) <= 12
    assert type(value["age"]) is int and 18 <= value["age"] <= 99
    assert len(value["tags"]) <= 3 and set(value["tags"]) <= {"red", "green", 'b"l'}
    assert value["at"] is None or (list(value["at"]) == ["x"] and 0 <= value["at"]["x"] <= 9)
    return True


def is_sum(text: str) -> bool:
    """A recursive-descent parser of the grammar SUMS."""

    def total(at: int) -> int:
        at, count = term(at), 0
        while at < len(text) and text[at] in "+*":
            at, count = term(at + 1), count + 1
        assert 1 <= count <= 4
        return at

    def term(at: int) -> int:
        if text[at] == "(":
            at = total(at + 1)
            assert text[at] == ")"
            return at + 1
        assert text[at] in "123456789"
        return at + 2 if text[at + 1 : at + 2].isdigit() else at + 1

    return total(0) == len(text)


def is_binding(text: str) -> bool:
    match = re.fullmatch(r"let {1,2}[a-z]{1,6}=(.*);", text, re.DOTALL)
    assert match is not None
    value = json.loads(match[1])
    return len(value) <= 4 and all(isinstance(item, bool) for item in value)


CHECKS = {
    "json": (Grammar("json_schema", json.dumps(SCHEMA)), is_person),
    "regex": (Grammar("regex", PATTERN), lambda text: bool(re.fullmatch(PATTERN, text))),
    "GBNF": (Grammar("ebnf", SUMS), is_sum),
    "Lark": (Grammar("ebnf", LARK), is_binding),
}
MODEL = default_model_path()
PROMPT = "It was the best of times, it was the worst of times. "


@pytest.fixture(scope="module")
def built() -> Built:
    return engine()


@pytest.fixture(params=[False, True], ids=["in turn", "overlapped"])
def overlap(built: Built, request: pytest.FixtureRequest) -> Iterator[bool]:
    built.core.overlap = request.param
    yield request.param
    built.core.overlap = False


def engine(pages: str = "48MiB", rows: int = 32) -> Built:
    options = EngineOptions(
        dtype="float32", device="cpu", kv_cache_memory=pages, max_num_seqs=rows, max_model_len=512
    )
    return build(MODEL, options)


def params(name: str | None, seed: int = 0, **more: Any) -> SamplingParams:
    grammar = CHECKS[name][0] if name is not None else None
    defaults = {"max_tokens": 160, "seed": seed, "temperature": 0.9, "grammar": grammar}
    return SamplingParams(**{**defaults, **more})


def start(built: Built, prompt: str, wanted: SamplingParams) -> Continuation:
    core = built.core
    assert core.tokenizer is not None
    return core.add(f"r{core._arrivals}", core.tokenizer.encode(prompt), wanted)


def finish(built: Built) -> None:
    while built.core.has_work:
        built.core.step()


def run(built: Built, *wanted: SamplingParams, prompt: str = PROMPT) -> list[CompletionOutput]:
    """The outputs of requests that run together."""
    live = [start(built, f"{prompt}{i}", each) for i, each in enumerate(wanted)]
    finish(built)
    return [continuation.stream.output for continuation in live]


def test_every_output_satisfies_its_grammar(built: Built) -> None:
    names = [name for name in CHECKS for _ in range(6)]
    outputs = run(built, *(params(name, seed) for seed, name in enumerate(names)))
    for name, (_, check) in CHECKS.items():
        mine = [output for output, own in zip(outputs, names, strict=True) if own == name]
        ended = [output.text for output in mine if output.finish_reason == "stop"]
        assert len(ended) >= 4, name
        assert len(set(ended)) > 2, "the grammar leaves room, the outputs should too"
        assert all(check(text) for text in ended)
    assert {output.finish_reason for output in outputs} <= {"stop", "length"}


@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_greedy_and_wild_outputs_satisfy_it_too(built: Built, temperature: float) -> None:
    bias = {ord("}"): -100.0, ord("x"): 100.0}
    for name in ("json", "regex"):
        wanted = params(name, temperature=temperature, logit_bias=bias, repetition_penalty=1.5)
        (output,) = run(built, wanted)
        assert output.finish_reason == "length" or CHECKS[name][1](output.text)


def test_others_in_the_batch_are_not_touched(built: Built, overlap: bool) -> None:
    wanted = [
        params(None, max_tokens=30, presence_penalty=1.0),
        params("regex"),
        params(None, 2, max_tokens=30, top_p=0.9),
        params("GBNF", max_tokens=40),
        params(None, temperature=0.0, max_tokens=30, logprobs=2),
    ]
    together = run(built, *wanted)
    for i, each in enumerate(wanted):
        alone = start(built, f"{PROMPT}{i}", each)
        finish(built)
        assert alone.stream.output.token_ids == together[i].token_ids


@pytest.mark.parametrize("budgets", [(16, 64, 8), (5,)])
def test_chunked_prefill_gives_the_same_output(built: Built, budgets: tuple[int, ...]) -> None:
    limits = built.core.scheduler.limits
    (expected,) = run(built, params("regex"))
    built.core.cache.reset()
    live = start(built, f"{PROMPT}0", params("regex"))
    step = 0
    while built.core.has_work:
        built.core.scheduler.limits = Limits(8, budgets[step % len(budgets)])
        built.core.step()
        step += 1
    built.core.scheduler.limits = limits
    assert live.stream.output.token_ids == expected.token_ids


def test_a_mask_finds_its_token_behind_a_prompt_that_is_not_done(built: Built) -> None:
    """A token that completes a page needs two slots, so a chunk leaves the last slot to a short
    prompt."""
    core, limits = built.core, built.core.scheduler.limits
    core.cache.reset()
    core.scheduler.limits = Limits(8, 5 * 64 + 63)
    try:
        long = start(built, "long " * 90, params(None, max_tokens=1))
        short = start(built, "a", params("regex", max_tokens=8))
        assert core.grammars is not None
        core.grammars.compile(CHECKS["regex"][0])
        core.step()
        assert short.stream.output.token_ids and not long.stream.output.token_ids
        finish(built)
    finally:
        core.scheduler.limits = limits
    assert re.match("M[rs]\\. [A-Z][a-z]{2}", short.stream.output.text)


@pytest.mark.parametrize(
    "overlapped", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["overlapped", "in turn"]
)
def test_the_state_survives_a_retraction(built: Built, overlapped: bool) -> None:
    wanted = [
        params(name, seed, max_tokens=110)
        for seed, name in enumerate([None, "json", "GBNF", "json", "json"])
    ]
    roomy = run(built, *wanted)
    tight = engine(pages="3MiB", rows=5)
    tight.core.overlap = overlapped
    live = [start(tight, f"{PROMPT}{i}", each) for i, each in enumerate(wanted)]
    finish(tight)
    retracted = [one for one in live if one.request.retractions]
    assert any(one.request.grammar is not None for one in retracted)
    for one, expected in zip(live, roomy, strict=True):
        assert one.stream.output.token_ids == expected.token_ids


def test_the_last_token_of_a_whole_output_stops_it(built: Built, overlap: bool) -> None:
    exact = SamplingParams(grammar=Grammar("regex", "abcd"), max_tokens=4)
    (output,) = run(built, exact)
    assert (output.text, output.finish_reason, output.stop_reason) == ("abcd", "stop", None)
    short = SamplingParams(grammar=Grammar("regex", "abcd"), max_tokens=3, min_tokens=3)
    (output,) = run(built, short)
    assert (output.text, output.finish_reason) == ("abc", "length")


def test_a_whole_output_ends_before_min_tokens(built: Built) -> None:
    wanted = SamplingParams(grammar=Grammar("regex", "ab"), max_tokens=20, min_tokens=10)
    (output,) = run(built, wanted)
    assert (output.text, output.finish_reason) == ("ab", "stop")


@pytest.mark.parametrize("min_tokens", [0, 5])
def test_stop_ids_end_an_output_where_the_grammar_may_end(built: Built, min_tokens: int) -> None:
    wanted = SamplingParams(
        grammar=Grammar("regex", "[a-z]{3,9}"),
        stop_token_ids=(10,),
        logit_bias={10: 100.0},
        max_tokens=20,
        min_tokens=min_tokens,
    )
    (output,) = run(built, wanted)
    assert output.finish_reason == "stop" and output.stop_reason == 10
    assert len(output.text) == max(3, min_tokens) and output.text.isalpha()


def test_stop_strings_still_cut(built: Built) -> None:
    wanted = SamplingParams(grammar=Grammar("regex", "abcdef"), stop=("cd",), max_tokens=20)
    (output,) = run(built, wanted)
    assert (output.text, output.stop_reason) == ("ab", "cd")


def test_log_probabilities_stay_those_of_the_model(built: Built) -> None:
    free, bound = run(
        built,
        params(None, temperature=0.0, max_tokens=1, logprobs=-1),
        params("regex", temperature=0.0, max_tokens=1, logprobs=-1),
        prompt=PROMPT,
    )
    again, _ = run(built, params("regex", temperature=0.0, max_tokens=1, logprobs=-1), params(None))
    assert free.logprobs is not None and bound.logprobs is not None and again.logprobs is not None
    assert dict(again.logprobs[0]).keys() == dict(free.logprobs[0]).keys()
    for token, entry in free.logprobs[0].items():
        assert again.logprobs[0][token].logprob == pytest.approx(entry.logprob, abs=1e-4)
    assert again.text == "M" and free.text != "M"
    assert again.cumulative_logprob == pytest.approx(free.logprobs[0][ord("M")].logprob, abs=1e-4)


def test_a_grammar_that_grows_too_complex_ends_its_request_alone(
    built: Built, overlap: bool
) -> None:
    bomb = params(None, grammar=Grammar("regex", "((a{1,1000}){1,1000}){1,1000}"))
    live = [start(built, PROMPT, each) for each in (params("regex"), bomb, params("Lark"))]
    finish(built)
    reasons = [one.stream.output.finish_reason for one in live]
    assert reasons == ["stop", "error", "stop"]
    assert live[1].error is not None and "too many expressions" in live[1].error
    assert CHECKS["regex"][1](live[0].stream.output.text)
    assert built.core.cache.num_owned == 0


def test_a_wrong_grammar_ends_its_request_alone(built: Built) -> None:
    live = [
        start(built, PROMPT, each)
        for each in (params(None, max_tokens=5), params(None, grammar=Grammar("regex", "(")))
    ]
    finish(built)
    assert [one.stream.output.finish_reason for one in live] == ["length", "error"]
    assert live[1].error is not None and "unclosed group" in live[1].error


class Held:
    """Grammars whose compilation the test controls."""

    def __init__(self) -> None:
        self.states: list[Future[GrammarState]] = []

    def submit(self, grammar: Grammar, end_ids: object) -> Future[GrammarState]:
        self.states.append(Future())
        return self.states[-1]


def test_streams_go_on_while_a_grammar_is_compiled(built: Built) -> None:
    core, loader = built.core, built.core.grammars
    assert loader is not None
    core.grammars = held = Held()  # type: ignore[assignment]
    try:
        waiting = start(built, PROMPT, params("regex"))
        gone = start(built, PROMPT, params("json"))
        running = start(built, PROMPT, params(None, max_tokens=30))
        for _ in range(10):
            core.step()
        assert len(running.stream.output.token_ids) == 10
        core.abort(gone.request.id)
        held.states[1].set_exception(RuntimeError("nobody waits for it"))
        held.states[0].set_result(loader.compile(CHECKS["regex"][0]))
        finish(built)
    finally:
        core.grammars = loader
    assert CHECKS["regex"][1](waiting.stream.output.text)
    assert gone.stream.output.finish_reason == "abort"
    assert len(running.stream.output.token_ids) == 30


def test_a_step_with_nothing_but_a_grammar_in_the_making_does_not_spin(built: Built) -> None:
    core, loader = built.core, built.core.grammars
    core.grammars = Held()  # type: ignore[assignment]
    try:
        waiting = start(built, PROMPT, params("regex"))
        assert core.has_work
        steps_before = core.stats.steps
        began = core.clock()
        assert [core.step() for _ in range(3)] == [[], [], []]
        assert core.clock() - began > 0.03
        assert core.stats.steps == steps_before
        core.abort(waiting.request.id)
        assert not core.has_work
    finally:
        core.grammars = loader


class Watched:
    """Wraps an executor and records its calls in order; sampling fails when the test says so."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.seen: list[tuple[str, int]] = []
        self.fails: int | None = None

    def launch(self, plan: StepPlan) -> WatchedStep:
        self.seen.append(("launch", plan.step_id))
        return WatchedStep(self, plan.step_id, self.inner.launch(plan))

    def shutdown(self) -> None:
        self.inner.shutdown()


class WatchedStep:
    def __init__(self, owner: Watched, number: int, inner: Launched) -> None:
        self.owner, self.number, self.inner = owner, number, inner

    def choose(self, masks: Masks) -> None:
        self.owner.seen.append(("choose", self.number))
        if self.owner.fails == self.number:
            raise RuntimeError("the device is gone")
        self.inner.choose(masks)

    def result(self) -> StepResult:
        self.owner.seen.append(("result", self.number))
        return self.inner.result()


@pytest.fixture
def watched(built: Built) -> Iterator[Watched]:
    core = built.core
    inner = core.executor
    core.executor = watched = Watched(inner)
    core.overlap = True
    yield watched
    core.executor, core.overlap = inner, False


def test_a_grammar_keeps_no_step_waiting(built: Built, watched: Watched) -> None:
    """The next step runs before the previous tokens are known; only its sampling waits for them."""
    start(built, PROMPT, params("regex", max_tokens=12))
    while not watched.seen:
        built.core.step()
    start(built, PROMPT, params(None, max_tokens=6))
    finish(built)
    first, last = watched.seen[0][1], watched.seen[-1][1]
    expected = [("launch", first), ("choose", first)]
    for number in range(first, last):
        expected += [("launch", number + 1), ("result", number), ("choose", number + 1)]
    assert [*expected, ("result", last)] == watched.seen
    assert last - first >= 11


def test_a_choice_that_fails_ends_its_step_alone(built: Built, watched: Watched) -> None:
    available = built.core.cache.available
    broken = start(built, PROMPT, params("regex"))
    for _ in range(3):
        built.core.step()
    watched.fails = watched.seen[-1][1] + 1
    with pytest.raises(RuntimeError, match="the device is gone"):
        built.core.step()
    assert broken.stream.output.finish_reason == "error"
    later = start(built, PROMPT, params("regex", max_tokens=5))
    finish(built)
    assert len(later.stream.output.token_ids) == 5
    assert built.core.cache.available == available
