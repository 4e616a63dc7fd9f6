"""Worker process that renders chat templates, so that an endless one cannot block the server.

Started by `TemplateRenderer` as `python -m cairn.server.template_worker SECONDS BYTES`. The first
message is empty, each further one is a TemplateInput. The reply is a status letter and the rendered
text or the error. A template that exceeds the time or the memory ends the process.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from cairn.engine.chat_template import TemplateInput, render
from cairn.errors import BadModel, BadRequest
from cairn.server.worker import Work, serve

TEXT, REFUSED, BROKEN = b"T", b"R", b"B"
MORE_TEXT = 1 << 24
"""Maximum number of characters of a rendered text beyond the size of its input in bytes."""


def packed(given: TemplateInput) -> bytes:
    """Encode an input as a message. Raises RecursionError if it is nested too deeply."""
    return json.dumps(asdict(given)).encode()


def unpacked(answer: bytes) -> str:
    """Decode a reply to the rendered text. Raises its BadRequest or BadModel."""
    kind, text = answer[:1], answer[1:].decode(errors="surrogatepass")
    if kind == TEXT:
        return text
    raise BadModel(text) if kind == BROKEN else BadRequest(text)


def begin(_: bytes) -> Work:
    """Render an empty template to load all imports. Returns the function that renders a message."""
    render(
        TemplateInput(
            template="",
            messages=[{}],
            tools=None,
            variables={},
            add_generation_prompt=True,
            continue_final_message=False,
        )
    )
    return _answer


def _answer(message: bytes) -> bytes:
    kind = TEXT
    try:
        text = render(TemplateInput(**json.loads(message)))
        if len(text) > MORE_TEXT + len(message):
            kind, text = REFUSED, f"the model's chat template makes {len(text)} characters"
    except BadRequest as error:
        kind, text = REFUSED, str(error)
    except BadModel as error:
        kind, text = BROKEN, str(error)
    return kind + text.encode(errors="surrogatepass")


if __name__ == "__main__":
    serve(begin, float(sys.argv[1]), int(sys.argv[2]))
