import pytest

from cairn.engine.messages import Ready
from cairn.obs.units import readable
from cairn.server.startup_report import StartupReport


@pytest.fixture
def lines():
    return []


def info(**changes):
    fields = {
        "vocab_size": 256,
        "max_model_len": 1260,
        "eos_ids": (),
        "page_size": 64,
        "landmarks": True,
        "selecting_layers": (0, 1),
        "num_pages": 40,
        "max_num_seqs": 8,
        "has_tokenizer": True,
        "choices": ("dtype=float32  because this CPU has no matrix unit",),
        "memory": (("weights", 3 << 20), ("pages", 1 << 30)),
    }
    return Ready(**{**fields, **changes})


def test_a_start_in_lines(lines):
    report = StartupReport(lines.append)
    report.listening("tiny", "http://127.0.0.1:8000", "http://127.0.0.1:8001")
    report.phase("weights", 1.234)
    report.loaded(info())
    report.ready("http://127.0.0.1:8000", 5.0)
    text = "\n".join(lines)
    assert "http://127.0.0.1:8001" in text
    assert "weights     1.23 s" in text
    assert "dtype=float32  because" in text
    assert "1.0 GiB" in text and "3.0 MiB" in text
    assert "40 pages of 63 tokens hold 2,520 tokens, one sequence at most 1,260" in text
    assert "--kv-cache-memory SIZE changes the size of the page pool" in text
    assert lines[-1] == "ready after 5.0 s: http://127.0.0.1:8000"


def test_recommended_sampling_is_reported(lines):
    StartupReport(lines.append).loaded(info(), {"temperature": 0.6, "top_k": 20})
    assert "  sampling defaults: temperature=0.6, top_k=20 (generation_config.json)" in lines


def test_pages_without_landmarks_are_full(lines):
    StartupReport(lines.append).loaded(info(landmarks=False))
    assert any("40 pages of 64 tokens hold 2,560 tokens" in line for line in lines)


def test_the_option_that_changes_the_pages_is_named(lines):
    StartupReport(lines.append).loaded(info(memory_flag="--gpu-memory-utilization SHARE"))
    assert "--gpu-memory-utilization SHARE changes the size of the page pool" in "\n".join(lines)


def test_stopping(lines):
    report = StartupReport(lines.append)
    report.stopping(0, 30)
    report.stopping(3, 30)
    report.cut(2)
    assert lines[0] == "stopping"
    assert "3 running requests have 30 s" in lines[1]
    assert "--shutdown-timeout" in lines[2]


def test_a_reader_that_went_away_stops_nothing():
    def closed(line):
        raise BrokenPipeError

    StartupReport(closed).loaded(info())


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 bytes"), (1536, "1.5 KiB"), (3 << 40, "3.0 TiB")]
)
def test_readable(count, text):
    assert readable(count) == text
