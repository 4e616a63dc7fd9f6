"""Muon for the matrices of the layers, Adam for embedding and gains, in place and capturable.

Muon (Jordan et al. 2024): the momentum of a matrix is brought near the closest orthogonal matrix
by a few Newton-Schulz steps, and that is the step. Values that change from step to step are in
device tensors, so that a captured graph reads new ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cairn.train.recipe import Rates

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic; singular values converge quickly to about 1."""
ITERATIONS = 5
MOMENTUM = (0.85, 0.95, 300)
"""Muon's momentum rises from the first value to the second over this number of steps."""
BETAS = (0.9, 0.95)


def orthogonalised(matrices: Tensor) -> Tensor:
    """[n, rows, columns] -> nearby matrices with singular values of about 1, float32."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = NEWTON_SCHULZ
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    result: Tensor = (x.mT if tall else x).float()
    return result


class Optimizer:
    """Muon and Adam for the parameters of a model.

    Args:
        model: the model; its gradients are allocated here, at fixed addresses.
        rates: learning rates.
    """

    def __init__(self, model: nn.Module, rates: Rates) -> None:
        self.rates = rates
        named = dict(model.named_parameters())
        by_shape: dict[tuple[int, ...], list[str]] = {}
        adam: list[str] = []
        for name, weight in named.items():
            weight.grad = torch.zeros_like(weight)
            is_matrix = weight.dim() == 2 and "embed" not in name and "lm_head" not in name
            if is_matrix:
                by_shape.setdefault(tuple(weight.shape), []).append(name)
            else:
                adam.append(name)
        self._muon: list[list[Tensor]] = [[named[n] for n in ns] for ns in by_shape.values()]
        self._adam: list[Tensor] = [named[name] for name in adam]
        self._adam_rates = [
            rates.embedding if weight.dim() == 2 else rates.gains for weight in self._adam
        ]
        self._momenta = [torch.zeros_like(torch.stack(w)) for w in self._muon]
        self._first = [torch.zeros_like(weight) for weight in self._adam]
        self._second = [torch.zeros_like(weight) for weight in self._adam]
        device = next(iter(named.values())).device
        # Factor of the rates, Muon's momentum, both corrections of Adam's averages.
        self._numbers = torch.zeros(4, device=device)

    def state(self) -> dict[str, Tensor]:
        """State of the optimizer besides the parameters."""
        groups = {"muon": self._momenta, "first": self._first, "second": self._second}
        return {f"{name}.{i}": t for name, group in groups.items() for i, t in enumerate(group)}

    def gradients(self) -> list[Tensor]:
        """Gradients of all parameters."""
        return [gradient for group in (*self._muon, self._adam) for gradient in _gradients(group)]

    def prepare(self, step: int, factor: float) -> None:
        """Write the step (0-based) and the learning-rate factor to the tensors that `apply`
        reads."""
        low, high, steps = MOMENTUM
        momentum = low + (high - low) * min(1.0, step / steps)
        corrections = [1 - beta ** (step + 1) for beta in BETAS]
        self._numbers.copy_(torch.tensor([factor, momentum, *corrections]))

    @torch.no_grad()
    def apply(self) -> None:
        """One optimizer step."""
        factor, momentum, first_mass, second_mass = self._numbers.unbind()
        for weights, buffer in zip(self._muon, self._momenta, strict=True):
            gradient = torch.stack(_gradients(weights))
            buffer.lerp_(gradient, 1 - momentum)
            rows, columns = gradient.shape[1:]
            update = orthogonalised(gradient.lerp(buffer, momentum))
            update = update * (factor * -self.rates.matrices * max(1.0, rows / columns) ** 0.5)
            torch._foreach_add_(weights, list(update.unbind()))
        gradients = _gradients(self._adam)
        torch._foreach_lerp_(self._first, gradients, 1 - BETAS[0])
        torch._foreach_mul_(self._second, BETAS[1])
        torch._foreach_addcmul_(self._second, gradients, gradients, 1 - BETAS[1])
        for weight, first, second, rate in zip(
            self._adam, self._first, self._second, self._adam_rates, strict=True
        ):
            scale = (second / second_mass).sqrt() + 1e-8
            weight.sub_(factor * rate / first_mass * first / scale)


def _gradients(weights: list[Tensor]) -> list[Tensor]:
    return [weight.grad for weight in weights if weight.grad is not None]
