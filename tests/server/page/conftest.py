"""Chromium and a scripted server, for tests of the page as a user sees it."""

import shutil
from urllib.parse import urlsplit

import pytest

from tests.server.page.driver import expect, sync_api
from tests.server.page.scripted import LANDMARKS, Script, Scripted, serving

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
]


# Of a module: while Playwright's event loop runs, asyncio starts none and other tests would fail.
@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    with sync_api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def served():
    scripted = Scripted()
    with serving(scripted.app) as address:
        yield scripted, address


@pytest.fixture
def script(served):
    """A new script; responses are sent at once unless a test holds them."""
    scripted, _ = served
    scripted.script = Script()
    scripted.script.hold.set()
    return scripted.script


@pytest.fixture
def tab(browser, served, script):
    """A separate tab; at the end, checks that it had no errors and contacted only the server."""
    _, address = served
    context = browser.new_context(base_url=address, viewport={"width": 1280, "height": 800})
    context.set_default_timeout(10_000)
    tab = context.new_page()
    wrong, hosts = [], set()
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on("console", lambda line: wrong.append(line.text) if "Security" in line.text else None)
    tab.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
    yield tab
    context.close()
    assert wrong == []
    assert hosts == {urlsplit(address).netloc}


@pytest.fixture
def ready(tab, script):
    """The page, connected."""

    def open_page(**facts):
        script.facts = LANDMARKS | facts
        tab.goto("/")
        expect(tab.locator("#model")).to_contain_text("tiny")
        return tab

    return open_page
