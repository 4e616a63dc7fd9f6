"""Subjects of an evaluation: an engine in this process or an OpenAI-compatible server.

All outputs are decoded greedily.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cairn.bench.serve.client import Server, ServerAddress
from cairn.bench.serve.exchange import Request
from cairn.bench.serve.lengths import Lengths, open_lengths
from cairn.errors import BadConfig, BadRequest, CairnError
from cairn.eval.haystack import Case, Question
from cairn.types import SamplingParams


@dataclass(frozen=True, slots=True)
class AskMode:
    """How questions are asked.

    Attributes:
        chat: as a user message through the chat template, without the lead of the answer.
        warm: prefill the document before the first question, so that every question finds it in the
            prefix cache.
    """

    chat: bool = False
    warm: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """An output of the subject.

    Attributes:
        text: the output.
        prompt_tokens: tokens of the prompt.
        cached_tokens: prompt tokens read from the prefix cache; None if a server does not report
            it.
    """

    text: str
    prompt_tokens: int
    cached_tokens: int | None


Done = Callable[[Case, list[Answer]], None]
"""Called with a case and the answers to its questions, in order."""


class Subject(ABC):
    """Base class: answers questions.

    Attributes:
        model: folder, or the model's name on the server.
        mode: how questions are asked.
    """

    model: Path | str
    mode: AskMode

    @property
    def name(self) -> str:
        """Name of the model, without parent folders."""
        return Path(self.model).name

    @abstractmethod
    def count(self, text: str) -> int:
        """Number of tokens of a text within a prompt."""

    @abstractmethod
    def check(self, length: int) -> None:
        """Raise BadRequest if `length` tokens are known to exceed the context."""

    @abstractmethod
    def ask(self, cases: Sequence[Case], done: Done) -> None:
        """Ask every question of every case. Calls `done` for each case.

        Raises:
            CairnError: a question could not be answered.
        """

    @abstractmethod
    def close(self) -> None:
        """Release all resources."""


class Engine(Subject):
    """An engine in this process. It runs one case at a time, all of its questions in one batch.

    Args:
        model: model folder.
        options: keywords of LLM.
        mode: how questions are asked.

    Raises:
        BadConfig: `mode` needs a prefix cache, which the options disable.
        BadRequest: the model has no tokenizer.
    """

    def __init__(self, model: Path, options: Mapping[str, Any], mode: AskMode) -> None:
        from cairn.llm import LLM

        if mode.warm and not options.get("enable_prefix_caching", True):
            raise BadConfig("a warm prefix cache was asked for, and none at all", "Drop one option")
        self.model, self.mode = model, mode
        self._llm = LLM(model, **options)
        tokenizer = self._llm.engine.core.tokenizer
        if tokenizer is None:
            self._llm.shutdown()
            raise BadRequest(f"{model} has no tokenizer", "This evaluation asks in text")
        self._tokenizer = tokenizer

    def count(self, text: str) -> int:
        """See Subject."""
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def check(self, length: int) -> None:
        """See Subject."""
        if length > self._llm.max_model_len:
            raise BadRequest(
                f"{length} tokens are asked for, but a sequence here has {self._llm.max_model_len} "
                "at most",
                "Raise --kv-cache-memory or --max-model-len, or ask for less",
            )

    def ask(self, cases: Sequence[Case], done: Done) -> None:
        """See Subject."""
        for case in cases:
            if self.mode.warm:
                self._generate([case.document], [1])
            prompts = [_prompt(case, question, self.mode) for question in case.questions]
            done(case, self._generate(prompts, [q.max_tokens for q in case.questions]))

    def close(self) -> None:
        """See Subject."""
        self._llm.shutdown()

    def _generate(self, prompts: Sequence[str], tokens: Sequence[int]) -> list[Answer]:
        params = [SamplingParams(temperature=0.0, max_tokens=count) for count in tokens]
        if self.mode.chat:
            talks = [[{"role": "user", "content": prompt}] for prompt in prompts]
            results = self._llm.chat(talks, params, use_tqdm=False)
        else:
            results = self._llm.generate(list(prompts), params, use_tqdm=False)
        for result in results:
            if result.outputs[0].finish_reason == "error":
                raise CairnError("the engine failed while it answered; the log says why")
        return [
            Answer(r.outputs[0].text, len(r.prompt_token_ids), r.num_cached_tokens) for r in results
        ]


class Remote(Subject):
    """A server. Cases run concurrently, the questions of a case in sequence.

    Args:
        address: URL and model.
        tokenizer: folder of the tokenizer that counts tokens; None lets the server count.
        mode: how questions are asked.
        at_once: maximum number of concurrent cases.

    Raises:
        BadConfig: the server does not respond, or cannot count tokens.
    """

    def __init__(
        self, address: ServerAddress, tokenizer: Path | None, mode: AskMode, at_once: int
    ) -> None:
        self.mode = mode
        self._server = Server(address)
        self._at_once = at_once
        self._loop = asyncio.Runner()
        try:
            self._lengths = self._loop.run(self._enter(tokenizer))
        except BaseException:
            self.close()
            raise
        self.model = self._server.model

    def count(self, text: str) -> int:
        """See Subject."""
        return self._loop.run(self._measure(text))

    def check(self, length: int) -> None:
        """See Subject. The server itself refuses prompts that are too long."""

    def ask(self, cases: Sequence[Case], done: Done) -> None:
        """See Subject."""
        self._loop.run(self._ask_all(iter(cases), done))

    def close(self) -> None:
        """See Subject."""
        self._loop.run(self._server.close())
        self._loop.close()

    async def _enter(self, tokenizer: Path | None) -> Lengths:
        await self._server.__aenter__()
        return await open_lengths(self._server, tokenizer)

    async def _measure(self, text: str) -> int:
        return await self._lengths.measure(text)

    async def _ask_all(self, cases: Iterator[Case], done: Done) -> None:
        async def work() -> None:
            for case in cases:
                if self.mode.warm:
                    await self._ask(case.document, 1)
                answers = []
                for question in case.questions:
                    prompt = _prompt(case, question, self.mode)
                    answers.append(await self._ask(prompt, question.max_tokens))
                done(case, answers)

        workers = [asyncio.create_task(work()) for _ in range(self._at_once)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()

    async def _ask(self, prompt: str, tokens: int) -> Answer:
        request = Request(prompt, 0, tokens, chat=self.mode.chat, stream=False)
        found = await self._server.post(request.path, request.body(self._server.model))
        try:
            choice, usage = found["choices"][0], found.get("usage") or {}
            text = choice["message"]["content"] if self.mode.chat else choice["text"]
            details = usage.get("prompt_tokens_details") or {}
            return Answer(text or "", usage.get("prompt_tokens", 0), details.get("cached_tokens"))
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise CairnError(f"the server's answer has no text: {str(found)[:200]}") from error


@dataclass(frozen=True, slots=True)
class Source:
    """Settings from which subjects are created: a model folder with engine options, or a server.

    Attributes:
        model: model folder; unused with an address.
        options: keywords of LLM.
        address: the server; None for an engine in this process.
        tokenizer: folder of the tokenizer that counts a server's tokens; None lets the server
            count.
        at_once: maximum number of concurrent cases on a server.
        chat: ask through the chat template.
    """

    model: Path
    options: Mapping[str, Any]
    address: ServerAddress | None = None
    tokenizer: Path | None = None
    at_once: int = 4
    chat: bool = False

    @contextmanager
    def open(
        self, changes: Mapping[str, Any] | None = None, warm: bool = False
    ) -> Iterator[Subject]:
        """Context manager: a subject, which is closed at exit.

        Args:
            changes: keywords of LLM that replace those of `options`.
            warm: see AskMode.

        Raises:
            BadConfig: engine options were given for a server.
            CairnError: as Engine and Remote.
        """
        mode = AskMode(self.chat, warm)
        options = {**self.options, **(changes or {})}
        subject: Subject
        if self.address is None:
            subject = Engine(self.model, options, mode)
        elif options:
            raise BadConfig(
                f"{', '.join(options)} cannot be set on a running server",
                "Start it with these options, or leave --base-url out",
            )
        else:
            subject = Remote(self.address, self.tokenizer, mode, self.at_once)
        try:
            yield subject
        finally:
            subject.close()


def _prompt(case: Case, question: Question, mode: AskMode) -> str:
    return case.document + question.text + ("" if mode.chat else question.lead)
