"""The settings that the dashboard relies on reach Streamlit, which passes over a key that it does not know in silence."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from streamlit import config

from app import cli_app


def keys_of(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from keys_of(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def settings() -> dict[str, Any]:
    """Of the file that `servelab app` points Streamlit at, wherever it is called."""
    return dict(keys_of(tomllib.loads((cli_app._REPOSITORY / ".streamlit" / "config.toml").read_text())))


def test_streamlit_knows_every_setting() -> None:
    assert set(settings()) <= set(config.get_config_options())


def test_a_tables_own_download_is_off() -> None:
    """It would write cells that a spreadsheet runs as formulas (roboflow/inference#2578); our export neutralises them."""
    assert settings()["client.disableDataExport"] is True


def test_only_this_machine_is_served() -> None:
    assert settings()["server.address"] == "127.0.0.1"
