"""The formats of tool calls: how each is detected, parsed and enforced by a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from cairn.server.tool_calls.base import Reader, Tools
from cairn.server.tool_calls.hermes import CLOSE_TAG, OPEN_TAG, Hermes
from cairn.server.tool_calls.llama3 import PYTHON_TAG, Llama3
from cairn.server.tool_calls.marker_readers import (
    JsonArgumentsReader,
    Markers,
    ParameterMarkers,
    ParametersReader,
)
from cairn.server.tool_calls.pythonic import Pythonic

JSON, PARAMETERS, KEYWORDS = "json", "parameters", "keywords"


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """A format of tool calls.

    Attributes:
        name: name of vLLM's parser for it.
        reader: constructs the parser.
        mark: pattern in the chat templates of models that use the format.
        head, tail: markup before and after the arguments of a call; `{}` stands for the function's
            name, `{!}` for the name as a JSON string.
        begin, between, end: markup before, between and after all calls.
        opening: prefix of `begin` + `head` that does not occur in text; empty if the beginning of a
            call cannot be recognized.
        arguments: encoding of the arguments: JSON, PARAMETERS in tags, or Python KEYWORDS.
        aliases: further names, including SGLang's.
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
        """Markup before the arguments of a call."""
        return self.head.replace("{!}", json.dumps(function)).replace("{}", function)

    @property
    def markers(self) -> str:
        """All markup of a call, concatenated."""
        return self.begin + self.head + self.tail + self.end

    def tail_of(self, function: str) -> str:
        """Markup after the arguments of a call."""
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


def _dsml(name: str, block: str, alias: str) -> ToolCallFormat:
    """DeepSeek's markup since V3.2. The outer tag, `block`, differs between versions."""
    before, after = f"<｜DSML｜{block}>", f"</｜DSML｜{block}>"
    begin = "<｜DSML｜invoke name="
    head = re.compile(rf'"{FUNCTION}"\s*>')
    markers = Markers(begin, head, "</｜DSML｜invoke>", before, after)
    return ToolCallFormat(
        name,
        partial(ParametersReader, markers=markers, parameter=DSML_PARAMETER),
        re.compile(before),
        head=f'{begin}"{{}}">\n',
        # The grammar's lexer is greedy, so alternative markers differ in their first character.
        tail="</｜DSML｜invoke>\n",
        begin=f"{before}\n",
        end=after,
        opening=f'{before}\n{begin}"',
        arguments=PARAMETERS,
        aliases=(alias,),
    )


ALL = (
    ToolCallFormat(
        "qwen3_coder",
        partial(ParametersReader, markers=CODER_MARKERS, parameter=CODER_PARAMETER),
        re.compile(r"<function="),
        head=f"{OPEN_TAG}\n<function={{}}>\n",
        tail=f"</function>\n{CLOSE_TAG}",
        between="\n",
        opening=f"{OPEN_TAG}\n<function=",
        arguments=PARAMETERS,
        aliases=("qwen3_xml",),
    ),
    ToolCallFormat(
        "hermes",
        Hermes,
        re.compile(OPEN_TAG),
        head=f'{OPEN_TAG}\n{{"name": {{!}}, "arguments": ',
        tail=f"}}\n{CLOSE_TAG}",
        between="\n",
        opening=OPEN_TAG,
        aliases=("qwen", "qwen25", "qwen2_5"),
    ),
    ToolCallFormat(
        "mistral",
        partial(JsonArgumentsReader, markers=MISTRAL_MARKERS),
        re.compile(r"\[ARGS\]"),
        head="[TOOL_CALLS]{}[ARGS]",
        tail="",
        opening="[TOOL_CALLS]",
    ),
    ToolCallFormat(
        "mistral_list",
        partial(JsonArgumentsReader, markers=MISTRAL_MARKERS),
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
    ToolCallFormat(
        "deepseek_v3",
        partial(JsonArgumentsReader, markers=DEEPSEEK_MARKERS),
        re.compile("(?s)<｜tool▁call▁begin｜>.*```json"),
        head="<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n",
        tail="\n```<｜tool▁call▁end｜>",
        begin="<｜tool▁calls▁begin｜>",
        between="\n",
        end="<｜tool▁calls▁end｜>",
        opening="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        aliases=("deepseekv3",),
    ),
    ToolCallFormat(
        "deepseek_v31",
        partial(JsonArgumentsReader, markers=DEEPSEEK_MARKERS),
        re.compile("<｜tool▁call▁begin｜>"),
        head="<｜tool▁call▁begin｜>{}<｜tool▁sep｜>",
        tail="<｜tool▁call▁end｜>",
        begin="<｜tool▁calls▁begin｜>",
        end="<｜tool▁calls▁end｜>",
        opening="<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        aliases=("deepseekv31",),
    ),
    ToolCallFormat(
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
    ToolCallFormat(
        "llama3_json",
        Llama3,
        re.compile(rf'{re.escape(PYTHON_TAG)}|(?s:ipython.*"parameters"|"parameters".*ipython)'),
        head='{"name": {!}, "parameters": ',
        tail="}",
        between="; ",
        aliases=("llama3", "llama4_json"),
    ),
)
"""In order of detection: a model uses the first format whose mark is in its chat template."""
FORMS = {form.name: form for form in ALL}
NAMES = {alias: form.name for form in ALL for alias in (form.name, *form.aliases)}
"""Values of --tool-parser -> name of the format."""
