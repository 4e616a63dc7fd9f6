"""Requests of lm-eval's `local-completions` to /v1/completions, and the fields that it reads."""

import httpx
import pytest

CONTEXTS = ["The key of the north gate is", "Copper melts at", "In the year"]


def ask(live, **payload):
    response = httpx.post(
        f"{live.url}/v1/completions", json={"model": "tiny"} | payload, timeout=60
    )
    assert response.status_code == 200, response.text
    return sorted(response.json()["choices"], key=lambda choice: choice["index"])


def generate(live, contexts, tokens=8, **fields):
    return ask(
        live,
        prompt=contexts,
        max_tokens=tokens,
        temperature=0,
        stop=["\n\n\n"],
        seed=1234,
        **fields,
    )


def loglikelihoods(live, pairs, max_tokens=1):
    """(log-likelihood, is greedy) of each continuation (context ids, continuation ids), computed as
    in lm-eval: the last entry is the generated token."""
    choices = ask(
        live,
        prompt=[[*context, *continuation] for context, continuation in pairs],
        max_tokens=max_tokens,
        logprobs=1,
        echo=True,
        temperature=0,
        seed=1234,
    )
    results = []
    for choice, (context, continuation) in zip(choices, pairs, strict=True):
        end = len(context) + len(continuation)
        assert len(choice["logprobs"]["token_logprobs"]) == end + max_tokens
        numbers = choice["logprobs"]["token_logprobs"][len(context) : end]
        tops = choice["logprobs"]["top_logprobs"][len(context) : end]
        greedy = all(n == max(top.values()) for n, top in zip(numbers, tops, strict=True))
        results.append((sum(numbers), greedy))
    return results


@pytest.fixture(scope="module")
def pairs(live):
    """Contexts with their greedy continuations."""
    choices = generate(live, CONTEXTS)
    texts = [choice["text"] for choice in choices]
    return [([*a.encode()], [*b.encode()]) for a, b in zip(CONTEXTS, texts, strict=True)]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_greedy_continuations_are_recognised(live, pairs, max_tokens):
    assert all(greedy for _, greedy in loglikelihoods(live, pairs, max_tokens))


def test_other_continuations_are_not_greedy_and_less_likely(live, pairs):
    others = [(context, [*b"qzxqzxqz"]) for context, _ in pairs]
    for (best, _), (other, greedy) in zip(
        loglikelihoods(live, pairs), loglikelihoods(live, others), strict=True
    ):
        assert not greedy
        assert other < best


def test_sum_equals_what_generation_reported(live, pairs):
    reported = generate(live, CONTEXTS, logprobs=1)
    for (total, _), choice in zip(loglikelihoods(live, pairs), reported, strict=True):
        assert total == pytest.approx(sum(choice["logprobs"]["token_logprobs"]), abs=2e-3)


def test_batch_equals_single(live, pairs):
    together = loglikelihoods(live, pairs * 5)
    alone = [loglikelihoods(live, [pair])[0] for pair in pairs]
    for i, (total, greedy) in enumerate(together):
        assert greedy == alone[i % len(alone)][1]
        assert total == pytest.approx(alone[i % len(alone)][0], abs=2e-3)


def test_generation_stops_and_stands_in_order(live):
    batch = generate(live, CONTEXTS)
    alone = [generate(live, [context])[0] for context in CONTEXTS]
    assert [choice["text"] for choice in batch] == [choice["text"] for choice in alone]
