import dataclasses
import json
import re

import pytest

from cairn.bench import records
from cairn.bench.machine import describe_machine
from cairn.bench.roofline import Roofline

CELL = records.Cell("345m", "decode", 8192, 1, "hsa", "bfloat16", 50.0, 30.0, 20.0)


def test_one_record_per_cell_appended(tmp_path):
    line = Roofline(bandwidth=2e10, gemm=3e11, dtype="bfloat16", device="cpu")
    path = tmp_path / "results" / "x.json"
    records.RecordFile("latency", "cairn bench latency", path).add(records.fields_of(CELL), line)
    file = records.RecordFile("latency", "cairn bench latency", path)
    assert [file.add(records.fields_of(CELL), line) for _ in range(2)] == records.known(path)[1:]
    found = json.loads(path.read_text())
    assert records.known(path) == found and file.count == 2
    assert len(found) == 3
    assert found[0]["fraction"] == 0.6
    assert found[0]["bandwidth_gb_s"] == 20.0
    needed = (
        "shape phase context batch backend dtype ms floor_ms fraction tokens_per_s launches "
        "selection peak_bytes step_tokens torch triton commit"
    )
    assert set(needed.split()) < found[0].keys()
    assert {"cpu", "threads", "command", "date"} < found[0].keys()


def test_the_file_is_named_after_day_machine_and_run(tmp_path):
    path = records.default_path("latency", describe_machine(), tmp_path)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d-[a-z0-9-]+-latency\.json", path.name)


@pytest.mark.parametrize(
    "device, name",
    [
        ("cuda:0 NVIDIA H100 80GB HBM3, 79 GiB", "h100"),
        ("cuda:0 NVIDIA GeForce RTX 4090, 24 GiB", "geforce-rtx-4090"),
        ("cuda:0 AMD Instinct MI300X, 191 GiB", "instinct-mi300x"),
    ],
)
def test_a_gpu_gives_the_file_its_short_name(device, name, tmp_path):
    machine = dataclasses.replace(describe_machine(), devices=("cpu", device))
    path = records.default_path("ops", machine, tmp_path)
    assert path.name[len("2026-11-21-") :] == f"{name}-ops.json"
