"""Write the generated pages, or check that they are current.

python -m tools.docs            write them
python -m tools.docs --check    name those that are stale, with exit code 1
"""

from __future__ import annotations

import sys

from tools.docs.pages import ROOT, texts


def main(arguments: list[str]) -> int:
    """Write or check; the exit code."""
    stale = []
    for name, text in texts().items():
        path = ROOT / name
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if "--check" not in arguments:
            path.write_text(text, encoding="utf-8")
    if "--check" in arguments and stale:
        sys.stderr.write(f"stale: {', '.join(stale)}; run `make docs`\n")
        return 1
    sys.stdout.write(f"written: {', '.join(stale)}\n" if stale else "all pages are current\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
