"""`cairn eval`: options, tables, records, charts, and errors."""

import json

import pytest

from tests.eval.conftest import KnowingApi

SMALL = ("--device", "cpu", "--kv-cache-memory", "16MiB")


def test_needles_in_the_embedded_model(run, tmp_path):
    pytest.importorskip("matplotlib")
    path, chart = tmp_path / "x.json", tmp_path / "x.png"
    given = ("eval", "needle", "--lengths", "600", "--depths", "0,1", "--samples", "1")
    given += ("--task", "single", "--variant", "base", "--variant", "warm", *SMALL)
    code, out, _ = run(*given, "--output", str(path), "--chart", str(chart))
    assert code == 0
    assert "answers equal to those of base" in " ".join(out.split()).replace("│", "")
    assert f"4 records appended to {path}" in out
    records = json.loads(path.read_text())
    assert all(r["accuracy"] == 1.0 and r["phase"] == "needle" for r in records)
    assert records[0]["command"].startswith("cairn") and records[0]["torch"]
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_ruler_on_a_server(run, tmp_path):
    path = tmp_path / "x.json"
    given = ("eval", "ruler", "--task", "niah_multivalue", "--lengths", "900", "--samples", "2")
    with KnowingApi(key="secret") as api:
        given += ("--base-url", api.url, "--api-key", "secret", "--output", str(path))
        code, out, _ = run(*given)
        assert code == 0
        assert "75.0" in out
        code, out, err = run(*given, "--json")
        assert code == 0 and f"1 records appended to {path}" in err
    records = json.loads(path.read_text())
    assert [r["score"] for r in records] == [75.0, 75.0]
    assert records[1:] == json.loads(out)
    assert "secret" not in path.read_text()


def test_loss_over_the_context(run, tmp_path):
    pytest.importorskip("matplotlib")
    path, chart, text = tmp_path / "x.json", tmp_path / "x.png", tmp_path / "x.py"
    text.write_text("value = other(name)\n" * 60)
    given = ("eval", "ppl", "--text", str(text), "--lengths", "64,512", "--last", "32")
    given += ("--samples", "2", "--output", str(path), "--chart", str(chart), *SMALL)
    code, out, _ = run(*given)
    assert code == 0
    assert "more than at 64" in " ".join(out.split())
    assert [r["length"] for r in json.loads(path.read_text())] == [64, 512]
    assert chart.read_bytes().startswith(b"\x89PNG")


def test_parity_with_itself_and_a_file(run, tmp_path):
    path, file = tmp_path / "x.json", tmp_path / "x.safetensors"
    given = ("eval", "parity", "--length", "100", "--last", "8", "--output", str(path), *SMALL)
    given += ("--dtype", "float32")
    assert run(*given, "--save", str(file))[0] == 0
    code, out, _ = run(*given, "--reference", str(file))
    assert code == 0 and "100.00%" in out
    code, out, _ = run(*given, "--other", "chunked_prefill_size=20", "--json")
    assert code == 0
    stored, shown = json.loads(path.read_text()), json.loads(out)
    assert [r["logprob_error_max"] for r in stored[:1]] == [0.0]
    assert stored[1:] == shown
    assert shown[0]["against"] == {"chunked_prefill_size": 20}
    assert 0 < shown[0]["logprob_error_max"] < 1e-3


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("needle", "--lengths", "0"), "below 1"),
        (("needle", "--depths", "0,x"), "0,0.5,1"),
        (("needle", "--depths", "2"), "0 to 1"),
        (("needle", "somewhere", "--base-url", "http://127.0.0.1:9"), "not both"),
        (("ruler", "--lengths", "600", "--task", "cwe", *SMALL), "too few"),
        (("ppl", "--lengths", "100"), "no context"),
        (("ppl", "--text", "nowhere", *SMALL), "does not exist"),
        (("parity",), "give one of"),
        (("parity", "--save", "x", "--other", "dtype=float32"), "give one of"),
        (("parity", "--reference", "x", "--text", "y"), "leave --text out"),
        (("parity", "--other", "dtype"), "NAME=VALUE"),
        (("parity", "--other", "dtyp=float32", "--length", "99", "--last", "9", *SMALL), "dtype"),
        (("parity", "--reference", "none.safetensors", *SMALL), "cannot be read"),
        (("needle", "--served-model", "x"), "--base-url"),
        (("needle", "--text", "nowhere"), "does not exist"),
        (("needle", "--chart", "x.jpg"), "png"),
        (("needle", "--base-url", "http://127.0.0.1:9"), "no server answers"),
    ],
)
def test_mistakes(run, arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = run("eval", *arguments)
    assert code == 2
    assert said in err
    assert not list(tmp_path.iterdir())
