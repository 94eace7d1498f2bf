"""Quantized models as variants of the quantization lab."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from backend.errors import ConfigError, ModelError
from backend.experiments.quantization_checkpoints import fitting_checkpoints
from backend.experiments.quantization_config import QuantizationLabConfig
from backend.experiments.quantization_lab import check_lab
from backend.models.sources import add_model
from tests.experiments.quantizing import SHAPE, checkpoint, run
from tests.helpers import make_tiny_llama


def test_a_quantized_model_is_measured_as_the_method_that_made_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERVELAB_HOME", str(tmp_path / "home"))
    model = make_tiny_llama(tmp_path / "model", **SHAPE)
    made = checkpoint(tmp_path / "made", model, head="int8", skip=["*.down_proj"])
    add_model(made, "tiny-int4")
    written = "int4:group_size=32,zero_point=integer,head=int8,skip=*.down_proj"
    end, (_, *rows) = run([written, "tiny-int4", str(made)], model=str(model), speed=True)
    assert (end.status, end.error) == ("finished", None)
    assert [row["variant"] for row in rows] == [written, "tiny-int4", str(made)]
    assert [row["checkpoint"] for row in rows] == [None, "tiny-int4", str(made)]
    same = ("kl_mean", "perplexity", "weights_bytes", "bits_per_weight", "num_layers", "layers", "emulated")
    for row in rows[1:]:
        assert {name: row[name] for name in same} == {name: rows[0][name] for name in same}
    assert len(rows[0]["layers"]) == 9
    assert all((row.get("decode_1_tok_s") is None) == row["emulated"] for row in rows)
    end, scanned = run(["tiny-int4"], model=str(model), experiment="sensitivity")
    assert end.status == "finished"
    assert [row["part"] for row in scanned][-1] == "all"


def test_what_is_no_variant_of_the_model_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVELAB_HOME", str(tmp_path / "home"))
    model = make_tiny_llama(tmp_path / "model", **SHAPE)
    smaller = make_tiny_llama(tmp_path / "smaller", **(SHAPE | {"num_hidden_layers": 2}))
    made = checkpoint(tmp_path / "made", smaller)

    def check(variant: Path | str) -> None:
        check_lab(QuantizationLabConfig.from_dict({"model": str(model), "variants": [str(variant)]}))

    with pytest.raises(ConfigError, match=r"made is no variant of .*model: its num_layers is 2, that of .* 3$"):
        check(made)
    with pytest.raises(ConfigError, match="model is not quantized: a variant is a method, or a model in fewer bits"):
        check(model)
    with pytest.raises(ModelError, match=r"there is no model '.*nowhere'"):
        check(tmp_path / "nowhere")
    check(checkpoint(tmp_path / "fitting", model))


def test_a_model_with_other_tokens_is_a_failed_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its probabilities would be of other things."""
    model = make_tiny_llama(tmp_path / "model", **SHAPE)
    made = checkpoint(tmp_path / "made", model)
    path = made / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["e"] = vocabulary["e"], vocabulary["a"]
    path.write_text(json.dumps(tokenizer))
    end, (_, row, other) = run([str(made), "int8"], model=str(model))
    assert end.status == "failed"
    assert "made is no variant of" in row["problem"]
    assert row["problem"].endswith("its tokenizer makes other tokens of the text")
    assert other["kl_mean"] > 0


def test_stored_models_that_fit_are_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERVELAB_HOME", str(tmp_path / "home"))
    model = make_tiny_llama(tmp_path / "model", **SHAPE)
    smaller = make_tiny_llama(tmp_path / "smaller", **(SHAPE | {"num_hidden_layers": 2}))
    add_model(model, "plain")
    add_model(checkpoint(tmp_path / "made", model, "int8"), "fits")
    add_model(checkpoint(tmp_path / "other", smaller, "int8"), "fits-not")
    assert fitting_checkpoints("plain") == ["fits"]
    assert fitting_checkpoints(str(smaller)) == ["fits-not"]
    assert fitting_checkpoints("dummy:tiny") == []
    assert fitting_checkpoints("smollm2-135m") == ["fits", "fits-not"], "not pulled: nothing is known of it"
