"""Rendering of a model's chat template: a Jinja program of its folder, run in Jinja's sandbox.

The sandbox keeps a template from files, processes and the network. It bounds neither time nor
memory: a server renders in a process that can be ended (`cairn.server.templates`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cairn.engine.chat import with_wrapped_arguments
from cairn.errors import BadModel, BadRequest

ERROR_LENGTH = 500
"""Characters of a template's error that are passed on; some quote the whole conversation."""
RESERVED = frozenset(
    {
        *("chat_template", "conversation", "conversations", "messages", "tools"),
        *("add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"),
    }
)
"""Variables that steer the rendering; a request may not set them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateInput:
    """A template and what it renders: strings, numbers, lists and mappings, as JSON has them.

    Attributes:
        template: Jinja source.
        messages: of the conversation.
        tools: function descriptions; None: none.
        variables: further ones by name, the special tokens among them.
        add_generation_prompt: end with the beginning of the assistant's answer.
        continue_final_message: the last message is left open.
    """

    template: str
    messages: list[dict[str, Any]]
    tools: list[Mapping[str, Any]] | None
    variables: dict[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool


def render(given: TemplateInput) -> str:
    """The text of a conversation.

    Raises:
        BadRequest: the template does not take the messages.
        BadModel: the template is broken.
    """
    wrapped = with_wrapped_arguments(given.messages)
    if wrapped is None:
        return _rendered(given)
    # A template that trips over arguments that are a text may take a mapping.
    with contextlib.suppress(BadRequest):
        return _rendered(given)
    return _rendered(replace(given, messages=wrapped))


def _rendered(given: TemplateInput) -> str:
    from jinja2 import TemplateSyntaxError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        texts, _ = render_jinja_template(
            conversations=[given.messages],
            tools=given.tools,
            chat_template=given.template,
            add_generation_prompt=given.add_generation_prompt,
            continue_final_message=given.continue_final_message,
            **given.variables,
        )
    except TemplateSyntaxError as error:
        raise BadModel(
            f"the model's chat template is broken: {error}", "Correct it in the model's folder"
        ) from error
    except Exception as error:
        # A template that raises refuses the messages, or fails on a field that it did not expect:
        # both are errors of the request.
        reason = str(error) or type(error).__name__
        raise BadRequest(
            f"the model's chat template refuses the messages: {reason[:ERROR_LENGTH]}"
        ) from error
    text: str = texts[0]
    return text
