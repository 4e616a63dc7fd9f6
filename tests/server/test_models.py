"""/v1/models."""

from tests.server.fake_client import LAYERS


def test_list_and_card(api):
    listed = api.request("GET", "/v1/models").json()
    assert listed["object"] == "list"
    (card,) = listed["data"]
    assert card["id"] == "tiny" and card["object"] == "model" and card["max_model_len"] == 4096
    assert card["cairn"]["page_size"] == 64
    assert card["cairn"]["landmark_layers"] == list(LAYERS)
    assert api.request("GET", "/v1/models/tiny").json() == card


def test_other_models_are_not_found(api):
    response = api.request("GET", "/v1/models/org/other")
    assert response.status_code == 404
    error = response.json()["error"]
    assert error["code"] == "model_not_found" and error["param"] == "model"
    assert "org/other" in error["message"] and "'tiny'" in error["message"]


def test_requests_name_the_model_or_none(api):
    assert api.complete(model="tiny")["model"] == "tiny"
    error = api.error("/v1/completions", {"prompt": "a", "model": "gpt"}, 404)
    assert error["code"] == "model_not_found"


def test_names_with_slashes(api):
    api.state.model_name = "org/model"
    assert api.request("GET", "/v1/models/org/model").json()["id"] == "org/model"


def test_an_empty_name_is_none(api):
    assert api.complete(model="")["model"] == "tiny"
    assert api.answer("/tokenize", {"prompt": "a", "model": ""})["count"] == 1


def test_several_names(api):
    api.state.aliases = ("gpt-4o", "org/tiny")
    names = ["tiny", "gpt-4o", "org/tiny"]
    assert [card["id"] for card in api.request("GET", "/v1/models").json()["data"]] == names
    for name in names:
        assert api.request("GET", f"/v1/models/{name}").json()["id"] == name
        assert api.complete(model=name)["model"] == "tiny"
    error = api.error("/v1/completions", {"prompt": "a", "model": "gpt-4"}, 404)
    assert "'gpt-4'" in error["message"]
