"""The markers that models put around their reasoning."""

from __future__ import annotations

from dataclasses import dataclass

AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True)
class Thought:
    """The markers around a model's reasoning."""

    begin: str
    end: str


THINK = Thought("<think>", "</think>")
MARKERS = {
    "think": THINK,
    "mistral": Thought("[THINK]", "[/THINK]"),
    "seed_oss": Thought("<seed:think>", "</seed:think>"),
}
NAMES = {
    **{name: name for name in MARKERS},
    **dict.fromkeys(
        ("deepseek_r1", "deepseek-r1", "deepseek_v3", "deepseek-v3", "glm45", "qwen3"), "think"
    ),
}
"""Names that an operator may give, vLLM's and SGLang's among them -> a key of MARKERS."""


def choose_thought(name: str, chat_template: str | None) -> Thought | None:
    """The markers of a model's reasoning; None: it is not separated from the answer.

    Args:
        name: one of NAMES; "auto": by the chat template; "none".
        chat_template: of the model.
    """
    if name == NONE:
        return None
    if name != AUTO:
        return MARKERS[NAMES[name]]
    for thought in MARKERS.values():
        if chat_template is not None and thought.end in chat_template:
            return thought
    return None
