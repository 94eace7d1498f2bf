"""What runs for every viewer at every interaction: the frame around the pages."""

from __future__ import annotations

from pathlib import Path

import streamlit as st

from app import resources
from app.components import links, notes, sidebar
from backend.errors import ServeLabError

_ASSETS = Path(__file__).parent / "assets"

st.set_page_config(page_title="ServeLab", page_icon=str(_ASSETS / "icon.svg"), layout="wide")
st.logo(str(_ASSETS / "logo.svg"), icon_image=str(_ASSETS / "icon.svg"), size="large")

page = st.navigation(
    [
        st.Page(links.HOME, title="ServeLab", default=True, visibility="hidden"),
        st.Page(links.RUN, title="Run", icon=":material/play_arrow:", url_path="run"),
        st.Page(links.PLAYGROUND, title="Playground", icon=":material/forum:", url_path="playground"),
        st.Page(links.HISTORY, title="History", icon=":material/history:", url_path="history"),
        st.Page(links.COMPARE, title="Compare", icon=":material/compare_arrows:", url_path="compare"),
        st.Page(links.KV_CACHE, title="KV cache", icon=":material/grid_on:", url_path="kv-cache"),
        st.Page(links.SCHEDULER, title="Scheduler", icon=":material/view_timeline:", url_path="scheduler"),
        st.Page(links.SPECULATION, title="Speculation", icon=":material/bolt:", url_path="speculation"),
        st.Page(links.KERNELS, title="Kernels", icon=":material/speed:", url_path="kernels"),
        st.Page(links.QUANTIZATION, title="Quantization", icon=":material/compress:", url_path="quantization"),
        st.Page(links.SIZING, title="Sizing", icon=":material/straighten:", url_path="sizing"),
        st.Page(links.DETAIL, title="Run detail", url_path="detail", visibility="hidden"),
    ]
)
try:
    sidebar.show(resources.get_services())
    page.run()
except ServeLabError as error:
    # What a page does not expect to fail is the database: locked for long, full, read-only, or newer than this program.
    st.error(notes.plain(str(error)), icon=":material/error:")
