import io
import sys

from cairn.obs.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_off_when_not_a_terminal(monkeypatch):
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    with Progress(100) as bar:
        bar.update(prefilled=50, generated=1, running=1, waiting=0)
    assert pipe.getvalue() == ""


def test_off_when_disabled(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress(100, enabled=False) as bar:
        bar.update(prefilled=50)
    assert terminal.getvalue() == ""


def test_shows_both_phases(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setenv("TERM", "xterm")
    with Progress(100, total_generated_tokens=16) as bar:
        bar.update(prefilled=64, waiting=3)
        bar.update(prefilled=100, generated=7, running=2, waiting=1)
    shown = terminal.getvalue()
    assert "prefill" in shown
    assert "100/100" in shown
    assert "7/16" in shown
    assert "2 running, 1 waiting" in shown
