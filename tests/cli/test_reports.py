"""`cairn ops`, `cairn doctor` and `cairn inspect`."""

import dataclasses
import functools
import json

import pytest

from cairn.bench.shapes import write_folder
from cairn.cli.inspect import readable


@pytest.fixture
def folder(tmp_path):
    return str(write_folder(tmp_path, "345m", "hsa"))


def test_ops_lists_every_op(run):
    from cairn.ops.registry import all_ops

    code, out, _ = run("ops")
    listed = {line.split()[1] for line in out.splitlines()[1:]}
    assert code == 0
    assert {op.name for op in all_ops() if op.family != "test"} <= listed


def test_ops_says_what_is_missing_here(run, monkeypatch):
    from cairn.ops.attention.dense_attention import dense_attention

    known = dense_attention.implementations
    absent = dataclasses.replace(known["gluon"], missing="not installed")
    monkeypatch.setitem(known, "gluon", absent)
    dense_attention._chosen.clear()
    code, out, _ = run("ops")
    assert code == 0
    assert "no gluon for dense_attention here: not installed" in out.splitlines()


def test_ops_json(run):
    code, out, _ = run("ops", "--json")
    rows = json.loads(out)
    assert code == 0
    assert {"family", "op", "names", "implementations", "chosen"} <= rows[0].keys()
    of_op = {row["op"]: row for row in rows}
    assert of_op["rmsnorm"]["names"] == ["rmsnorm"]
    assert "top_p_sampling_from_probs" in of_op["draw_from_probs"]["names"]
    kernel = {one["name"]: one["devices"] for one in of_op["rmsnorm"]["implementations"]}
    assert kernel["torch"] == ["cpu"]


@functools.cache
def made():
    from cairn.ops.docs import pages

    return pages()


@pytest.fixture
def pages_once(monkeypatch):
    """Tests of the ops check the pages' content; this test generates them once."""
    once = made()
    monkeypatch.setattr("cairn.ops.docs.pages", lambda measured: once)


@pytest.mark.usefixtures("pages_once")
def test_ops_docs_replaces_the_pages_of_a_folder(run, tmp_path):
    assert run("ops", "--docs", str(tmp_path))[0] == 0
    (tmp_path / "gone.md").write_text("of a family that is no more")
    (tmp_path / "chart.png").write_text("not a page")
    code, out, _ = run("ops", "--docs", str(tmp_path))
    assert code == 0 and "pages in" in out
    found = {path.name for path in tmp_path.iterdir()}
    assert {"README.md", "norm.md", "chart.png"} <= found
    assert "gone.md" not in found


def test_ops_docs_take_records_of_several_files(run, tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr("cairn.ops.docs.pages", lambda measured: shown.extend(measured) or made())
    files = [tmp_path / "whole.json", tmp_path / "later.json"]
    records = [{"op": "rmsnorm", "size": "1 x 64", "ms": n} for n in (1.0, 2.0)]
    for file, record in zip(files, records, strict=True):
        file.write_text(json.dumps([record]))
    given = [part for file in files for part in ("--measured", str(file))]
    assert run("ops", "--docs", str(tmp_path / "pages"), *given)[0] == 0
    assert shown == records


@pytest.mark.usefixtures("pages_once")
@pytest.mark.parametrize("name", ["notes.md", "README.md"])
def test_ops_docs_leaves_texts_of_others_alone(run, tmp_path, name):
    (tmp_path / name).write_text("mine")
    code, _, err = run("ops", "--docs", str(tmp_path))
    assert code == 2 and "not pages of ops" in err
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


@pytest.mark.parametrize("text", ["{nope", "{}", "[1]", '[{"op": "rmsnorm"}]', "\xff"])
def test_ops_docs_of_what_is_no_record(run, tmp_path, text):
    file = tmp_path / "records.json"
    file.write_text(text, encoding="latin-1")
    code, _, err = run("ops", "--docs", str(tmp_path / "pages"), "--measured", str(file))
    assert code == 2 and err.startswith("error: ") and "records.json" in err


def test_doctor(run, folder):
    code, out, _ = run("doctor", folder)
    assert code == 0
    assert "torch" in out
    assert "attention_backend=hsa  because 16 of 16 layers" in out


def test_doctor_json(run, folder):
    code, out, _ = run("doctor", folder, "--json")
    report = json.loads(out)
    assert code == 0
    assert report["devices"][0] == "cpu"
    assert report["memory"]["total"] > 0
    assert {"dtype", "attention_backend"} <= {choice["name"] for choice in report["choices"]}


def test_inspect_json(run, folder):
    code, out, _ = run("inspect", folder, "--json", "--dtype", "bfloat16")
    report = json.loads(out)
    assert code == 0
    assert report["model"]["num_layers"] == 16
    assert report["layers"] == {
        "0-15": "landmark selection: top 32 pages and a window of 512 slots, prior summaries"
    }
    # For one of 16 layers: keys and values 64 x 2 x 64, summaries 16 x 64 and a float32 bias of 16
    # heads.
    assert report["memory"]["summary_bytes_per_page"] == 16 * (16 * 64 * 2 + 16 * 4)
    assert report["memory"]["bytes_per_page"] == 16 * (2 * 64 * 2 * 64 * 2 + 2112)
    assert report["memory"]["tokens_per_page"] == 63
    names = {switch["name"]: switch["value"] for switch in report["switches"]}
    assert names["enable_softmax1"] is True


def test_inspect_shows_what_options_change(run, folder):
    code, out, _ = run("inspect", folder, "--hsa-topk", "8", "--hsa-layers", "0-3,7")
    assert code == 0
    assert "top 8 pages" in out
    assert "  0-3   " in out
    assert "hsa_topk=8 contradicts the trained model (32)" in out


def test_inspect_refuses_what_the_engine_would(run, folder):
    code, out, err = run("inspect", folder, "--page-size", "32")
    assert (code, out) == (2, "")
    assert err.startswith("error: page_size is 32")
    assert err.count("\n") == 1


def test_inspect_without_a_model(run, tmp_path):
    code, _, err = run("inspect", str(tmp_path / "nothing"))
    assert code == 2
    assert err.startswith("error: ")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (1536, "1.5 KiB"), (3 << 40, "3.0 TiB"), (5 << 50, "5,120.0 TiB")],
)
def test_readable(count, text):
    assert readable(count) == text
