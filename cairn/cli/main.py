"""The `cairn` command group, and the conversion of errors to a message and an exit code."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Sequence

import click

from cairn.cli.batch import batch
from cairn.cli.bench import bench
from cairn.cli.demo import demo
from cairn.cli.doctor import doctor
from cairn.cli.eval import evaluate
from cairn.cli.generate import generate
from cairn.cli.inspect import inspect
from cairn.cli.ops import ops
from cairn.cli.ray import ray
from cairn.cli.serve import serve
from cairn.cli.train import train
from cairn.errors import BadConfig, BadModel, BadRequest, CairnError
from cairn.obs import log
from cairn.version import __version__

COLLECTED = 100_000, 20, 100
"""Thresholds of Python's garbage collector. With the default thresholds, 0.6 of the 9.7 s of CPU
time of a warm `cairn generate` went into collections during imports, which found nothing."""
FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 128 + signal.SIGINT


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="cairn")
@click.option(
    "--log-level",
    type=click.Choice(log.LEVELS),
    help="Minimum level of the log on stderr.  [default: CAIRN_LOG, or warning]",
)
def cairn(log_level: str | None) -> None:
    """Serve language models over very long contexts.

    Commands with a MODEL argument use the small model of the package (cairn-7m) by default.
    """
    log.configure(log_level)


for _command in (
    *(serve, generate, batch, ray, demo, inspect, doctor, ops, bench, evaluate, train),
):
    cairn.add_command(_command)


def exit_code(error: CairnError) -> int:
    """The exit code of an error: 2 for bad input, 1 for everything else."""
    return BAD_INPUT if isinstance(error, BadRequest | BadConfig | BadModel) else FAILED


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit the process.

    Args:
        arguments: the arguments after the program's name; None takes sys.argv.
    """
    gc.set_threshold(*COLLECTED)
    try:
        code = cairn.main(args=arguments, prog_name="cairn", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except CairnError as error:
        click.echo(f"error: {' '.join(str(error).split())}", err=True)
        code = exit_code(error)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        code = INTERRUPTED
    except BrokenPipeError:
        # The reader of stdout (`| head`) has closed it. Discard further output without an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = FAILED
    except OSError as error:
        click.echo(f"error: {error}", err=True)
        code = FAILED
    sys.exit(code if isinstance(code, int) else 0)
