"""`cairn bench latency` and `cairn bench ops`: options, tables, records and charts."""

import json

import pytest

from cairn.bench.ops import SECONDS
from cairn.bench.roofline import Roofline

LINE = Roofline(bandwidth=1e10, gemm=1e11, dtype="float32", device="cpu")


@pytest.fixture(autouse=True)
def line(monkeypatch):
    monkeypatch.setattr("cairn.bench.latency.measure", lambda dtype, device: LINE)
    monkeypatch.setattr("cairn.bench.ops.measure", lambda dtype, device: LINE)
    monkeypatch.setattr("cairn.bench.ops.measure_copy", lambda device: 1e10)
    monkeypatch.setitem(SECONDS, "tiny", 0.0)


def test_the_embedded_model_is_measured_and_drawn(run, tmp_path):
    pytest.importorskip("matplotlib")
    path, chart = tmp_path / "x.json", tmp_path / "x.png"
    given = ("--contexts", "100,400", "--batches", "2", "--steps", "3", "--kind", "hsa")
    given += ("--device", "cpu", "--dtype", "float32")
    code, out, _ = run("bench", "latency", *given, "--output", str(path), "--chart", str(chart))
    records = json.loads(path.read_text())
    assert code == 0
    assert f"4 records appended to {path}" in out
    assert [(r["phase"], r["context"]) for r in records] == [
        ("prefill", 100),
        ("decode", 100),
        ("prefill", 400),
        ("decode", 400),
    ]
    assert all(r["ms"] > 0 and r["batch"] == 2 and r["selection"] == "trained" for r in records)
    assert records[0]["command"].startswith("cairn")
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_ops_are_timed_and_recorded(run, tmp_path):
    path = tmp_path / "x.json"
    given = ("bench", "ops", "norm", "--device", "cpu", "--output", str(path))
    code, out, _ = run(*given)
    assert code == 0
    assert "rmsnorm" in out and "of the floor" in out
    kept = json.loads(path.read_text())
    assert {"rmsnorm", "fused_add_rmsnorm"} <= {record["op"] for record in kept}
    assert {record["family"] for record in kept} == {"norm"}
    needed = "op family size dtype implementation ms floor_ms fraction gb_s gflop_s alternative"
    assert set(f"{needed} alternative_ms speedup launches torch triton commit".split()) < set(
        kept[0]
    )
    code, out, _ = run(*given, "--json", "--dtype", "bfloat16")
    assert code == 0
    shown = json.loads(out)
    assert {record["dtype"] for record in shown} == {"bfloat16"}
    assert json.loads(path.read_text()) == kept + shown


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("ops", "rmsnor"), "rmsnorm"),
        (("ops", "--device", "cuda", "norm"), "--device cpu"),
        (("latency", "--overlap"), "--shape"),
        (("latency", "--shape", "345x", "--contexts", "8"), "345m"),
        (("latency", "--chart", "x.jpg"), "png"),
        (("latency", "--contexts", "0"), "below 1"),
    ],
)
def test_mistakes(run, arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, out, err = run("bench", *arguments)
    assert code == 2
    assert said in err
    assert not out
    assert not list(tmp_path.iterdir())
