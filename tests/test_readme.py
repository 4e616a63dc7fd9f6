"""README is short, its examples print the shown output, and the commands of all pages exist."""

from __future__ import annotations

import pytest

from tools.docs import snippets
from tools.docs.pages import ROOT

README = ROOT / "README.md"


def test_readme_is_short() -> None:
    assert README.stat().st_size <= 9 * 1024


@pytest.mark.parametrize("file", snippets.pages(), ids=lambda path: path.name)
def test_commands_and_snippets_can_be_read(file) -> None:
    for block in snippets.blocks(file):
        snippets.check(block, None, run=False, with_server=False)


def test_the_example_of_ops_prints_what_stands_below_it() -> None:
    found = snippets.blocks(README)
    [index] = [i for i, block in enumerate(found) if "from cairn import ops" in block.text]
    snippets.run_python(found[index], snippets.output_of(found, index))


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("sh", "cairn sevre", "no command 'sevre'"),
        ("sh", "cairn serve --portt 1", "No such option"),
        ("sh", "cairn serve --port x", "not a valid integer"),
        ("sh", "make cofee", "no target 'cofee'"),
        ("sh", "if then", "syntax error"),
        ("json", "{", "Expecting"),
        ("toml", "modell = 'm'", "names no model"),
        ("yaml", "a: [", "expected"),
        ("yaml", "spec: [{args: [serve, --port, 1]}]", "texts only"),
        ("yaml", "spec: [{args: [serve, --portt, '1']}]", "No such option"),
        ("dockerfile", 'CMD ["sevre"]', "no command 'sevre'"),
    ],
)
def test_broken_snippets_are_found(kind: str, text: str, message: str) -> None:
    block = snippets.Block(README, 1, kind, text)
    with pytest.raises(snippets.Broken, match=message):
        snippets.check(block, None, run=False, with_server=False)


def test_another_output_is_found() -> None:
    block = snippets.Block(README, 1, "python", "print(1)")
    with pytest.raises(snippets.Broken, match="prints"):
        snippets.run_python(block, "2\n")
