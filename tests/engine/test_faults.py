import pytest

from cairn.engine.faults import Fault, FaultyExecutor, faults_of, parse_faults
from cairn.errors import BadConfig
from cairn.types import SamplingParams
from tests.engine.fakes import drain, fake_core


def test_reads_a_list_of_faults():
    assert parse_faults("") == ()
    assert parse_faults("stall:1.5@3,raise@4,die@50") == (
        Fault("stall", 3, 1.5),
        Fault("raise", 4),
        Fault("die", 50),
    )


@pytest.mark.parametrize("text", ["raise", "raise@x", "stall@3", "stall:@3", "burn@3", "die@3 "])
def test_refuses_another_form(text):
    with pytest.raises(BadConfig, match="CAIRN_FAULT has .*Write stall:SECONDS@STEP"):
        parse_faults(text)


@pytest.mark.parametrize("allowed", [{}, {"CAIRN_ALLOW_FAULTS": ""}, {"CAIRN_ALLOW_FAULTS": "0"}])
def test_a_fault_that_is_not_allowed_is_refused_by_name(allowed):
    assert faults_of(allowed) == ()
    with pytest.raises(BadConfig, match="CAIRN_FAULT is 'die@3'.*CAIRN_ALLOW_FAULTS=1"):
        faults_of({"CAIRN_FAULT": "die@3", **allowed})


def test_an_allowed_fault_is_injected():
    assert faults_of({"CAIRN_ALLOW_FAULTS": "1"}) == ()
    environment = {"CAIRN_FAULT": "die@3", "CAIRN_ALLOW_FAULTS": "1"}
    assert faults_of(environment) == (Fault("die", 3),)


def test_only_the_named_step_fails():
    core = fake_core()
    core.executor = FaultyExecutor(core.executor, parse_faults("raise@2"))
    first = core.add("a", [1, 2, 3], SamplingParams(max_tokens=5))
    core.step()
    with pytest.raises(RuntimeError, match="step 2"):
        core.step()
    assert first.stream.output.finish_reason == "error"
    assert "step 2" in first.error
    second = core.add("b", [1, 2, 3], SamplingParams(max_tokens=5))
    drain(core)
    assert second.stream.output.finish_reason == "length"
