"""`cairn demo`: asks for facts that are hidden in a long document."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from cairn.cli.options import (
    count_option,
    engine_arguments,
    engine_options,
    model_argument,
    model_or_default,
)


@click.command()
@model_argument
@count_option("--tokens", 128_000, "Length of the document in tokens.", least=4096)
@click.option(
    "--questions",
    type=click.IntRange(min=1, max=16),
    default=3,
    show_default=True,
    help="Questions of each of the three kinds.",
)
@click.option(
    "--needle-seed",
    type=int,
    default=0,
    show_default=True,
    help="Seed of the facts and their places.",
)
@engine_options
def demo(model: Path | None, tokens: int, questions: int, needle_seed: int, **options: Any) -> None:
    """Ask MODEL for facts hidden in a long document.

    The document consists of the sources of Python's standard library. Shows the answers, times and
    memory. The exit code is 0 if every answer is right.
    """
    from cairn.demo.run import run_demo

    right = run_demo(
        model_or_default(model),
        tokens=tokens,
        questions=questions,
        seed=needle_seed,
        options=engine_arguments(options),
    )
    sys.exit(0 if right else 1)
