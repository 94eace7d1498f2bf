"""A variant saved as a model: which codes it has, what an ended run leaves to the next, and what is refused."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from backend.config import EngineConfig
from backend.errors import ServeLabError
from backend.experiments import quantization_checkpoints
from backend.experiments.quantization_config import QuantizationLabConfig, parse_variant
from backend.experiments.quantization_save import check_save, run_save
from backend.experiments.text_pass import load_text_model
from backend.metrics.stats import RunEnd
from backend.models import store
from backend.models.sources import add_model, list_models, resolve_source
from backend.quantization.single_layer import SingleLayer
from tests.experiments.quantizing import SHAPE, Sink, run
from tests.helpers import make_tiny_llama, paged_logits

IDS = list(range(40))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A tiny model, and a models' folder of the test's own."""
    monkeypatch.setenv("SERVELAB_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(quantization_checkpoints, "NUM_WINDOWS", 2)
    monkeypatch.setattr(quantization_checkpoints, "WINDOW_LENGTH", 64)
    return str(make_tiny_llama(tmp_path / "model", **SHAPE))


def config(model: str, variant: str, name: str = "saved") -> QuantizationLabConfig:
    return QuantizationLabConfig.from_dict({"model": model, "experiment": "save", "variants": [variant], "name": name})


def save(model: str, variant: str, sink: Sink | None = None, cancel: threading.Event | None = None) -> RunEnd:
    return run_save(config(model, variant), sink or Sink(), cancel or threading.Event())  # type: ignore[arg-type]


def logits(name: str, engine: EngineConfig | None = None) -> torch.Tensor:
    loaded = load_text_model(resolve_source(name), engine or EngineConfig().with_overrides({"model.name": name})).loaded
    return paged_logits(loaded.model, IDS)


@pytest.mark.parametrize(
    "variant",
    [
        "int8",
        "w8a8_int8",
        "fp8",
        "fp8:granularity=tensor",
        "int4:bits=3,group_size=32,zero_point=none",
        "int4:group_size=32,zero_point=integer,head=int8,skip=*.o_proj",
        "int8:kv=int4",
    ],
)
def test_the_model_is_the_variant(model: str, variant: str) -> None:
    sink = Sink()
    assert save(model, variant, sink).status == "finished"
    assert [(phase.name, phase.done) for phase in sink.phases if phase.name == "quantizing"] == [
        ("quantizing", done) for done in range(4)
    ]
    expected = parse_variant(variant).engine_config(model)
    assert torch.equal(logits("saved"), logits(model, expected))
    (info,) = [info for info in list_models() if info.name == "saved"]
    assert (info.state, info.description) == ("ready", f"{model} by {parse_variant(variant).method}")
    assert info.quantization


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_what_was_chosen_for_the_matrix_is_not_chosen_again(
    model: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variant = f"{method}:group_size=32,head=int8"
    end, (_, row) = run([variant], model=model, layers=False)
    assert (end.status, end.error) == ("finished", None)

    def never(*arguments: Any) -> None:
        raise AssertionError("a layer is quantized again")

    monkeypatch.setattr(SingleLayer, "load", never)
    sink = Sink()
    assert save(model, variant, sink).status == "finished"
    assert any(phase.name == "copying" and phase.unit == "bytes" for phase in sink.phases)
    assert contents(store.model_folder("saved")) == contents(Path(row["checkpoint"]))
    assert load_text_model(resolve_source("saved"), EngineConfig()).loaded.config.stored_quantization is not None


def test_and_the_other_way_round(model: str) -> None:
    assert save(model, "gptq:group_size=32").status == "finished"
    sink = Sink()
    _, (_, row) = run(["gptq:group_size=32"], sink, model=model, layers=False)
    assert not any("choosing codes" in phase.name for phase in sink.phases)
    assert contents(store.model_folder("saved")) == contents(Path(row["checkpoint"]))


@pytest.mark.parametrize("variant", ["int8", "gptq:group_size=32"])
def test_a_cancelled_run_goes_on_where_it_was(model: str, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cancel = threading.Event()
    sink = Sink(lambda phase: cancel.set() if (phase.name, phase.done) == ("quantizing", 1) else None)
    end = save(model, variant, sink, cancel)
    assert end.status == "cancelled"
    assert end.error is not None
    assert "are kept: saving it again under the same name goes on behind them" in end.error
    assert store.stored_names() == []
    chosen: list[int] = []
    load = SingleLayer.load

    def counted(self: SingleLayer, index: int, read: Any) -> None:
        chosen.append(index)
        load(self, index, read)

    monkeypatch.setattr(SingleLayer, "load", counted)
    assert save(model, variant).status == "finished"
    assert chosen == [2]
    assert logits("saved").isfinite().all()


def test_a_run_that_is_cancelled_before_its_first_layer_keeps_nothing(model: str) -> None:
    cancel = threading.Event()
    cancel.set()
    end = save(model, "int8", cancel=cancel)
    assert (end.status, end.error) == ("cancelled", None)
    assert store.stored_names() == []


def test_a_name_that_is_taken_meanwhile_fails_before_the_work(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_save(config(model, "int8"))
    add_model(model, "saved")
    with pytest.raises(ServeLabError, match="there is already a model 'saved'"):
        save(model, "int8")


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("nf4", "the compressed-tensors format does not have nf4"),
        ("llm_int8", "the compressed-tensors format does not have llm_int8"),
        ("none:kv=int8", "a KV cache is no part of a checkpoint"),
        ("int4", "the format has no floating minimums; int4:zero_point=integer has one"),
        ("gptq:zero_point=float", "no floating minimums; gptq:zero_point=integer has one"),
    ],
)
def test_what_has_no_checkpoint_is_said_at_once(model: str, variant: str, message: str) -> None:
    with pytest.raises(ServeLabError, match=message):
        check_save(config(model, variant))


def test_names_and_models_are_looked_at_at_once(model: str) -> None:
    add_model(model, "taken")
    for name, message in (
        ("taken", "already a model"),
        ("a b", "cannot name"),
        ("", "cannot name"),
        ("smollm2-135m", "stands for"),
    ):
        with pytest.raises(ServeLabError, match=message):
            check_save(config(model, "int8", name))
    with pytest.raises(ServeLabError, match="dummy:tiny has no files to make a checkpoint of"):
        check_save(config("dummy:tiny", "int8"))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != store.MANIFEST_NAME}
