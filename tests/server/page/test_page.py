import re

import httpx
import pytest

from cairn.server import page as assets
from tests.server.page.driver import expect, finished, say


def test_a_chat_streams_and_counts(ready, script):
    script.pieces = ["Hello", ", ", "you"]
    script.hold.clear()
    tab = ready()
    say(tab, "Hi")
    answer = tab.locator(".answer .body")
    expect(answer).to_have_text("Hello")
    expect(tab.locator("#stop")).to_be_visible()
    script.hold.set()
    expect(answer).to_have_text("Hello, you")
    finished(tab)
    facts = tab.locator(".answer .facts")
    expect(facts).to_contain_text(re.compile(r"TTFT \d+\.\d+ s"))
    expect(facts).to_contain_text(re.compile(r"\d tokens/s"))
    expect(facts).to_contain_text("3 tokens")
    expect(facts).to_contain_text("prompt 9, 63 cached")
    expect(facts).to_contain_text("max tokens reached")

    script.pieces = ["Bye"]
    say(tab, "More")
    finished(tab)
    first, second = script.asked
    assert first["path"] == "/v1/chat/completions"
    assert first["messages"] == [{"role": "user", "content": "Hi"}]
    assert first["stream_options"] == {"include_usage": True}
    assert first["separate_reasoning"] is False
    assert [m["content"] for m in second["messages"]] == ["Hi", "Hello, you", "More"]


def test_text_never_becomes_markup(ready, script):
    evil = "<img src=x onerror=\"document.title='owned'\"><script>1</script><b>bold</b> &amp;"
    script.pieces = [evil, "\n  two"]
    tab = ready()
    say(tab, evil)
    finished(tab)
    expect(tab.locator(".user .body")).to_have_text(evil)
    assert tab.locator(".answer .body").evaluate("e => e.textContent") == evil + "\n  two"
    assert tab.locator("#log :is(img, script, b)").count() == 0
    assert tab.title() == "cairn"


def test_stopping_leaves_the_server(ready, script):
    script.pieces = ["one", "two"]
    script.hold.clear()
    tab = ready()
    say(tab, "count")
    expect(tab.locator(".answer .body")).to_have_text("one")
    tab.keyboard.press("Escape")
    finished(tab)
    expect(tab.locator("#status")).to_have_text("Stopped")
    expect(tab.locator(".answer .facts")).to_contain_text("stopped")
    assert script.gone.wait(5)
    assert tab.locator(".error:not(:empty)").count() == 0


def test_a_completion_sends_the_settings(ready, script):
    tab = ready(chat_template=False)
    assert tab.locator("input[value=completion]").is_checked()
    tab.locator("#settings-open").click()
    tab.get_by_label("Temperature").fill("0.3")
    tab.get_by_label("Max tokens").fill("7")
    tab.get_by_label("System prompt").fill("Be brief")
    tab.get_by_role("button", name="Done").click()
    say(tab, "Once ")
    finished(tab)
    tab.reload()
    expect(tab.locator("#model")).to_contain_text("tiny")
    tab.locator(".segments label", has_text="Chat").click()
    say(tab, "Hi")
    finished(tab)
    completion, chat = script.asked
    assert completion["path"] == "/v1/completions"
    assert completion["prompt"] == "Once "
    assert (completion["temperature"], completion["max_tokens"]) == (0.3, 7)
    assert (chat["temperature"], chat["max_tokens"]) == (0.3, 7)
    assert chat["messages"][0] == {"role": "system", "content": "Be brief"}


@pytest.mark.parametrize(
    ("content", "shown"),
    [(b"caf\xc3\xa9 " * 9, "notes.txt"), (b"\xff\xfe\x00", "is not text in UTF-8")],
)
def test_dropping_a_file(ready, content, shown):
    tab = ready()
    tab.evaluate(
        """(bytes) => {
          const dataTransfer = new DataTransfer();
          dataTransfer.items.add(new File([new Uint8Array(bytes)], "notes.txt"));
          document.body.dispatchEvent(new DragEvent("drop", {dataTransfer, cancelable: true}));
        }""",
        list(content),
    )
    expect(tab.locator("#composer")).to_contain_text(shown)
    assert tab.locator("#context").is_visible() == (shown == "notes.txt")
    if shown == "notes.txt":
        expect(tab.locator("#context-size")).to_contain_text("45 tokens")
        tab.get_by_role("button", name="Remove the context").click()
        expect(tab.locator("#context")).to_be_hidden()


def test_asks_for_the_key_and_keeps_it_for_the_tab(tab, script):
    script.key = "s3cret"
    tab.goto("/")
    dialog = tab.locator("#key")
    expect(dialog).to_be_visible()
    for key, reason in (("wrong", "does not know this key"), ("s3cret", None)):
        tab.locator("#key-value").fill(key)
        tab.locator("#key-value").press("Enter")
        if reason:
            expect(dialog).to_contain_text(reason)
    expect(dialog).to_be_hidden()
    expect(tab.locator("#model")).to_contain_text("tiny")
    say(tab, "Hi")
    finished(tab)
    tab.reload()
    expect(tab.locator("#model")).to_contain_text("tiny")
    assert tab.evaluate("sessionStorage.getItem('cairn.key')") == "s3cret"
    assert tab.evaluate("JSON.stringify({...localStorage})").count("s3cret") == 0


def test_without_a_key_it_says_so(tab, script):
    script.key = "s3cret"
    tab.goto("/")
    tab.locator("#key").get_by_role("button", name="Cancel").click()
    expect(tab.locator("#status")).to_have_text("this server asks for an API key")
    expect(tab.locator("#model")).to_have_text("not connected")


def test_waits_for_a_server_that_loads(tab, script):
    script.loading = 1
    tab.goto("/")
    expect(tab.locator("#model")).to_have_text("waiting for the server")
    expect(tab.locator("#status")).to_have_text("the model is loading")
    expect(tab.locator("#model")).to_contain_text("tiny")
    expect(tab.locator("#status")).to_have_text("")


def test_refusals_are_told_and_the_text_comes_back(ready, script):
    script.failure = (429, {"error": {"message": "the queue is full"}})
    tab = ready()
    say(tab, "Hi")
    finished(tab)
    alert = tab.get_by_role("alert")
    expect(alert).to_have_text("the queue is full. Try again in 7 s")
    expect(tab.locator("#prompt")).to_have_value("Hi")
    tab.locator("#prompt").press("Control+Enter")
    finished(tab)
    # The failed message is not part of the conversation.
    assert script.asked[1]["messages"] == [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("breaks", "told"),
    [("the engine died", "the engine died"), ("", "closed the connection before")],
)
def test_an_answer_that_breaks_off(ready, script, breaks, told):
    script.pieces = ["some", " text"]
    script.breaks = breaks
    tab = ready()
    say(tab, "Hi")
    finished(tab)
    expect(tab.get_by_role("alert")).to_contain_text(told)
    expect(tab.locator(".answer .body")).to_have_text("some text")


def test_new_forgets_everything(ready, script):
    tab = ready()
    say(tab, "Hi")
    finished(tab)
    tab.get_by_role("button", name="New").click()
    expect(tab.locator("article")).to_have_count(0)
    expect(tab.locator("#welcome")).to_be_visible()
    expect(tab.locator("#reads-empty")).to_be_visible()
    say(tab, "Again")
    finished(tab)
    assert [m["content"] for m in script.asked[1]["messages"]] == ["Again"]


def test_new_while_pages_wait_to_be_listed(ready):
    tab = ready()
    say(tab, "Hi")
    finished(tab)
    # The second look at a token comes too soon after the first, so its list is delayed.
    tab.evaluate(
        """async () => {
          const frame = () => new Promise((done) => requestAnimationFrame(done));
          for (let look = 0; look < 2; look++) {
            document.getElementById("token").dispatchEvent(new Event("input"));
            await frame();
            await frame();
          }
          document.getElementById("new").click();
        }"""
    )
    tab.wait_for_timeout(300)
    expect(tab.locator("#reads-empty")).to_be_visible()


def test_events_are_read_however_they_are_cut(ready):
    tab = ready()
    same = tab.evaluate(
        r"""async () => {
          const { events } = await import("/page/sse.js");
          const text = ": ping\n\ndata: {\"a\":\"é€😀\"}\r\rdata:two\r\ndata: lines\r\n\r\n" +
            "event: x\ndata: last\n\n";
          const bytes = new TextEncoder().encode(text);
          const wanted = JSON.stringify(['{"a":"é€😀"}', "two\nlines", "last"]);
          for (let cut = 1; cut < bytes.length; cut++) {
            const stream = new ReadableStream({ start(to) {
              for (const part of [bytes.slice(0, cut), bytes.slice(cut)]) to.enqueue(part);
              to.close();
            }});
            const seen = [];
            for await (const data of events(stream)) seen.push(data);
            if (JSON.stringify(seen) !== wanted) return [cut, seen];
          }
          return true;
        }"""
    )
    assert same is True


CONTRAST = """(pairs) => {
  const style = getComputedStyle(document.documentElement);
  const light = (name) => {
    const hex = style.getPropertyValue(name).trim();
    const [r, g, b] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255)
      .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  return pairs.map(([a, b]) => {
    const [low, high] = [light(a), light(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  });
}"""


def test_text_is_readable_in_both_schemes(ready):
    tab = ready()
    grounds = ("--bg", "--surface")
    pairs = [(ink, bg) for ink in ("--ink", "--muted", "--good", "--bad") for bg in grounds]
    pairs += [("--on-accent", "--accent"), ("--ink", "--lit")]
    for scheme in ("light", "dark"):
        tab.emulate_media(color_scheme=scheme)
        assert min(tab.evaluate(CONTRAST, pairs)) >= 4.5, scheme


def test_every_control_has_a_name_and_the_keyboard_reaches_it(ready, script):
    tab = ready(chat_template=False)
    say(tab, "Hi")
    finished(tab)
    expect(tab.locator("#reads-body")).to_be_visible()
    reached = set()
    for _ in range(14):
        tab.keyboard.press("Tab")
        reached.add(tab.evaluate("document.activeElement.id || document.activeElement.value"))
    wanted = {"new", "settings-open", "prompt", "completion", "attach", "send"}
    assert reached >= wanted | {"layer", "strip", "token"}
    nameless = tab.evaluate(
        """() => [...document.querySelectorAll("button, input, select, textarea, canvas")]
          .filter((e) => e.checkVisibility() && !e.ariaLabel && !e.textContent.trim()
            && ![...(e.labels ?? [])].some((label) => label.textContent.trim()))
          .map((e) => e.outerHTML)"""
    )
    assert nameless == []
    log = tab.get_by_role("log")
    expect(log).to_have_attribute("aria-live", "polite")


def test_files_are_closed_to_everything_foreign(served):
    _, address = served
    with httpx.Client(base_url=address) as client:
        first = client.get("/")
        policy = first.headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "unsafe" not in policy
        assert first.headers["x-content-type-options"] == "nosniff"
        again = client.get("/", headers={"If-None-Match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert client.get("/page/__init__.py").status_code == 404
        assert client.get("/page/..%2F__init__.py").status_code == 404
    texts = [asset.body.decode() for asset in assets.ASSETS.values()]
    foreign = re.compile(r"(?:src|href|url\(|import|fetch\()\W*(?:https?:)?//")
    assert not [text for text in texts if foreign.search(text)]
    assert not [text for text in texts if "innerHTML" in text or "insertAdjacentHTML" in text]
