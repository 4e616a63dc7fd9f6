import random

import pytest

from cairn.errors import BadRequest
from cairn.eval.haystack import Question, excerpt, fitted, hide, library, read_texts
from cairn.eval.words import Names, noise, prose

QUESTION = Question("?", " It is", ("x",), max_tokens=5)


@pytest.mark.parametrize("length", [600, 5000, 70_000])
@pytest.mark.parametrize("chars_per_token", [1, 3.7])
def test_the_longest_prompt_has_the_length(length, chars_per_token):
    def count(text):
        return round(len(text) / chars_per_token)

    def make(chars):
        return "begin " + library(chars, random.Random(1)), (QUESTION, QUESTION)

    case = fitted("any", length, 0, make, count)
    used = count(case.document) + count("? It is") + 5
    assert length - length // 128 <= used <= length
    assert case.tokens == 2 * used


def test_prose_comes_close_without_half_sentences():
    case = fitted("any", 4096, 0, lambda n: (prose(n, random.Random(2)), (QUESTION,)), len)
    assert 4096 - 200 < case.tokens <= 4096
    assert case.document[-2:] in (". ", ".\n")


def test_a_task_that_does_not_fit():
    with pytest.raises(BadRequest, match="30 tokens are too few for the task 'any'"):
        fitted("any", 30, 0, lambda n: ("x" * (100 + n), (QUESTION,)), len)


def test_lines_stand_at_their_depths_behind_a_border():
    filler = "".join(f"line {i:04}\n" for i in range(1000))
    text = hide(filler, [(1.0, "END\n"), (0.0, "BEGIN\n"), (0.5, "MIDDLE\n")], ["\n"])
    lines = text.split("\n")
    assert lines[0] == "BEGIN" and lines[-2] == "END"
    assert abs(lines.index("MIDDLE") - 501) <= 1
    assert text.replace("BEGIN\n", "").replace("MIDDLE\n", "").replace("END\n", "") == filler


def test_the_nearest_border_counts():
    assert hide("One. Two\nThree. Four.", [(0.5, "X ")], [". ", "\n"]) == "One. Two\nX Three. Four."
    assert hide("no border", [(0.5, "X "), (1.0, "Y ")], ["\n"]) == "X Y no border"


def test_a_stretch_begins_a_line_and_goes_on_at_the_start():
    text = "one\ntwo\nthree\n"
    for seed in range(9):
        found = excerpt(text, 40, random.Random(seed))
        assert len(found) == 40
        assert found.split("\n")[0] in ("one", "two", "three")
    with pytest.raises(BadRequest, match="empty"):
        excerpt(" ", 5, random.Random(0))


def test_texts_of_a_folder_in_order_without_what_is_no_text(tmp_path):
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.txt").write_text("one\n")
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe\x00")
    assert list(read_texts([tmp_path])) == ["one\n", "two\n"]
    with pytest.raises(BadRequest, match="no text"):
        list(read_texts([tmp_path / "c.bin"]))
    with pytest.raises(BadRequest, match="does not exist"):
        list(read_texts([tmp_path / "d"]))


def test_text_is_made_by_the_seed():
    assert prose(500, random.Random(3)) == prose(500, random.Random(3))
    assert prose(500, random.Random(3)) != prose(500, random.Random(4))
    assert 400 < len(noise(500, random.Random(0))) <= 500


def test_no_name_comes_twice():
    names = Names(random.Random(0))
    for draw in (names.key, names.number, names.uuid, names.variable, names.word, names.code):
        found = [draw() for _ in range(600)]
        assert len(set(found)) == 600
