"""The Run form against the settings it stands for, and text that repeats a run against the command line's own reader."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest

from app import state
from app.components import form_fields as form
from app.components.fields import fields_of
from app.components.settings_text import cli_command, setting_lines, toml_document
from app.settings_input import engine_config_and_workload
from backend.config import EngineConfig
from backend.errors import ConfigError
from backend.workload.spec import Arrivals, Source, Workload

ROOT = Path(__file__).resolve().parents[2]

RUNS = [
    (EngineConfig(), Workload()),
    (
        EngineConfig.from_dict({"model": {"name": "dummy:tiny", "dtype": "float16"}, "cache": {"block_size": 8}}),
        Workload.from_dict(
            {"source": {"kind": "synthetic", "num_requests": 8, "prompt_len": {"kind": "uniform", "min": 4, "max": 9}}}
        ),
    ),
    (
        EngineConfig.from_dict({"cache": {"num_blocks": 64, "cpu_bytes": 2**21 + 1}, "kernels": {"cpu_threads": 2}}),
        Workload.from_dict(
            {
                "source": {"kind": "prompts", "prompts": ["two\nlines", "= +1", 'quo"te \\ é 🙂'], "chat": False},
                "arrivals": {"kind": "poisson", "rate": 0.5},
                "output_len": {"kind": "normal", "mean": 20.0, "std": 3.0, "min": 1, "max": 40},
                "sampling": {
                    "n": 3,
                    "temperature": 0.7,
                    "top_p": 0.9,
                    "ignore_eos": True,
                    "stop": ["###", " "],
                    "stop_token_ids": [2, 3],
                },
                "slo": {"preset": "chat", "ttft_ms": 150.0},
                "priorities": {"0": 0.25, "-1": 1.0},
                "warmup_requests": 0,
                "seed": 7,
            }
        ),
    ),
    (
        EngineConfig.from_dict({"model": {"name": "123"}}),
        Workload.from_dict(
            {
                "source": {"kind": "prompts", "file": "/tmp/a.jsonl", "field": "messages", "limit": 3},
                "arrivals": {"kind": "closed_loop", "concurrency": 2},
            }
        ),
    ),
    (
        EngineConfig(),
        Workload.from_dict(
            {
                "source": {"kind": "shared_prefix", "suffix_len": 5},
                "arrivals": {"kind": "constant", "rate": 3.0},
                "output_len": 1,
            }
        ),
    ),
    (
        EngineConfig(),
        Workload.from_dict(
            {
                "source": {
                    "kind": "conversations",
                    "num_conversations": 9,
                    "turns": {"kind": "uniform", "min": 2, "max": 6},
                    "first_len": 100,
                    "turn_len": {"kind": "normal", "mean": 20.0, "std": 5.0},
                    "system_len": 48,
                    "think_time_s": 2.5,
                },
                "arrivals": {"kind": "gamma", "rate": 2.0, "burstiness": 0.5},
            }
        ),
    ),
    (
        EngineConfig(),
        Workload.from_dict(
            {
                "source": {"kind": "trace", "file": "/tmp/trace.csv", "limit": 100, "max_prompt_len": 2048},
                "arrivals": {"kind": "trace", "speedup": 4.0},
            }
        ),
    ),
    (EngineConfig(), Workload.from_dict({"source": {"kind": "trace", "file": "a.csv"}})),
    (
        EngineConfig(),
        Workload.from_dict(
            {
                "source": {"kind": "mooncake", "file": "/tmp/t.jsonl", "scale": 16, "max_output_len": 9},
                "arrivals": {"kind": "all_at_once"},
            }
        ),
    ),
    (
        EngineConfig(),
        Workload.from_dict(
            {
                "source": {"kind": "mooncake", "file": "/tmp/t.jsonl", "block_len": 16},
                "arrivals": {"kind": "gamma", "rate": 2.0},
            }
        ),
    ),
]


def test_untouched_form_is_the_default_config_and_workload() -> None:
    assert state.form_lines({}) == []
    assert state.read_form(state.default_values()) == (EngineConfig(), Workload())


@pytest.mark.parametrize("run", RUNS)
def test_a_filled_form_reads_as_the_run_it_was_filled_from(run: tuple[EngineConfig, Workload]) -> None:
    assert state.read_form(state.fill_form(*run)) == run


@pytest.mark.parametrize("run", RUNS)
def test_the_printed_command_is_the_same_run(run: tuple[EngineConfig, Workload]) -> None:
    words = shlex.split(cli_command(*run, label="it's a 'label'").replace("\\\n", ""))
    settings = [value for option, value in pairwise(words) if option == "--set"]
    assert engine_config_and_workload(None, None, settings) == run
    assert words[:2] == ["servelab", "run"]
    assert words[-2:] == ["--label", "it's a 'label'"]


@pytest.mark.parametrize("run", RUNS)
def test_toml_reads_back(run: tuple[EngineConfig, Workload]) -> None:
    config, workload = run
    assert EngineConfig.from_dict(tomllib.loads(toml_document(config.to_dict()))) == config
    assert Workload.from_dict(tomllib.loads(toml_document(workload.to_dict()))) == workload


def test_defaults_need_no_settings() -> None:
    assert setting_lines(EngineConfig(), Workload()) == []


def test_every_setting_with_a_choice_is_on_the_form() -> None:
    shown = set(state.default_values())
    offered = {field.key for field in fields_of(EngineConfig)} | {
        field.key for field in fields_of(Workload, "workload.")
    }
    assert offered <= shown


@pytest.mark.parametrize(
    ("choice", "needed"),
    [("synthetic", {}), ("conversations", {}), ("trace", {"file": "a"}), ("mooncake", {"file": "a"})],
)
def test_a_source_that_is_chosen_and_left_alone_has_its_own_defaults(choice: str, needed: dict[str, str]) -> None:
    """Also where it shares a key with another source, whose default is a different one."""
    arrivals = "trace" if choice in form.TRACES else "all_at_once"
    values = {form.SOURCE: choice, form.ARRIVALS: arrivals, f"{form.SOURCE}.file": needed.get("file", "")}
    assert state.read_form(values)[1] == Workload.from_dict({"source": {"kind": choice, **needed}})


def test_every_setting_of_a_source_or_of_arrivals_is_on_the_form() -> None:
    shown = set(state.default_values()) | set(form.LENGTHS)
    for union, key in ((Source, form.SOURCE), (Arrivals, form.ARRIVALS.removesuffix(".kind"))):
        kinds = get_args(get_args(union)[0])
        assert len(kinds) >= 6
        assert {f"{key}.{name}" for kind in kinds for name in kind.model_fields} - {f"{key}.kind"} <= shown


def test_hand_written_lines_win() -> None:
    config, workload = state.read_form(
        {"cache.block_size": 32, form.OVERRIDES: "cache.block_size=8\n\n workload.output_len = 5"}
    )
    assert config.cache.block_size == 8
    assert workload.output_len == 5


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({form.OVERRIDES: "cache.blocksize=8"}, "cache.blocksize"),
        ({form.OVERRIDES: "cache.layout=ring"}, "cache.layout"),
        ({form.OVERRIDES: "nonsense"}, "nonsense"),
        ({form.MODEL: " "}, "model.name"),
        ({form.SOURCE: "own"}, "workload.source.prompts"),
        ({form.SOURCE: "file"}, "workload.source.file"),
        ({form.SOURCE: "trace"}, "workload.source.file is empty; it takes: A path on this machine; columns TIMESTAMP"),
        ({form.SOURCE: "mooncake"}, "workload.source.file is empty; it takes: A path on this machine; timestamp"),
        ({"workload.sampling.top_p": 0.0}, "sampling.top_p"),
        ({"workload.sampling.temperature": float("nan")}, "sampling.temperature"),
        ({"workload.sampling.stop_token_ids": "2, x"}, "sampling.stop_token_ids"),
        ({f"{form.OUTPUT_LEN}.kind": "uniform", f"{form.OUTPUT_LEN}.min": 9, f"{form.OUTPUT_LEN}.max": 3}, "min = 9"),
    ],
)
def test_a_wrong_value_is_named(values: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named.replace(".", r"\.")) as failure:
        state.read_form(values)
    assert "\n" not in str(failure.value)


def test_the_dashboard_does_without_the_command_line() -> None:
    code = (
        "import importlib, pathlib, sys;"
        "names = [path.stem for path in pathlib.Path('app/components').glob('*.py') if path.stem != '__init__'];"
        "[importlib.import_module(f'app.components.{name}') for name in names];"
        "import app.state, app.main;"
        "sys.exit('typer' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_run_ids_from_an_address() -> None:
    assert state.run_ids_in("3, 4,3,,x") == ([3, 4], ["x"])
    assert state.run_ids_in(None) == ([], [])
    assert state.run_ids_in(state.address_of([5, 2])) == ([5, 2], [])
