"""Certificates: whether speculation gives what plain decoding gives; the one of the run's settings, and those before it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd
import streamlit as st

from app import formatting
from app.certificate_texts import EXCUSED_HEADERS, excused_rows, figures
from app.components import activity, links, live_panel, notes, run_actions
from app.components.run_table import certificate_text
from app.components.speculation_pick import CERTIFICATE, method_of
from app.services import Services, start_certificate_run, stored_verdict
from backend.config import EngineConfig
from backend.core.speculation import is_synthetic
from backend.errors import DatabaseError, ServeLabError
from backend.experiments.certificate import Verdict
from backend.experiments.certificate_config import CertificateConfig
from db.run_rows import Run

_BADGES: dict[str, Any] = {"exact": "green", "rejected": "red", "inconclusive": "orange"}
_ERROR, _SELECT, _SAMPLES = "certificate error", "speculation-certificate-select", "speculation-certificate-samples"
_MAX_LISTED = 50


def show(services: Services, run: Run | None) -> None:
    """
    Args:
        run: of a workload, whose settings are certified; None: there is none.
    """
    wanted = None if run is None or method_of(run) is None else _config_of(run)
    if run is not None and is_synthetic(run.config):
        text = f"Run #{run.run_id} has synthetic drafts, accepted at a set rate: there is no exactness to certify."
        st.info(text, icon=":material/casino:")
    certificates = {each.run_id: each for each in services.repository.list(kind="certificate", limit=_MAX_LISTED)}
    _start(services, certificates.values(), wanted)
    shown = _pick(services, certificates, wanted)
    if shown is None and wanted is not None:
        st.info(
            "No certificate has these settings yet. It compares greedy tokens prompt by prompt, and samples by a χ² and a "
            "total-variation test, with plain decoding.",
            icon=":material/verified:",
        )
    elif shown is None:
        st.info(
            "There is no certificate yet. Choose a run with speculation to certify its settings, or start one with "
            "`servelab spec verify --set speculative.method=ngram`.",
            icon=":material/verified:",
        )
    else:
        _certificate(services, shown, None if wanted is None else _has(shown, wanted))
    if certificates:
        _history(services, list(certificates.values()), wanted)


def _config_of(run: Run) -> CertificateConfig | None:
    """What certifies the run's settings; None for those of a version that knew others, and where there is nothing to certify."""
    try:
        engine = EngineConfig.from_dict(run.config)
        config = CertificateConfig(model=engine.model.name, engine=engine)
        _ = config.speculative_engine
        return config
    except ServeLabError:
        return None


def _has(certificate: Run, wanted: CertificateConfig) -> bool:
    """Whether it was made with these settings, however much it sampled."""
    try:
        return CertificateConfig.from_dict(certificate.config).speculative_engine == wanted.speculative_engine
    except ServeLabError:
        return False


def _start(services: Services, certificates: Iterable[Run], wanted: CertificateConfig | None) -> None:
    if wanted is not None:
        st.session_state.setdefault(_SAMPLES, wanted.num_samples)
        with st.container(horizontal=True, vertical_alignment="bottom"):
            # No bounds: a browser keeps a number it finds out of bounds to itself, and the default would be taken.
            st.number_input(
                "Samples",
                value=None,
                step=1024,
                key=_SAMPLES,
                width=150,
                placeholder=str(wanted.num_samples),
                help="By each engine, 20 or more. Fewer take less time, and find less of what is wrong.  \n`num_samples`",
                persist_state="session",
            )
            activity.start_button(
                services,
                "Certify these settings",
                key="certificate-start",
                why_queue="Waits for the run under way, then starts.",
                on_click=_begin,
                args=(services, wanted),
            )
        st.caption(
            notes.plain(
                f"{_last_time(certificates, wanted)} Samples and greedy answers are each by an engine with and one without "
                "speculation."
            )
        )
    if error := st.session_state.pop(_ERROR, None):
        st.error(notes.plain(error), icon=":material/error:")
    activity.polled(
        services.queue.live, activity.is_active, lambda snapshot: _under_way(services, snapshot), live_panel.POLL_S
    )


def _last_time(certificates: Iterable[Run], wanted: CertificateConfig) -> str:
    """How long the newest certificate of the same model took."""
    for run in certificates:
        if run.model == wanted.model and run.status == "finished" and run.started_at and run.ended_at:
            seconds = (run.ended_at - run.started_at).total_seconds()
            samples = formatting.count(run.config["num_samples"])
            return f"Last time {samples} samples took {formatting.duration(seconds)} (#{run.run_id})."
    return (
        f"The default model takes a few minutes on two CPU cores, with {formatting.count(wanted.num_samples)} samples."
    )


def _begin(services: Services, wanted: CertificateConfig) -> None:
    """A callback: it runs before the page is drawn."""
    try:
        num_samples = st.session_state.get(_SAMPLES)
        if num_samples is not None:
            wanted = wanted.with_overrides({"num_samples": num_samples})
        st.session_state[CERTIFICATE] = start_certificate_run(services, wanted)
    except ServeLabError as error:
        st.session_state[_ERROR] = str(error)


def _under_way(services: Services, snapshot: Any) -> None:
    if not activity.is_active(snapshot):
        return
    run = services.repository.get(snapshot.run_id)
    live_panel.progress(services, snapshot, run)
    if run is not None and run.kind == "serve":
        links.detail_link(snapshot.run_id, "A workload runs; a certificate waits until the device is free.")
    live_panel.queue(services)


def _pick(services: Services, certificates: dict[int, Run], wanted: CertificateConfig | None) -> Run | None:
    """The one that the address names, else the newest with these settings, else, where no settings are asked for, the newest."""
    state = st.session_state
    asked = state.get(CERTIFICATE)
    if asked is not None and asked not in certificates:
        named = services.repository.get(asked)
        if named is not None and named.kind == "certificate":
            certificates[asked] = named
        else:
            st.warning(notes.plain(f"There is no certificate #{asked}. It may have been deleted."))
            asked = state[CERTIFICATE] = None
    if not certificates:
        return None
    alike = (run_id for run_id, each in certificates.items() if wanted is None or _has(each, wanted))
    state[_SELECT] = next(alike, None) if asked is None else asked
    st.selectbox(
        "Certificate",
        list(certificates),
        index=None,
        format_func=lambda run_id: _name(certificates[run_id]),
        key=_SELECT,
        placeholder="none with these settings; choose another",
        on_change=_take,
    )
    return None if state[_SELECT] is None else certificates[state[_SELECT]]


def _take() -> None:
    st.session_state[CERTIFICATE] = st.session_state[_SELECT]


def _name(run: Run) -> str:
    """Of what does not change while it goes on: the browser keeps the name that it has shown."""
    return f"{run.title}: {run.model}, {certificate_text(run.config)}"


def _certificate(services: Services, run: Run, is_alike: bool | None) -> None:
    with st.container(horizontal=True, vertical_alignment="center"):
        st.subheader(f"Certificate {notes.plain(run.title)}", anchor=False, width="content")
        if run.is_final:  # how far it is stands above, and goes on there
            notes.status_badge(run.status)
        created = formatting.timestamp(run.created_at)
        st.caption(notes.plain(f"{run.model}: {certificate_text(run.config)}. Created {created}."), width="content")
    if is_alike is False:
        st.caption("Its settings are not those of the run above.")
    if not run.is_final:
        queue = services.queue
        if not activity.is_active(queue.live(run.run_id)) and run.run_id not in queue.queued():
            live_panel.elsewhere(run, "Its verdict is here when it ends and the page is loaded again.")
        return
    verdict, problem = _verdict_of(services, run)
    if run.status != "finished":
        notes.failure(run.status, run.error)
    notes.recording_error(services, run.run_id)
    if problem is not None:
        st.error(notes.plain(problem))
    if verdict is not None:
        st.badge(verdict.result, color=_BADGES[verdict.result])
        for reason in verdict.reasons:
            st.markdown(f"- {notes.plain(reason)}")
        st.table(pd.DataFrame(figures(verdict), columns=["Figure", "Value"]).set_index("Figure"))
        if excused := excused_rows(verdict):
            st.caption("Greedy tokens that differ and are excused: the order of sums may turn logits so close around.")
            st.dataframe(
                pd.DataFrame(excused, columns=EXCUSED_HEADERS),
                hide_index=True,
                lazy=False,
                key="speculation-certificate-excused",
            )
    notes.show(run.notices)
    with st.expander("Name and notes", icon=":material/edit:"):
        run_actions.label_and_notes(services, run)


def _verdict_of(services: Services, run: Run) -> tuple[Verdict | None, str | None]:
    """And why it cannot be read."""
    try:
        return stored_verdict(services, run.run_id), None
    except DatabaseError as error:
        return None, str(error)


def _history(services: Services, certificates: list[Run], wanted: CertificateConfig | None) -> None:
    rows = []
    for run in certificates:
        verdict, problem = _verdict_of(services, run)
        rows.append(
            {
                "Certificate": run.title,
                "Result": verdict.result if verdict else "damaged" if problem else run.status,
                "Model": run.model,
                "What": certificate_text(run.config),
                "p": None if verdict is None else f"{verdict.sampled.p_value:.2g}",
                "Total variation": None if verdict is None else f"{verdict.sampled.total_variation:.4f}",
                **({} if wanted is None else {"These settings": "yes" if _has(run, wanted) else "no"}),
                "Created": formatting.timestamp(run.created_at),
            }
        )
    with st.expander(f"All certificates ({len(rows)})", icon=":material/history:"):
        st.dataframe(
            pd.DataFrame(rows),
            hide_index=True,
            lazy=False,
            placeholder=formatting.NONE,
            key="speculation-certificates",
        )
