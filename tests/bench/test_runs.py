"""The benchmarks on a fake engine: the calls they make and the results from its counters."""

import json
from pathlib import Path

import pytest

from cairn.bench import latency, session
from cairn.bench.latency import LatencyPlan, run_latency
from cairn.bench.offline import OfflinePlan, run_offline
from cairn.bench.roofline import Roofline, decode_bytes
from cairn.bench.session import Subject
from cairn.bench.shapes import config_of
from cairn.errors import BadConfig, CairnError
from cairn.models.registry import load_spec
from cairn.specs.choice import Notes
from cairn.specs.options import MixerOptions, resolve_mixers
from tests.fake_llm import FakeLLM
from tests.specs import parameter_count


@pytest.fixture
def llms(monkeypatch):
    made = []

    def make(model=None, **options):
        made.append(FakeLLM(model, options))
        made[-1].config = json.loads((Path(model) / "config.json").read_text())
        if made[-1].config["model_type"] == "qwen3":
            # The fake has a landmark model, which runs densely here.
            options = MixerOptions(attention_backend="dense")
            made[-1].spec = resolve_mixers(made[-1].spec, options, Notes())
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
    found = list(run_latency(plan()))
    cells = [cell for cell, _ in found]
    assert len(cells) == 2 * 2 * 2 * 2
    assert {line.bandwidth for _, line in found} == {1e10}
    first, second = cells[:2]
    assert (first.phase, first.context, first.batch, first.backend) == ("prefill", 100, 1, "hsa")
    assert first.ms == pytest.approx(500)
    assert first.tokens_per_s == pytest.approx(100 / 0.5)
    assert second.phase == "decode"
    assert second.ms == pytest.approx(500 / 4)
    assert second.pages_read == 41
    assert second.host_us == pytest.approx(100)
    assert second.host_us_by_stage["results"] == pytest.approx(30)
    assert second.fraction == pytest.approx(second.floor_ms / second.ms)
    assert first.selection == "random" and first.step_tokens == 512
    assert first.launches is None and first.peak_bytes is None
    assert cells[-1].selection is None
    assert first.parameters == parameter_count(llms[0].spec)
    assert all(llm.closed for llm in llms)


def test_row_26_the_dense_twin_differs_by_the_landmarks_alone():
    hsa, dense = (load_spec(config_of("345m", kind)) for kind in ("hsa", "dense"))
    mixer = hsa.mixers[0]
    query = mixer.num_heads * mixer.head_dim
    own = hsa.num_layers * (hsa.hidden_size * query + mixer.head_dim)
    own += (hsa.embedding_rows - dense.embedding_rows) * hsa.hidden_size
    assert hsa.num_layers == dense.num_layers
    assert parameter_count(hsa) - parameter_count(dense) == own


def test_each_kind_of_a_shape_is_its_own_model(llms):
    list(run_latency(plan(contexts=(10,), batches=(3,))))
    assert [llm.config["model_type"] for llm in llms] == ["qwen_hils", "qwen3"]
    assert llms[0].options == {
        "dtype": "float32",
        "load_format": "random",
        "max_num_seqs": 3,
        "max_model_len": 300 + 4 + 1,
    }


def test_shared_pages_change_the_prompts_and_the_positions(llms):
    shared = plan(subject=Subject(None, "345m", overlap=True), contexts=(400,))
    assert {cell.selection for cell, _ in run_latency(shared)} == {"shared", None}
    hsa, dense = llms
    assert hsa.config["apply_hils_rope"] is False
    assert dense.config == config_of("345m", "dense")
    prompt, _ = hsa.calls[1]
    assert len(set(prompt["prompt_token_ids"][:32])) < 8


def test_a_dense_run_of_a_landmark_model_has_a_dense_floor(llms):
    hsa = load_spec(config_of("345m", "hsa"))
    line = Roofline(bandwidth=1e10, gemm=1e11, dtype="float32", device="cpu")
    found = run_latency(plan(contexts=(100_000,), batches=(1,), steps=1))
    floors = {(cell.backend, cell.phase): cell.floor_ms for cell, _ in found}
    slots = 100_000 + 100_000 // 63
    assert floors["hsa", "prefill"] == pytest.approx(line.prefill_floor(hsa, slots) * 1e3)
    assert floors["dense", "prefill"] > 3 * floors["hsa", "prefill"]
    assert floors["dense", "decode"] > 1.8 * floors["hsa", "decode"]


@pytest.mark.parametrize("kind, billions", [("hsa", 6.90), ("dense", 6.89)])
def test_the_7b_shape(kind, billions):
    spec = load_spec(config_of("7b", kind))
    assert spec.num_layers == 32 and spec.mixers[0].head_dim == 128
    assert len(spec.selecting_layers) == (8 if kind == "hsa" else 0)
    assert decode_bytes(spec, 0, 1, "bfloat16") == pytest.approx(2 * billions * 1e9, rel=0.002)


@pytest.mark.parametrize(
    "count, told", [("preemptions", "1 preemptions"), ("steps", "10 steps"), ("prefill_tokens", "")]
)
def test_rows_that_did_not_decode_side_by_side_are_no_cell(llms, monkeypatch, count, told):
    generate = FakeLLM.generate

    def crowded(self, prompts, *args, **kwargs):
        results = generate(self, prompts, *args, **kwargs)
        # The third call decodes: rows one after the other, or with preemptions.
        gained = {"preemptions": 1, "steps": 5, "prefill_tokens": 130}[count]
        if len(self.calls) > 3:
            self.counts[count] += gained
        return results

    monkeypatch.setattr(FakeLLM, "generate", crowded)
    cells = run_latency(plan(contexts=(100,), batches=(2,), backends=("hsa",)))
    assert next(cells)[0].phase == "prefill"
    with pytest.raises(CairnError, match="2 rows of 100 and 4 tokens did not run") as refused:
        next(cells)
    assert told in str(refused.value) and "--kv-cache-memory" in str(refused.value)


def test_decode_runs_the_prompts_of_the_prefill_again(llms):
    list(run_latency(plan(contexts=(10,), batches=(2,), backends=("hsa",))))
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
