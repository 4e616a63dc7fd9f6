"""The markers that models put around their reasoning."""

from __future__ import annotations

from dataclasses import dataclass

AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """The texts that open and close a model's reasoning."""

    begin: str
    end: str


THINK = ReasoningMarkers("<think>", "</think>")
MARKERS = {
    "think": THINK,
    "mistral": ReasoningMarkers("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningMarkers("<seed:think>", "</seed:think>"),
}
NAMES = {
    **{name: name for name in MARKERS},
    **dict.fromkeys(
        ("deepseek_r1", "deepseek-r1", "deepseek_v3", "deepseek-v3", "glm45", "qwen3"), "think"
    ),
}
"""Values of --reasoning-parser, including the names that vLLM and SGLang use -> key of MARKERS."""


def choose_markers(name: str, chat_template: str | None) -> ReasoningMarkers | None:
    """The markers of a model's reasoning, or None to leave reasoning in the content.

    Args:
        name: a key of NAMES, "none", or "auto" to detect the markers in the chat template.
        chat_template: the model's chat template, None when it has none.
    """
    if name == NONE:
        return None
    if name != AUTO:
        return MARKERS[NAMES[name]]
    for markers in MARKERS.values():
        if chat_template is not None and markers.end in chat_template:
            return markers
    return None
