"""The forms in which models write tool calls: how each is recognized, read and asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from cairn.server.tool_calls.base import Reader, Tools
from cairn.server.tool_calls.hermes import CLOSE_TAG, OPEN_TAG, Hermes
from cairn.server.tool_calls.llama3 import PYTHON_TAG, Llama3
from cairn.server.tool_calls.marked import Markers, Named, ParameterMarkers, Tagged
from cairn.server.tool_calls.pythonic import Pythonic

JSON, PARAMETERS, KEYWORDS = "json", "parameters", "keywords"


@dataclass(frozen=True, slots=True)
class Form:
    """A form of tool calls.

    Attributes:
        name: as vLLM calls its parser.
        reader: finds the calls in an output.
        mark: what chat templates hold that show this form.
        head, tail: what stands around the arguments of a call; `{}` is the function's name, `{!}`
            the same as a JSON string.
        begin, between, end: what stands before, between and behind all calls.
        opening: the first part of `begin` and `head` that no text holds; empty: a call
            cannot be recognised at its beginning.
        arguments: how they are written: JSON, PARAMETERS in tags, or KEYWORDS of Python.
        aliases: other names, SGLang's among them.
    """

    name: str
    reader: Callable[[Tools | None], Reader]
    mark: re.Pattern[str]
    head: str
    tail: str
    begin: str = ""
    between: str = ""
    end: str = ""
    opening: str = ""
    arguments: str = JSON
    aliases: tuple[str, ...] = ()

    def head_of(self, function: str) -> str:
        """What stands before the arguments of a call."""
        return self.head.replace("{!}", json.dumps(function)).replace("{}", function)

    @property
    def markers(self) -> str:
        """All markup of a call."""
        return self.begin + self.head + self.tail + self.end

    def tail_of(self, function: str) -> str:
        """What stands behind the arguments of a call."""
        return self.tail.replace("{!}", json.dumps(function)).replace("{}", function)


FUNCTION = r"([a-zA-Z0-9_.-]{1,64})"
MISTRAL_MARKERS = Markers(
    "[TOOL_CALLS]",
    re.compile(rf"\s*{FUNCTION}(?:\[CALL_ID\][\w-]+)?(?:\[ARGS\])?\s*(?=\{{)"),
)
DEEPSEEK_MARKERS = Markers(
    begin="<｜tool▁call▁begin｜>",
    head=re.compile(
        rf"\s*(?:function\s*<｜tool▁sep｜>)?{FUNCTION}\s*(?:<｜tool▁sep｜>)?\s*(?:```json)?\s*(?=\{{)"
    ),
    end="<｜tool▁call▁end｜>",
    before="<｜tool▁calls▁begin｜>",
    after="<｜tool▁calls▁end｜>",
)
CODER_MARKERS = Markers(
    begin="<function=",
    head=re.compile(rf"{FUNCTION}>"),
    end="</function>",
    before=OPEN_TAG,
    after=CLOSE_TAG,
)
CODER_PARAMETER = ParameterMarkers(
    "<parameter=", re.compile(r"<parameter=([^>\n]+)>"), "</parameter>"
)
DSML_PARAMETER = ParameterMarkers(
    "<｜DSML｜parameter name=",
    re.compile(r'<｜DSML｜parameter name="([^"\n]+)"(?:\s+string="(?P<string>true|false)")?\s*>'),
    "</｜DSML｜parameter>",
)


def _dsml(name: str, block: str, alias: str) -> Form:
    """DeepSeek's markup since V3.2, whose outermost tag changed."""
    before, after = f"<｜DSML｜{block}>", f"</｜DSML｜{block}>"
    begin = "<｜DSML｜invoke name="
    head = re.compile(rf'"{FUNCTION}"\s*>')
    markers = Markers(begin, head, "</｜DSML｜invoke>", before, after)
    return Form(
        name,
        partial(Tagged, markers=markers, parameter=DSML_PARAMETER),
        re.compile(before),
        head=f'{begin}"{{}}">\n',
        # No two markers that may follow share their first character: the grammar's lexer is greedy.
        tail="</｜DSML｜invoke>\n",
        begin=f"{before}\n",
        end=after,
        opening=f'{before}\n{begin}"',
        arguments=PARAMETERS,
        aliases=(alias,),
    )


ALL = (
    Form(
        "qwen3_coder",
        partial(Tagged, markers=CODER_MARKERS, parameter=CODER_PARAMETER),
        re.compile(r"<function="),
        head=f"{OPEN_TAG}\n<function={{}}>\n",
        tail=f"</function>\n{CLOSE_TAG}",
        between="\n",
        opening=f"{OPEN_TAG}\n<function=",
        arguments=PARAMETERS,
        aliases=("qwen3_xml",),
    ),
    Form(
        "hermes",
        Hermes,
        re.compile(OPEN_TAG),
        head=f'{OPEN_TAG}\n{{"name": {{!}}, "arguments": ',
        tail=f"}}\n{CLOSE_TAG}",
        between="\n",
        opening=OPEN_TAG,
        aliases=("qwen", "qwen25", "qwen2_5"),
    ),
    Form(
        "mistral",
        partial(Named, markers=MISTRAL_MARKERS),
        re.compile(r"\[ARGS\]"),
        head="[TOOL_CALLS]{}[ARGS]",
        tail="",
        opening="[TOOL_CALLS]",
    ),
    Form(
        "mistral_list",
        partial(Named, markers=MISTRAL_MARKERS),
        re.compile(r"\[TOOL_CALLS\]"),
        head='{"name": {!}, "arguments": ',
        tail="}",
        begin="[TOOL_CALLS][",
        between=", ",
        end="]",
        opening="[TOOL_CALLS][",
    ),
    _dsml("deepseek_v4", "tool_calls", "deepseekv4"),
    _dsml("deepseek_v32", "function_calls", "deepseekv32"),
    Form(
        "deepseek_v3",
        partial(Named, markers=DEEPSEEK_MARKERS),
        re.compile("(?s)<｜tool▁call▁begin｜>.*```json"),
        head="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n",
        tail="\n```<｜tool▁call▁end｜>",
        begin="<｜tool▁calls▁begin｜>",
        between="\n",
        end="<｜tool▁calls▁end｜>",
        opening="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        aliases=("deepseekv3",),
    ),
    Form(
        "deepseek_v31",
        partial(Named, markers=DEEPSEEK_MARKERS),
        re.compile("<｜tool▁call▁begin｜>"),
        head="<｜tool▁call▁begin｜>{}<｜tool▁sep｜>",
        tail="<｜tool▁call▁end｜>",
        begin="<｜tool▁calls▁begin｜>",
        end="<｜tool▁calls▁end｜>",
        opening="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        aliases=("deepseekv31",),
    ),
    Form(
        "pythonic",
        Pythonic,
        re.compile(r"\[func_name1\(|<\|python_start\|>"),
        head="{}(",
        tail=")",
        begin="[",
        between=", ",
        end="]",
        arguments=KEYWORDS,
        aliases=("llama4_pythonic",),
    ),
    Form(
        "llama3_json",
        Llama3,
        re.compile(rf'{re.escape(PYTHON_TAG)}|(?s:ipython.*"parameters"|"parameters".*ipython)'),
        head='{"name": {!}, "parameters": ',
        tail="}",
        between="; ",
        aliases=("llama3", "llama4_json"),
    ),
)
"""The first whose mark a template holds is the model's."""
FORMS = {form.name: form for form in ALL}
NAMES = {alias: form.name for form in ALL for alias in (form.name, *form.aliases)}
"""Names that an operator may give -> that of the form."""
