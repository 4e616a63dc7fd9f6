"""Run or check every command and snippet of README.md and of docs/.

    python -m tools.docs.snippets [FILE]...

- A block of Python runs in a process of its own; a block marked `text` that follows must be what it
  prints. A block marked `python server` runs while a server of the embedded model listens.
- A line of a block marked `sh` that begins with `cairn` is parsed by the command line without being
  run: the command and its options must exist, their values must be of the right type. `curl` of the
  API runs against the server; `make` must name a target. The whole block must be valid shell.
- A block marked `json` must be JSON, one marked `toml` a plan of `cairn ray serve`. What a `yaml`
  file and a `dockerfile` give to the image, whose entry point is `cairn`, is parsed as above.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click
import yaml

from cairn.cli.main import cairn
from cairn.errors import CairnError
from cairn.server.ray import plan_of

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(?P<kind>[^\n`]*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
PORT = 8000
FREE_PORT = 8719
"""The documentation's port is the default; the check listens on another."""


class Broken(Exception):
    """A command or snippet of the documentation that does not do what it says."""


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        file: the page.
        line: of its first line of text.
        kind: what stands behind the fence.
        text: its content.
    """

    file: Path
    line: int
    kind: str
    text: str

    @property
    def place(self) -> str:
        """For a message."""
        return f"{self.file.relative_to(ROOT)}:{self.line}"


def pages() -> list[Path]:
    """The documentation, but for the pages of ops, whose only blocks are signatures."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"]
    return found + sorted((ROOT / "docs").glob("*.md"))


def blocks(file: Path) -> list[Block]:
    """The fenced blocks of a page."""
    text = file.read_text(encoding="utf-8")
    return [
        Block(file, text.count("\n", 0, m.start()) + 2, m["kind"].strip(), m["text"])
        for m in FENCE.finditer(text)
    ]


def check_shell(block: Block) -> None:
    """Commands exist and take their options. Raises Broken."""
    parsed = subprocess.run(
        ["bash", "-n"], input=block.text, text=True, check=False, capture_output=True
    )
    if parsed.returncode:
        raise Broken(f"{block.place}: {parsed.stderr.strip()}")
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        ends = [i for i, word in enumerate(words) if word in ("&", "|", ";")]
        words = words[: ends[0]] if ends else words
        if words[:1] == ["cairn"]:
            _parse(block, words[1:])
        elif words[:1] == ["make"]:
            _has_target(block, words[1])


def _parse(block: Block, words: list[str]) -> None:
    """Let click parse a command without running it."""
    command: click.Command = cairn
    while isinstance(command, click.Group) and words:
        found = command.commands.get(words[0])
        if found is None:
            raise Broken(f"{block.place}: no command {words[0]!r}")
        command, words = found, words[1:]
    # A name in capitals behind an option stands for its value: --pid PID.
    words = ["1" if re.fullmatch("[A-Z]+", word) and i else word for i, word in enumerate(words)]
    try:
        command.make_context(command.name, list(words)).close()
    except click.BadParameter as error:
        if "does not exist" not in error.format_message():
            raise Broken(f"{block.place}: {error.format_message()}") from None
    except click.UsageError as error:
        raise Broken(f"{block.place}: {error.format_message()}") from None


def check_yaml(block: Block) -> None:
    """Each `command` and `args` is one of cairn's. Raises Broken."""
    try:
        values = list(yaml.safe_load_all(block.text))
    except yaml.YAMLError as error:
        raise Broken(f"{block.place}: {error}") from None
    while values:
        value = values.pop()
        if isinstance(value, dict):
            for key in ("command", "args"):
                words = value.get(key, [])
                if not all(isinstance(word, str) for word in words):
                    raise Broken(f"{block.place}: {key} must hold texts only")
                if words:
                    _parse(block, words)
            values += value.values()
        elif isinstance(value, list):
            values += value


def check_dockerfile(block: Block) -> None:
    """Its CMD is one of cairn's. Raises Broken."""
    [words] = re.findall(r"^CMD (.*)$", block.text, re.MULTILINE)
    _parse(block, json.loads(words))


def _has_target(block: Block, target: str) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    if not re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE):
        raise Broken(f"{block.place}: the Makefile has no target {target!r}")


def run_python(block: Block, wanted: str | None, timeout: float = 300) -> None:
    """Run a snippet; its output must be `wanted`, if there is any. Raises Broken."""
    code = block.text.replace(f":{PORT}", f":{FREE_PORT}")
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if ran.returncode:
        raise Broken(f"{block.place}: {ran.stderr.strip()[-2000:]}")
    if wanted is not None and ran.stdout.strip() != wanted.strip():
        raise Broken(f"{block.place} prints\n{ran.stdout}\nnot\n{wanted}")


def run_curl(block: Block) -> None:
    """Send the request; the server must answer with 2xx. Raises Broken."""
    command = block.text.replace(f":{PORT}", f":{FREE_PORT}").replace(
        "curl ", "curl -sS --fail ", 1
    )
    ran = subprocess.run(
        ["bash", "-c", command], check=False, capture_output=True, text=True, timeout=120
    )
    if ran.returncode:
        raise Broken(f"{block.place}: {ran.stderr.strip()}")


@contextmanager
def server() -> Iterator[None]:
    """The embedded model's server, ready; stopped at the end."""
    options = ["--port", str(FREE_PORT), "--admin-port", "0", "--kv-cache-memory", "64MiB"]
    command = [sys.executable, "-m", "cairn", "serve", *options]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        for _ in range(600):
            if process.poll() is not None:
                raise Broken(f"the server ended: {process.communicate()[1].decode()[-2000:]}")
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{FREE_PORT}/ready", timeout=5).close()
                break
            except OSError:
                time.sleep(0.5)
        yield
    finally:
        process.terminate()
        process.wait(60)


def output_of(found: list[Block], index: int) -> str | None:
    """The text block directly behind a snippet."""
    following = found[index + 1] if index + 1 < len(found) else None
    return following.text if following is not None and following.kind == "text" else None


def check(block: Block, wanted: str | None, run: bool, with_server: bool) -> None:
    """Check one block, and run it if asked and possible. Raises Broken."""
    kind = block.kind.split()
    if kind[:1] == ["sh"]:
        check_shell(block)
        if with_server and block.text.startswith("curl ") and "/v1/" in block.text:
            run_curl(block)
    elif kind[:1] == ["json"]:
        try:
            json.loads(block.text)
        except ValueError as error:
            raise Broken(f"{block.place}: {error}") from None
    elif kind[:1] == ["toml"]:
        try:
            plan_of(block.text)
        except CairnError as error:
            raise Broken(f"{block.place}: {error}") from None
    elif kind[:1] == ["yaml"]:
        check_yaml(block)
    elif kind[:1] == ["dockerfile"]:
        check_dockerfile(block)
    elif kind[:1] == ["python"]:
        compile(block.text, block.place, "exec")
        if run and (with_server or "server" not in kind):
            run_python(block, wanted)


def main(arguments: list[str]) -> int:
    """Check the pages given, or all; the exit code."""
    files = [Path(name).resolve() for name in arguments] or pages()
    failed = 0
    with server():
        for file in files:
            found = blocks(file)
            for i, block in enumerate(found):
                try:
                    check(block, output_of(found, i), run=True, with_server=True)
                except Broken as error:
                    failed += 1
                    sys.stderr.write(f"{error}\n")
            sys.stdout.write(f"{file.relative_to(ROOT)}: {len(found)} blocks\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
