"""The Quantization page's button that stores a variant as a model, and stored quantized models on that page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from app.components.quantization_save import default_name
from app.services import Services, start_quantization_run
from backend.errors import ServeLabError
from backend.experiments.quantization_config import QuantizationLabConfig, parse_variant
from backend.metrics.live import LiveRun
from backend.metrics.stats import Phase, RunEnd, RunStart, RunStatus
from backend.models import store
from backend.models.sources import add_model, resolve_source
from db.recorder import RunRecorder
from tests.app.pages import page, press, words
from tests.app.quantization_runs import add_quantization_run, reference, result
from tests.app.stored_runs import FakeServices
from tests.experiments.quantizing import SHAPE, checkpoint
from tests.helpers import make_tiny_llama

VARIANT = "int4:group_size=32,zero_point=integer"
NAME = "quantization-save-name"


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A stored model, in a models' folder of the test's own."""
    monkeypatch.setenv("SERVELAB_HOME", str(tmp_path / "home"))
    add_model(make_tiny_llama(tmp_path / "files", **SHAPE), "tiny")
    return "tiny"


def take_away(services: FakeServices, model: str, variant: str = VARIANT, run: int = 1) -> AppTest:
    if services.repository.get(run) is None:
        add_quantization_run(services, [reference(), result(variant)], model=model)
    return page("quantization", run=str(run), view="Take it away")


def end_save(services: FakeServices, run_id: int, status: RunStatus, error: str | None = None) -> None:
    run = services.repository.get(run_id)
    assert run is not None
    recorder = RunRecorder(services.database, run_id)
    recorder.on_run_start(RunStart(100.0, run.config, {}, {}, (), {}, 0))
    recorder.on_run_end(RunEnd(status, 112.0, None, error))
    recorder.close()


def test_the_button_queues_the_save_of_the_variant_under_a_sane_name(services: FakeServices, model: str) -> None:
    app = take_away(services, model)
    assert app.text_input(key=NAME).value == "tiny-int4-g32"
    press(app, "Save as a model")
    (task,) = services.fake_queue.tasks
    run = services.repository.get(2)
    assert run is not None
    assert (task[0], run.kind, run.model) == (2, "quantization", model)
    assert (run.config["experiment"], run.config["variants"], run.config["name"]) == (
        "save",
        [VARIANT],
        "tiny-int4-g32",
    )
    assert "Run #2 is to save the model tiny-int4-g32. How far it is stands above." in words(app)
    assert app.query_params["run"] == "1", "the page still shows the figures"


def test_a_name_of_ones_own(services: FakeServices, model: str) -> None:
    app = take_away(services, model)
    app.text_input(key=NAME).set_value(" mine ").run()
    press(app, "Save as a model")
    run = services.repository.get(2)
    assert run is not None
    assert run.config["name"] == "mine"


@pytest.mark.parametrize(
    ("name", "message"), [("tiny", "already a model 'tiny'"), ("a b", "cannot name"), ("", "cannot")]
)
def test_a_name_that_cannot_be_had_is_said_beside_the_button(
    services: FakeServices, model: str, name: str, message: str
) -> None:
    app = take_away(services, model)
    app.text_input(key=NAME).set_value(name).run()
    press(app, "Save as a model")
    assert message in "".join(error.value for error in app.error).replace("\\", "")
    assert services.repository.count() == 1
    assert services.fake_queue.tasks == []


@pytest.mark.parametrize(
    ("variant", "why"),
    [
        ("nf4", "the compressed-tensors format does not have nf4."),
        ("int4", "int4:zero_point=integer has one."),
        ("none:kv=int8", "a KV cache is no part of a checkpoint."),
    ],
)
def test_what_cannot_be_saved_has_a_sentence_and_no_button(
    services: FakeServices, model: str, variant: str, why: str
) -> None:
    app = take_away(services, model, variant)
    assert why in words(app)
    assert "Save as a model" not in [button.label for button in app.button]


def test_how_far_it_is_and_its_cancel_stand_on_the_page(services: FakeServices, model: str) -> None:
    app = take_away(services, model)
    press(app, "Save as a model")
    live = services.fake_queue.live_run = LiveRun(2)
    live.on_phase(Phase("quantizing", 2, 3, "layers"))
    app.run()
    assert "Add to queue" in [button.label for button in app.button]
    (progress,) = app.get("progress")
    assert "quantizing 2 of 3 layers" in progress.proto.text
    press(app, "Cancel")
    assert services.fake_queue.cancelled == [2]


def test_what_became_of_it_is_said(services: FakeServices, model: str, tmp_path: Path) -> None:
    app = take_away(services, model)
    press(app, "Save as a model")
    end_save(services, 2, "failed", "the disk is full; make room")
    app.run()
    assert "the disk is full; make room" in words(app)
    press(app, "Save as a model")
    end_save(services, 3, "cancelled", "The layers that are finished are kept")
    app.run()
    assert "was cancelled" in words(app)
    assert "The layers that are finished are kept" in words(app)
    press(app, "Save as a model")
    add_model(checkpoint(tmp_path / "made", Path(str(resolve_source(model).path))), "tiny-int4-g32")
    end_save(services, 4, "finished")
    app.run()
    (success,) = app.success
    text = success.value.replace("\\", "")
    assert re.match(r"tiny-int4-g32 is a model now: choose it wherever one is chosen\. Run #4, .*12\.0 s", text)
    assert app.text_input(key=NAME).value == "tiny-int4-g32-2", "the next name that can be had"
    press(app, "Run it")
    assert app.title[0].value == "Run"
    assert app.session_state["form:model.name"] == "tiny-int4-g32"
    assert "tiny-int4-g32" in app.selectbox(key="form:model.name").options
    store.remove("tiny-int4-g32", lambda: None)
    assert "It is there no more" in words(take_away(services, model))


def test_a_saved_runs_address_leads_to_the_figures_of_its_variant(services: FakeServices, model: str) -> None:
    press(take_away(services, model), "Save as a model")
    end_save(services, 2, "finished")
    app = page("detail", run="2")
    assert app.title[0].value == "Quantization"
    assert app.query_params["run"] == "1"
    assert "Run #2 saved the model tiny-int4-g32." in words(app)
    assert "no quantization run" not in words(app)
    assert "saved: int4 g32 zero point as tiny-int4-g32" in list(page("history").dataframe[0].value["workload"])


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        ("int8", "m-int8"),
        ("gptq:bits=3", "m-gptq-3bit"),
        ("int4:group_size=-1,zero_point=none,head=int8", "m-int4-channel-symmetric-head-int8"),
        ("fp8:granularity=tensor,skip=*.down_proj", "m-fp8-tensor-partly"),
    ],
)
def test_default_names(model: str, variant: str, name: str) -> None:
    assert default_name("/some where/M", parse_variant(variant)) == name
    store.check_name(default_name(f"/{'x' * 300} y", parse_variant(variant)))
    for number in (2, 3):
        (store.model_folder(name) if number == 2 else store.model_folder(f"{name}-2")).mkdir()
        assert default_name("/some where/M", parse_variant(variant)) == f"{name}-{number}"


# Quantized models as variants


def test_stored_quantized_models_can_be_chosen_as_variants_and_not_as_the_reference(
    services: FakeServices, model: str, tmp_path: Path
) -> None:
    made = checkpoint(tmp_path / "made", Path(str(resolve_source(model).path)))
    add_model(made, "tiny-int4")
    app = page("quantization")
    app.selectbox(key="quantization-model").set_value(model).run()
    assert "tiny-int4" in app.multiselect[0].options
    assert "tiny-int4" not in app.selectbox(key="quantization-model").options
    app.multiselect[0].set_value(["int8", "tiny-int4"]).run()
    press(app, "Measure")
    run = services.repository.get(1)
    assert run is not None
    assert run.config["variants"] == ["int8", "tiny-int4"]
    app.selectbox(key="quantization-model").set_value("dummy:tiny").run()
    press(app, "Measure")
    assert "tiny-int4 is no variant of dummy:tiny" in words(app)
    assert services.repository.count() == 1


def test_a_variant_that_is_a_model_is_taken_away_by_its_name(
    services: FakeServices, model: str, tmp_path: Path
) -> None:
    made = checkpoint(tmp_path / "made", Path(str(resolve_source(model).path)))
    add_model(made, "tiny-int4")
    app = take_away(services, model, "tiny-int4")
    assert "tiny-int4 is a checkpoint already." in words(app)
    assert 'name = "tiny-int4"' in app.code[0].value
    add_quantization_run(services, [reference(), result(str(made), checkpoint=str(made))], model=model)
    app = take_away(services, model, run=2)
    assert f"servelab models add {made}" in app.code[0].value


# The whole way


def test_a_save_as_a_run_of_the_queue(model: str) -> None:
    values = {"model": model, "experiment": "save", "variants": [VARIANT], "name": "saved"}
    config = QuantizationLabConfig.from_dict(values)
    with Services.open() as services:
        run_id = start_quantization_run(services, config)
        end = services.queue.wait(run_id, timeout=120)
        assert end is not None
        assert (end.status, end.error) == ("finished", None)
        (stored,) = services.repository.get_all([run_id])
        assert (stored.kind, stored.status, stored.config["name"]) == ("quantization", "finished", "saved")
        with pytest.raises(ServeLabError, match="already a model 'saved'"):
            start_quantization_run(services, config)
        assert services.repository.count() == 1
    assert resolve_source("saved").path == store.model_folder("saved")
