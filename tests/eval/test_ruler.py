import re
from collections import Counter

import pytest

from cairn.errors import BadRequest
from cairn.eval.grid import RulerPlan, run_ruler
from cairn.eval.haystack import Question
from cairn.eval.options import RULER_TASKS
from cairn.eval.report import ruler_table
from cairn.eval.ruler import RETRIEVAL, cases, recall


def solve(task, prompt):
    """The answers, computed from the prompt alone."""
    if task.startswith("niah"):
        asked = re.search(r" for (.*) mentioned in the provided text\?", prompt)[1]
        keys = re.split(r", and |, ", asked)
        pairs = re.findall(r"One of the special magic \w+ for (\S+) is: (\S+)\. ", prompt)
        return {value for key, value in pairs if key in keys}
    text = prompt.rpartition("\n\n" if task == "vt" else "ones that appear most often.\n")[2]
    if task == "vt":
        value = re.search(r"the value (\d+)", prompt.rpartition("Question:")[2])[1]
        found = {re.search(rf"VAR (\w+) = {value}\. ", text)[1]}
        for name, other in re.findall(r"VAR (\w+) = VAR (\w+)\. ", text):
            if other in found:
                found.add(name)
        return found
    if task == "cwe":
        counts = Counter(re.findall(r"\d+\. (\w+)", text))
        return {word for word, _ in counts.most_common(10)}
    words = prompt.rpartition("\nQuestion:")[0].rpartition("coded words. ")[2].split()
    return {word for word, _ in Counter(words).most_common(4)} - {"...."}


@pytest.mark.parametrize("task", RULER_TASKS)
def test_the_prompt_has_the_answers_and_the_length(task):
    for case in cases(task, 8000, 2, 0, len):
        [question] = case.questions
        assert 8000 - 400 <= case.tokens <= 8000
        assert solve(task, case.document + question.text + question.lead) == set(question.answers)
        assert len(question.answers) == len(set(question.answers))


@pytest.mark.parametrize("task, hidden, answers", [("multikey_1", 4, 1), ("multivalue", 4, 4)])
def test_how_many_needles(task, hidden, answers):
    [case] = cases(f"niah_{task}", 5000, 1, 0, len)
    assert len(re.findall(r"is: \d{7}\. ", case.document)) == hidden
    assert len(case.questions[0].answers) == answers


def test_a_haystack_of_needles_has_nothing_else():
    [case] = cases("niah_multikey_3", 6000, 1, 0, len)
    text = case.document.partition("\n")[2]
    assert not re.sub(r"One of the special magic uuids for \S{36} is: \S{36}\. ", "", text)


def test_samples_differ_and_the_seed_decides():
    def made(seed):
        return [case.document for case in cases("niah_single_2", 3000, 2, seed, len)]

    assert made(0) == made(0)
    assert len({*made(0), *made(1)}) == 4


def test_the_share_found_counts():
    question = Question("", "", ("alpha", "beta", "gamma", "delta"), 10)
    assert recall("ALPHA, then beta.", question) == 0.5
    assert recall("nothing", question) == 0.0


def test_eleven_of_rulers_thirteen_tasks():
    assert len(RULER_TASKS) == 11 and len(RETRIEVAL) == 8


def test_too_short():
    with pytest.raises(BadRequest, match="too few for the task 'cwe'"):
        list(cases("cwe", 1000, 1, 0, len))


def test_a_server_is_scored(served):
    kept = []
    plan = RulerPlan(served, ("niah_multivalue", "fwe"), (900, 1800), samples=3)
    records = list(run_ruler(plan, kept.append))
    assert records == kept
    assert [(r["task"], r["length"]) for r in records] == [
        ("niah_multivalue", 900),
        ("fwe", 900),
        ("niah_multivalue", 1800),
        ("fwe", 1800),
    ]
    assert [r["score"] for r in records] == [75.0, 0.0, 75.0, 0.0]
    assert all(r["asked"] == 3 and 0 <= r["low"] <= r["score"] <= r["high"] for r in records)
    table = ruler_table(records)
    assert list(table.columns[1].cells) == ["75.0", "0.0", "37.5"]


def test_a_length_too_short_for_a_task_is_refused_before_anything_is_asked(served):
    kept = []
    plan = RulerPlan(served, ("niah_multivalue", "cwe"), (1800, 300), samples=1)
    with pytest.raises(BadRequest, match="300 tokens are too few for the task 'cwe'"):
        list(run_ruler(plan, kept.append))
    assert kept == []
