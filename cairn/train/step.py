"""One training step; on a GPU as two CUDA graphs, for gradients and for the optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cairn.train.data import Batch
from cairn.train.model import TrainedModel, losses
from cairn.train.optimizer import Optimizer
from cairn.train.recipe import Recipe

METRICS = ("text", "answer", "right", "page_mass")
"""Metrics of a step: cross-entropy of text and of answers (nats per token), accuracy on answer
tokens, fraction of attention on pages for text tokens."""


class _Inputs:
    """Input buffers of the graphs, at fixed addresses."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.ids = torch.zeros(shape, dtype=torch.int64, device=device)
        self.classes = torch.zeros(shape, dtype=torch.uint8, device=device)

    def fill(self, batch: Batch) -> None:
        self.ids.copy_(torch.from_numpy(batch.ids))
        self.classes.copy_(torch.from_numpy(batch.classes))


class TrainStep:
    """Runs training steps.

    Args:
        model: on its device.
        recipe: the run.
        dtype: of the computation.
    """

    def __init__(self, model: TrainedModel, recipe: Recipe, dtype: torch.dtype) -> None:
        self.model, self.recipe, self.dtype = model, recipe, dtype
        self.optimizer = Optimizer(model, recipe.rates)
        self.device = next(model.parameters()).device
        self.metrics = torch.zeros(len(METRICS), device=self.device)
        self._losses: Callable[..., Tensor] = losses
        self._inputs: dict[tuple[int, ...], _Inputs] = {}
        self._backward: dict[tuple[int, ...], torch.cuda.CUDAGraph] = {}
        self._apply: torch.cuda.CUDAGraph | None = None
        self._pool: Any = None
        if self.device.type == "cuda":
            model.compile_halves()
            self._losses = torch.compile(losses, dynamic=False)

    def __call__(self, batch: Batch, step: int) -> Tensor:
        """Train on a batch: METRICS of the model before the step [4], overwritten by the next."""
        inputs = self._inputs_of(batch)
        self.optimizer.prepare(step, self.recipe.rates.factor(step, self.recipe.steps))
        if self.device.type != "cuda":
            self._gradients(inputs, batch.topk)
            self.optimizer.apply()
            return self.metrics
        key = (*batch.ids.shape, batch.topk)
        if key not in self._backward:
            self._backward[key] = self._captured(lambda: self._gradients(inputs, batch.topk))
        if self._apply is None:
            self._apply = self._captured(self.optimizer.apply)
        self._backward[key].replay()
        self._apply.replay()
        return self.metrics

    def evaluate(self, batch: Batch, topk: int) -> Tensor:
        """METRICS [4] of a batch, without training on it."""
        # Gradients stay enabled: under no_grad torch.compile would compile everything again.
        return self._forward(self._inputs_of(batch), topk).detach()

    def _inputs_of(self, batch: Batch) -> _Inputs:
        shape = batch.ids.shape
        if shape not in self._inputs:
            self._inputs[shape] = _Inputs(shape, self.device)
        self._inputs[shape].fill(batch)
        return self._inputs[shape]

    def _forward(self, inputs: _Inputs, topk: int) -> Tensor:
        result = self.model(inputs.ids[:, :-1], topk, self.dtype)
        return self._losses(
            result.hidden.flatten(0, 1),
            self.model.table,
            result.page_mass.flatten(),
            inputs.ids[:, 1:].flatten(),
            inputs.classes[:, 1:].flatten(),
        )

    def _gradients(self, inputs: _Inputs, topk: int) -> None:
        torch._foreach_zero_(self.optimizer.gradients())
        metrics = self._forward(inputs, topk)
        text, answer, _, page_mass = metrics.unbind()
        recipe = self.recipe
        loss = text + recipe.answer_weight * answer + recipe.page_weight * page_mass
        loss.backward()
        self.metrics.copy_(metrics.detach())

    def _captured(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture `run` as a CUDA graph, restoring the state that warm-up runs change."""
        state = [*self.model.parameters(), *self.optimizer.state().values()]
        kept = [tensor.detach().clone() for tensor in state]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        # Compile and load all kernels before capture, on a side stream as CUDA graphs require.
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        with torch.no_grad():
            torch._foreach_copy_([tensor.detach() for tensor in state], kept)
        graph = torch.cuda.CUDAGraph()
        # All graphs share one memory pool: outputs of a replay are read before the next one.
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        self._pool = graph.pool()
        return graph
