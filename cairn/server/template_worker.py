"""Worker process that renders chat templates, so that an endless one cannot block the server.

Started by `TemplateRenderer`: `python -m cairn.server.template_worker SECONDS BYTES`. Its first
message is empty; each other one is a TemplateInput. The answer is a letter and a text: what was
rendered, or why it was not. A template that takes more than SECONDS or that much memory may end
the process.
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
"""Characters that a text may have beyond the bytes that it was made from."""


def packed(given: TemplateInput) -> bytes:
    """The message for an input. Raises RecursionError for one that is nested too deeply."""
    return json.dumps(asdict(given)).encode()


def unpacked(answer: bytes) -> str:
    """The text of an answer. Raises BadRequest and BadModel, as `render`."""
    kind, text = answer[:1], answer[1:].decode(errors="surrogatepass")
    if kind == TEXT:
        return text
    raise BadModel(text) if kind == BROKEN else BadRequest(text)


def begin(_: bytes) -> Work:
    """The function that renders, after one empty rendering that imports what the first needs."""
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
