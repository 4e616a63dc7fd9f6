"""The signs that models put around what they think before they answer."""

from __future__ import annotations

from dataclasses import dataclass

AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True)
class Thought:
    """The signs around what a model thinks."""

    begin: str
    end: str


THINK = Thought("<think>", "</think>")
SIGNS = {
    "think": THINK,
    "mistral": Thought("[THINK]", "[/THINK]"),
    "seed_oss": Thought("<seed:think>", "</seed:think>"),
}
NAMES = {
    **{name: name for name in SIGNS},
    **dict.fromkeys(
        ("deepseek_r1", "deepseek-r1", "deepseek_v3", "deepseek-v3", "glm45", "qwen3"), "think"
    ),
}
"""Names that an operator may give, vLLM's and SGLang's among them -> a key of SIGNS."""


def choose_thought(name: str, chat_template: str | None) -> Thought | None:
    """The signs of a model's thoughts; None: what it thinks is not looked for.

    Args:
        name: one of NAMES; "auto": by the chat template; "none".
        chat_template: of the model.
    """
    if name == NONE:
        return None
    if name != AUTO:
        return SIGNS[NAMES[name]]
    for thought in SIGNS.values():
        if chat_template is not None and thought.end in chat_template:
            return thought
    return None
