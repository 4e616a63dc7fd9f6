"""Trees as lists of children, and the tensors that hold them."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Forest:
    """children[b][node] are the children of a node, in order."""

    children: list[list[list[int]]]

    @classmethod
    def grow(cls, batch: int, nodes: int, rng: random.Random) -> Forest:
        forest = []
        for _ in range(batch):
            tree: list[list[int]] = [[] for _ in range(nodes)]
            for node in range(1, nodes):
                tree[rng.randrange(node)].append(node)
            forest.append(tree)
        return cls(forest)

    def tensors(self, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
        """retrive_index, retrive_next_token, retrive_next_sibling."""
        batch, nodes = len(self.children), len(self.children[0])
        index = torch.arange(batch * nodes).view(batch, nodes)
        next_token, next_sibling = (torch.full((batch, nodes), -1) for _ in range(2))
        for b, tree in enumerate(self.children):
            for node, children in enumerate(tree):
                for place, child in enumerate(children):
                    if place == 0:
                        next_token[b, node] = child
                    else:
                        next_sibling[b, children[place - 1]] = child
        return index.to(device), next_token.to(device), next_sibling.to(device)


CIRCLES = (
    torch.arange(8).view(2, 4),
    torch.tensor([[1, -1, -1, -1], [1, 2, 1, -1]]),
    torch.tensor([[-1, 2, 1, -1], [-1, -1, -1, -1]]),
)
"""Such tensors that are no trees: nodes 1 and 2 are each other's next sibling; or child."""
