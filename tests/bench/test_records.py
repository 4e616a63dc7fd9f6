import json
import re

from cairn.bench import records
from cairn.bench.machine import describe_machine

CELL = records.Cell("345m", "decode", 8192, 1, "hsa", "bfloat16", 50.0, 30.0, 20.0)


def test_one_record_per_cell_appended(tmp_path):
    run = records.RunInfo(describe_machine(), "abc123", "cairn bench latency", 2e10, 3e11)
    path = tmp_path / "results" / "x.json"
    records.append(records.records([CELL], run), path)
    records.append(records.records([CELL, CELL], run), path)
    found = json.loads(path.read_text())
    assert len(found) == 3
    assert found[0]["fraction"] == 0.6
    assert found[0]["bandwidth_gb_s"] == 20.0
    needed = (
        "shape phase context batch backend dtype ms floor_ms fraction tokens_per_s torch commit"
    )
    assert set(needed.split()) < found[0].keys()
    assert {"cpu", "threads", "command", "date"} < found[0].keys()


def test_the_file_is_named_after_day_machine_and_run(tmp_path):
    path = records.default_path("latency-345m", describe_machine(), tmp_path)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-[a-z0-9-]+-latency-345m\.json", path.name)
