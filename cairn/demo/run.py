"""Runs the demo: prefills the document once, asks for each hidden fact, and shows time and
memory."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cairn.demo.document import Document, HiddenFact, build_document, make_facts

if TYPE_CHECKING:
    from rich.console import Console

    from cairn.llm import LLM, Stats

MIB = 1 << 20


def run_demo(
    model: Path, *, tokens: int, questions: int, seed: int, options: Mapping[str, Any]
) -> bool:
    """Run the demo and print answers, times and memory to stdout.

    Args:
        model: folder of a byte-level model (a token is a byte).
        tokens: length of the document in tokens.
        questions: number of facts of each of the three kinds.
        seed: seed of the facts and their places.
        options: keywords of LLM.

    Returns:
        Whether every answer was right.

    Raises:
        CairnError: an invalid model or option, or a document that is too short for its facts.
    """
    from rich.console import Console

    console = Console(highlight=False)
    rng = random.Random(seed)
    document = build_document(tokens, make_facts(questions, rng), rng)
    console.print(
        f"[bold]{len(document.text):,}[/] tokens from {document.files} files of the standard "
        f"library; {len(document.facts)} facts hidden in it"
    )
    began = time.perf_counter()

    with console.status("importing PyTorch and loading the model"):
        from cairn.llm import LLM

        llm = LLM(str(model), **options)
    console.print(f"{model.name} is ready after {time.perf_counter() - began:.1f} s")
    try:
        _read(llm, document, console)
        before = llm.stats()
        right = [_ask(llm, document, hidden, console) for hidden in document.facts]
        console.print()
        console.print(f"[bold]{sum(right)} of {len(right)} answers are right[/]")
        _show_costs(before, llm.stats(), console)
    finally:
        llm.shutdown()
    return all(right)


def _read(llm: LLM, document: Document, console: Console) -> None:
    """Prefill the document, whose pages stay in the prefix cache for the questions."""
    from cairn.types import SamplingParams

    began = time.perf_counter()
    llm.generate([document.text], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    seconds = time.perf_counter() - began
    rate = len(document.text) / seconds
    console.print(f"read in {seconds:.1f} s ({rate:,.0f} tokens/s)\n")


def _ask(llm: LLM, document: Document, hidden: HiddenFact, console: Console) -> bool:
    """Print a question and its streamed answer. Returns whether the answer is right."""
    from cairn.types import SamplingParams

    fact = hidden.fact
    depths = ", ".join(f"{depth:.0%}" for depth in hidden.depths)
    console.print(f"[dim]{fact.kind:<8} at {depths:<14}[/] {fact.question.strip()} ", end="")
    params = SamplingParams(temperature=0.0, max_tokens=len(fact.answer), ignore_eos=True)
    answer = ""
    for piece, _ in llm.stream(document.text + fact.question, params):
        answer += piece
        console.print(piece, end="", style="bold", markup=False)
        sys.stdout.flush()
    right = answer == fact.answer
    console.print("  [green]right[/]" if right else f"  [red]wrong[/], it is {fact.answer}")
    return right


def _show_costs(read: Stats, total: Stats, console: Console) -> None:
    """Print the totals of the run, and the pages read by the answers, which ran after `read`."""
    from rich.table import Table

    table = Table(title="What it cost", title_justify="left")
    for name in ("", "tokens", "seconds", "tokens/s"):
        table.add_column(name, justify="right" if name else "left")
    for name, count, seconds in (
        ("prefill", total.prefill_tokens, total.prefill_seconds),
        ("decode", total.decode_tokens, total.decode_seconds),
    ):
        rate = count / seconds if seconds else 0.0
        table.add_row(name, f"{count:,}", f"{seconds:.2f}", f"{rate:,.0f}")
    console.print(table)
    for name, part, whole, unit in (
        (
            "pages read to answer",
            total.pages_read - read.pages_read,
            total.pages_held - read.pages_held,
            "pages held",
        ),
        ("prefix cache hits", total.cached_prompt_tokens, total.prompt_tokens, "prompt tokens"),
    ):
        share = part / whole if whole else 0.0
        console.print(f"{name:<22}{part:,} of {whole:,} {unit} ({share:.1%})")
    console.print(f"{'peak memory':<22}{peak_memory() / MIB:,.0f} MiB")


def peak_memory() -> int:
    """Peak resident size of this process in bytes; 0 if the system does not report it."""
    if os.name != "posix":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
