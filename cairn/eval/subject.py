"""What is evaluated: an engine in this process or an OpenAI-compatible server. Greedy decoding."""

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
class Manner:
    """How to ask.

    Attributes:
        chat: as a user's message, through the model's chat template, without the answer's lead.
        warm: the document is read once before the first question, so that every question finds it
            in the prefix cache.
    """

    chat: bool = False
    warm: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back.

    Attributes:
        text: the output.
        prompt_tokens: of the prompt.
        cached_tokens: of those, from the prefix cache; None where a server does not say.
    """

    text: str
    prompt_tokens: int
    cached_tokens: int | None


Done = Callable[[Case, list[Answer]], None]
"""Takes the answers to a case's questions, in their order."""


class Subject(ABC):
    """Someone who can be asked.

    Attributes:
        model: folder, or what the server calls it.
        manner: how it is asked.
    """

    model: Path | str
    manner: Manner

    @property
    def name(self) -> str:
        """Of the model, without the folders before it."""
        return Path(self.model).name

    @abstractmethod
    def count(self, text: str) -> int:
        """Tokens of a text inside a prompt."""

    @abstractmethod
    def check(self, length: int) -> None:
        """Raise BadRequest for a length that is known to be too long."""

    @abstractmethod
    def ask(self, cases: Sequence[Case], done: Done) -> None:
        """Ask every question of every case; `done` is called as cases are answered.

        Raises:
            CairnError: a question that could not be answered.
        """

    @abstractmethod
    def close(self) -> None:
        """Give everything back."""


class Engine(Subject):
    """The engine in this process. A case's questions are asked together, one case at a time.

    Args:
        model: folder.
        options: keywords of LLM.
        manner: how to ask.

    Raises:
        BadConfig: the manner asks for a prefix cache that the options turn off.
        BadRequest: the model has no tokenizer.
    """

    def __init__(self, model: Path, options: Mapping[str, Any], manner: Manner) -> None:
        from cairn.llm import LLM

        if manner.warm and not options.get("enable_prefix_caching", True):
            raise BadConfig("a warm prefix cache was asked for, and none at all", "Drop one option")
        self.model, self.manner = model, manner
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
            if self.manner.warm:
                self._generate([case.document], [1])
            prompts = [_prompt(case, question, self.manner) for question in case.questions]
            done(case, self._generate(prompts, [q.max_tokens for q in case.questions]))

    def close(self) -> None:
        """See Subject."""
        self._llm.shutdown()

    def _generate(self, prompts: Sequence[str], tokens: Sequence[int]) -> list[Answer]:
        params = [SamplingParams(temperature=0.0, max_tokens=count) for count in tokens]
        if self.manner.chat:
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
    """A server. Cases are asked side by side, the questions of one case after each other.

    Args:
        address: where and which model.
        tokenizer: folder that counts tokens; None: the server does.
        manner: how to ask.
        at_once: cases in flight.

    Raises:
        BadConfig: no server, or no way to tell lengths.
    """

    def __init__(
        self, address: ServerAddress, tokenizer: Path | None, manner: Manner, at_once: int
    ) -> None:
        self.manner = manner
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
        """See Subject: a server refuses what is too long when it is asked."""

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
                if self.manner.warm:
                    await self._ask(case.document, 1)
                answers = []
                for question in case.questions:
                    prompt = _prompt(case, question, self.manner)
                    answers.append(await self._ask(prompt, question.max_tokens))
                done(case, answers)

        workers = [asyncio.create_task(work()) for _ in range(self._at_once)]
        try:
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()

    async def _ask(self, prompt: str, tokens: int) -> Answer:
        request = Request(prompt, 0, tokens, chat=self.manner.chat, stream=False)
        found = await self._server.post(request.path, request.body(self._server.model))
        try:
            choice, usage = found["choices"][0], found.get("usage") or {}
            text = choice["message"]["content"] if self.manner.chat else choice["text"]
            details = usage.get("prompt_tokens_details") or {}
            return Answer(text or "", usage.get("prompt_tokens", 0), details.get("cached_tokens"))
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise CairnError(f"the server's answer has no text: {str(found)[:200]}") from error


@dataclass(frozen=True, slots=True)
class Source:
    """Where subjects come from: a folder with options of the engine, or a server.

    Attributes:
        model: folder; unused with an address.
        options: keywords of LLM.
        address: of a server; None: this process.
        tokenizer: folder that counts a server's tokens; None: it does.
        at_once: cases in flight on a server.
        chat: ask in chat form.
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
        """A subject, closed at the end.

        Args:
            changes: keywords of LLM in place of the options.
            warm: see Manner.

        Raises:
            BadConfig: options of the engine for a server.
            CairnError: as Engine and Remote.
        """
        manner = Manner(self.chat, warm)
        options = {**self.options, **(changes or {})}
        subject: Subject
        if self.address is None:
            subject = Engine(self.model, options, manner)
        elif options:
            raise BadConfig(
                f"{', '.join(options)} cannot be set on a running server",
                "Start it with these options, or leave --base-url out",
            )
        else:
            subject = Remote(self.address, self.tokenizer, manner, self.at_once)
        try:
            yield subject
        finally:
            subject.close()


def _prompt(case: Case, question: Question, manner: Manner) -> str:
    return case.document + question.text + ("" if manner.chat else question.lead)
