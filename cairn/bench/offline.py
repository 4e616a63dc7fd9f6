"""`cairn bench offline`: throughput of a batch of prompts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cairn.bench.records import Cell
from cairn.bench.session import Subject, open_engine, random_prompts, run_phase
from cairn.models.registry import measure_weights


@dataclass(frozen=True, slots=True)
class OfflinePlan:
    """Options of an offline run.

    Attributes:
        subject: folder or shape.
        num_prompts: prompts of the batch.
        input_len, output_len: user tokens per prompt and per output.
        backend: the attention kind.
        options: keywords of LLM.
    """

    subject: Subject
    num_prompts: int
    input_len: int
    output_len: int
    backend: str
    options: Mapping[str, Any]


def run_offline(plan: OfflinePlan) -> list[Cell]:
    """Run the prompts once after a warm-up. Returns one cell; its tokens/s count prompts and
    outputs."""
    options = {"max_model_len": plan.input_len + plan.output_len} | dict(plan.options)
    with open_engine(plan.subject, plan.backend, options) as llm:
        vocab = llm.spec.vocab_size
        run_phase(llm, random_prompts(1, min(plan.input_len, 64), vocab, seed=1), 1)
        prompts = random_prompts(plan.num_prompts, plan.input_len, vocab, seed=2)
        began = time.perf_counter()
        phase = run_phase(llm, prompts, plan.output_len)
        seconds = time.perf_counter() - began
        tokens = plan.num_prompts * (plan.input_len + plan.output_len)
        return [
            Cell(
                shape=plan.subject.name,
                phase="offline",
                context=plan.input_len + plan.output_len,
                batch=plan.num_prompts,
                backend=plan.backend,
                dtype=llm.engine_config.dtype,
                ms=seconds * 1e3,
                floor_ms=None,
                tokens_per_s=tokens / seconds,
                host_us=sum(phase.host_us.values()) if phase.host_us else None,
                host_us_by_stage=phase.host_us,
                parameters=measure_weights(llm.spec, llm.engine_config.dtype)[0],
            )
        ]
