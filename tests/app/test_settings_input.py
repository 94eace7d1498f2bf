from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.settings_input import engine_config, engine_config_and_workload
from backend.config import EngineConfig
from backend.errors import ConfigError
from backend.workload.spec import PoissonRate, UniformLength, Workload


def test_without_files_and_overrides_a_run_is_the_defaults() -> None:
    assert engine_config_and_workload(None, None, []) == (EngineConfig(), Workload())


def test_overrides_reach_config_and_workload() -> None:
    config, workload = engine_config_and_workload(
        None,
        None,
        [
            "cache.block_size=32",
            "model.dtype=bfloat16",
            "model.name=dummy:tiny",
            "cache.gpu_memory_utilization=0.5",
            "workload.arrivals.kind=poisson",
            "workload.arrivals.rate=4",
            'workload.output_len={kind = "uniform", min = 4, max = 8}',
            'workload.sampling.stop=["END", "STOP"]',
            "workload.sampling.ignore_eos=true",
        ],
    )
    assert config == EngineConfig.from_dict(
        {
            "model": {"name": "dummy:tiny", "dtype": "bfloat16"},
            "cache": {"block_size": 32, "gpu_memory_utilization": 0.5},
        }
    )
    assert workload.arrivals == PoissonRate(rate=4.0)
    assert workload.output_len == UniformLength(min=4, max=8)
    assert workload.sampling.stop == ("END", "STOP")
    assert workload.sampling.ignore_eos


def test_overrides_win_over_files_and_the_last_one_over_the_others(tmp_path: Path) -> None:
    config_file, workload_file = tmp_path / "config.toml", tmp_path / "workload.toml"
    config_file.write_text('[model]\nname = "dummy:tiny"\n[cache]\nblock_size = 8\n')
    workload_file.write_text('seed = 3\noutput_len = 5\n[arrivals]\nkind = "closed_loop"\nconcurrency = 2\n')
    config, workload = engine_config_and_workload(
        config_file, workload_file, ["cache.block_size=64", "cache.block_size=4", "workload.seed=9"]
    )
    assert (config.model.name, config.cache.block_size) == ("dummy:tiny", 4)
    assert (workload.seed, workload.output_len, workload.arrivals.kind) == (9, 5, "closed_loop")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("name", "name"),
        ('"12"', "12"),
        ("a=b", "a=b"),
        ("/models/a b", "/models/a b"),
        ("2020-01-01", "2020-01-01"),
        ("x\ny = 2", "x\ny = 2"),
        ("", ""),
    ],
)
def test_what_is_not_a_toml_value_is_text(text: str, value: Any) -> None:
    setting = f"model.name={text}"
    if value:
        assert engine_config(None, [setting]).model.name == value
    else:
        with pytest.raises(ConfigError, match=r"model\.name"):
            engine_config(None, [setting])


@pytest.mark.parametrize(
    ("setting", "fragments"),
    [
        ("block_size=4", ["SECTION.KEY=VALUE"]),
        ("cache.block_size", ["SECTION.KEY=VALUE"]),
        ("cache.=4", ["SECTION.KEY=VALUE"]),
        ("kv.block_size=4", ["unknown section 'kv'", "model, cache, scheduler", "workload"]),
        ("cache.blocksize=4", ["cache.blocksize", "block_size"]),
        ("cache.block_size=24", ["cache.block_size", "24", "16"]),
        ("cache.num_blocks=many", ["cache.num_blocks", "many"]),
        ("workload.seeds=1", ["seeds", "seed"]),
        ("workload.arrivals.rate=1", ["rate"]),
    ],
)
def test_a_wrong_override_is_named_with_what_is_allowed(setting: str, fragments: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        engine_config_and_workload(None, None, [setting])
    message = str(error.value)
    assert "\n" not in message
    assert all(fragment in message for fragment in fragments), message


@pytest.mark.parametrize(
    ("setting", "named", "reason"),
    [
        ("cache.num_blocks=" + "[" * 5000, "cache.num_blocks", "nested too deeply"),
        ("model.name=" + "[" * 100 + "]" * 100, "model.name", "nested too deeply"),
        ("model.name={a" + ".a" * 5000 + "=1}", "model.name", "nested too deeply"),
        ("model" + ".a" * 5000 + "=1", "model.a.a", "nested too deeply"),
        ("cache.num_blocks=" + "1" * 5000, "cache.num_blocks", "too many digits"),
        ("cache.num_blocks=0x" + "f" * 5000, "cache.num_blocks", "too many digits"),
        ("workload.source.prompts=[[" + "1" * 5000 + "]]", "workload.source.prompts", "too many digits"),
        ("x" * 5000 + ".y=1", "xxx...", "unknown section"),
    ],
    ids=["brackets", "list", "dotted value", "dotted key", "digits", "hexadecimal", "in a list", "section"],
)
def test_a_monstrous_override_is_one_short_line(setting: str, named: str, reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        engine_config_and_workload(None, None, [setting])
    assert named in str(error.value)
    assert reason in str(error.value)


def test_a_file_with_a_number_of_thousands_of_digits_is_named(tmp_path: Path) -> None:
    path = tmp_path / "workload.toml"
    for number in ("1" * 5000, "0x" + "f" * 5000):
        path.write_text(f"seed = {number}")
        with pytest.raises(ConfigError, match=r"workload\.toml.*digits"):
            engine_config_and_workload(None, path, [])


def test_generate_takes_no_workload_settings() -> None:
    with pytest.raises(ConfigError, match=r"unknown section 'workload'; allowed: model, (?!.*workload)"):
        engine_config(None, ["workload.seed=1"])


def test_a_head_s_folder_is_stored_so_that_it_is_found_from_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for typed, stored in (("heads/mine", "heads/mine"), ("~/mine", "home/mine"), (str(tmp_path / "mine"), "mine")):
        config = engine_config(None, ["speculative.method=eagle", f"speculative.model={typed}"])
        assert config.speculative.model == str(tmp_path / stored)
    named = engine_config(None, ["speculative.method=draft_model", "speculative.model=smollm2-135m"])
    assert named.speculative.model == "smollm2-135m"
    assert engine_config(None, ["speculative.method=medusa"]).speculative.model is None
