"""Variants as they are written, and what of them is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from backend.config import EngineConfig
from backend.core.kv_format import KV_FORMATS
from backend.errors import ConfigError
from backend.experiments.quantization_config import (
    DEFAULT_VARIANTS,
    METHODS,
    QuantizationLabConfig,
    parse_variant,
    variant_name,
)
from backend.paths import models_home


@pytest.mark.parametrize(
    ("text", "name", "settings"),
    [
        ("int8", "int8", {"quantization.method": "int8"}),
        (
            " int4:bits=3, group_size=-1,zero_point=none ",
            "int4 3 bits per channel symmetric",
            {"quantization.method": "int4", "quantization.bits": 3, "quantization.group_size": -1}
            | {"quantization.zero_point": "none"},
        ),
        (
            "fp8:granularity=tensor",
            "fp8 per tensor",
            {"quantization.method": "fp8", "quantization.granularity": "tensor"},
        ),
        (
            "llm_int8:threshold=3.5",
            "llm_int8 above 3.5",
            {"quantization.method": "llm_int8", "quantization.threshold": 3.5},
        ),
        ("none:kv=int4", "KV int4", {"cache.dtype": "int4"}),
        (
            "nf4:kv=int8,head=int8",
            "nf4 head int8 KV int8",
            {"quantization.method": "nf4", "quantization.head": "int8", "cache.dtype": "int8"},
        ),
        (
            "int4:skip=*.down_proj,head=int8,skip=model.layers.0.*",
            "int4 head int8 without *.down_proj, model.layers.0.*",
            {"quantization.method": "int4", "quantization.head": "int8"}
            | {"quantization.skip": ["*.down_proj", "model.layers.0.*"]},
        ),
    ],
)
def test_a_variant_is_what_an_engine_of_these_settings_loads(text: str, name: str, settings: dict[str, object]) -> None:
    variant = parse_variant(text)
    assert variant.name == variant_name(text) == name
    assert variant.engine_config("dummy:tiny") == EngineConfig().with_overrides(settings | {"model.name": "dummy:tiny"})


def test_a_calibrated_variant_has_a_grid_and_loads_its_checkpoint_as_it_is() -> None:
    variant = parse_variant("awq:bits=3,group_size=32,kv=int8")
    assert (variant.method, variant.is_calibrated, variant.name) == ("awq", True, "awq 3 bits g32 KV int8")
    grid = variant.quantization
    assert (grid.method, grid.bits, grid.group_size, grid.zero_point) == ("int4", 3, 32, "integer")
    config = variant.engine_config("/folder")
    assert config == EngineConfig().with_overrides({"model.name": "/folder", "cache.dtype": "int8"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("int5", "there is no method 'int5'; allowed: int8, int4"),
        ("", "there is no method ''"),
        ("int8:bits=4", "bits = 4 belongs to method"),
        ("int4:bits=9", "bits = 9"),
        ("int4:bits", "'bits' is no option; allowed: bits, group_size"),
        ("int4:skop=x", "'skop=x' is no option"),
        ("none:skip=x,kv=int8", "leaves layers out, and none quantizes none"),
        ("none", "changes nothing"),
        ("none:kv=int3", "cache.dtype = 'int3'"),
        ("gptq:granularity=tensor", "granularity = 'tensor' belongs to method"),
    ],
)
def test_what_is_refused_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_variant(text)
    with pytest.raises(ConfigError, match=message):
        QuantizationLabConfig.from_dict({"variants": ["int8", text]})
    assert variant_name(text) == text


def test_the_same_variant_twice_is_one() -> None:
    config = QuantizationLabConfig.from_dict(
        {"variants": ["int8", "int4:bits=4,group_size=32", "int8 ", "int4:group_size=32,bits=4"]}
    )
    assert config.variants == ("int8", "int4:bits=4,group_size=32")
    assert QuantizationLabConfig.from_dict(config.to_dict()) == config


def test_every_method_is_a_default_variant() -> None:
    assert {text.partition(":")[0] for text in DEFAULT_VARIANTS} == {*METHODS, "none"}
    assert {parse_variant(text).cache_dtype for text in DEFAULT_VARIANTS} == set(KV_FORMATS)
    assert QuantizationLabConfig().variants == DEFAULT_VARIANTS
    with pytest.raises(ConfigError, match="variants"):
        QuantizationLabConfig.from_dict({"variants": []})


# Quantized models as variants


def store_folder(name: str) -> None:
    (models_home() / name).mkdir(parents=True)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SERVELAB_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("home")
def test_a_stored_model_is_a_variant_by_its_name() -> None:
    with pytest.raises(ConfigError, match="there is no method 'tiny-int4'"):
        parse_variant("tiny-int4")
    store_folder("tiny-int4")
    variant = parse_variant(" tiny-int4 ")
    assert (variant.checkpoint, variant.method, variant.name) == ("tiny-int4", None, "tiny-int4")
    assert not variant.is_calibrated
    assert variant.engine_config("tiny-int4") == EngineConfig().with_overrides({"model.name": "tiny-int4"})
    store_folder("int8")
    assert parse_variant("int8").checkpoint is None, "a method's name stays the method's"


def test_a_folder_is_a_variant_where_it_is_written_with_a_slash(home: Path) -> None:
    config = QuantizationLabConfig.from_dict({"variants": ["./out", "int8", f"{home}/out", "deep/er"]})
    assert config.variants == (f"{home}/out", "int8", f"{home}/deep/er"), "as another process finds them"
    assert parse_variant(config.variants[0]).name == variant_name("./out") == "out"
    with pytest.raises(ConfigError, match=r"a stored one's name, or a folder, as in \./folder"):
        parse_variant("out")
    with pytest.raises(ConfigError, match="no user has a home of this name"):
        parse_variant("~nobody-of-this-name/out")


# What is saved


@pytest.mark.parametrize(
    "values",
    [
        {"experiment": "save", "variants": ["int8"]},
        {"experiment": "save", "variants": ["int8", "fp8"], "name": "x"},
        {"experiment": "compare", "name": "x"},
    ],
)
def test_one_variant_is_saved_under_a_name(values: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="stores one variant, under a name"):
        QuantizationLabConfig.from_dict(values)
    config = QuantizationLabConfig.from_dict({"experiment": "save", "variants": ["int8"], "name": "x"})
    assert QuantizationLabConfig.from_dict(config.to_dict()) == config
