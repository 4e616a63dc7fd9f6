import random
from itertools import pairwise

import pytest

from cairn.demo.document import build_document, library_lines, make_facts
from cairn.errors import BadRequest


@pytest.fixture
def sources(tmp_path):
    for name in ("b.py", "a.py", "test/skipped.py", "pkg/c.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"{name} line {i}\n" for i in range(200)))
    (tmp_path / "accents.py").write_text("é = 1\n", encoding="utf-8")
    return tmp_path


def test_files_in_a_fixed_order(sources):
    names = [path.relative_to(sources).as_posix() for path, _ in library_lines(sources)]
    assert names == ["a.py", "b.py", "pkg/c.py"]


def test_the_machine_holds_enough():
    rng = random.Random(0)
    document = build_document(128_000, make_facts(3, rng), rng)
    assert len(document.text) == 128_000
    assert document.text.isascii()


def test_every_line_is_there_once_at_a_line_start(sources):
    rng = random.Random(1)
    document = build_document(6000, make_facts(4, rng), rng, sources)
    lines = document.text.split("\n")
    assert len(document.text) == 6000
    assert len(document.facts) == 12
    for hidden in document.facts:
        for line, depth in zip(hidden.fact.lines, hidden.depths, strict=True):
            assert lines.count(line) == 1
            assert document.text.find(line) == round(depth * 6000)


def test_facts_are_spread(sources):
    rng = random.Random(2)
    document = build_document(8000, make_facts(4, rng), rng, sources)
    depths = sorted(depth for hidden in document.facts for depth in hidden.depths)
    assert depths[0] < 0.15
    assert depths[-1] > 0.85
    assert all(b - a < 0.2 for a, b in pairwise(depths))


def test_the_kinds_of_questions():
    line, sentence, chain = make_facts(1, random.Random(3))
    key = line.lines[0][5:9]
    assert line.lines == (f"#key {key}={line.answer}",)
    assert line.question == f"\n#ask {key}="
    key = sentence.lines[0].split()[6]
    assert sentence.lines == (f"One of the magic numbers for {key} is {sentence.answer}.",)
    assert sentence.question == f"\nWhat is the magic number for {key}? It is "
    first, second, third = (text[5:].split("=") for text in chain.lines)
    assert (first[1], second[1]) == (second[0], third[0])
    assert chain.question == f"\n#run {first[0]}="
    assert chain.answer == f"{second[0]}={third[0]}={third[1]}"


def test_the_seed_decides(sources):
    def build(seed):
        rng = random.Random(seed)
        return build_document(6000, make_facts(2, rng), rng, sources).text

    assert build(5) == build(5)
    assert build(5) != build(6)


def test_too_long(sources):
    with pytest.raises(BadRequest, match="fewer than"):
        build_document(1_000_000, [], random.Random(0), sources)


def test_too_short(sources):
    rng = random.Random(0)
    with pytest.raises(BadRequest, match="too short"):
        build_document(2000, make_facts(14, rng), rng, sources)
