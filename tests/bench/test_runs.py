"""The benchmarks on a fake engine: what they ask of it and what they make of its counters."""

import json
from pathlib import Path

import pytest

from cairn.bench import latency, session
from cairn.bench.latency import LatencyPlan, run_latency
from cairn.bench.offline import OfflinePlan, run_offline
from cairn.bench.roofline import Roofline
from cairn.bench.session import Subject
from cairn.bench.shapes import config_of
from cairn.errors import BadConfig
from cairn.models.registry import load_spec
from cairn.models.weight_map import parameter_count
from tests.fake_llm import FakeLLM


@pytest.fixture
def llms(monkeypatch):
    made = []

    def make(model=None, **options):
        made.append(FakeLLM(model, options))
        made[-1].config = json.loads((Path(model) / "config.json").read_text())
        return made[-1]

    monkeypatch.setattr(session, "LLM", make)
    line = Roofline(bandwidth=1e10, gemm=1e11, dtype="float32", device="cpu")
    monkeypatch.setattr(latency, "measure", lambda dtype, device: line)
    return made


def plan(**changes):
    given = {
        "subject": Subject(None, "345m"),
        "contexts": (100, 630),
        "batches": (1, 2),
        "steps": 4,
        "backends": ("hsa", "dense"),
        "options": {"dtype": "float32"},
    }
    return LatencyPlan(**(given | changes))


def test_latency_cells(llms):
    reported = []
    cells, line = run_latency(plan(), reported.append)
    assert cells == reported
    assert len(cells) == 2 * 2 * 2 * 2
    assert line.bandwidth == 1e10
    first, second = cells[:2]
    assert (first.phase, first.context, first.batch, first.backend) == ("prefill", 100, 1, "hsa")
    assert first.ms == pytest.approx(500)
    assert first.tokens_per_s == pytest.approx(100 / 0.5)
    assert second.phase == "decode"
    assert second.ms == pytest.approx(500 / 4)
    assert second.pages_read == 41
    assert second.fraction == pytest.approx(second.floor_ms / second.ms)
    assert first.parameters == parameter_count(llms[0].spec)
    assert all(llm.closed for llm in llms)


def test_row_26_the_dense_twin_differs_by_the_landmarks_alone():
    hsa, dense = (load_spec(config_of("345m", kind)) for kind in ("hsa", "dense"))
    own = hsa.num_layers * (hsa.hidden_size * hsa.num_heads * hsa.head_dim + hsa.head_dim)
    own += (hsa.embedding_rows - dense.embedding_rows) * hsa.hidden_size
    assert hsa.num_layers == dense.num_layers
    assert parameter_count(hsa) - parameter_count(dense) == own


def test_each_kind_of_a_shape_is_its_own_model(llms):
    run_latency(plan(contexts=(10,), batches=(3,)))
    assert [llm.config["model_type"] for llm in llms] == ["qwen_hils", "qwen3"]
    assert llms[0].options == {
        "dtype": "float32",
        "load_format": "random",
        "max_num_seqs": 3,
        "max_model_len": 300 + 4 + 1,
    }


def test_decode_runs_the_prompts_of_the_prefill_again(llms):
    run_latency(plan(contexts=(10,), batches=(2,), backends=("hsa",)))
    prompts = [prompt["prompt_token_ids"] for prompt, _ in llms[0].calls]
    warm_up, a, b, again_a, again_b = prompts
    assert len(warm_up) == latency.WARM_UP_TOKENS
    assert (a, b) == (again_a, again_b)
    assert a != b
    lengths = [params.max_tokens for _, params in llms[0].calls]
    assert lengths == [2, 1, 1, 5, 5]


def test_offline(llms):
    (cell,) = run_offline(OfflinePlan(Subject(None, "345m"), 3, 20, 5, "hsa", {}))
    assert cell.batch == 3
    assert cell.context == 25
    assert cell.tokens_per_s == pytest.approx(75 / (cell.ms / 1e3))


def test_unknown_shape():
    with pytest.raises(BadConfig, match=r"345x.*345m"):
        run_offline(OfflinePlan(Subject(None, "345x"), 1, 1, 1, "hsa", {}))
