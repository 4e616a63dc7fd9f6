import re

from tests.server.page.driver import PER_PAGE, colour, expect, finished, middle, paste, say
from tests.server.page.scripted import DENSE, read_by


def test_the_strip_shows_what_each_token_read(ready, script):
    script.pieces = ["a", "b"]
    script.reads = [
        [
            {"layer": 0, "pages": [4, 7], "weights": [0.8, 0.1], "window": 0.1},
            {"layer": 2, "pages": [9], "weights": [0.2], "window": 0.7},
        ],
        read_by([5], [0.6], window=0.4),
    ]
    text = "".join(f"[{i:05}]" for i in range(180))
    tab = ready()
    tab.locator(".segments label", has_text="Completion").click()
    say(tab, text)
    finished(tab)
    pages = -(-(len(text) + 1) // PER_PAGE)
    expect(tab.locator("#reads-count")).to_have_text(f"{pages} pages, 1 selected, window 40%")
    expect(tab.locator("#heaviest li .text")).to_have_text([text[5 * PER_PAGE : 6 * PER_PAGE]])
    plain = colour(tab, 4)
    assert colour(tab, 5) != plain
    # The query of the second token is at token 1260, slot 1280: the window of 256 slots reaches
    # back to slot 1025, in page 16.
    window = colour(tab, 17)
    assert [colour(tab, page) == window for page in range(14, 20)] == [False] * 2 + [True] * 4

    tab.locator(".token", has_text="a").click()
    expect(tab.locator("#reads-count")).to_have_text(f"{pages} pages, 3 selected, window 40%")
    expect(tab.locator("#heaviest .page")).to_have_text(["4", "9", "7"])
    expect(tab.locator("#heaviest .share")).to_have_text(["40%", "10%", "5.0%"])
    assert colour(tab, 5) == plain
    assert len({colour(tab, 4), colour(tab, 9), plain}) == 3
    expect(tab.locator(".token.lit")).to_have_text("a")

    tab.get_by_label("Layer").select_option("2")
    expect(tab.locator("#heaviest .share")).to_have_text(["20%"])
    expect(tab.locator("#reads-count")).to_contain_text("window 70%")
    expect(tab.locator("#peak")).to_have_text("60%")
    tab.locator("#token").press("ArrowRight")
    expect(tab.locator("#heaviest .page")).to_have_text(["5"])
    expect(tab.locator("#token-name")).to_have_text("2 of 2  “b”")
    expect(tab.locator(".token.lit")).to_have_text("b")


def test_the_strip_is_there_before_the_first_token(ready, script):
    script.hold_at = 0
    script.hold.clear()
    tab = ready(chat_template=False)
    say(tab, "x" * 10 * PER_PAGE)
    expect(tab.locator("#reads-count")).to_have_text("10 pages to read")
    expect(tab.locator("#reads-token")).to_be_hidden()
    expect(tab.locator(".facts")).to_contain_text("reading")
    expect(tab.locator("#status")).to_have_text("Reading")
    script.hold.set()
    finished(tab)
    expect(tab.locator("#reads-count")).to_have_text("11 pages, 1 selected, window 30%")


def test_pointing_at_a_page_shows_its_text_fetched_once(ready, script):
    text = "".join(f"[{i:05}]" for i in range(60))
    tab = ready(chat_template=False)
    say(tab, text)
    finished(tab)
    strip, peek = tab.locator("#strip"), tab.locator("#peek")
    for _ in range(2):
        strip.hover(position=middle(tab, 2))
        expect(peek.locator("pre")).to_have_text(text[2 * PER_PAGE : 3 * PER_PAGE])
        expect(peek).to_contain_text("page 2 · in the window")
        strip.hover(position=middle(tab, 1))
        expect(peek).to_contain_text("page 1 · 50%")
        expect(peek.locator("pre")).to_have_text(text[PER_PAGE : 2 * PER_PAGE])
    tab.mouse.move(5, 5)
    expect(peek).to_be_hidden()
    strip.press("Home")
    strip.press("ArrowRight")
    expect(strip).to_have_attribute("aria-valuenow", "1")
    expect(strip).to_have_attribute("aria-valuetext", "page 1 · 50%")
    fetched = [tuple(tokens) for tokens in script.detokenized]
    assert len(fetched) == len(set(fetched)) == 3


def test_the_strip_holds_any_context(ready):
    tab = ready()
    fits = tab.evaluate(
        """async () => {
          const { layout } = await import("/page/strip.js");
          return [1, 30, 1600, 6000, 8000, 200_000, 10_000_000].map((pages) => {
            const { size, columns, rows, perCell } = layout(pages, 500, 230);
            return [columns * rows * perCell >= pages, Math.round(columns * size) === 500,
                    rows * size < 260, perCell];
          });
        }"""
    )
    assert all(held and wide and low for held, wide, low, _ in fits)
    assert [per_cell == 1 for *_, per_cell in fits] == [True] * 4 + [False] * 3


def test_the_example_hides_a_fact_and_finds_it(ready, script):
    script.reads = [read_by([3], [0.4])] * 20
    tab = ready(chat_template=False)
    tab.locator("#example-length label", has_text="32K").click()
    tab.get_by_role("button", name="Hide a fact and ask").click()
    finished(tab)
    expect(tab.locator(".answer .right")).to_have_text("right")
    (asked,) = script.asked
    document, _, question = asked["prompt"].rpartition("\n")
    key = re.fullmatch(r"#ask (\w{4})=", question)[1]
    line = re.search(rf"^#key {key}=\d{{5}}$", document, re.MULTILINE)
    assert 30_000 < len(document) < 32_100
    assert line.start() < 0.9 * len(document)
    assert (asked["temperature"], asked["max_tokens"]) == (0, 5)
    expect(tab.locator("#legend-fact")).to_be_visible()
    tab.locator("#strip").hover(position=middle(tab, line.start() // PER_PAGE))
    expect(tab.locator("#peek-title")).to_contain_text("holds a hidden fact")
    expect(tab.locator("#peek-text")).to_contain_text("#key"[: PER_PAGE - line.start() % PER_PAGE])

    tab.get_by_role("button", name="Ask for a chain of lines").click()
    expect(tab.locator(".answer .wrong")).to_contain_text("wrong, it is")
    *_, chain = script.asked
    assert chain["prompt"].startswith(document + "\n#run ")
    name = chain["prompt"][-5:-1]
    for _ in range(3):
        name = re.search(rf"^#key {name}=(\w+)$", document, re.MULTILINE)[1]
    expect(tab.locator(".answer .wrong")).to_contain_text(name)


def test_documents_of_the_example_fit_the_model(ready, script):
    script.max_model_len = 6000
    tab = ready()
    expect(tab.locator("#example-length")).to_have_text("5K tokens")
    tab.get_by_role("button", name="Hide a fact and ask").click()
    finished(tab)
    assert len(script.asked[0]["prompt"]) < 5600


def test_dense_models_have_no_strip(ready, script):
    tab = ready(**DENSE)
    say(tab, "Hi")
    finished(tab)
    expect(tab.locator("#reads")).to_be_hidden()
    assert "cairn" not in script.asked[0]
    expect(tab.locator(".answer .body")).to_have_text("?")


def test_selection_is_asked_for_within_its_limit(ready, script):
    tab = ready(max_selection_tokens=100)
    say(tab, "Hi")
    finished(tab)
    assert "cairn" not in script.asked[0]
    tab.locator("#settings-open").click()
    expect(tab.locator("#watch-limit")).to_have_text("up to 100 tokens")
    tab.get_by_label("Max tokens").fill("100")
    tab.keyboard.press("Escape")
    say(tab, "Hi")
    finished(tab)
    assert script.asked[1]["cairn"] == {"selection": True}


def test_a_long_paste_becomes_context(ready, script):
    script.pieces = ["x"] * 3
    script.reads = [read_by([70, 6000], [0.5, 0.2])] * 3
    tab = ready(chat_template=False)
    text = "0123456789" * 40_000
    paste(tab, text)
    expect(tab.locator("#context")).to_contain_text("Pasted text")
    expect(tab.locator("#context")).to_contain_text("400,000 tokens, 6,350 pages")
    expect(tab.locator("#context")).to_contain_text("more than the model's 131,072")
    expect(tab.locator("#prompt")).to_have_value("")
    say(tab, "And?")
    finished(tab)
    assert script.asked[0]["prompt"] == text + "\nAnd?"
    expect(tab.locator("#heaviest .page")).to_have_text(["70", "6,000"])
    expect(tab.locator("#heaviest .text").first).to_contain_text("0123456789")
    # The next completion still contains it; a chat includes it once.
    expect(tab.locator("#context")).to_be_visible()
    tab.locator(".segments label", has_text="Chat").click()
    say(tab, "Hm")
    finished(tab)
    expect(tab.locator("#context")).to_be_hidden()
    assert script.asked[1]["messages"] == [{"role": "user", "content": text + "\nHm"}]
