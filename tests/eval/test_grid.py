from dataclasses import replace

import pytest

from cairn.errors import BadConfig, BadRequest, CairnError
from cairn.eval.grid import NeedlePlan, run_needle, totals
from cairn.eval.needles import Grid
from cairn.eval.score import wilson
from cairn.eval.subject import Source

GRID = Grid(lengths=(700,), depths=(0.0, 0.5), samples=1, keys=4)


def run(plan):
    kept = []
    for cells in run_needle(plan, kept.append):
        assert cells == kept[-len(cells) :]
    return kept


def share(records, **wanted):
    return totals([r for r in records if wanted.items() <= r.items()])["accuracy"]


def test_the_embedded_model_finds_all_however_it_is_computed(local):
    variants = ("base", "warm", "window")
    grid = replace(GRID, tasks=("single", "tracking"))
    records = run(NeedlePlan(local, grid, variants=variants))
    assert len(records) == 3 * 2 * 2
    for variant in variants[:2]:
        assert share(records, variant=variant) == 1.0
        assert all(r["same_as_first"] == r["asked"] for r in records if r["variant"] == variant)
    # Beyond the window nothing is found, because the answers are in the selected pages.
    assert share(records, variant="window", depth=0.0) == 0.0
    wrong = next(r for r in records if r["variant"] == "window" and r["depth"] == 0.0)
    assert wrong["wrong"] and wrong["same_as_first"] < wrong["asked"]
    assert wrong["options"]["attention_backend"] == "window"
    assert all(r["cached_share"] > 0.8 for r in records if r["variant"] == "warm")
    assert all(
        r["cached_share"] == 0.0 for r in records if (r["variant"], r["task"]) == ("base", "single")
    )


def test_a_server_is_asked_the_same(served, api):
    grid = Grid(tasks=("multi",), lengths=(600,), depths=(0.0, 1.0), samples=3, keys=4)
    records = run(NeedlePlan(served, grid, form="lines"))
    [asked] = {r["asked"] for r in records}
    assert asked == 3
    # It knows the lines and not the sentences, which alternate.
    assert totals(records)["right"] == 3
    assert all(r["wrong"][0][1] == "word" for r in records if r["wrong"])
    bodies = [body for body in api.bodies if "#ask" in body["prompt"][-12:]]
    assert len(bodies) == 3
    assert all(body["temperature"] == 0 and body["max_tokens"] < 8 for body in bodies)
    assert 1 < api.most_running <= 4


def test_a_warm_server_reads_the_document_first(served, api):
    grid = Grid(tasks=("single",), lengths=(600,), depths=(0.5,), samples=1)
    run(NeedlePlan(served, grid, form="lines", variants=("warm",)))
    read, asked = api.bodies[-2:]
    assert read["max_tokens"] == 1
    assert asked["prompt"].startswith(read["prompt"])


def test_chat_leaves_the_lead_out(served, api):
    chat = Source(served.model, {}, served.address, chat=True)
    grid = Grid(tasks=("single",), lengths=(600,), depths=(0.5,), samples=1)
    run(NeedlePlan(chat, grid, form="english"))
    assert api.bodies[-1]["messages"][0]["content"].endswith("the provided text?")


def test_errors_of_a_server_are_reported(served, api):
    api.status = dict.fromkeys(range(1, 99), 503)
    with pytest.raises(CairnError, match=r"/v1/completions answers 503: refused"):
        run(NeedlePlan(served, GRID, form="lines"))


def test_options_of_the_engine_are_no_options_of_a_server(served):
    with pytest.raises(BadConfig, match="kv_cache_dtype cannot be set on a running server"):
        run(NeedlePlan(served, GRID, variants=("fp8",)))


def test_a_length_beyond_the_pages_is_refused_before_anything_runs(local):
    with pytest.raises(BadRequest, match="90000 tokens are asked for, but a sequence here has"):
        run(NeedlePlan(local, Grid(lengths=(500, 90_000))))


def test_warm_needs_a_prefix_cache(local):
    cold = Source(local.model, {**local.options, "enable_prefix_caching": False})
    with pytest.raises(BadConfig, match="warm"):
        run(NeedlePlan(cold, GRID, variants=("warm",)))


@pytest.mark.parametrize(
    "right, asked, low, high",
    # Computed with statsmodels' proportion_confint(..., method="wilson").
    [(8, 10, 0.490162, 0.943318), (0, 5, 0.0, 0.434482), (5, 5, 0.565518, 1.0), (0, 0, 0.0, 1.0)],
)
def test_wilson(right, asked, low, high):
    assert wilson(right, asked) == pytest.approx((low, high), abs=1e-5)
