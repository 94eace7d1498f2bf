"""Pages opened as a browser opens them, by address, in Streamlit's own test harness."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from streamlit.testing.v1 import AppTest

from app.components.run_table import table_key
from db.run_rows import Run

DASHBOARD = str(Path(__file__).resolve().parents[2] / "app" / "dashboard.py")


def page(name: str = "run", **query: str) -> AppTest:
    """Open a page by its address."""
    app = AppTest.from_file(DASHBOARD, default_timeout=60)
    app.run()
    app.switch_page(f"app_pages/{name}.py")
    for key, value in query.items():
        app.query_params[key] = value
    app.run()
    assert not app.exception, app.exception[0].message
    return app


def press(app: AppTest, label: str) -> None:
    next(button for button in app.button if button.label == label).click().run()
    assert not app.exception, app.exception[0].message


def words(app: AppTest) -> str:
    """All text of the page, without the backslashes that keep Markdown from reading it."""
    elements = [*app.title, *app.subheader, *app.caption, *app.info, *app.warning, *app.error, *app.markdown]
    return "\n".join(element.value for element in elements).replace("\\", "")


def tick(app: AppTest, runs: Sequence[Run], *rows: int) -> None:
    """Tick rows of History's table, which shows these runs."""
    app.session_state[table_key(runs)] = {"selection": {"rows": list(rows), "columns": [], "cells": []}}
    app.run()
    assert not app.exception, app.exception[0].message
