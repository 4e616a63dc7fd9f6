"""An image on the page: chosen, sent as a part of the message, kept in the history."""

from tests.seeing import data_url, file_of, picture
from tests.server.page.driver import expect, finished, say

PNG = file_of(picture(1))


def choose(tab):
    file = {"name": "cat.png", "mimeType": "image/png", "buffer": PNG}
    tab.locator("#file").set_input_files([file])


def test_an_image_is_sent(ready, script):
    script.pieces = ["A cat"]
    tab = ready(images=True)
    choose(tab)
    expect(tab.locator("#images")).to_contain_text("cat.png")
    say(tab, "What is it?")
    finished(tab)
    expect(tab.locator("#images")).to_be_hidden()
    expect(tab.locator(".user .body")).to_contain_text("cat.png")
    image = {"type": "image_url", "image_url": {"url": data_url(PNG)}}
    content = [image, {"type": "text", "text": "What is it?"}]
    assert script.asked[0]["messages"] == [{"role": "user", "content": content}]
    say(tab, "And now?")
    finished(tab)
    assert script.asked[1]["messages"][0]["content"] == content


def test_an_image_is_taken_away(ready, script):
    tab = ready(images=True)
    choose(tab)
    tab.locator("#images-drop").click()
    expect(tab.locator("#images")).to_be_hidden()


def test_a_model_that_reads_text_only(ready, script):
    tab = ready()
    choose(tab)
    expect(tab.locator("#status")).to_contain_text("not text")
    expect(tab.locator("#images")).to_be_hidden()
