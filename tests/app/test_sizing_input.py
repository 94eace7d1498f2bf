"""What can be typed, pasted and linked on the Sizing page, rightly and wrongly."""

from __future__ import annotations

import json

import pytest

from app.components import sizing_form, sizing_state
from app.components.sizing_state import CARD, CONFIG, KV_DTYPE, MODEL, OUTPUT, PASTED, PROMPT, TYPED
from backend.analysis.presets import MODEL_PRESETS
from tests.app.pages import page, words
from tests.app.sizing_pages import Machine, address, key, metrics
from tests.app.stored_runs import FakeServices


@pytest.fixture(autouse=True)
def no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same cards everywhere."""
    monkeypatch.setattr(sizing_form, "environment", Machine())


# Configs


def test_a_pasted_config_that_lacks_a_field_names_it_and_keeps_the_text(services: FakeServices) -> None:
    app = page("sizing", llm=PASTED)
    assert "Paste a model's config.json above" in words(app)
    config = dict(MODEL_PRESETS["Llama-3.1-8B"].config)
    del config["num_hidden_layers"]
    broken = json.dumps(config)
    app.text_area(key=key(CONFIG)).set_value(broken).run()
    assert [error.value.replace("\\", "") for error in app.error] == [
        "num_hidden_layers is missing from the model config (also n_layer, n_layers, num_layers)."
    ]
    assert app.text_area(key=key(CONFIG)).value == broken
    assert not app.metric
    app.text_area(key=key(CONFIG)).set_value(json.dumps(config | {"num_hidden_layers": 32})).run()
    assert not app.error
    assert metrics(app) == metrics(page("sizing"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"model_type": "llama",\n "hidden_size": }', "not JSON, line 2, column 17"),
        ("[1]", "a model config is a JSON object, not list"),
        ("{}", "model_type is missing"),
        ('{"model_type": "mamba", "state_size": 16}', "state_size is set"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' + "1" * 5000 + "}", "thousands of digits"),
        (" " * 200_001 + "{}", "at most 200,000 are read"),
        ('{"model_type": "<b>*x*</b>"}', "hidden_size is missing"),
    ],
)
def test_a_config_that_is_none(services: FakeServices, text: str, said: str) -> None:
    app = page("sizing", llm=PASTED)
    app.text_area(key=key(CONFIG)).set_value(text).run()
    assert not app.exception
    assert len(app.error) == 1
    assert said in words(app)
    assert app.text_area(key=key(CONFIG)).value == text


def test_a_family_whose_weights_are_not_known_is_sized_with_them_typed_in(services: FakeServices) -> None:
    config = {"model_type": "new", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config |= {"num_key_value_heads": 2}
    app = page("sizing", llm=PASTED, config=json.dumps(config))
    assert metrics(app)["KV per token"] == "256 B"
    assert metrics(app)["Requests that fit"] == "–"
    assert "model_type 'new' is not one whose weights are known" in words(app)
    app.number_input(key=key(sizing_state.WEIGHTS_GIB)).set_value(1.5).run()
    assert not app.error
    assert metrics(app)["Weights"] == "1.50 GiB"
    assert metrics(app)["Requests that fit"] != "–"
    assert "names no max_position_embeddings: type a context length" in words(app)


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ({"prompt": "0"}, "the prompt's length is 0; it has at least 1 token"),
        ({"output": "-3"}, "the output's length is -3"),
        ({"block": "0"}, "block_size 0 is not an integer of at least 1"),
        ({"share": "0"}, "gpu_memory_utilization 0.0 is not above 0 and at most 1"),
        ({"share": "1.5"}, "gpu_memory_utilization 1.5"),
        ({"reserve_gib": "-1"}, "the reserve for activations is -1 GiB"),
        ({"card": TYPED, "card_gib": "0"}, "the card's memory is 0 GiB; it is at least 1 byte"),
        ({"card": TYPED, "card_gib": "1e-12"}, "the card's memory is 1e-12 GiB; it is at least 1 byte"),
        ({"llm": "no-such-model"}, "there is no model 'no-such-model'"),
        ({"llm": "dummy:none"}, "there is no dummy shape 'none'"),
        ({"llm": "/etc"}, "/etc/config.json cannot be read: No such file"),
    ],
)
def test_an_input_out_of_range_is_one_error_and_loses_nothing(
    services: FakeServices, query: dict[str, str], said: str
) -> None:
    app = page("sizing", **({"prompt": "777", "kv": "int8"} | query))
    assert len(app.error) == 1
    assert said in words(app)
    assert app.selectbox(key=key(KV_DTYPE)).value == "int8"
    assert app.query_params["kv"] == "int8"
    for name, text in query.items():
        assert app.query_params[name] == text


def test_an_emptied_field_is_named(services: FakeServices) -> None:
    app = page("sizing")
    app.number_input(key=key(PROMPT)).set_value(None).run()
    assert [error.value for error in app.error] == ["the prompt's length is empty; type a number\\."]


# The address


def test_a_link_opens_what_it_was_copied_from(services: FakeServices) -> None:
    app = page("sizing")
    app.selectbox(key=key(MODEL)).set_value("Mistral-7B-v0.1").run()
    app.selectbox(key=key(CARD)).set_value(TYPED).run()
    app.number_input(key=key(sizing_state.CARD_GIB)).set_value(23.5).run()
    app.number_input(key=key(PROMPT)).set_value(9000).run()
    app.selectbox(key=key(KV_DTYPE)).set_value("int4").run()
    assert address(app) == {
        "llm": "Mistral-7B-v0.1",
        "card": "typed",
        "card_gib": "23.5",
        "prompt": "9000",
        "kv": "int4",
    }
    copy = page("sizing", **address(app))
    assert metrics(copy) == metrics(app) != metrics(page("sizing"))
    assert copy.number_input(key=key(PROMPT)).value == 9000


def test_a_link_carries_a_pasted_config(services: FakeServices) -> None:
    app = page("sizing", llm=PASTED)
    config = MODEL_PRESETS["Gemma-3-4B"].config
    app.text_area(key=key(CONFIG)).set_value(json.dumps(config, indent=4)).run()
    copy = page("sizing", **address(app))
    assert json.loads(copy.text_area(key=key(CONFIG)).value) == config
    assert metrics(copy) == metrics(page("sizing", llm="Gemma-3-4B"))
    app.text_area(key=key(CONFIG)).set_value(json.dumps(config | {"padding": "x" * 10_000})).run()
    assert "too long for the address" in words(app)
    assert "config" not in app.query_params
    assert metrics(app) == metrics(copy), "the text is kept"


def test_what_an_address_cannot_ask_for_is_said_and_left_at_its_default(services: FakeServices) -> None:
    asked = {"prompt": "many", "card": "C64", "kv": "int2", "share": "nan", "output": "9" * 13}
    app = page("sizing", **asked)
    assert len(app.warning) == 1
    for name, text in asked.items():
        assert f"{name} = {text}" in words(app)
        assert name not in app.query_params
    assert metrics(app) == metrics(page("sizing"))


def test_inputs_survive_a_visit_to_another_page(services: FakeServices) -> None:
    app = page("sizing", llm="Qwen3-8B", output="77")
    before = metrics(app)
    app.switch_page("app_pages/history.py")
    app.query_params.clear()
    app.run()
    app.switch_page("app_pages/sizing.py")
    app.query_params.clear()
    app.run()
    assert not app.exception
    assert metrics(app) == before
    assert (app.query_params["llm"], app.query_params["output"]) == ("Qwen3-8B", "77")
    assert app.number_input(key=key(OUTPUT)).value == 77
