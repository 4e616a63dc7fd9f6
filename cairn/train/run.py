"""A training run: data, steps, log, checkpoints and export of the model."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cairn.errors import BadConfig
from cairn.models.registry import load_spec
from cairn.train.checkpoint import (
    STATE,
    Progress,
    export,
    fingerprint,
    load_state,
    save_state,
    write_run,
)
from cairn.train.data import Batch, Batches, Corpus, load_corpus
from cairn.train.model import PLAIN_PAGE, TrainedModel, selecting_mixer
from cairn.train.recipe import Recipe
from cairn.train.step import METRICS, TrainStep

AHEAD = 8
"""Number of batches that are built ahead."""
WORKERS = 2
HELD_OUT_BATCHES = 4

Line = dict[str, float]
"""A log line: step, length, rate (factor of the learning rates), tokens_per_second and METRICS,
averaged since the previous line; bits is `text` in bits per token."""


@dataclass(frozen=True, slots=True)
class Run:
    """Options of a run besides the recipe.

    Attributes:
        output: folder of the state and of the model.
        data: folders of text or code; none: the sources of Python and of its installed packages.
        device: "auto", "cpu" or "cuda".
        dtype: of the computation; None: bfloat16 on a GPU, float32 elsewhere.
        max_seconds: time limit, after which the state is saved; None: no limit.
    """

    output: Path
    data: tuple[Path, ...] = ()
    device: str = "auto"
    dtype: torch.dtype | None = None
    max_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one call: finished or interrupted.

    Attributes:
        finished: whether the model was exported; otherwise the folder holds a state to resume from.
        progress: progress of the run.
        held_out: metrics on held-out text; empty if not finished.
        parameters: number of parameters.
    """

    finished: bool
    progress: Progress
    held_out: Line
    parameters: int


def train(recipe: Recipe, run: Run, report: Callable[[Line], None]) -> Outcome:
    """Train from scratch, or from the state in the output folder.

    Args:
        recipe: model, data and schedule.
        run: folders, device and limits.
        report: called with every line of the log.

    Raises:
        BadConfig: an invalid recipe, folder or device; the folder holds a model or state of another
            run; the loss is NaN.
        BadModel: the recipe's config is not a valid model.
    """
    device = _device(run.device)
    if (run.output / "config.json").exists() and not (run.output / STATE).exists():
        raise BadConfig(f"{run.output} holds a model already", "Choose another output folder")
    spec = load_spec(recipe.config)
    size = spec.chunk_size or PLAIN_PAGE
    for stage in recipe.stages:
        if stage.length % size:
            raise BadConfig(
                f"a stage has a length of {stage.length} slots", f"Write a multiple of {size}"
            )
    own = size - 1 if spec.landmarks else size
    longest = max(stage.length for stage in recipe.stages) // size * own + 1
    corpus, vocabulary = load_corpus(run.data, recipe.tokenizer, longest)
    if vocabulary.size != spec.vocab_size:
        spec = load_spec({**recipe.config, "vocab_size": vocabulary.size})
    model = TrainedModel(spec, recipe.seed).to(device)
    dtype = run.dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    training = TrainStep(model, recipe, dtype)
    run.output.mkdir(parents=True, exist_ok=True)
    progress = load_state(run.output, training, fingerprint(recipe, corpus)) or Progress()
    batches = Batches(recipe, corpus, vocabulary, (own, size))
    sitting = _Sitting(training, batches, corpus, progress, run, report)
    held_out: Line = {}
    finished = sitting.go()
    if finished:
        held_out = sitting.held_out()
        export(run.output, model, recipe, vocabulary)
    write_run(run.output, recipe, corpus, progress, held_out)
    count = sum(weight.numel() for weight in model.parameters())
    return Outcome(finished, progress, held_out, count)


class _Sitting:
    """The training loop of one call."""

    def __init__(
        self,
        training: TrainStep,
        batches: Batches,
        corpus: Corpus,
        progress: Progress,
        run: Run,
        report: Callable[[Line], None],
    ) -> None:
        self.training, self.batches, self.progress = training, batches, progress
        self.run, self.report, self.recipe = run, report, training.recipe
        self.fingerprint = fingerprint(self.recipe, corpus)

    def go(self) -> bool:
        """Run to the end or to the time limit and save the state. Returns whether the run is
        finished."""
        progress, recipe, limit = self.progress, self.recipe, self.run.max_seconds
        total = torch.zeros(len(METRICS), device=self.training.device)
        began = now = time.perf_counter()
        slots = 0
        for step, batch in self._batches(progress.step):
            total += self.training(batch, step)
            slots += recipe.stage_of(step).slots
            progress.step = step + 1
            last = progress.step == recipe.steps
            if last or progress.step % recipe.log_steps == 0:
                since, now = now, self._finish_line(total, now, slots)
                progress.seconds += now - since
                slots = 0
                # Save between log lines only: a checkpoint does not hold the sums of an unfinished
                # line.
                is_over = limit is not None and now - began > limit
                if last or is_over or progress.step % recipe.checkpoint_steps == 0:
                    save_state(self.run.output, self.training, progress, self.fingerprint)
                if is_over and not last:
                    return False
        return True

    def _finish_line(self, total: Tensor, since: float, slots: int) -> float:
        """Report the steps since `since` and reset the counters; returns the current time."""
        step = self.progress.step
        first = (step - 1) // self.recipe.log_steps * self.recipe.log_steps
        means = (total / (step - first)).tolist()
        total.zero_()
        now = time.perf_counter()
        stage = self.recipe.stage_of(step - 1)
        line: Line = {
            "step": step,
            "length": stage.length,
            "rate": self.recipe.rates.factor(step - 1, self.recipe.steps),
            "tokens_per_second": slots / (now - since),
            **_named(means),
        }
        self.progress.history.append({name: float(f"{x:.5g}") for name, x in line.items()})
        self.report(line)
        if not math.isfinite(sum(means)):
            raise BadConfig(
                f"the loss is not a number at step {step}", "Write lower learning rates (rates)"
            )
        return now

    def _batches(self, first: int) -> Iterator[tuple[int, Batch]]:
        """Yield the batches from a step on; threads build them ahead of time."""
        waiting: deque[Future[Batch]] = deque()
        with ThreadPoolExecutor(WORKERS) as pool:
            try:
                for step in range(first, self.recipe.steps):
                    while len(waiting) < AHEAD and step + len(waiting) < self.recipe.steps:
                        waiting.append(pool.submit(self.batches.train, step + len(waiting)))
                    yield step, waiting.popleft().result()
            finally:
                pool.shutdown(cancel_futures=True)

    def held_out(self) -> Line:
        """Metrics on held-out text, with sequences of the last stage's length."""
        stage = self.recipe.stages[-1]
        hils = selecting_mixer(self.training.model.spec)
        topk = hils.topk if hils is not None else stage.topk[0]
        found = [
            self.training.evaluate(self.batches.held_out(stage, i), topk)
            for i in range(HELD_OUT_BATCHES)
        ]
        return {"length": stage.length, **_named(torch.stack(found).mean(0).tolist())}


def _named(means: list[float]) -> Line:
    line = dict(zip(METRICS, means, strict=True))
    return {**line, "bits": line["text"] / math.log(2)}


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise BadConfig(f"device is {name!r}, but no CUDA device is here", "Use cpu or auto")
    if name != "cpu" and not name.startswith("cuda"):
        raise BadConfig(f"device is {name!r}", "Use auto, cpu or cuda")
    return torch.device(name)
