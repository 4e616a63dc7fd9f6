from types import SimpleNamespace

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cairn.engine.messages import Delta, Stats, Timing
from cairn.obs import metrics as module
from cairn.obs.metrics import BY_REASON, COUNTERS, GAUGES, EngineView, Metrics


def view(stats=None, step_age=0.0):
    totals = {**msgspec.structs.asdict(stats), "step_age": step_age} if stats else {}
    return EngineView(totals, {"weights": 1.5})


def made(stats=None, step_age=0.0):
    return Metrics("tiny", lambda: [view(stats, step_age)])


def scraped(metrics, replica="0"):
    """All samples by name and labels, without model name and replica."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            assert sample.labels.pop("model_name") == "tiny"
            if sample.labels.pop("replica", replica) == replica:
                found[(sample.name, *sample.labels.values())] = sample.value
    return found


def test_names_that_dashboards_of_the_field_ask_for():
    names = {key[0] for key in scraped(made(Stats()))}
    assert names >= {
        "cairn:num_requests_running",
        "cairn:num_requests_waiting",
        "cairn:kv_cache_usage_perc",
        "cairn:prefix_cache_queries_total",
        "cairn:prefix_cache_hits_total",
        "cairn:prompt_tokens_total",
        "cairn:generation_tokens_total",
        "cairn:num_preemptions_total",
        "cairn:time_to_first_token_seconds_bucket",
        "cairn:inter_token_latency_seconds_sum",
        "cairn:e2e_request_latency_seconds_count",
        "cairn:request_queue_time_seconds_count",
        "cairn:request_prefill_time_seconds_count",
        "cairn:request_decode_time_seconds_count",
        "cairn:startup_seconds",
        "cairn:step_age_seconds",
        "cairn:selected_pages_per_query",
        "cairn:decode_stall_seconds_total",
        "cairn:leaked_pages",
    }


def test_every_total_of_the_engine_is_shown():
    """Each field has a distinct value and is exported under its name."""
    names = Stats.__struct_fields__
    values = {name: i + 2 for i, name in enumerate(names)}
    reasons = {key: {"ticket": values[key], "damaged": 1} for key, _ in BY_REASON.values()}
    stats = Stats(**{**values, **reasons})
    found = scraped(made(stats, step_age=0.25))
    shown = {}
    for table, suffix in ((GAUGES, ""), (COUNTERS, "_total")):
        for metric, (key, _) in table.items():
            shown[key] = found[(f"cairn:{metric}{suffix}",)]
    for metric, (key, _) in BY_REASON.items():
        shown[key] = found[(f"cairn:{metric}_total", "ticket")]
        assert found[(f"cairn:{metric}_total", "damaged")] == 1
    assert shown.pop("step_age") == 0.25
    assert shown == values


def test_shares():
    stats = Stats(
        pages_total=100, pages_free=50, pages_cached=30, selecting_queries=8, pages_selected=20
    )
    found = scraped(made(stats))
    assert found[("cairn:kv_cache_usage_perc",)] == 0.2
    assert found[("cairn:selected_pages_per_query",)] == 2.5


def test_replicas_by_number():
    metrics = Metrics("tiny", lambda: [view(), view(Stats(running=3))])
    down, up = scraped(metrics, "0"), scraped(metrics, "1")
    assert (down[("cairn:replica_up",)], up[("cairn:replica_up",)]) == (0, 1)
    assert ("cairn:num_requests_running",) not in down
    assert up[("cairn:num_requests_running",)] == 3
    assert down[("cairn:startup_seconds", "weights")] == 1.5


def test_before_the_engine_serves_there_are_phases_only():
    found = scraped(made())
    assert found[("cairn:startup_seconds", "weights")] == 1.5
    assert ("cairn:num_requests_running",) not in found


@pytest.fixture
def clock(monkeypatch):
    """A fake clock."""
    now = SimpleNamespace(value=100.0)
    monkeypatch.setattr(module.time, "perf_counter", lambda: now.value)
    return now


def test_a_request_as_its_client_sees_it(clock):
    metrics = made()
    with metrics.track("/v1/chat/completions") as track:
        clock.value += 2.0
        track.delta(Delta("a", 0, token_ids=(1,)))
        track.delta(Delta("a", 1, token_ids=(1,)))
        clock.value += 0.3
        track.delta(Delta("a", 0, token_ids=(2, 3, 4)))
        track.delta(Delta("a", 0, text="late"))
        clock.value += 0.5
        timing = Timing(queue=0.5, prefill=1.5, decode=0.75)
        track.delta(Delta("a", 1, token_ids=(2,), finish_reason="length", timing=timing))
        track.delta(Delta("a", 0, finish_reason="stop"))
        track.end()
    found = scraped(metrics)
    assert found[("cairn:time_to_first_token_seconds_count",)] == 2
    assert found[("cairn:time_to_first_token_seconds_sum",)] == 4.0
    assert found[("cairn:inter_token_latency_seconds_count",)] == 4
    assert found[("cairn:inter_token_latency_seconds_sum",)] == pytest.approx(0.3 + 0.8)
    assert found[("cairn:request_queue_time_seconds_sum",)] == 0.5
    assert found[("cairn:request_prefill_time_seconds_sum",)] == 1.5
    assert found[("cairn:request_decode_time_seconds_sum",)] == 0.75
    assert found[("cairn:e2e_request_latency_seconds_sum",)] == pytest.approx(2.8)
    assert found[("cairn:request_success_total", "length")] == 1
    assert found[("cairn:request_success_total", "stop")] == 1


def test_a_client_that_leaves_is_an_abort():
    metrics = made()
    with pytest.raises(GeneratorExit), metrics.track("/v1/completions"):
        raise GeneratorExit
    with metrics.track("/v1/completions") as track:
        track.end("abort")
    found = scraped(metrics)
    assert found[("cairn:num_aborts_total", "/v1/completions")] == 2
    assert found[("cairn:e2e_request_latency_seconds_count",)] == 0


def test_a_failed_request_is_no_abort():
    metrics = made()
    with pytest.raises(ValueError), metrics.track("/v1/completions"):
        raise ValueError
    assert not any(name == "cairn:num_aborts_total" for name, *_ in scraped(metrics))
