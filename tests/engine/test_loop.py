"""The loop on a fake model, one message and one step at a time."""

import threading
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from cairn.cache.invariants import check
from cairn.engine.loop import EngineLoop
from cairn.engine.messages import (
    Abort,
    Call,
    FromEngine,
    Outputs,
    Reading,
    Reply,
    Stats,
    Stop,
    Submit,
    pack_ids,
)
from cairn.errors import EngineDead, InvariantError
from cairn.runner.orders import CAPTURES
from cairn.types import SamplingParams
from tests.engine.fakes import all_pages_back, fake_core, next_token

SECONDS = 30


class Steps:
    """An executor that waits for permission before every step, and records the pages it could
    use."""

    def __init__(self, core) -> None:
        self.inner = core.executor
        self.cache = core.cache
        self.leave = threading.Semaphore(0)
        self.reached = threading.Semaphore(0)
        self.available: list[int] = []
        self.error: Exception | None = None
        self.captures: list[str] = []
        self.ahead = {name: 2 for name in CAPTURES}

    def call(self, name):
        """Captures wait for permission, too."""
        self.captures.append(name)
        self.reached.release()
        assert self.leave.acquire(timeout=SECONDS)
        self.ahead[name] -= 1
        return self.ahead[name] > 0

    def launch(self, plan):
        self.available.append(self.cache.available)
        self.reached.release()
        assert self.leave.acquire(timeout=SECONDS)
        if self.error is not None:
            raise self.error
        return self.inner.launch(plan)


class Running:
    """A loop in a thread; `steps` controls it, `sent` has its messages."""

    def __init__(self, graphs=None, **core) -> None:
        self.core = fake_core(**core)
        self.core.executor = self.steps = Steps(self.core)
        self.vitals = SimpleNamespace(stats=Stats(), step_began=None)
        self.sent: list[FromEngine] = []
        self.said = threading.Condition()
        self.failure: Exception | None = None
        self._context = zmq.Context()
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.bind("inproc://loop")
        inbox = self._context.socket(zmq.PULL)
        inbox.connect("inproc://loop")
        reads = SimpleNamespace(queries=0, selected_by_head=0.0)
        pools = SimpleNamespace(frame_traffic=lambda: (0, 0, 0))
        runner = SimpleNamespace(reads=reads, graphs=graphs, pools=pools)
        built = SimpleNamespace(core=self.core, runner=runner, rounds=None)
        self.loop = EngineLoop(built, inbox, self._take, self.vitals)
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.loop.run()
        except (EngineDead, InvariantError) as error:
            self.failure = error

    def _take(self, message) -> None:
        # Encode and decode, so that messages that cannot be sent fail here.
        data = msgspec.msgpack.encode(message)
        with self.said:
            self.sent.append(msgspec.msgpack.decode(data, type=FromEngine))
            self.said.notify_all()

    def tell(self, *messages) -> None:
        for message in messages:
            self._outbox.send(msgspec.msgpack.encode(message))

    def submit(self, name: str, n: int = 1, size: int = 6, **params) -> None:
        sampling = SamplingParams(**{"max_tokens": 50, "n": n, **params})
        self.tell(Submit(name, pack_ids([1] * size), sampling))

    def reach_step(self) -> None:
        assert self.steps.reached.acquire(timeout=SECONDS)

    def step(self, count: int = 1) -> None:
        """Let the waiting step run, and all further ones up to the next wait."""
        for _ in range(count):
            self.steps.leave.release()
            self.reach_step()

    def wait(self, condition) -> None:
        with self.said:
            assert self.said.wait_for(lambda: condition(self.sent), SECONDS), self.sent

    def close(self) -> None:
        self.tell(Stop())
        for _ in range(10_000):
            self.steps.leave.release()
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()
        self._context.destroy(linger=0)


@pytest.fixture
def make():
    opened = []

    def start(**core) -> Running:
        opened.append(Running(**core))
        return opened[-1]

    yield start
    for running in opened:
        running.close()


def deltas(sent):
    return [delta for message in sent if isinstance(message, Outputs) for delta in message.deltas]


def test_one_message_a_step_with_every_continuation_that_moved(make):
    running = make()
    running.submit("a", n=3)
    running.submit("b")
    running.reach_step()
    running.step(5)
    sent = running.sent
    assert all(isinstance(message, Outputs) for message in sent)
    assert len(sent) == 5
    names = {("a", 0), ("a", 1), ("a", 2), ("b", 0)}
    assert {(d.id, d.index) for d in sent[-1].deltas} == names
    assert all(len(d.token_ids) == 1 for d in sent[-1].deltas)
    first = {(d.id, d.index): d for d in reversed(deltas(sent))}
    assert first["a", 0].cached_tokens is not None
    assert first["a", 1].cached_tokens is None


def test_how_far_a_long_prompt_is_read(make, monkeypatch):
    monkeypatch.setattr("cairn.engine.loop.STATS_SECONDS", 0.0)
    running = make(step_slots=8, landmarks=False, prefix_caching=False)
    running.submit("long", n=2, size=30)
    running.reach_step()
    running.step(6)
    told = [message.read for message in running.sent if isinstance(message, Reading)]
    assert [read["long"] for read in told if "long" in read] == [8, 16, 24]
    running.wait(lambda sent: any(delta.id == "long" for delta in deltas(sent)))


def test_pages_of_what_is_taken_back_return_before_the_next_step(make):
    running = make()
    running.submit("stays")
    running.submit("goes", n=2, size=40)
    running.reach_step()
    running.step(4)
    before = running.steps.available[-1]
    running.tell(Abort(["goes", "unknown"]))
    # The running step does not know about it; the next one is planned without them.
    running.step()
    assert running.steps.available[-1] >= before + 13
    running.step()
    ended = [d for d in deltas(running.sent) if d.finish_reason]
    assert [(d.id, d.index, d.finish_reason) for d in ended] == [
        ("goes", 0, "abort"),
        ("goes", 1, "abort"),
    ]
    running.tell(Abort(["stays"]))
    running.steps.leave.release()
    running.wait(lambda sent: len([d for d in deltas(sent) if d.finish_reason]) == 3)
    running.tell(Call(7, "cache"))
    running.wait(lambda sent: isinstance(sent[-1], Reply))
    reply = running.sent[-1]
    assert reply.number == 7 and reply.value["problems"] == [] and reply.value["owned"] == 0
    assert all_pages_back(running.core)
    assert not check(running.core.cache, []).problems


def test_waiting_requests_can_be_aborted(make):
    running = make(rows=1)
    running.submit("runs")
    running.submit("waits", n=30)
    running.reach_step()
    running.step(2)
    running.tell(Abort(["waits"]))
    running.step(2)
    ended = [d for d in deltas(running.sent) if d.finish_reason == "abort"]
    assert {d.id for d in ended} == {"waits"} and len(ended) == 30
    assert not any(d.token_ids for d in ended)
    # Nothing of them is cached while the row is in use.
    assert len(running.core.scheduler.waiting) <= 1


def test_a_request_that_cannot_be_added_ends_with_its_cause(make):
    running = make()
    running.submit("far", n=2, size=10_000)
    running.wait(lambda sent: len(deltas(sent)) == 2)
    for index, delta in enumerate(deltas(running.sent)):
        assert (delta.id, delta.index, delta.finish_reason) == ("far", index, "error")
        assert "the prompt has 10000 tokens" in delta.error and delta.status == 400
    assert not running.core.has_work


def test_failing_steps_end_their_requests_and_the_third_ends_the_engine(make):
    running = make()
    running.steps.error = RuntimeError("the device is tired")
    for count in (1, 2, 3):
        running.submit(f"r{count}")
        running.reach_step()
        running.steps.leave.release()
        if count < 3:
            running.wait(lambda sent, n=count: len(deltas(sent)) == n)
    running.thread.join(SECONDS)
    assert isinstance(running.failure, EngineDead)
    assert "3 steps in a row failed" in str(running.failure)
    assert {d.finish_reason for d in deltas(running.sent)} == {"error"}
    assert all("the device is tired" in d.error for d in deltas(running.sent))
    assert all_pages_back(running.core)


@pytest.mark.parametrize(
    "error", [InvariantError("page 3 has two owners"), EngineDead("rank 1 was killed")]
)
def test_errors_that_end_the_engine_at_once(make, error):
    running = make()
    running.steps.error = error
    running.submit("a")
    running.reach_step()
    running.steps.leave.release()
    running.thread.join(SECONDS)
    assert running.failure is error


def test_a_lost_page_shows_when_the_engine_rests(make):
    running = make()
    running.core.cache.allocator.take(2)
    running.submit("a", max_tokens=2)
    running.reach_step()
    running.step(1)
    running.steps.leave.release()
    running.wait(lambda sent: any(d.finish_reason for d in deltas(sent)))
    for _ in range(SECONDS * 10):
        if running.vitals.stats.pages_leaked:
            break
        threading.Event().wait(0.1)
    assert running.vitals.stats.pages_leaked == 2
    assert running.vitals.stats.running == running.vitals.stats.waiting == 0


def test_an_idle_engine_captures_graphs_and_a_request_waits_for_one_at_most(make):
    running = make(graphs="those of decode steps")
    running.reach_step()
    running.submit("a", max_tokens=2)
    running.step()
    assert len(running.steps.captures) == len(running.steps.available) == 1
    for _ in range(4):
        # The request's second step, then the remaining captures.
        running.step()
    running.steps.leave.release()
    running.wait(lambda sent: any(d.finish_reason for d in deltas(sent)))
    assert running.steps.captures == [name for name in CAPTURES for _ in range(2)]
    assert len(running.steps.available) == 2


def test_ended_requests_in_a_step_in_flight_are_not_counted(make, monkeypatch):
    """With overlap, the step after the end of an output is running when the end is detected."""
    monkeypatch.setattr("cairn.engine.loop.STATS_SECONDS", 0)
    chosen = [next_token("a.0", index) for index in range(50)]
    last = next(i for i in range(3, 50) if chosen[i] not in chosen[:i])
    running = make(overlap=True, eos_ids=(chosen[last],))
    told, plain = [], running.loop._refresh_stats

    def refresh():
        plain()
        told.append((running.vitals.stats.running, running.vitals.stats.waiting))

    monkeypatch.setattr(running.loop, "_refresh_stats", refresh)
    running.submit("a")
    running.reach_step()
    running.step(last + 1)
    running.steps.leave.release()
    running.wait(lambda sent: any(d.finish_reason for d in deltas(sent)))
    running.tell(Call(1, "cache"))
    running.wait(lambda sent: isinstance(sent[-1], Reply))
    assert set(told) == {(1, 0), (0, 0)}


def test_the_age_of_a_step_is_known_while_it_runs(make):
    running = make()
    assert running.vitals.step_began is None
    running.submit("a", max_tokens=1)
    running.reach_step()
    assert running.vitals.step_began is not None
    running.steps.leave.release()
    running.wait(lambda sent: any(d.finish_reason for d in deltas(sent)))
    assert running.vitals.step_began is None


def test_a_call_that_fails_is_its_callers_alone(make):
    running = make()
    running.tell(Call(1, "dance"), Call(2, "flush_cache", {"all": True}), Call(3, "flush_cache"))
    running.wait(lambda sent: len(sent) == 3)
    first, second, third = running.sent
    assert first.error == "no method 'dance'" and first.status == 400
    assert "TypeError" in second.error and second.status == 500
    assert third.error is None and third.value == {"pages": 0}


def test_a_profile_that_cannot_start_is_its_callers_alone(make, monkeypatch):
    def broken(**_):
        raise RuntimeError("the profiler is in use")

    running = make()
    running.tell(Call(1, "profile", {"colour": "red"}))
    running.wait(lambda sent: len(sent) == 1)
    monkeypatch.setattr("cairn.engine.loop.StepProfile", broken)
    running.tell(Call(2, "profile"), Call(3, "flush_cache"))
    running.wait(lambda sent: len(sent) == 3)
    first, second, third = running.sent
    assert "TypeError" in first.error and first.status == 500
    assert second.error == "RuntimeError: the profiler is in use" and second.status == 500
    assert third.error is None
    monkeypatch.undo()
    running.tell(Call(4, "profile", {"steps": 1, "seconds": 0.05}))
    running.wait(lambda sent: len(sent) == 4)
    assert running.sent[3].error is None and running.sent[3].value["steps"] == 0
