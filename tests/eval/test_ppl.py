import math

import pytest

from cairn.config import default_model_path
from cairn.errors import BadRequest
from cairn.eval.corpus import excerpts
from cairn.eval.ppl import Loss, PplPlan, run_ppl, summary

OPTIONS = {"kv_cache_memory": "4MiB", "device": "cpu", "dtype": "float32"}
MODEL = default_model_path()


class Bytes:
    """A tokenizer of bytes."""

    def encode(self, text, add_special_tokens=True):
        assert not add_special_tokens
        return list(text.encode())


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "a.txt").write_text("".join(f"{i:03} " for i in range(250)))
    return tmp_path


def test_stretches_are_spread_over_the_text(corpus):
    found = excerpts([corpus], Bytes(), 100, 3)
    assert [bytes(list(ids))[:4] for ids in found] == [b"000 ", b"025 ", b"050 "]
    assert all(len(ids) == 100 for ids in found)


def test_stretches_overlap_where_the_text_is_short(corpus):
    found = excerpts([corpus], Bytes(), 800, 3)
    # 250 numbers of four characters and a newline: the last excerpt ends with them.
    assert [bytes(list(ids))[:4] for ids in found] == [b"000 ", b"025 ", b"50 0"]
    assert bytes(list(found[-1])).endswith(b"249 \n")
    with pytest.raises(BadRequest, match="holds 1001 tokens, fewer than 1002"):
        excerpts([corpus], Bytes(), 1002, 1)


def test_the_context_helps_a_text_that_repeats_itself(tmp_path):
    """Every length predicts the same tokens, and more context makes them likelier."""
    line = "alpha = beta(gamma) + 48213\n"
    (tmp_path / "x.py").write_text(line * 40)
    plan = PplPlan(MODEL, OPTIONS, (tmp_path,), lengths=(600, 40), last=28, samples=2)
    kept = []
    short, long = list(run_ppl(plan, kept.append))
    assert kept == [short, long]
    assert (short["length"], long["length"]) == (40, 600)
    assert short["more_than_first"] == 0.0
    assert long["more_than_first"] < -0.3
    assert long["bits_per_byte"] == pytest.approx(long["nats_per_token"] / math.log(2), abs=1e-4)
    assert long["bytes_per_token"] == 1.0 and len(long["each_bits_per_byte"]) == 2


def test_summary_of_losses():
    first = [Loss(70.0, 50, 100), Loss(90.0, 50, 100)]
    found = summary([Loss(77.0, 50, 100), Loss(101.0, 50, 100)], first)
    assert found["perplexity"] == pytest.approx(math.exp(1.78), abs=1e-4)
    assert found["bits_per_byte"] == pytest.approx(178 / math.log(2) / 200, abs=1e-4)
    assert found["more_than_first"] == pytest.approx(18 / 160, abs=1e-4)
    # Differences of 7 and 11 nats: the mean is 9, its standard error 2.
    assert found["more_error"] == pytest.approx(2 / 80, abs=1e-4)
    assert summary(first[:1], first[:1])["more_error"] is None


def test_no_context_is_refused():
    with pytest.raises(BadRequest, match="no context"):
        PplPlan(MODEL, {}, lengths=(2048,), last=2048)
