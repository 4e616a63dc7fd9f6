"""Log-probabilities in the formats of the API."""

from cairn.engine.messages import Position
from cairn.server.logprobs import LegacyLogprobs, best, chosen_logprob


class Twins:
    """A tokenizer whose ids 1 and 2 have the same text."""

    def token_bytes(self, token):
        return b"x" if token in (1, 2) else b"y"

    def detokenizer(self, prompt, special=False):
        return self

    def push(self, token):
        return "x"


def test_minus_infinity_is_a_number():
    position = Position((1, 2), (-0.1, float("-inf")), (1, 2))
    assert chosen_logprob(position, 2) == -9999.0
    assert best(position, 2) == [(1, -0.1), (2, -9999.0)]


def test_the_token_is_reported_beside_the_best():
    position = Position((1, 5, 9), (-0.1, -0.2, -7.0), (1, 2, 40))
    assert best(position, 2) == [(1, -0.1), (5, -0.2)]
    assert chosen_logprob(position, 9) == -7.0


def test_the_likelier_of_two_tokens_with_one_text_speaks_for_it():
    lists = LegacyLogprobs(Twins(), (), 0, 1)
    scored = lists.take([2], [Position((1, 2), (-0.1, -3.0), (1, 2))])
    assert scored.top_logprobs == [{"x": -0.1}]
    assert scored.token_logprobs == [-3.0]


def test_offsets_go_on():
    lists = LegacyLogprobs(Twins(), (), 7, 0)
    position = Position((1,), (-0.1,), (1,))
    assert lists.take([1, 1], [None, position]).text_offset == [7, 8]
    assert lists.take([1], [position]).text_offset == [9]
