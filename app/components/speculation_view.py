"""The first tab of the Speculation page: a request's rounds token by token, and what those of the whole run add up to."""

from __future__ import annotations

import numpy as np
import streamlit as st

from app import formatting
from app.components import (
    figures,
    links,
    notes,
    run_actions,
    speculation_charts,
    speculation_request,
    speculation_setup,
)
from app.components.activity import polled
from app.components.live_panel import POLL_S
from app.components.speculation_pick import method_of, method_text, settings_of
from app.components.speculation_source import Source, load
from app.services import Services
from backend.analysis.draft_rounds import acceptance_length, acceptance_rate, rates_by_position, rolling_length
from backend.errors import DatabaseError
from db.run_rows import Run

MAX_POINTS = 300  # of the curve over time
_WINDOWS = (20, 200)  # rounds of a rolling mean: a twentieth of the run, but no fewer and no more
_EXPLANATION = """
A step of a model over one token waits for its weights, and over a few tokens it hardly waits longer. So somebody cheap drafts
$k$ tokens, and the model verifies all of them in one step: that is a round. A drafted token $x$ is accepted with probability
$\\min(1, p(x)/q(x))$, where $p$ is the model's probability and $q$ the draft's; at the first one that is not, the model's own
token is drawn from what is left of $p$ above $q$ (recovered), and behind a draft that was accepted whole comes one more (bonus).
That gives exactly the model's own distribution, so the figures here are about speed alone, and the certificate tests it.
With rates $r_1, r_2, \\dots$ by position and costs in plain steps

$$\\text{speedup} = \\frac{1 + r_1 + r_1 r_2 + \\dots + r_1 \\cdots r_k}{\\text{draft} + \\text{verify}}$$

Leviathan, Kalman and Matias 2023, *Fast Inference from Transformers via Speculative Decoding*; Chen et al. 2023, *Accelerating
Large Language Model Decoding with Speculative Sampling*.
"""


def show(services: Services, run: Run) -> None:
    if run.is_final:
        _run(services, run, goes_on=False)
    else:
        polled(
            lambda: services.repository.get(run.run_id),
            lambda now: now is not None and not now.is_final,
            lambda now: _run(services, now, goes_on=True),
            POLL_S,
        )


def explanation() -> None:
    with st.expander("What am I looking at?", icon=":material/help:"):
        st.markdown(_EXPLANATION)


def source_of(services: Services, run: Run) -> Source | None:
    """The run's rounds; None, with the reason on the page, where there are none."""
    if method_of(run) is None:
        st.info(
            f"Run #{run.run_id} decoded without speculation. Choose on the Run page, under Advanced, "
            "**Speculation**, who drafts; from the command line it is `--set speculative.method=ngram`.",
            icon=":material/bolt:",
        )
        speculation_setup.with_speculation(run)
        return None
    try:
        source = load(services, run)
    except DatabaseError as error:
        text = f"The rounds of run #{run.run_id} cannot be shown: {error}."
        st.error(notes.plain(text), icon=":material/broken_image:")
        return None
    if source is None:
        text = (
            f"Run #{run.run_id} has no round: nothing was drafted for any of its requests."
            if run.is_final
            else f"Run #{run.run_id} is {run.status}; its rounds appear here from the first one on."
        )
        st.info(text, icon=":material/hourglass_empty:")
        notes.show(run.notices)
        if run.is_final and settings_of(run).get("adaptive"):
            speculation_setup.always_drafting(run)
        return None
    if source.problem is not None:
        text = f"Of run #{run.run_id} rounds up to step {source.history.next_step - 1:,} are shown: {source.problem}."
        st.warning(notes.plain(text), icon=":material/warning:")
    elif run.is_final and (missing := source.num_missing):
        text = f"Of run #{run.run_id} {missing:,} rounds are not in its ledger: what is shown is of the others."
        st.warning(notes.plain(text), icon=":material/warning:")
    return source


def _run(services: Services, run: Run | None, *, goes_on: bool) -> None:
    if run is None:
        st.error("This run has been deleted.")
        return
    source = source_of(services, run)
    if source is None:
        return
    _headline(source)
    notes.show([notice for notice in run.notices if "speculat" in notice])
    if not len(source.measured.step):
        st.info("All rounds so far are of the warm-up.", icon=":material/hourglass_empty:")
        return
    speculation_request.show(services, source, choose=not goes_on)
    with st.grid(2, min_column_width=320):
        rates = rates_by_position(source.measured)
        st.vega_lite_chart(*speculation_charts.by_position(rates), key="speculation-positions")
        _over_time(source)
    if not goes_on:
        _raw(services, source)


def _headline(source: Source) -> None:
    rounds, settings = source.measured, settings_of(source.run)
    num_drafted, num_accepted = int(rounds.num_drafted.sum()), int(rounds.num_delivered.sum())
    num_rounds = len(rounds.step)
    steps, first = np.unique(rounds.step, return_index=True)
    draft_ms, verify_ms = (
        float(column[first].mean()) if num_rounds else None for column in (rounds.draft_ms, rounds.verify_ms)
    )
    # None of a run that came to its end before any request did.
    num_behind = source.num_tokens_behind_the_first if source.run.is_final else 0
    share = int(rounds.num_emitted.sum()) / num_behind if num_behind else None
    with figures.row():
        figures.figure(
            "Acceptance length",
            formatting.metric("mean_acceptance_length", acceptance_length(rounds)),
            "mean_acceptance_length",
            method_text(source.run),
        )
        figures.figure(
            "Draft acceptance",
            formatting.percent(acceptance_rate(rounds)),
            "draft_acceptance_rate",
            f"{formatting.count(num_accepted)} of {formatting.quantity(num_drafted, 'tok')}",
        )
        figures.figure(
            "Rounds",
            formatting.count(num_rounds),
            "A draft of one request and its verification; those of the warm-up are left out. Below, the share of the output "
            "behind the first tokens that came out of them.",
            None if share is None else f"{formatting.percent(min(1.0, share))} of the output",
        )
        figures.figure(
            "Draft",
            formatting.quantity(draft_ms, "ms"),
            "Mean time of drafting, over the steps that verified anything: all requests of a step are drafted for at once.",
            f"in {formatting.quantity(len(steps), 'steps')}",
        )
        figures.figure(
            "Verify",
            formatting.quantity(verify_ms, "ms"),
            "Mean time of the model over such a step, sampling and accept test included. Below, how many tokens of a request are "
            "in it: those that were drafted, in the mean, and one more.",
            "of whole trees" if settings.get("tree") else f"of {num_drafted / max(1, num_rounds):.3g} + 1 tokens",
        )


def _over_time(source: Source) -> None:
    num_rounds = len(source.measured.step)
    window = min(max(_WINDOWS[0], num_rounds // 20), _WINDOWS[1], num_rounds)
    points = rolling_length(source.measured, window, MAX_POINTS)
    steps = [step for step, _, _ in source.times]
    if not steps:
        st.caption("The times of this run's steps are not known, so nothing can be shown over time.")
        return
    seconds = np.interp([step for step, _ in points], steps, [end for _, _, end in source.times])
    longest = int(source.measured.num_drafted.max()) + 1
    curve = list(zip(seconds.tolist(), [length for _, length in points], strict=True))
    st.vega_lite_chart(*speculation_charts.over_time(curve, window, longest), key="speculation-lengths")


def _raw(services: Services, source: Source) -> None:
    run = source.run
    with st.container(horizontal=True):
        links.detail_link(run.run_id)
        links.scheduler_link(run.run_id)
        run_actions.export(services, [run], first="rounds")
