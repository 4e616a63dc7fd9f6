import re

import pytest

from cairn.config import default_model_path
from cairn.errors import BadRequest
from cairn.eval.haystack import library
from cairn.eval.needles import English, Grid, Lines, cases, choose_format
from cairn.eval.words import prose

LINES, ENGLISH = Lines(library), English(prose)
GRID = Grid(lengths=(6000,), depths=(0.0, 0.5, 1.0), samples=2, keys=6)


@pytest.mark.parametrize("form", [LINES, ENGLISH])
@pytest.mark.parametrize("task, documents, asked", [("single", 6, 1), ("multi", 2, 3)])
def test_the_answer_stands_at_its_depth(form, task, documents, asked):
    made = list(cases(GRID, form, task, 6000, len))
    assert len(made) == documents
    for case in made:
        assert len(case.questions) == asked
        for question in case.questions:
            [answer] = question.answers
            assert case.document.count(answer) == 1
            at = case.document.index(answer) / len(case.document)
            assert abs(at - question.depth) < 0.07
        # The other keys of `multi` are hidden, too.
        hidden = re.findall(r"#key|magic numbers for", case.document)
        assert len(hidden) == (6 if task == "multi" else 1)


@pytest.mark.parametrize("form", [LINES, ENGLISH])
def test_a_chain_can_be_followed_and_ends_at_the_depth(form):
    for case in cases(GRID, form, "tracking", 6000, len):
        links = dict(re.findall(r"(?:#key |VAR )(\w+) ?= ?(?:VAR )?(\w+)", case.document))
        for question in case.questions:
            at = re.search(r"(?:#run |VAR )(\w+)(?:=$| have)", question.text)[1]
            way = []
            while at in links:
                at = links[at]
                way.append(at)
            assert question.answers == ("=".join(way) if form is LINES else way[-1],)
            assert len(way) == 3
            depth = case.document.index(f"{way[-1]}") / len(case.document)
            assert abs(depth - question.depth) < 0.07


def test_the_seed_decides():
    def made(seed):
        grid = Grid(depths=(0.5,), samples=2, seed=seed)
        return [case.document for case in cases(grid, LINES, "single", 800, len)]

    assert made(1) == made(1)
    assert len({*made(1), *made(2)}) == 4


@pytest.mark.parametrize(
    "form, output, answer, right",
    [
        (LINES, "48213\n", "48213", True),
        (LINES, "48213.", "48213", True),
        (LINES, "48213", "48213", True),
        (LINES, "482135", "48213", False),
        (LINES, " 48213", "48213", False),
        (LINES, "48214", "48213", False),
        (ENGLISH, " 1053758.", "1053758", True),
        (ENGLISH, "It is **1,053,758**, not 7", "1053758", True),
        (ENGLISH, "10537581", "1053758", False),
        (ENGLISH, "Not 7 but 1053758", "1053758", False),
        (ENGLISH, "nothing", "1053758", False),
    ],
)
def test_exactly_right(form, output, answer, right):
    assert form.right(output, answer) is right


def test_the_card_chooses_the_format(tmp_path):
    assert choose_format("auto", default_model_path(), None).name == "lines"
    assert choose_format("auto", "models/cairn-7m", None).name == "lines"
    assert choose_format("auto", "another", None).name == "english"
    assert choose_format("auto", tmp_path, None).name == "english"
    assert choose_format("lines", tmp_path, None).name == "lines"


def test_impossible_grids():
    with pytest.raises(BadRequest, match="0 to 1"):
        Grid(depths=(1.5,))
    with pytest.raises(BadRequest, match="2 keys cannot stand at 3 depths"):
        Grid(depths=(0.0, 0.5, 1.0), keys=2)
    with pytest.raises(BadRequest, match="too few"):
        list(cases(Grid(keys=40), LINES, "multi", 600, len))
