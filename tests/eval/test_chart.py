import pytest

pytest.importorskip("matplotlib")

from cairn.eval import chart


def cell(variant, task, depth, length, right):
    names = {"variant": variant, "task": task, "depth": depth, "length": length}
    return names | {"shape": "tiny", "right": right, "asked": 4, "accuracy": right / 4}


def test_a_panel_for_each_task_and_variant(tmp_path, monkeypatch):
    kept = []
    original = chart.save
    monkeypatch.setattr(chart, "save", lambda *given: (kept.append(given[0]), original(*given)))
    path = tmp_path / "x.png"
    records = [cell("base", "single", d, n, 4) for d in (0.0, 1.0) for n in (1024, 1 << 20)]
    records += [cell("fp8", "single", 0.0, 1024, 1), cell("base", "multi", 0.0, 1024, 3)]
    chart.heat_map(records, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    panels = {ax.get_title(loc="left"): ax for ax in kept[0].axes if ax.get_title(loc="left")}
    assert set(panels) == {"single, base", "multi, base", "single, fp8", "multi, fp8"}
    full = panels["single, base"]
    assert [t.get_text() for t in full.get_xticklabels()] == ["1K", "1M"]
    assert [t.get_text() for t in full.get_yticklabels()] == ["0%", "100%"]
    assert {t.get_text() for t in full.texts} == {"4/4"}
    assert [t.get_text() for t in panels["single, fp8"].texts] == ["1/4"]
    assert [t.get_text() for t in panels["multi, fp8"].texts] == ["none"]


def test_lengths_as_people_write_them():
    assert [chart.short(n) for n in (1000, 1024, 65536, 1 << 20)] == ["1,000", "1K", "64K", "1M"]
