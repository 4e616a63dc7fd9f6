"""Real client programs with the embedded model.

Each test is skipped where its client is not installed. The server is one of this suite, or the one
at CAIRN_TEST_SERVER (http://host:port, serving the embedded model as "tiny"), so that clients can
live in an environment of their own. docs/clients.md shows what they print.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow
KEY = "#key abcd=48213\nx = 1\nx = 1\n#ask abcd="
ADD = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}, "b": {"enum": [3, 4]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ADD_TOOL = {"type": "function", "function": {"name": "add", "description": "+", "parameters": ADD}}


@pytest.fixture(scope="module")
def url(request):
    given = os.environ.get("CAIRN_TEST_SERVER")
    found = given or request.getfixturevalue("live").url
    os.environ.update(OPENAI_API_KEY="none", OPENAI_BASE_URL=f"{found}/v1")
    return found


def is_sum(arguments):
    given = json.loads(arguments) if isinstance(arguments, str) else arguments
    return given["a"] in (1, 2) and given["b"] in (3, 4)


def test_openai_chat(url):
    client = pytest.importorskip("openai").OpenAI(base_url=f"{url}/v1", api_key="none")
    stream = client.completions.create(
        model="tiny", prompt=KEY, max_tokens=5, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == "48213"
    user = {"role": "user", "content": "Add."}
    made = client.chat.completions.create(
        model="tiny", messages=[user], tools=[ADD_TOOL], tool_choice="required", max_tokens=200
    ).choices[0]
    (call,) = made.message.tool_calls[:1]
    assert is_sum(call.function.arguments)
    told = {"role": "tool", "tool_call_id": call.id, "content": "4"}
    after = client.chat.completions.create(
        model="tiny", messages=[user, made.message, told], tools=[ADD_TOOL], max_tokens=5
    )
    assert after.usage.completion_tokens == 5


def test_openai_responses(url):
    client = pytest.importorskip("openai").OpenAI(base_url=f"{url}/v1", api_key="none")
    made = client.responses.create(model="tiny", input="hi", max_output_tokens=16)
    assert made.output_text and made.status == "incomplete" and made.usage.output_tokens == 16
    tool = {"type": "function", "name": "add", "parameters": ADD, "strict": True}
    with client.responses.stream(
        model="tiny", input="Add.", tools=[tool], tool_choice="required", max_output_tokens=200
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds and kinds[-1] == "response.completed"
    call = final.output[0]
    assert is_sum(call.arguments)
    answered = {"type": "function_call_output", "call_id": call.call_id, "output": "4"}
    after = client.responses.create(
        model="tiny", input=["Add.", call, answered][1:], tools=[tool], max_output_tokens=5
    )
    assert after.usage.output_tokens == 5


def test_anthropic(url):
    client = pytest.importorskip("anthropic").Anthropic(base_url=url, api_key="none")
    hi = [{"role": "user", "content": "hi"}]
    with client.messages.stream(model="tiny", max_tokens=8, messages=hi) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert final.content[0].text == text and final.stop_reason == "max_tokens"
    tool = {"name": "add", "input_schema": ADD}
    made = client.messages.create(
        model="tiny", max_tokens=200, messages=hi, tools=[tool], tool_choice={"type": "any"}
    )
    use = made.content[0]
    assert made.stop_reason == "tool_use" and is_sum(use.input)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "4"}
    history = [*hi, {"role": "assistant", "content": made.content[:1]}]
    after = client.messages.create(
        model="tiny", max_tokens=4, messages=[*history, {"role": "user", "content": [result]}],
        tools=[tool],
    )  # fmt: skip
    assert after.usage.output_tokens == 4
    assert client.messages.count_tokens(model="tiny", messages=hi).input_tokens > 2


def test_litellm(url):
    litellm = pytest.importorskip("litellm")
    to = {"model": "openai/tiny", "api_base": f"{url}/v1", "api_key": "none"}
    user = {"role": "user", "content": "Add."}
    made = litellm.completion(
        **to, messages=[user], tools=[ADD_TOOL], tool_choice="required", max_tokens=200
    )
    message = made.choices[0].message
    call = message.tool_calls[0]
    assert is_sum(call.function.arguments)
    told = {"role": "tool", "tool_call_id": call.id, "name": "add", "content": "4"}
    messages = [user, message, told]
    parts = litellm.completion(**to, messages=messages, tools=[ADD_TOOL], max_tokens=5, stream=True)
    assert list(parts)[-1].choices[0].finish_reason == "length"
    answer = litellm.completion(
        model="anthropic/tiny", api_base=url, api_key="none", messages=[user], max_tokens=5
    )
    assert answer.usage.completion_tokens == 5


def test_langchain(url):
    chat = pytest.importorskip("langchain_openai").ChatOpenAI
    model = chat(model="tiny", base_url=f"{url}/v1", api_key="none", max_tokens=200)
    bound = model.bind_tools([ADD_TOOL], strict=True, tool_choice="required")
    said = bound.invoke("Add.")
    assert is_sum(said.tool_calls[0]["args"])
    merged = None
    for part in bound.stream("Add."):
        merged = part if merged is None else merged + part
    assert is_sum(merged.tool_calls[0]["args"])
    automatic = model.bind(max_tokens=8).bind_tools([ADD_TOOL], strict=True).invoke("Add.")
    assert automatic.response_metadata["finish_reason"] == "length"
    structured = model.with_structured_output({**ADD, "title": "add"}, method="json_schema")
    assert is_sum(structured.invoke("Add."))
    assert len(model.bind(max_tokens=4).batch(["a", "b"])) == 2


def test_llama_index(url):
    kind = pytest.importorskip("llama_index.llms.openai_like").OpenAILike
    messages = pytest.importorskip("llama_index.core.llms").ChatMessage
    model = kind(
        model="tiny", api_base=f"{url}/v1", api_key="none", max_tokens=5, temperature=0,
        is_chat_model=False, context_window=8192,
    )  # fmt: skip
    assert model.complete(KEY).text == "48213"
    assert "".join(part.delta for part in model.stream_complete(KEY)) == "48213"
    model.is_chat_model = True
    said = model.chat([messages(role="user", content="hi")])
    assert said.message.content is not None
    assert list(model.stream_chat([messages(role="user", content="hi")]))


def test_pydantic_ai(url):
    ai = pytest.importorskip("pydantic_ai")
    from pydantic import BaseModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Sum(BaseModel):
        up: bool

    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    bias = {str(ord(sign)): 30 for sign in "},"}
    for model in (
        OpenAIChatModel("tiny", provider=provider),
        OpenAIResponsesModel("tiny", provider=provider),
    ):
        agent = ai.Agent(model, model_settings={"max_tokens": 16})
        assert isinstance(agent.run_sync("hi").output, str)
    agent = ai.Agent(
        OpenAIChatModel("tiny", provider=provider),
        output_type=ai.NativeOutput(Sum),
        model_settings={"max_tokens": 100, "temperature": 0, "extra_body": {"logit_bias": bias}},
    )
    assert isinstance(agent.run_sync("Up?").output, Sum)


def ran(*arguments, folder):
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=folder, env=env, capture_output=True, text=True,
        timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_guidellm(url, tmp_path):
    pytest.importorskip("guidellm")
    from cairn.config import default_model_path

    ran(
        "guidellm", "run", "--backend", f"kind=openai_http,target={url},model=tiny",
        "--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=3",
        "--tokenizer", f"kind=huggingface_auto,model={default_model_path()}",
        "--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16",
        "--output", f"kind=json,path={tmp_path / 'report.json'}", "--disable-progress",
        folder=tmp_path,
    )  # fmt: skip
    report = json.loads((tmp_path / "report.json").read_text())
    totals = report["benchmarks"][0]["metrics"]["request_totals"]
    assert totals["successful"] == 3 and totals["errored"] == 0


TASK = """\
task: keys
dataset_path: json
dataset_kwargs: {{data_files: {data}}}
test_split: train
output_type: {kind}
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: ["48213", "11111"]
generation_kwargs: {{until: ["\\n"], max_gen_toks: 5, temperature: 0}}
metric_list: [{{metric: {metric}}}]
"""


@pytest.mark.parametrize(
    "model, kind, metric",
    [
        ("local-completions", "multiple_choice", "acc"),
        ("local-completions", "generate_until", "exact_match"),
        ("local-chat-completions", "generate_until", "exact_match"),
    ],
)
def test_lm_eval(url, tmp_path, model, kind, metric):
    pytest.importorskip("lm_eval")
    from cairn.config import default_model_path

    line = {"text": KEY, "answer": 0 if kind == "multiple_choice" else "48213"}
    (tmp_path / "data.jsonl").write_text(json.dumps(line) + "\n")
    task = TASK.format(data=tmp_path / "data.jsonl", kind=kind, metric=metric)
    if kind != "multiple_choice":
        task = "\n".join(row for row in task.splitlines() if not row.startswith("doc_to_choice"))
    (tmp_path / "keys.yaml").write_text(task)
    chat = "chat" in model
    path = "chat/completions" if chat else "completions"
    given = f"model=tiny,base_url={url}/v1/{path},tokenized_requests=False,num_concurrent=1"
    if not chat:
        given += f",tokenizer={default_model_path()}"
    arguments = ["--apply_chat_template"] if chat else []
    ran(
        "lm_eval", "--model", model, "--model_args", given, "--tasks", "keys",
        "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"), *arguments,
        folder=tmp_path,
    )  # fmt: skip
    (found,) = (tmp_path / "out").rglob("results*.json")
    results = json.loads(found.read_text())["results"]["keys"]
    if not chat:
        assert max(v for k, v in results.items() if k.startswith(metric) and "stderr" not in k) == 1
