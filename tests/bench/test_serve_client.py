"""The client against a scripted server: requests, measured times, and error messages."""

import time

import pytest

from cairn.bench.serve.client import Server, ServerAddress, read_metrics
from cairn.bench.serve.exchange import Request
from cairn.bench.serve.load import run
from cairn.errors import BadConfig
from tests.bench.fake_api import FakeApi

HELLO = Request("hello world!", 3, 5)


def ask(api, request=HELLO, leave_after=None, **address):
    async def main():
        async with Server(ServerAddress(api.url, **address)) as server:
            return await server.send(request, leave_after=leave_after)

    return run(main())


@pytest.mark.parametrize("chat", [False, True])
def test_a_stream_is_measured(chat):
    with FakeApi(prefill=0.02, pace=0.02) as api:
        outcome = ask(api, Request("hello world!", 3, 5, chat=chat))
        assert outcome.complete and outcome.counted
        assert (outcome.input_tokens, outcome.output_tokens, outcome.cached_tokens) == (3, 5, 0)
        # The role and the end of the stream are not pieces of text.
        assert len(outcome.stamps) == 5
        assert outcome.ttft >= 0.06
        assert outcome.e2e >= 0.06 + 4 * 0.02
        assert len(outcome.gaps) == 4
        # On a busy machine the first piece may be received late, which shortens its gap.
        assert 0.04 < sum(outcome.gaps) <= outcome.e2e - outcome.ttft
        assert outcome.tpot == pytest.approx((outcome.e2e - outcome.ttft) / 4)
        assert outcome.text == ""
        body = api.bodies[0]
        assert body["stream_options"] == {"include_usage": True}
        assert ("messages" in body) == chat
        assert body["model"] == "fake-model"
        assert not body.keys() & {"n", "stop", "ignore_eos"}


def test_the_request_body_has_all_options():
    with FakeApi() as api:
        request = Request("x", 1, 2, n=3, stop=("a", "b"), ignore_eos=True, stream=False)
        outcome = ask(api, request, model="other")
        assert outcome.complete
        assert outcome.ttft is None and outcome.tpot is None
        assert outcome.output_tokens == 6
        body = api.bodies[0]
        assert (body["n"], body["stop"], body["ignore_eos"]) == (3, ["a", "b"], True)
        assert body["model"] == "other"
        assert "stream" not in body


def test_pieces_of_the_first_continuation_alone_are_timed():
    with FakeApi() as api:
        assert len(ask(api, Request("x", 1, 4, n=3)).stamps) == 4


def test_without_usage_the_text_is_kept():
    with FakeApi(usage=False) as api:
        outcome = ask(api)
        assert outcome.complete and not outcome.counted
        assert outcome.text == "word" * 5


def test_failures_have_kinds():
    with FakeApi(status={0: 429}) as api:
        outcome = ask(api)
        assert (outcome.error, outcome.detail) == ("HTTP 429", "refused 0")
        assert not outcome.complete
    with FakeApi(ending='{"error": {"message": "engine died"}}') as api:
        outcome = ask(api)
        assert (outcome.error, outcome.detail) == ("error in the stream", "engine died")
    with FakeApi(ending="{nonsense") as api:
        assert ask(api).error == "not the API's JSON"
    with FakeApi(ending=":") as api:
        api.ending = "{}"
        assert ask(api).error == "stream cut short"
    with FakeApi(pace=5.0) as api:
        assert ask(api, timeout=0.2).error == "timeout"


def test_a_server_that_goes_away_is_a_connection_error():
    async def main(api):
        async with Server(ServerAddress(api.url)) as server:
            api.__exit__()
            return await server.send(HELLO)

    api = FakeApi().__enter__()
    assert run(main(api)).error == "connection"


def test_leaving_closes_the_connection():
    with FakeApi(pace=0.05) as api:
        outcome = ask(api, Request("x", 1, 100), leave_after=0.2)
        assert outcome.aborted and outcome.error is None and not outcome.complete
        assert outcome.e2e < 4
        end = time.monotonic() + 5
        while api.cut_off == 0 and time.monotonic() < end:
            time.sleep(0.01)
        assert api.cut_off == 1 and api.running == 0


def test_the_key_is_sent_and_asked_for():
    with FakeApi(key="secret") as api:
        assert ask(api, api_key="secret").complete
        with pytest.raises(BadConfig, match="401.*--api-key"):
            ask(api)


@pytest.mark.parametrize("url", ["{}/", "{}/v1", "{}/v1/"])
def test_the_base_url_may_end_in_v1(url):
    with FakeApi() as api:
        assert ServerAddress(url.format(api.url)).root == api.url


def test_no_server():
    with FakeApi() as api:
        url = api.url
    with pytest.raises(BadConfig, match=f"no server answers at {url}.*--base-url"):
        run(Server(ServerAddress(url)).__aenter__())


def test_a_server_that_lists_no_model():
    with FakeApi(models=()) as api:
        with pytest.raises(BadConfig, match="--model"):
            ask(api)
        assert ask(api, model="named").complete


def test_metrics_are_summed_over_labels():
    text = '# TYPE a gauge\na{x="1"} 2\na{x="{2}"} 3.5\nb 1e3\nc NaN\nno value\n'
    found = read_metrics(text)
    assert (found["a"], found["b"]) == (5.5, 1000.0)
