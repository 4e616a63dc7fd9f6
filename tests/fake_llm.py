"""A substitute for cairn.llm.LLM without a model: outputs from a function, counters like the
engine's."""

from dataclasses import dataclass, field
from types import SimpleNamespace

from cairn.bench.shapes import config_of
from cairn.engine.totals import HostTimes
from cairn.models.registry import load_spec
from cairn.types import CompletionOutput, RequestOutput, SamplingParams, TokenLogprobs

COUNTERS = (
    "steps",
    "prompt_tokens",
    "cached_prompt_tokens",
    "prefill_tokens",
    "decode_tokens",
    "generated_tokens",
    "queries",
    "pages_read",
    "pages_held",
    "preemptions",
    "frame_hits",
    "frame_misses",
)


@dataclass
class FakeLLM:
    """The class attribute `answer` maps a prompt (text or mapping) to the generated text."""

    model: str
    options: dict
    calls: list = field(default_factory=list)
    closed: bool = False
    has_tokenizer = True
    finish_reason = "length"
    default_params = SamplingParams()
    answer = staticmethod(lambda prompt: "an answer")

    def __post_init__(self):
        self.spec = load_spec(config_of("345m", "hsa"))
        self.engine_config = SimpleNamespace(
            dtype="float32",
            device="cpu",
            chunked_prefill_size=512,
            kv_cache_dtype="float32",
            page_size=64,
        )
        self.cached = set()
        self.counts = dict.fromkeys(COUNTERS, 0)
        self.seconds = 0.0

    def _output(self, prompt, params):
        self.calls.append((prompt, params))
        text = self.answer(prompt)
        ids = prompt["prompt_token_ids"] if isinstance(prompt, dict) else list(prompt.encode())
        count = params.max_tokens
        self.counts["prompt_tokens"] += len(ids)
        self.counts["prefill_tokens"] += len(ids) % 63 if tuple(ids) in self.cached else len(ids)
        self.cached.add(tuple(ids))
        self.counts["decode_tokens"] += count - 1
        self.counts["generated_tokens"] += count
        self.counts["queries"] += count
        self.counts["pages_read"] += 41 * count
        self.counts["pages_held"] += 2000 * count
        self.seconds += 0.5
        outputs = [
            CompletionOutput(
                index=i,
                text=text,
                token_ids=list(text.encode()) or [7, 8],
                finish_reason=self.finish_reason,
                logprobs=None
                if params.logprobs is None
                else [TokenLogprobs([65, 66], [-0.1, -2.0], [1, 2])],
            )
            for i in range(params.n)
        ]
        return RequestOutput("request-1", None, ids, outputs=outputs, finished=True)

    def generate(self, prompts, sampling_params=None, *, use_tqdm=True):
        # All of them side by side.
        self.counts["steps"] += sampling_params.max_tokens
        return [self._output(prompt, sampling_params) for prompt in prompts]

    def chat(self, messages, sampling_params=None, *, use_tqdm=True):
        return [self._output(messages[0]["content"], sampling_params)]

    def stream(self, prompt, sampling_params=None):
        result = self._output(prompt, sampling_params)
        text = result.outputs[0].text
        result.finished = False
        for piece in (text[:2], text[2:-1]):
            yield piece, result
        result.finished = True
        yield text[-1:] if len(text) > 2 else "", result

    def stats(self):
        seconds = {"prefill_seconds": self.seconds, "decode_seconds": self.seconds}
        steps = self.counts["steps"]
        steady = HostTimes(steps, *(part * 1e-6 * steps for part in (10, 20, 30, 40)))
        return SimpleNamespace(**self.counts, **seconds, steady=steady)

    def shutdown(self):
        self.closed = True
