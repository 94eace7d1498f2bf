"""Which runs, request, round and certificate the Speculation page shows: in the address and in the session."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import streamlit as st

from app.components import run_pick
from app.services import Services
from app.state import address_of, run_ids_in
from backend.analysis.same_requests import request_differences
from backend.experiments.compare import flatten
from db.run_ids import parse_run_id
from db.run_rows import Run

RUN = "speculation-run"
WITH = "speculation-with"  # a run of the same workload without speculation; None: there is none
BESIDE = "speculation-beside"  # runs whose proposers stand beside this one's; None: the page's own choice
REQUEST = "speculation-request"  # as `kv_cache_map.request_name` names it; None: the first
ROUND = "speculation-round"  # number of the first round that is drawn, from 1 on; None: where the page begins
CERTIFICATE = "speculation-certificate"  # run id of the one that is shown; None: the latest

VIEW = "view"  # which of the page's tabs is open
ROUNDS, SPEEDUP, PROPOSERS, CERTIFICATES = "Rounds", "Speedup", "Proposers", "Certificate"

_ADDRESS = "speculation-address"
_NAMES = ("run", "with", "beside", "request", "round", "certificate")
_OF_A_RUN = (WITH, BESIDE, REQUEST, ROUND)
_WHAT = "of a workload"
_MAX_DIGITS = 9  # of a round in the address
Row = Mapping[str, Any]  # of a request, by column name

_NONE = "none"  # in the address: nobody is to stand there


def pick(services: Services) -> Run | None:
    """The run that the address names, by default the one that goes on, else the newest that speculated."""
    runs = run_pick.listed(services)
    _follow_address(services, runs)
    return run_pick.choose(runs, RUN, _begin_anew, run_name) if runs else None


def write_address() -> None:
    """What is shown, so that it can be sent to somebody."""
    state = st.session_state
    beside = state.get(BESIDE)
    values = {
        "run": state.get(RUN),
        "with": state.get(WITH),
        "beside": None if beside is None else address_of(beside) or _NONE,
        "request": state.get(REQUEST),
        "round": state.get(ROUND),
        "certificate": state.get(CERTIFICATE),
    }
    wanted = {name: str(value) for name, value in values.items() if value is not None}
    state[_ADDRESS] = tuple(wanted.get(name, "") for name in _NAMES)
    for name in _NAMES:
        if name in wanted and st.query_params.get(name) != wanted[name]:
            st.query_params[name] = wanted[name]
        elif name not in wanted and name in st.query_params:
            del st.query_params[name]


def settings_of(run: Run) -> dict[str, Any]:
    """Its `speculative.*` as run, else as asked; of a run of an older version, none."""
    config = run.resolved_config or run.config
    settings = config.get("speculative") if isinstance(config, Mapping) else None
    return dict(settings) if isinstance(settings, Mapping) else {}


def method_of(run: Run) -> str | None:
    """Who drafts; None for a run without speculation."""
    method = settings_of(run).get("method")
    return method if isinstance(method, str) and method != "none" else None


def method_text(run: Run) -> str:
    """ "ngram, k = 5", "draft_model smollm2-135m, k = 3", "lookahead 14 × 5, k = 5", "synthetic at 0.7, k = 5, always",
    "eagle, trees, depth 5", or "without speculation".
    """
    method, settings = method_of(run), settings_of(run)
    if method is None:
        return "without speculation"
    rate = settings.get("synthetic_acceptance")
    name = f"{method} {settings['model']}" if settings.get("model") else method
    name = name if rate is None else f"{name} at {rate:g}"
    if method == "lookahead":
        name = f"{name} {settings.get('lookahead_window')} × {settings.get('lookahead_ngram')}"
    always = ", always" if settings.get("adaptive") is False else ""
    drafts = "trees, depth" if settings.get("tree") else "k ="
    return f"{name}, {drafts} {settings.get('num_speculative_tokens')}{always}"


def run_name(run: Run) -> str:
    """As `run_pick.run_name`, and how it speculates, where its label does not say just that."""
    name, method = run_pick.run_name(run), method_text(run)
    return name if run.label == method else f"{name}, {method}"


def same_questions(services: Services, run: Run) -> list[Run]:
    """The other finished runs of the same model and workload, newest first."""
    listed = services.repository.list(
        kind="serve", statuses={"finished"}, models={run.model} if run.model else None, limit=run_pick.MAX_LISTED
    )
    return [other for other in listed if other.run_id != run.run_id and other.workload == run.workload]


def differs_in_speculation_only(run: Run, other: Run) -> bool:
    ours, theirs = (
        {key: value for key, value in flatten(each.config).items() if not key.startswith("speculative.")}
        for each in (run, other)
    )
    return ours == theirs


def short_name(run: Run) -> str:
    """Among runs of one model and workload. A label that says how it speculates says it once."""
    method = method_text(run)
    return run.title if run.label == method else f"{run.title}: {method}"


def asked_differently(first: Iterable[Row], second: Iterable[Row]) -> list[str]:
    """As `request_differences`, but for arrivals: in a closed loop they are as late as the answers before them."""
    ours, theirs = (
        [{**row, "arrival_time": None if row["arrival_time"] is None else 0.0} for row in rows]
        for rows in (first, second)
    )
    return request_differences(ours, theirs)


def _follow_address(services: Services, runs: dict[int, Run]) -> None:
    """Take what the address says when something else than the page changed it; see to it that the run can be shown."""
    state = st.session_state
    address = tuple(st.query_params.get(name, "") for name in _NAMES)
    if address != state.get(_ADDRESS) or RUN not in state:
        _take(services, runs, dict(zip(_NAMES, address, strict=True)))
    else:  # it may be older than those that are listed, or deleted by now
        run_pick.find(services, runs, state[RUN], str(state[RUN]), _WHAT)
    if state.get(RUN) not in runs:
        for key in _OF_A_RUN:
            state[key] = None
        state[RUN] = run_pick.default(services, runs, _speculates)
    if not runs:
        del state[RUN]


def _take(services: Services, runs: dict[int, Run], address: dict[str, str]) -> None:
    state = st.session_state
    asked = parse_run_id(address["run"])
    named = None if asked is None else services.repository.get(asked)
    if named is not None and named.kind == "certificate":
        state[VIEW], asked = CERTIFICATES, None
        address = dict.fromkeys(_NAMES, "") | {"certificate": str(named.run_id)}
    state[CERTIFICATE] = parse_run_id(address["certificate"])
    run_pick.find(services, runs, asked, address["run"], _WHAT)
    state[RUN] = asked
    is_known = asked in runs or not address["run"]
    state[WITH] = parse_run_id(address["with"]) if is_known else None
    state[BESIDE] = run_ids_in(address["beside"].replace(_NONE, ""))[0] if address["beside"] and is_known else None
    state[REQUEST] = address["request"] or None if is_known else None
    state[ROUND] = _number(address["round"]) if is_known else None
    if state[RUN] is None and asked is None:
        state[RUN] = run_pick.default(services, runs, _speculates)


def _speculates(run: Run) -> bool:
    return method_of(run) is not None


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS else None


def _begin_anew() -> None:
    """Another run was chosen."""
    for key in (*_OF_A_RUN, CERTIFICATE):
        st.session_state[key] = None
