"""The layout of the page on desktop and phone screens."""

import pytest

from tests.server.page.driver import expect, finished, middle, paste, say

DESKTOP = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}
SCREENS = pytest.mark.parametrize("screen", [DESKTOP, PHONE], ids=["desktop", "phone"])


def box(tab, selector):
    found = tab.locator(selector).first.bounding_box()
    assert found is not None, selector
    return found


def overlap(a, b):
    """Whether two boxes overlap."""
    across = a["x"] < b["x"] + b["width"] and b["x"] < a["x"] + a["width"]
    return across and a["y"] < b["y"] + b["height"] and b["y"] < a["y"] + a["height"]


def test_a_phone_shows_the_composer_and_the_pages_at_once(ready):
    tab = ready()
    tab.set_viewport_size(PHONE)
    tab.evaluate("document.getElementById('model').firstChild.data = 'a-long-name-'.repeat(8)")
    assert box(tab, "#model")["height"] < 30
    assert box(tab, ".top")["height"] < 60
    send, mode = box(tab, "#send"), box(tab, ".composer .segments")
    assert abs(send["y"] + send["height"] / 2 - mode["y"] - mode["height"] / 2) < 5
    assert box(tab, "#reads-title")["y"] + box(tab, "#reads-title")["height"] < PHONE["height"]
    assert tab.evaluate("document.documentElement.scrollWidth") == PHONE["width"]


def test_a_long_conversation_leaves_the_pages_where_they_are(ready, script):
    script.pieces = ["line\n"] * 60
    tab = ready(chat_template=False)
    tab.set_viewport_size(PHONE)
    say(tab, "x" * 500)
    finished(tab)
    assert box(tab, "#strip")["y"] < PHONE["height"]
    assert box(tab, "#send")["y"] < PHONE["height"]


@SCREENS
def test_touch_targets_are_large_enough(ready, script, screen):
    script.pieces = ["a", "b"]
    tab = ready(chat_template=False)
    tab.set_viewport_size(screen)
    paste(tab, "x" * 5000)
    say(tab, "y")
    finished(tab)
    for selector in (
        *("#context-drop", "#layer", "#token", "#send", "#attach", "#new", "#settings-open"),
        ".composer .segments label",
    ):
        size = box(tab, selector)
        assert min(size["width"], size["height"]) >= 24, (selector, size)


@SCREENS
def test_the_tooltip_of_a_page_covers_neither_strip_nor_legend(ready, screen):
    tab = ready(chat_template=False)
    tab.set_viewport_size(screen)
    paste(tab, "line\n" * 4000)
    say(tab, "x")
    finished(tab)
    for cell in (0, 9, 40, 150):
        tab.locator("#strip").hover(position=middle(tab, cell))
        expect(tab.locator("#peek-text")).to_contain_text("line")
        peek = box(tab, "#peek")
        assert not overlap(peek, box(tab, "#legend")), cell
        assert not overlap(peek, box(tab, "#strip")), cell
        assert peek["x"] >= 0 and peek["x"] + peek["width"] <= screen["width"]


def test_how_far_a_long_context_is_read(ready, script):
    script.comments = ["still working", "read 1000 of 100000 tokens", "read 45056 of 100000 tokens"]
    script.pieces = ["a"]
    script.hold_at = 0
    script.hold.clear()
    tab = ready(chat_template=False)
    say(tab, "x")
    expect(tab.locator(".facts .read")).to_have_text("45,056 of 100,000 tokens, 45%")
    script.hold.set()
    finished(tab)
    expect(tab.locator(".facts .read")).to_have_count(0)
