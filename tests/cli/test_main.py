import pytest

from cairn.cli import main as entry
from cairn.errors import BadConfig, BadModel, BadRequest, Busy, EngineDead, OutOfMemory, TooLong


def test_help_names_every_command(run):
    code, out, _ = run("--help")
    assert code == 0
    for name in ("generate", "demo", "inspect", "doctor", "ops", "bench"):
        assert f"  {name} " in out


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "--help"),
        ("demo", "--help"),
        ("inspect", "--help"),
        ("doctor", "--help"),
        ("ops", "--help"),
        ("bench", "offline", "--help"),
        ("bench", "speculation", "--help"),
        ("bench", "latency", "--help"),
        ("--version",),
    ],
    ids=" ".join,
)
def test_help(run, arguments):
    assert run(*arguments)[0] == 0


@pytest.mark.parametrize("kind", [BadRequest, TooLong, BadModel, BadConfig])
def test_bad_input_is_code_2(kind):
    assert entry.exit_code(kind("no")) == 2


@pytest.mark.parametrize("kind", [Busy, EngineDead, OutOfMemory])
def test_other_errors_are_code_1(kind):
    assert entry.exit_code(kind("no")) == 1


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (BadRequest("two\nlines", "Do this"), 2, "error: two lines. Do this\n"),
        (EngineDead("gone"), 1, "error: gone\n"),
        (FileNotFoundError(2, "No such file", "x"), 1, "error: [Errno 2] No such file: 'x'\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_an_error_is_one_line(run, monkeypatch, error, code, line):
    def fail(model=None, **options):
        raise error

    monkeypatch.setattr("cairn.llm.LLM", fail)
    found, out, err = run("generate", "--prompt", "x")
    assert (found, out, err.lstrip("\n")) == (code, "", line)


def test_unknown_option_is_code_2(run):
    code, out, err = run("generate", "--temprature", "1")
    assert (code, out) == (2, "")
    assert "--temperature" in err


@pytest.mark.parametrize("command", [("batch",), ("ray", "serve")])
def test_a_missing_file_is_code_2(run, command):
    code, out, err = run(*command, "none.jsonl")
    assert (code, out) == (2, "")
    assert "'none.jsonl' does not exist" in err


def test_unknown_log_level(run, monkeypatch):
    monkeypatch.setenv("CAIRN_LOG", "loud")
    code, _, err = run("ops")
    assert code == 2
    assert err.startswith("error: log level 'loud'")
