"""tree_speculative_sampling_target_only: its path against a scalar loop, and the distribution of
its tokens."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
from torch import Tensor

from cairn.errors import BadArgument
from cairn.ops import tree_speculative_sampling_target_only
from tests.ops.sampling.variants import runnable_on
from tests.ops.speculative.forest import CIRCLES, Forest

VARIANTS = runnable_on(tree_speculative_sampling_target_only, "cpu")


def emitted(forest: Forest, tokens: Tensor, coins: Tensor, final: Tensor, law: Tensor, **options):
    """predicts, accept_index, accept_token_num and draft_probs after a call."""
    longest, name = options.pop("longest"), options.pop("name", "reference")
    batch, nodes = tokens.shape
    predicts = torch.full((batch * nodes,), -5, dtype=torch.int32)
    accept_index = torch.full((batch, longest), -1, dtype=torch.int32)
    accepted = torch.empty(batch, dtype=torch.int32)
    draft = options.pop("draft", torch.zeros_like(law)).clone()
    tree_speculative_sampling_target_only.using(name)(
        *(predicts, accept_index, accepted, tokens, *forest.tensors(), coins, final, law, draft),
        **options,
    )
    return predicts, accept_index, accepted, draft


def walk(tree, tokens, coins, final, law, draft, longest, single, acc):
    """One request in Python floats: path, emitted tokens, and the remaining draft probabilities."""
    node, path, said, draft = 0, [0], [], draft.clone()
    while len(path) < longest:
        mass, taken = 0.0, None
        for child in tree[node]:
            p = float(law[node, tokens[child]])
            mass += p
            if float(coins[node]) <= mass / max(acc, 1e-9) or p >= single:
                taken = child
                break
            draft[node, tokens[child]] = law[node, tokens[child]]
        if taken is None:
            break
        said.append(int(tokens[taken]))
        node = taken
        path.append(node)
    q = law[node].double()
    if len(path) < longest:
        q = (q - draft[node].double()).clamp(min=0)
    bound, running = float(final) * float(q.sum()), 0.0
    last = None
    for token, mass in enumerate(q.tolist()):
        running += mass
        if mass > 0:
            last = token
            if running > bound:
                break
    said.append(law.shape[1] - 1 if last is None else last)
    return path, said, draft


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("single, acc", [(1.0, 1.0), (0.4, 0.5), (1.0, 0.0), (1, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_path_and_final_token(seed: int, single: float, acc: float, name: str) -> None:
    rng, g = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, nodes, longest, vocabulary = 5, (4, 11, 20)[seed], (2, 6, 3)[seed], (4, 9, 100)[seed]
    forest = Forest.grow(batch, nodes, rng)
    tokens = torch.randint(0, min(vocabulary, 6), (batch, nodes), generator=g)
    coins, final = torch.rand(batch, nodes, generator=g), torch.rand(batch, generator=g)
    law = torch.softmax(2 * torch.randn(batch, nodes, vocabulary, generator=g), -1)
    draft = law * 0.5 if seed == 1 else torch.zeros_like(law)
    options = {"threshold_single": single, "threshold_acc": acc, "draft": draft}
    predicts, accept_index, accepted, left = emitted(
        *(forest, tokens, coins, final, law), longest=longest, name=name, **options
    )
    for b in range(batch):
        given = (tokens[b], coins[b], final[b], law[b], draft[b], longest, single, acc)
        path, said, noted = walk(forest.children[b], *given)
        assert accepted[b] == len(path) - 1
        flat = [b * nodes + node for node in path]
        assert accept_index[b].tolist() == flat + [-1] * (longest - len(path))
        assert [int(predicts[n]) for n in flat] == said
        others = set(range(b * nodes, (b + 1) * nodes)) - set(flat)
        assert all(predicts[n] == -5 for n in others)
        assert torch.equal(left[b], noted)


def test_emitted_tokens_follow_the_targets_distribution(device: str) -> None:
    """Chi-square test of the first emitted token, with three candidates."""
    draws = 100_000 if device == "cuda" else 5_000
    law = torch.tensor([0.05, 0.3, 0.0, 0.15, 0.4, 0.1])
    forest = Forest([[[1, 2, 3], [], [], []]] * draws)
    g = torch.Generator().manual_seed(1)
    given = (
        *(torch.full((4 * draws,), -1, dtype=torch.int32), torch.full((draws, 2), -1).int()),
        *(torch.empty(draws, dtype=torch.int32), torch.tensor([[0, 4, 1, 3]]).repeat(draws, 1)),
        *forest.tensors(),
        *(torch.rand(draws, 4, generator=g), torch.rand(draws, generator=g)),
        *(law.repeat(draws, 4, 1), torch.zeros(draws, 4, 6)),
    )
    given = tuple(tensor.to(device) for tensor in given)
    tree_speculative_sampling_target_only(*given)
    counts = torch.bincount(given[0].view(draws, 4)[:, 0].cpu(), minlength=6)
    assert counts[2] == 0
    expected = law * draws
    chi = ((counts - expected) ** 2 / expected.clamp(min=1)).sum()
    # 4 degrees of freedom, p = 1e-4.
    assert chi < 23.5
    # Only the root's coin decides which candidate is accepted.
    taken = torch.searchsorted(torch.tensor([0.4, 0.7, 0.85]), given[7].cpu()[:, 0].contiguous())
    assert torch.equal(given[2].cpu(), (taken < 3).int())


@pytest.mark.parametrize("name", VARIANTS)
def test_a_law_without_mass_gives_the_last_token(name: str) -> None:
    law = torch.zeros(1, 1, 5)
    said, *_ = emitted(
        *(Forest([[[]]]), torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1)),
        *(torch.zeros(1), law),
        longest=1,
        name=name,
    )
    assert said.tolist() == [4]


@pytest.mark.parametrize("name", VARIANTS)
def test_links_in_a_circle_end_the_walk(name: str) -> None:
    # The coin rejects both siblings, then accepts all nodes.
    predicts = torch.full((8,), -5, dtype=torch.int32)
    accept_index = torch.full((2, 9), -1, dtype=torch.int32)
    accepted = torch.empty(2, dtype=torch.int32)
    law, draft = torch.tensor([0.125, 0.125, 0.75]).repeat(2, 4, 1), torch.zeros(2, 4, 3)
    coins = torch.tensor([[0.9] * 4, [0.1] * 4])
    tree_speculative_sampling_target_only.using(name)(
        *(predicts, accept_index, accepted, torch.tensor([[0, 0, 1, 2]]).repeat(2, 1)),
        *(*CIRCLES, coins, torch.full((2,), 0.5), law, draft),
    )
    assert accepted.tolist() == [0, 3]
    assert accept_index[:, :5].tolist() == [[0, -1, -1, -1, -1], [4, 5, 6, 5, -1]]
    assert predicts.tolist() == [2, -5, -5, -5, 0, 2, 0, -5]
    assert draft[0, 0].tolist() == [0.125, 0.125, 0] and not draft[1].any()


def test_wrong_arguments_are_named() -> None:
    forest, long = Forest.grow(2, 3, random.Random(0)), torch.int64
    good = {
        "predicts": torch.zeros(6).int(),
        "accept_index": torch.zeros(2, 2).int(),
        "accept_token_num": torch.zeros(2).int(),
        "candidates": torch.zeros(2, 3, dtype=long),
        **dict(
            zip(
                ("retrive_index", "retrive_next_token", "retrive_next_sibling"),
                forest.tensors(),
                strict=True,
            )
        ),
        "uniform_samples": torch.zeros(2, 3),
        "uniform_samples_for_final_sampling": torch.zeros(2),
        "target_probs": torch.zeros(2, 3, 4),
        "draft_probs": torch.zeros(2, 3, 4),
    }
    tree_speculative_sampling_target_only(**good)
    for name, change in product(good, ("shape", "dtype")):
        tensor = good[name]
        wrong = tensor[:1, ..., :1] if change == "shape" and tensor.dim() > 1 else tensor[:1]
        wrong = tensor.to(torch.int16) if change == "dtype" else wrong
        expected = "" if name == "candidates" else name
        with pytest.raises(BadArgument, match=f"argument `{expected}"):
            tree_speculative_sampling_target_only(**{**good, name: wrong})
    for name, number in (
        *(("retrive_index", 6), ("retrive_next_token", 3), ("retrive_next_sibling", 3)),
        *(("candidates", 4), ("candidates", -1)),
    ):
        wrong = good[name].clone()
        wrong[1, 2] = number
        with pytest.raises(BadArgument, match=f"`{name}` holds {number}, not "):
            tree_speculative_sampling_target_only(**{**good, name: wrong})
    # The token of node 0 and unreachable nodes are ignored.
    good["candidates"][:, 0] = -1
    tree_speculative_sampling_target_only(**good)
    for name in ("retrive_next_token", "retrive_next_sibling", "retrive_index", "candidates"):
        good[name][good[name] == 2] = -1
        good[name][:, 2] = -1
    tree_speculative_sampling_target_only(**good)
