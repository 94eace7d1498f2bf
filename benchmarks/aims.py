"""What the engine aims at by the protocol of `benchmarks/engine.py`, and which figures of a result fall short of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

LARGE, SMALL = "dummy:llama-3.1-8b", "dummy:smollm2-135m"

# At least so many times the peer.
MIN_RATIOS: Mapping[tuple[str, str], float] = {
    (LARGE, "decode 1"): 1.12,
    (LARGE, "decode 8"): 1.10,
    (LARGE, "decode 32"): 1.05,
    (LARGE, "decode 128"): 1.0,
    (LARGE, "prefill 1x2048"): 1.0,
    (LARGE, "prefill 16x1024"): 1.0,
    (LARGE, "mix 256"): 1.05,
    (SMALL, "decode 128"): 2.0,
    (SMALL, "mix 256"): 2.0,
}
# At most so many microseconds a step.
MAX_STEP_US: Mapping[tuple[str, str], float] = {(SMALL, "decode 1"): 600.0, (SMALL, "decode 32"): 900.0}
# The device idles for at most such a share of steady decoding.
MAX_IDLE: Mapping[tuple[str, str], float] = {
    **{(LARGE, f"idle {requests}"): 0.03 for requests in (1, 8, 32, 128, 256)},
    **{(SMALL, f"idle {requests}"): 0.10 for requests in (1, 8, 32)},
}


def missed(figures: Iterable[Mapping[str, Any]]) -> list[str]:
    """The figures that fall short, each with its aim."""
    short = []
    for figure in figures:
        key = figure["model"], figure["name"]
        step_us = figure["details"].get("step_us")
        if key in MIN_RATIOS and figure["ratio"] is not None and figure["ratio"] < MIN_RATIOS[key]:
            short.append(f"{_name(key)}, {figure['ratio']:.3f} × instead of {MIN_RATIOS[key]:.2f} ×")
        if key in MAX_STEP_US and step_us is not None and step_us > MAX_STEP_US[key]:
            short.append(f"{_name(key)}, {step_us:,.0f} us a step instead of {MAX_STEP_US[key]:,.0f}")
        if key in MAX_IDLE and figure["median"] is not None and figure["median"] > MAX_IDLE[key]:
            short.append(f"{_name(key)}, {figure['median']:.1%} instead of {MAX_IDLE[key]:.0%}")
    return short


def _name(key: tuple[str, str]) -> str:
    return f"{key[1]} of {key[0]}"
