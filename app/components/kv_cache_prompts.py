"""A run's prompts put together again, with the tokenizer that they need; of its records what is needed is added as it comes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import streamlit as st

from app.services import Services
from backend.analysis.run_prompts import RunPrompts
from backend.errors import ModelError
from backend.tokenizer import Tokenizer, load_tokenizer
from backend.workload.spec import Workload
from backend.workload.targets import Prompt
from db.run_rows import Run


@dataclass
class Prompts:
    """Grows with a run that goes on."""

    run_id: int
    tokenizer: Tokenizer | None  # None where the model is not there any more
    known: RunPrompts
    last_row: int = 0

    def grow(self, services: Services) -> bool:
        """Take in the records that have come; whether there were any."""
        rows = services.repository.request_tokens(self.run_id, after=self.last_row)
        self.known.add(rows)
        self.last_row = max([self.last_row, *(row["row_id"] for row in rows)])
        return bool(rows)


def open_prompts(run: Run) -> Prompts:
    """Of a run that was loaded, without its records. Raises `ConfigError` where they cannot be had again."""
    config: dict[str, Any] = run.resolved_config or {}
    load = run.load or {}
    workload = Workload.from_dict(run.workload)
    tokenizer: Tokenizer | None = None
    problem: ModelError | None = None
    try:
        tokenizer = _tokenizer(run.model)
    except ModelError as error:
        problem = error

    def encode(prompt: Prompt) -> list[int]:
        if tokenizer is None:
            assert problem is not None
            raise problem
        text = prompt.text or ""
        return tokenizer.encode_chat([{"role": "user", "content": text}]) if prompt.chat else tokenizer.encode(text)

    known = RunPrompts(
        workload, load.get("model", {}), config["model"]["max_model_len"], load.get("prompts_sha256"), encode
    )
    return Prompts(run.run_id, tokenizer, known)


@st.cache_resource(max_entries=2, show_spinner=False)
def _tokenizer(model: str) -> Tokenizer:
    """Raises `ModelError`."""
    from backend.models.sources import resolve_source

    return load_tokenizer(resolve_source(model))
