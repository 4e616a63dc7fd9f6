"""Runs `cairn eval parity`: compares the engine's logits with those of another source.

The other source is the same model with other engine options, a file of logits, or a server that
returns log-probabilities of the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from cairn.bench.serve.client import Server, ServerAddress
from cairn.bench.serve.load import run
from cairn.errors import BadRequest, CairnError
from cairn.eval.corpus import excerpts, tokenizer_of
from cairn.eval.logits import tail_logits
from cairn.llm import LLM

Record = dict[str, Any]

TOP = 5
"""Number of alternatives to request from a server, OpenAI's maximum."""


@dataclass(frozen=True, slots=True)
class ParityPlan:
    """Settings of a comparison.

    Attributes:
        model: model folder.
        options: keywords of LLM.
        texts: files and folders; empty for the standard library's sources.
        length: tokens per prompt.
        last: number of last positions of each prompt to compare.
        samples: number of prompts.
    """

    model: Path
    options: Mapping[str, Any]
    texts: tuple[Path, ...] = ()
    length: int = 2048
    last: int = 256
    samples: int = 2


def compare(want: Tensor, got: Tensor) -> Record:
    """Compare the logits of two sources.

    Args:
        want, got: [n, V] logits or log-probabilities.

    Returns:
        A record with the number of rows, mean and maximum of KL(want || got) in nats, top-1
        agreement, the largest difference of a log-probability, and the median over rows of each
        row's largest difference.
    """
    kls, errors, same = [], [], 0
    for a, b in zip(want.split(64), got.split(64), strict=True):
        p, q = a.double().log_softmax(-1), b.double().log_softmax(-1)
        kls.append((p.exp() * (p - q)).sum(-1))
        errors.append((p - q).abs().amax(-1))
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
    kl, error = torch.cat(kls), torch.cat(errors)
    return {
        "rows": len(kl),
        "kl_mean": float(kl.mean()),
        "kl_max": float(kl.max()),
        "top1_agreement": same / len(kl),
        "logprob_error_max": float(error.max()),
        "logprob_error_median": float(error.median()),
    }


def against_options(plan: ParityPlan, changes: Mapping[str, Any]) -> Record:
    """Compare with the same engine after changing keywords of LLM.

    Raises:
        CairnError: an invalid model, option or text.
    """
    if not changes:
        raise BadRequest("nothing differs from this engine", "Give an option to change")
    with _engine(plan.model, plan.options) as llm:
        prompts = _prompts(plan, llm)
        want = torch.cat([tail_logits(llm, ids, plan.last) for ids in prompts])
    with _engine(plan.model, {**plan.options, **changes}) as llm:
        got = torch.cat([tail_logits(llm, ids, plan.last) for ids in prompts])
    return {"against": dict(changes), "length": plan.length} | compare(want, got)


def against_file(plan: ParityPlan, path: Path) -> Record:
    """Compare with a file of logits; see `load_reference`.

    Raises:
        CairnError: an invalid model, option or file.
    """
    ids, want = load_reference(path)
    with _engine(plan.model, plan.options) as llm:
        if want.shape[1] != llm.spec.vocab_size:
            raise BadRequest(
                f"{path} has {want.shape[1]} logits a row, but the model's vocabulary has "
                f"{llm.spec.vocab_size}"
            )
        got = tail_logits(llm, ids, len(want))
    return {"against": path.name, "length": len(ids)} | compare(want, got)


def save_reference(plan: ParityPlan, path: Path) -> Record:
    """Write the engine's logits of the first prompt to a file for `load_reference`.

    Raises:
        CairnError: an invalid model, option or text.
    """
    with _engine(plan.model, plan.options) as llm:
        ids = _prompts(plan, llm)[0]
        logits = tail_logits(llm, ids, plan.last)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"input_ids": torch.tensor(ids), "logits": logits}, path)
    return {"saved": path.name, "length": len(ids), "rows": len(logits)}


def load_reference(path: Path) -> tuple[list[int], Tensor]:
    """Load a prompt [n] and the logits [k, V] of its last k positions.

    Args:
        path: safetensors file with `input_ids` and `logits` (or `logits_tail`).

    Raises:
        BadRequest: the file does not exist, or has other tensors.
    """
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise BadRequest(f"{path} cannot be read: {error}") from error
    logits = tensors.get("logits", tensors.get("logits_tail"))
    ids = tensors.get("input_ids")
    if ids is None or logits is None or ids.dim() != 1 or logits.dim() != 2:
        raise BadRequest(
            f"{path} holds {', '.join(f'{n} {list(t.shape)}' for n, t in tensors.items())}",
            "It needs input_ids [n] and logits [k, vocabulary] of the last k positions",
        )
    if not 0 < len(logits) <= len(ids):
        raise BadRequest(f"{path} holds {len(logits)} rows of logits for {len(ids)} tokens")
    return ids.tolist(), logits.float()


def against_server(plan: ParityPlan, address: ServerAddress) -> Record:
    """Compare with a server whose /v1/completions supports echo with logprobs.

    A server returns only the most likely tokens of a position. KL is over these and one bucket for
    the rest, a lower bound of the KL over the vocabulary. Tokens are matched by their text.

    Raises:
        CairnError: an invalid model, option or text, or a server without log-probabilities.
    """
    with _engine(plan.model, plan.options) as llm:
        prompts = _prompts(plan, llm)
        names = _names(llm)
        answers = run(_ask(address, prompts))
        found = [
            _beside(tail_logits(llm, ids[:-1], plan.last), ids[-plan.last :], answer, names)
            for ids, answer in zip(prompts, answers, strict=True)
        ]
    kl, error, same = (torch.cat([part[i] for part in found]) for i in range(3))
    return {
        "against": "server",
        "length": plan.length,
        "rows": len(kl),
        "kl_mean": float(kl.mean()),
        "kl_max": float(kl.max()),
        "top1_agreement": float(same.double().mean()),
        "logprob_error_max": float(error.max()),
        "logprob_error_median": float(error.median()),
    }


Position = tuple[float, dict[str, float]]
"""Log-probabilities that a server returns for a position: that of the prompt's token, and those of
the most likely tokens by text."""


async def _ask(address: ServerAddress, prompts: Sequence[Sequence[int]]) -> list[list[Position]]:
    answers = []
    async with Server(address) as server:
        for ids in prompts:
            body = {
                "model": server.model,
                "prompt": list(ids),
                # Some servers refuse 0. The generated token is dropped below.
                "max_tokens": 1,
                "temperature": 0,
                "echo": True,
                "logprobs": TOP,
            }
            answers.append(_positions(await server.post("completions", body), len(ids)))
    return answers


def _positions(answer: Any, count: int) -> list[Position]:
    """The positions of the echoed prompt, except the first, which has no log-probability."""
    try:
        found = answer["choices"][0]["logprobs"]
        pairs = list(zip(found["token_logprobs"], found["top_logprobs"], strict=True))[1:count]
        positions = [(float(value), dict(top)) for value, top in pairs]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise CairnError(
            "the server does not tell the log-probabilities of a prompt",
            "It must take echo and logprobs in /v1/completions",
        ) from error
    if len(positions) != count - 1:
        raise CairnError(f"the server tells {len(positions)} positions of {count - 1}")
    return positions


def _beside(
    logits: Tensor,
    ids: Sequence[int],
    positions: Sequence[Position],
    names: Mapping[str, list[int]],
) -> tuple[Tensor, Tensor, Tensor]:
    """KL, largest difference of a log-probability, and top-1 agreement of each position: each
    [n]."""
    kls, errors, same = [], [], []
    own = logits.double().log_softmax(-1)
    for row, token, (value, top) in zip(own, ids, positions[-len(ids) :], strict=True):
        # If several ids decode to the same text, use the likeliest.
        known = {name: float(row[names[name]].max()) for name in top if name in names}
        theirs = torch.tensor([top[name] for name in known], dtype=torch.float64)
        ours = torch.tensor(list(known.values()), dtype=torch.float64)
        kls.append(_bucketed(theirs, ours))
        errors.append(max([abs(float(row[token]) - value), *(theirs - ours).abs().tolist()]))
        best = max(top, key=lambda name: top[name])
        same.append(int(row.argmax()) in names.get(best, ()))
    return torch.tensor(kls), torch.tensor(errors), torch.tensor(same)


def _bucketed(want: Tensor, got: Tensor) -> float:
    """KL over the given tokens and one bucket for all others."""
    rest_want = (1.0 - want.exp().sum()).clamp(min=1e-12)
    rest_got = (1.0 - got.exp().sum()).clamp(min=1e-12)
    rest = rest_want * (rest_want.log() - rest_got.log())
    return float((want.exp() * (want - got)).sum() + rest)


def _names(llm: LLM) -> dict[str, list[int]]:
    """Token ids by the text that a server returns; incomplete UTF-8 is in OpenAI's `bytes:`
    format."""
    tokenizer = tokenizer_of(llm)
    names: dict[str, list[int]] = {}
    for token in range(llm.spec.vocab_size):
        spelled = tokenizer.token_bytes(token)
        try:
            name = spelled.decode()
        except UnicodeDecodeError:
            name = "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)
        names.setdefault(name, []).append(token)
    return names


def _prompts(plan: ParityPlan, llm: LLM) -> list[list[int]]:
    tokenizer = tokenizer_of(llm)
    if plan.last >= plan.length:
        raise BadRequest(f"{plan.last} positions of {plan.length} tokens", "Ask for fewer")
    found = excerpts(plan.texts, tokenizer, plan.length, plan.samples)
    return [ids.tolist() for ids in found]


@contextmanager
def _engine(model: Path, options: Mapping[str, Any]) -> Iterator[LLM]:
    llm = LLM(model, **options)
    try:
        yield llm
    finally:
        llm.shutdown()
