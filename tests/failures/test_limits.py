"""Table 1 of known failures of such engines: the rows about memory, limits and bookkeeping.

Row 29: there is no tensor parallelism yet, so the option is refused.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import subprocess
import sys

import pytest

from cairn import LLM, BadConfig, BadRequest, SamplingParams, TooLong
from cairn.bench.shapes import config_of
from cairn.models.registry import load_spec
from cairn.specs.media import MediaLimits
from tests.engine.harness import (
    GOLDENS,
    ROUNDING,
    assert_same,
    difference,
    engine,
    greedy,
    run,
    text,
)
from tests.failures.models import SIZE, TOPK, WINDOW, check_ledger, folder, variant, wide
from tests.failures.oracle import oracle
from tests.specs import hils_of, parameter_count

PER_PAGE = SIZE - 1

MEASURE = """
import sys
from pathlib import Path
from cairn import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu", load_format="random", kv_cache_memory="256MiB",
          chunked_prefill_size=1 << 20)
params = SamplingParams(temperature=0, max_tokens=1)
def peak(tokens):
    ids = [i * i % 199 for i in range(tokens)]
    llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
    # Not getrusage: its peak begins with the parent's memory.
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
print(peak(64), peak(8192), peak(16384))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return folder(tmp_path_factory.mktemp("wide"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory as Linux counts it")
def test_row_2_prefill_memory_is_linear_in_tokens(tmp_path):
    """One step of 16K tokens. [T, h_q, pages] in float32 alone would be 560 MB here."""
    at = folder(tmp_path / "long", max_position_embeddings=40000)
    ran = subprocess.run(
        [sys.executable, "-c", MEASURE, str(at)], capture_output=True, text=True, check=True
    )
    base, half, full = (int(word) for word in ran.stdout.split())
    assert full - base < 2.5 * (half - base)
    assert full - base < 400 << 20


@pytest.mark.parametrize("length", [20, 300, 1200, 3500])
def test_row_7_pages_read_do_not_grow_with_the_context(model, length, device):
    """At most top-k and the window's pages per query and layer, counted step by step."""
    llm = LLM(str(model), load_format="random", device=device, kv_cache_memory="8MiB")
    limit = TOPK + WINDOW // SIZE + 1
    before = llm.stats()
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    for _ in llm.stream({"prompt_token_ids": text(7, length)}, params):
        now = llm.stats()
        # Steps are counted at their launch: the step of the last token has been launched with the
        # one before.
        queries, pages = now.queries - before.queries, now.pages_read - before.pages_read
        assert (pages > 0) == (queries > 0)
        assert pages <= limit * queries
        before = now
    assert before.queries >= 2 * (length + 39)
    assert (before.pages_held > 3 * before.pages_read) == (length > 1000)


def test_row_9_the_effective_configuration_is_printed(model, caplog):
    with caplog.at_level(logging.INFO, logger="cairn"):
        built = engine(str(model), load_format="random", dtype="auto", kv_cache_memory=None)
    printed = " ".join(record.getMessage() for record in caplog.records)
    expected = {
        "dtype": built.config.dtype,
        "attention_backend": "hsa",
        "page_size": SIZE,
        "chunked_prefill_size": 1088,
        "max_model_len": 4096,
    }
    for name, value in expected.items():
        assert f"{name}={value}  because " in printed
    assert "kv_cache_memory=" in printed
    assert not any(record.levelno >= logging.WARNING for record in caplog.records)


def test_row_9_defaults(model):
    resolved = LLM(str(model), load_format="random", device="cpu").engine_config
    hils = hils_of(resolved.model)
    assert resolved.model.selecting_layers == (0, 1)
    assert (hils.topk, hils.window, hils.strategy) == (4, 32, "hils")
    config = dataclasses.asdict(resolved)
    for name in ("choices", "warnings", "kv_cache_memory", "model"):
        del config[name]
    assert config == {
        "dtype": "float32",
        "device": "cpu",
        "page_size": 16,
        "seed": 0,
        "max_num_seqs": 64,
        "chunked_prefill_size": 1088,
        "itl_target_ms": None,
        "enable_prefix_caching": True,
        "load_format": "random",
        "gpu_memory_utilization": None,
        "kv_cache_dtype": "float32",
        "disable_cuda_graph": False,
        "disable_overlap_schedule": False,
        "speculation": None,
        "kv_host_memory": 0,
        "kv_host_tier": False,
        "balance": None,
        "nodes": None,
        "tensor_parallel_size": 1,
        "disaggregation": None,
        "media": dataclasses.asdict(MediaLimits()),
    }


def test_row_12_every_page_has_one_owner_at_every_step(model, device):
    """A pool under pressure: requests grow, share pages, are preempted and end; the ledger stays
    valid."""
    built = wide(model, device=device, max_model_len=600, max_num_seqs=6, kv_cache_memory=5376 * 44)
    shared = text(12, 90)
    for i in range(20):
        prompt = shared[: 30 * (i % 4)] + text(i, 10 + 23 * (i % 5))
        built.core.add(f"r{i}", prompt, greedy(5 + 17 * (i % 6)))
    steps = 0
    while built.core.has_work:
        built.core.step()
        check_ledger(built)
        steps += 1
        if steps % 25 == 0:
            built.core.abort(f"r{steps // 25}")
        held = [request.lease for request in built.core.scheduler.running]
        written = [page for lease in held for page in lease.owned]
        assert len(written) == len(set(written))
    assert built.core.scheduler.preemptions > 0
    assert built.core.cache.num_owned == 0


def test_row_18_exactly_the_maximal_length(tmp_path, device):
    """299 + 1 and 200 + 100 tokens run and agree with a model of longer context; 300 prompt tokens
    do not fit."""
    short = folder(tmp_path / "short", max_position_embeddings=300, rope_context_length=4096)
    long = folder(tmp_path / "long", rope_context_length=4096)
    prompt = text(18, 300)
    for length, count in ((299, 1), (200, 100)):
        got = run(wide(short, device=device), [prompt[:length]], greedy(1000))[0]
        assert len(got.tokens) == count
        assert_same(got, run(wide(long, device=device), [prompt[:length]], greedy(count))[0])
    with pytest.raises(TooLong, match="300 tokens.* 300 "):
        wide(short, device=device).core.add("r", prompt, greedy(1))
    with pytest.raises(BadConfig, match="301.* 300 "):
        wide(short, device=device, max_model_len=301)


def test_row_18_a_smaller_configured_length_changes_nothing(model, device):
    prompt = text(18, 250)
    small, large = wide(model, device=device, max_model_len=260), wide(model, device=device)
    assert_same(run(small, [prompt], greedy(10))[0], run(large, [prompt], greedy(10))[0])


@pytest.mark.parametrize("backend", [None, "hsa", "window", "dense"])
def test_row_21_default_flags_start_and_answer(backend):
    options = {"attention_backend": backend} if backend else {}
    for case in ("qwen_gqa4_prior_lora_inrange", "olmo_mha_interleave4"):
        llm = LLM(GOLDENS / case, **options)
        (result,) = llm.generate([{"prompt_token_ids": text(2, 80)}])
        assert len(result.outputs[0].token_ids) in range(1, 17)
        llm.shutdown()


def test_row_22_the_advertised_capacity_is_usable(model, caplog):
    """One sequence fills the whole pool; then many share it, which are preempted in turn."""
    with caplog.at_level(logging.INFO, logger="cairn"):
        built = wide(model, kv_cache_memory=5376 * 30)
    longest = built.memory.max_model_len
    assert longest == built.memory.num_pages * PER_PAGE
    assert built.memory.num_pages * built.memory.bytes_per_page <= 5376 * 30
    assert built.runner.pools.nbytes == built.memory.num_pages * built.memory.bytes_per_page
    assert f"max_model_len={longest}" in caplog.text
    prompt = text(22, longest - 20)
    (got,) = run(built, [prompt], greedy(1000), poisoned=False)
    assert len(got.tokens) == 20
    want, _ = oracle(built, prompt + got.tokens[:-1])
    assert difference(got.logprobs, want[-20:]) < ROUNDING
    many = [text(i, 100) for i in range(8)]
    for one, count in zip(run(built, many, greedy(60)), [60] * 8, strict=True):
        assert len(one.tokens) == count
    check_ledger(built)


@pytest.mark.parametrize("size", [1, 8, 32, 64])
def test_row_23_a_wrong_page_size_is_refused_with_the_right_one(model, size):
    with pytest.raises(BadConfig, match=f"page_size is {size}.*--page-size {SIZE}"):
        wide(model, page_size=size)
    assert wide(model, page_size=SIZE).config.page_size == SIZE


def test_row_26_the_dense_twin_is_the_same_model_without_landmarks():
    """As many layers of the same widths; the counts differ only by the landmarks' own weights."""
    sparse, dense = (load_spec(config_of("345m", kind)) for kind in ("hsa", "dense"))
    for name in ("num_layers", "hidden_size"):
        assert getattr(sparse, name) == getattr(dense, name)
    assert not dense.landmarks
    own, twin = sparse.mixers[0], dense.mixers[0]
    for name in ("num_heads", "num_kv_heads", "head_dim"):
        assert getattr(own, name) == getattr(twin, name)
    assert sparse.layers[0].ffn == dense.layers[0].ffn
    projection = sparse.hidden_size * own.num_heads * own.head_dim + own.head_dim
    rows = sparse.embedding_rows - dense.embedding_rows
    assert 0 <= rows <= 32
    extra = parameter_count(sparse) - parameter_count(dense)
    assert extra - sparse.num_layers * projection in (rows * 1024, 1024, 0)


def test_row_28_a_thousand_short_requests_leave_nothing_behind(model):
    built = wide(model, max_num_seqs=64, chunked_prefill_size=2048)
    cache = built.core.cache
    everything = cache.num_free
    for i in range(1000):
        built.core.add(f"r{i}", text(i, 1 + i % 40), greedy(1 + i % 3))
    while built.core.has_work:
        built.core.step()
    check_ledger(built)
    assert cache.num_owned == 0
    cache.reset()
    assert cache.num_free == everything
    assert not built.core.scheduler.running
    assert sorted(built.core.scheduler._free_rows) == list(range(64))


def test_row_29_an_option_of_another_engine_is_refused_not_ignored(model):
    with pytest.raises(BadRequest, match="no option 'tp_size'"):
        LLM(str(model), tp_size=2)


def test_no_field_of_a_result_shows_a_landmark(tmp_path):
    """Requests that stop, are truncated, and are preempted around the landmark of a page."""
    config = json.loads((GOLDENS / "qwen_c64" / "config.json").read_text())
    llm = LLM(variant(tmp_path / "m", "qwen_c64", eos_token_id=None), kv_cache_memory="8MiB")
    vocab = config["vocab_size"]
    for length in (62, 63, 64, 126):
        prompt = {"prompt_token_ids": text(length, length)}
        for count in (1, 2, 3, 66):
            params = SamplingParams(
                temperature=0, max_tokens=count, logprobs=-1, prompt_logprobs=-1
            )
            (result,) = llm.generate([prompt], params, use_tqdm=False)
            (output,) = result.outputs
            assert result.prompt_token_ids == prompt["prompt_token_ids"]
            assert len(output.token_ids) == len(output.logprobs) == count
            assert output.finish_reason == "length"
            assert max(output.token_ids) < vocab
            for entry in (*output.logprobs, *result.prompt_logprobs[1:]):
                assert set(entry) == set(range(vocab))
