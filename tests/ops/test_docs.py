"""The pages of docs/ops are current and complete."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import cairn.ops
from cairn.ops import gpu
from cairn.ops.docs import entries, pages
from cairn.train import sequence

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "ops"
WHOLE = "2026-11-27-h100-ops.json"
"""The record of all ops; later ones contain some ops."""
RECORDS = sorted(
    path for path in (ROOT / "benchmarks" / "results").glob("*-ops.json") if path.name >= WHOLE
)
REMAKE = "made anew by: cairn ops --docs docs/ops" + "".join(
    f" --measured {path.relative_to(ROOT)}" for path in RECORDS
)


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    return pages([record for path in RECORDS for record in json.loads(path.read_text("utf-8"))])


@pytest.mark.skipif(not gpu.AVAILABLE, reason="without Triton the pages would list no kernel")
def test_pages_are_current(made: dict[str, str]) -> None:
    assert {path.name for path in FOLDER.glob("*.md")} == made.keys(), REMAKE
    old = [name for name, text in made.items() if (FOLDER / name).read_text("utf-8") != text]
    assert not old, REMAKE


def test_every_public_name_has_a_section(made: dict[str, str]) -> None:
    assert {entry.name for entry in entries()} == {*cairn.ops.__all__, *sequence.__all__}
    for entry in entries():
        assert f"\n## {entry.name}\n" in made[f"{entry.family}.md"]
        assert f"({entry.family}.md#{entry.name.lower()})" in made["README.md"]


def test_a_section_says_what_the_op_is(made: dict[str, str]) -> None:
    section = made["norm.md"].split("## rmsnorm\n")[1].split("\n## ")[0]
    assert "rmsnorm(\n    input: Tensor,\n    weight: Tensor,\n    eps: float = 1e-06," in section
    assert (
        "\ninput \\* rsqrt(mean(input^2) + eps) \\* weight, in float32, rounded once.\n" in section
    )
    assert "\n- `weight`: [H], input's dtype or float32.\n" in section
    assert "\n**Raises**\n\n- `BadArgument`: " in section
    assert "\n| triton | cuda | float32, bfloat16, float16 | some layouts |\n" in section
    assert "\n| reference | cpu, cuda | float32, bfloat16, float16 | all |\n" in section


def test_pages_of_wrapper_functions_name_the_registered_op(made: dict[str, str]) -> None:
    section = made["sampling.md"].split("## top_p_sampling_from_probs\n")[1].split("\n## ")[0]
    assert "Runs `torch.ops.cairn.draw_from_probs`." in section
    assert "generator: torch.Generator | None = None" in section


def test_measurements_stand_beside_the_op() -> None:
    record = {
        "op": "rmsnorm",
        "size": "7 x 9",
        "implementation": "triton",
        "dtype": "bfloat16",
        "devices": ["cpu", "cuda:0 H100"],
        "commit": "abc",
        "ms": 0.5,
        "gb_s": 20.0,
        "fraction": 0.25,
        "of_copy": 0.3,
        "alternative": "rms_norm",
        "alternative_ms": 1.0,
    }
    hosted = {"of_alike": 0.45, "host_ms": 0.012, "least_host": "rms_norm", "least_host_ms": 0.015}
    alone = {"size": "1 x 9", "alternative": None, "host_ms": 0.02, "least_host_ms": None}
    records = [{**record, "ms": 9.0}, {**record, **hosted}, {**record, **alone}]
    records.append({"op": "rmsnorm", "size": "no place", "error": "out of memory"})
    other = {**record, "op": "layernorm"}
    records += [other, {**other, "size": "2 x 9", "commit": "def"}]
    page = pages(records)["norm.md"]
    section = page.split("## rmsnorm\n")[1].split("\n## ")[0]
    assert "Measured on cuda:0 H100, bfloat16, at commit abc:" in section
    numbers = "triton | 500.0 | 20 | 25% | 30%"
    assert f"| 7 x 9 | {numbers} | 45% | rms_norm 1000.0 µs | 12, rms_norm 15 |" in section
    assert f"| 1 x 9 | {numbers} | - | - | 20 |" in section
    assert "9000" not in section and "no place" not in section
    section = page.split("## layernorm\n")[1].split("\n## ")[0]
    assert "at commits abc and def:" in section
    assert f"| 2 x 9 | {numbers} | - | rms_norm 1000.0 µs | - |" in section


def test_tables_are_whole(made: dict[str, str]) -> None:
    for text in made.values():
        for line in text.splitlines():
            if line.startswith("|"):
                assert line.endswith("|")
                assert len(re.findall(r"(?<!\\)\|", line)) in (4, 5, 10)
