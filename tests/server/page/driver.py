"""User actions on the page, and measurements of its strip of pages."""

import re

import pytest

from tests.server.page.scripted import LANDMARKS

sync_api = pytest.importorskip("playwright.sync_api")
expect = sync_api.expect
PER_PAGE = LANDMARKS["page_size"] - 1


def say(tab, text):
    tab.locator("#prompt").fill(text)
    tab.locator("#prompt").press("Enter")


def finished(tab):
    expect(tab.locator("#send")).to_be_visible()
    expect(tab.locator("#status")).to_have_text(re.compile("Done|Stopped|Failed"))


def middle(tab, cell):
    """The center of a cell in the strip."""
    script = """async (cell) => {
      const { layout } = await import("/page/strip.js");
      const canvas = document.getElementById("strip");
      const pages = Number(canvas.getAttribute("aria-valuemax")) + 1;
      const { size, columns } = layout(pages, canvas.parentElement.clientWidth, 230);
      return {x: (cell % columns + 0.5) * size, y: (Math.floor(cell / columns) + 0.5) * size};
    }"""
    return tab.evaluate(script, cell)


def colour(tab, cell):
    """RGB at the center of a cell of the strip."""
    script = """({x, y}) => [...document.getElementById("strip").getContext("2d")
      .getImageData(x, y, 1, 1).data].slice(0, 3)"""
    return tuple(tab.evaluate(script, middle(tab, cell)))


def paste(tab, text):
    tab.evaluate(
        """(text) => {
          const clipboardData = new DataTransfer();
          clipboardData.setData("text/plain", text);
          const field = document.getElementById("prompt");
          field.dispatchEvent(new ClipboardEvent("paste", {clipboardData, cancelable: true}));
        }""",
        text,
    )
