"""The dashboard as a server: `servelab app`, or `streamlit run app/main.py` in the repository, where its settings lie.

One process, one engine for all viewers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import streamlit as st

from app import resources


@asynccontextmanager
async def lifespan(_app: st.App) -> AsyncIterator[None]:
    """Starts to build the engine host when the server starts, and frees the device when it stops."""
    resources.warm_up()
    try:
        yield
    finally:
        # In a thread: cancelling a run and writing its last rows takes a moment, and the event loop still has viewers.
        await asyncio.to_thread(resources.close)


app = st.App(Path(__file__).with_name("dashboard.py"), lifespan=lifespan)
