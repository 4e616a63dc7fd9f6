import pytest

from cairn.bench.chart import latency_chart, require_matplotlib
from cairn.errors import BadConfig

pytest.importorskip("matplotlib")


def record(backend, context, ms, **fields):
    cell = {"shape": "345m", "phase": "decode", "batch": 1, "floor_ms": ms / 2}
    return cell | {"backend": backend, "context": context, "ms": ms} | fields


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws records; returns the axes of the figure by title, and the path."""
    kept = []

    def save(figure, path):
        kept.append(figure)
        original(figure, path)

    from cairn.bench import chart

    original = chart.save
    monkeypatch.setattr(chart, "save", save)

    def draw(records):
        path = tmp_path / "charts" / "latency.png"
        latency_chart(records, path)
        assert path.read_bytes().startswith(b"\x89PNG")
        return {ax.get_title(loc="left"): ax for ax in kept[-1].axes}

    return draw


def test_a_line_for_each_backend_with_its_floor(drawn):
    axes = drawn(
        [
            record("hsa", 8192, 1.0, selection="random"),
            record("hsa", 1024, 0.5, selection="random"),
            record("dense", 8192, 3.0),
            record("hsa", 8192, 0.9, selection="random"),
            record("hsa", 8192, 0.8, selection="shared"),
            record("hsa", 8192, 40.0, phase="prefill", selection="random"),
            {"phase": "offline", "shape": "345m"},
        ]
    )
    decode = axes["345m: decode"]
    lines = {line.get_label(): line for line in decode.lines if line.get_label()[0] != "_"}
    assert set(lines) == {"hsa, batch 1", "hsa, batch 1, shared pages", "dense, batch 1"}
    assert list(lines["hsa, batch 1"].get_xdata()) == [1024, 8192]
    # The last record with the same settings is used.
    assert list(lines["hsa, batch 1"].get_ydata()) == [0.5, 0.9]
    assert len(decode.lines) == 2 * len(lines)
    assert len(axes["345m: prefill"].lines) == 2


def test_a_row_for_each_shape(drawn):
    axes = drawn([record("hsa", 64, 1.0), record("hsa", 64, 2.0, shape="7b", floor_ms=None)])
    assert set(axes) == {f"{shape}: {phase}" for shape in ("345m", "7b") for phase in PHASES}
    assert len(axes["7b: decode"].lines) == 1


PHASES = ("prefill", "decode")


def test_no_png_is_refused(tmp_path):
    with pytest.raises(BadConfig, match="png"):
        require_matplotlib(tmp_path / "x.jpg")
