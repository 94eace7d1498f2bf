"""The Sizing page as its tests read it, on a machine that they choose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from streamlit.testing.v1 import AppTest

from app.components import sizing_form


@dataclass(frozen=True)
class Machine:
    """What the page knows of the machine, in place of the one the tests run on."""

    gpu: str | None = None
    gpu_memory_bytes: int | None = None

    def __call__(self) -> dict[str, Any]:
        return {"gpu": self.gpu, "gpu_memory_bytes": self.gpu_memory_bytes}


def key(name: str) -> str:
    return sizing_form.PREFIX + name


def metrics(app: AppTest) -> dict[str, str]:
    return {metric.label: metric.value for metric in app.metric}


def address(app: AppTest) -> dict[str, str]:
    """The query of the address, as it stands."""
    return {name: value if isinstance(value, str) else value[0] for name, value in app.query_params.items()}


def table(app: AppTest, name: str) -> list[dict[str, Any]]:
    """The rows of a table, found by its first column."""
    return next(frame.value.to_dict("records") for frame in app.dataframe if frame.value.columns[0] == name)
