"""Servers for tests of the API: one without an engine, and a real one on the embedded model."""

from __future__ import annotations

import json
import shutil

import pytest

from cairn.config import default_model_path
from cairn.engine.grammar import GrammarCompiler, Vocabulary
from cairn.engine.tokenizer import Tokenizer
from tests.server.fake_api import FakeApi
from tests.server.running import running

HERMES_TEMPLATE = """\
{%- if tools %}<|tools|>{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>
{% endif %}
{%- for message in messages %}<|{{ message.role }}|>{{ message.name or '' }}
{{- message.reasoning_content or '' }}
{{- message.content }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{{ call.id }}{{ call.function | tojson }}</tool_call>
{%- endfor %}{{ message.tool_call_id or '' }}
{% endfor %}{{ extra or '' }}{{ reasoning_effort or '' }}{{ documents or '' }}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""


def pytest_ignore_collect(collection_path, config):
    """Systematic examples take seconds to collect in every worker, so only where they run."""
    if collection_path.name == "test_schema_systematic.py" and "not slow" in config.option.markexpr:
        return True
    return None


def model_with_template(folder, template=HERMES_TEMPLATE):
    """The embedded model with a chat template, its weights linked."""
    source = default_model_path()
    folder.mkdir()
    for file in source.iterdir():
        if file.suffix == ".safetensors":
            (folder / file.name).symlink_to(file)
        else:
            shutil.copy(file, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def tokenizer():
    """Tokenizer of the embedded model: ids are bytes, no chat template."""
    return Tokenizer(default_model_path())


@pytest.fixture(scope="session")
def tool_model(tmp_path_factory):
    """The embedded model's tokenizer with a chat template that supports tools."""
    return model_with_template(tmp_path_factory.mktemp("models") / "tiny-tools")


@pytest.fixture(scope="session")
def tool_tokenizer(tool_model):
    return Tokenizer(tool_model)


@pytest.fixture(scope="session")
def compiler():
    """A grammar compiler whose tokens are bytes; byte 0 ends the output."""
    return GrammarCompiler(Vocabulary(tuple(bytes([i]) for i in range(256))))


@pytest.fixture
def api(tokenizer):
    """The API with a FakeClient, without a chat template."""
    return FakeApi(tokenizer)


@pytest.fixture
def tool_api(tool_tokenizer):
    """The API with a FakeClient, and a chat template that supports tools."""
    return FakeApi(tool_tokenizer)


@pytest.fixture(scope="session")
def live(tool_model, tmp_path_factory):
    """A real server on the embedded model with a chat template; clients call it "tiny"."""
    folder = tmp_path_factory.mktemp("live")
    flags = ("--served-model-name", "tiny", "--dtype", "float32")
    with running(folder, str(tool_model), *flags) as server:
        yield server
