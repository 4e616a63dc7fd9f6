import random
from pathlib import Path

import pytest

from cairn.demo.document import make_facts
from cairn.demo.run import peak_memory, run_demo
from tests.fake_llm import FakeLLM

RIGHT = {fact.question: fact.answer for fact in make_facts(2, random.Random(0))}


def know(prompt):
    """The right answer to a question, for any document."""
    return next((a for question, a in RIGHT.items() if prompt.endswith(question)), "x")


@pytest.fixture
def llms(monkeypatch):
    made = []

    def make(model=None, **options):
        made.append(FakeLLM(model, options))
        return made[-1]

    monkeypatch.setattr("cairn.llm.LLM", make)
    monkeypatch.setattr(FakeLLM, "answer", staticmethod(know))
    return made


def demo():
    return run_demo(Path("tiny"), tokens=20_000, questions=2, seed=0, options={"dtype": "float32"})


def test_all_answers_are_right(llms, capsys):
    assert demo()
    out = capsys.readouterr().out
    assert out.count("  right\n") == 6
    assert "6 of 6 answers are right" in out
    for word in ("prefill", "decode", "pages read", "prefix cache", "peak memory"):
        assert word in out
    assert llms[0].options == {"dtype": "float32"}
    assert llms[0].closed


def test_the_document_is_read_first_and_shared(llms):
    demo()
    prompts = [prompt for prompt, _ in llms[0].calls]
    assert len(prompts[0]) == 20_000
    assert len(prompts) == 7
    assert all(prompt.startswith(prompts[0]) for prompt in prompts[1:])
    assert all(params.greedy for _, params in llms[0].calls)


def test_one_answer_is_wrong(llms, capsys, monkeypatch):
    monkeypatch.setattr(
        FakeLLM, "answer", staticmethod(lambda p: "00000" if "#ask" in p[-20:] else know(p))
    )
    assert not demo()
    out = capsys.readouterr().out
    assert out.count("wrong, it is ") == 2
    assert "4 of 6 answers are right" in out


def test_shut_down_even_when_it_fails(llms, monkeypatch):
    def fail(prompt):
        raise RuntimeError("boom")

    monkeypatch.setattr(FakeLLM, "answer", staticmethod(fail))
    with pytest.raises(RuntimeError, match="boom"):
        demo()
    assert llms[0].closed


def test_peak_memory_is_in_bytes():
    assert 10 << 20 < peak_memory() < 1 << 44
