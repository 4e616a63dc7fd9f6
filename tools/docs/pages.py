"""Which pages are generated, and from what."""

from __future__ import annotations

from pathlib import Path

from tools.docs import configuration, performance, support

ROOT = Path(__file__).parents[2]
START, END = "<!-- generated: performance -->", "<!-- end -->"


def texts() -> dict[str, str]:
    """Path, relative to the repository's root -> text of every generated page.

    README.md is written by hand but for its table of performance.
    """
    return {
        "docs/configuration.md": configuration.page(),
        "docs/performance.md": performance.page(),
        "docs/support.md": support.page(),
        "README.md": _readme(),
    }


def _readme() -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if START not in text:
        return text
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{performance.readme_table()}{END}{after}"
