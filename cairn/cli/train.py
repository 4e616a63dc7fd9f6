"""`cairn train`: trains a small landmark model from scratch."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from cairn.train.run import Outcome


@click.command()
@click.option(
    "--recipe",
    metavar="NAME|FILE",
    default="embedded",
    show_default=True,
    help="embedded (7.6 million parameters), dense (its dense twin), or a recipe file.",
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="Folder of the model. An interrupted run continues from the checkpoint there.",
)
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    multiple=True,
    help="Folder of text or code; repeatable.  [default: the sources of Python and of its "
    "installed packages]",
)
@click.option("--seed", type=int, help="Seed of weights, data and facts.  [default: the recipe's]")
@click.option(
    "--device", metavar="NAME", default="auto", show_default=True, help="auto, cpu or cuda."
)
@click.option(
    "--max-minutes",
    type=click.FloatRange(min=0, min_open=True),
    help="Stop after this many minutes with exit code 3. The same command continues the run.",
)
@click.option(
    "--smoke",
    is_flag=True,
    help="Run a small version of the recipe, which takes a minute on a CPU.",
)
def train(
    recipe: str,
    output: Path,
    data: tuple[Path, ...],
    seed: int | None,
    device: str,
    max_minutes: float | None,
    smoke: bool,
) -> None:
    """Train a small landmark model.

    The training data is text with hidden facts and questions about them.

    The output folder can be given as MODEL to every other command.
    """
    from cairn.train import recipe as recipes

    chosen = recipes.load_recipe(recipe)
    chosen = recipes.smoke(chosen) if smoke else chosen
    chosen = chosen if seed is None else replace(chosen, seed=seed)

    from cairn.train.display import Display
    from cairn.train.run import Run
    from cairn.train.run import train as run_training

    limit = None if max_minutes is None else max_minutes * 60
    with Display(chosen) as display:
        outcome = run_training(chosen, Run(output, data, device, max_seconds=limit), display.show)
    _say(outcome, output)
    sys.exit(0 if outcome.finished else 3)


def _say(outcome: Outcome, output: Path) -> None:
    done, found = outcome.progress, outcome.held_out
    if not outcome.finished:
        click.echo(f"stopped at step {done.step} after {done.seconds:.0f} s; run it again to go on")
        return
    click.echo(
        f"{output}: {outcome.parameters / 1e6:.2f} million parameters, {done.step} steps in "
        f"{done.seconds:.0f} s; held-out text {found['bits']:.3f} bits a token, "
        f"{found['right']:.1%} of the answers' tokens right at {found['length']:.0f} slots"
    )
