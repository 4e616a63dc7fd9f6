"""Reading a request without standing in the way of others."""

import threading

import pytest

PATH = "/v1/completions"


class Watched:
    """A tokenizer that remembers which threads encoded."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.threads = []

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def encode(self, *arguments, **options):
        self.threads.append(threading.current_thread())
        return self._tokenizer.encode(*arguments, **options)


@pytest.mark.parametrize("size, elsewhere", [(100, False), (20_000, True)])
def test_long_texts_are_encoded_in_a_thread(api, size, elsewhere):
    api.state.tokenizer = watched = Watched(api.state.tokenizer)
    api.post(PATH, {"prompt": "x" * size})
    (thread,) = watched.threads
    assert (thread is not threading.main_thread()) == elsewhere
