from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest

from benchmarks.aims import ATTENTION, LARGE, SMALL, missed, missed_speculation
from benchmarks.figures import Figure, Unit


def figure(model: str, name: str, unit: Unit, value: float, **more: Any) -> dict[str, Any]:
    return asdict(Figure.of(model, name, unit, [value], **more))


def test_what_falls_short_is_named_with_its_aim() -> None:
    figures = [
        figure(LARGE, "mix 256", "tok/s", 104.0, peer=100.0, peer_name="vLLM"),
        figure(LARGE, "decode 128", "tok/s", 100.0, peer=100.0, peer_name="vLLM"),
        figure(SMALL, "decode 1", "tok/s", 1500.0, details={"step_us": 666.7}),
        figure(SMALL, "decode 32", "tok/s", 36000.0, details={"step_us": 888.9}),
        figure(SMALL, "idle 8", "share", 0.142),
        figure(SMALL, "idle 128", "share", 0.4),  # asked up to 32 requests only
        figure(LARGE, "idle 256", "share", 0.03),
    ]
    assert missed(figures) == [
        f"mix 256 of {LARGE}, 1.040 × instead of 1.05 ×",
        f"decode 1 of {SMALL}, 667 us a step instead of 600",
        f"idle 8 of {SMALL}, 14.2% instead of 10%",
    ]


@pytest.mark.parametrize(
    ("name", "most", "above"),
    [("start, cold", 60.0, "60.1 s instead of 60 s"), ("start, warm", 20.0, "20.1 s instead of 20 s")],
)
def test_a_start_takes_so_long_at_most(name: str, most: float, above: str) -> None:
    assert missed([figure(LARGE, name, "s", most), figure(SMALL, name, "s", 1000.0)]) == []
    assert missed([figure(LARGE, name, "s", most + 0.1)]) == [f"{name} of {LARGE}, {above}"]


@pytest.mark.parametrize("order", ["scattered", "in order"])
@pytest.mark.parametrize("length", [32768, 131072])
def test_attention_of_one_token_reads_as_fast_as_this(length: int, order: str) -> None:
    name = f"decode 1x{length}, {order}"
    assert missed([figure(ATTENTION, name, "us", 40.0, share=0.80, limit="copy")]) == []
    short = [figure(ATTENTION, name, "us", 40.0, peer=1.0, share=0.796, limit="copy")]
    assert missed(short) == [f"{name} of {ATTENTION}, 79.6% of its limit instead of 80%"]


@pytest.mark.parametrize("order", ["scattered", "in order"])
@pytest.mark.parametrize("length", [2048, 8192, 32768])
def test_attention_of_a_prompt_is_as_fast_as_this_beside_torchs(length: int, order: str) -> None:
    name = f"prefill {length}, {order}"
    assert missed([figure(ATTENTION, name, "us", 100.0, peer=90.0, share=0.3, limit="matmul")]) == []
    assert missed([figure(ATTENTION, name, "us", 100.0, peer=89.0)]) == [
        f"{name} of {ATTENTION}, 0.890 × instead of 0.90 ×"
    ]


def test_scattered_blocks_cost_little_beside_blocks_in_order() -> None:
    """Speeds are the inverse of times: 97 us in order are 0.97 of the speed of 100 us scattered."""
    in_order = [figure(ATTENTION, f"{name}, in order", "us", 97.0) for name in ("decode 1x32768", "prefill 2048")]
    assert missed([*in_order, figure(ATTENTION, "decode 1x32768, scattered", "us", 100.0)]) == []
    slower = [figure(ATTENTION, f"{name}, scattered", "us", 101.0) for name in ("decode 1x32768", "prefill 2048")]
    assert missed([*slower, *in_order]) == [
        f"{name}, scattered of {ATTENTION}, 96.0% of the speed in order instead of 97%"
        for name in ("decode 1x32768", "prefill 2048")
    ]
    failed = asdict(Figure(ATTENTION, "decode 1x32768, in order", "us", error="EngineError: out of memory"))
    assert missed([slower[0], failed]) == missed(slower) == [], "without the other there is nothing to hold it against"


@pytest.mark.parametrize("model", [LARGE, SMALL])
@pytest.mark.parametrize("requests", [1, 32, 128])
def test_open_pages_cost_little(model: str, requests: int) -> None:
    name = f"dashboard {requests}"
    assert missed([figure(model, name, "share", 0.97)]) == []
    assert missed([figure(model, name, "share", 0.966)]) == [
        f"{name} of {model}, 96.6% of the speed without instead of 97%"
    ]


def test_what_was_not_measured_or_has_no_peer_is_not_short() -> None:
    names = ("mix 256", "start, cold", "dashboard 1")
    failed = [asdict(Figure(LARGE, name, "tok/s", error="EngineError: out of memory")) for name in names]
    failed.append(asdict(Figure(ATTENTION, "decode 1x32768, scattered", "us", error="EngineError: out of memory")))
    assert missed([*failed, figure(LARGE, "decode 8", "tok/s", 1.0), figure("dummy:x", "mix 256", "tok/s", 1.0)]) == []


def test_without_a_card_speculation_aims_at_texts_to_copy_only() -> None:
    row = {"requests": 1, "of_predicted": 0.5, "whole_drafts": {"num_tokens": 6, "verify_cost": 3.0}}
    rows = [
        row | {"method": "plain"},
        row | {"method": "ngram", "speedup": 1.19},
        row | {"method": "ngram", "requests": 16, "speedup": 0.5},
        row | {"method": "eagle", "speedup": 0.5},
    ]
    result = {"card": None, "options": {"copying": True}, "results": rows}
    assert missed_speculation(result) == ["ngram at 1 requests, 1.19 × plain decoding instead of 1.2 ×"]
    rows[1]["speedup"] = 1.2
    assert missed_speculation(result) == []
    rows[1]["speedup"] = 0.5
    assert missed_speculation(result | {"options": {"copying": False}}) == []
    on_a_card = missed_speculation(result | {"card": "NVIDIA H200"})
    assert "ngram at 1 requests, 0.50 × plain decoding instead of 2.0 ×" in on_a_card


@pytest.mark.parametrize(
    ("method", "requests", "whole", "is_held"),
    [
        ("eagle", 1, {"num_tokens": 6, "is_tree": False}, True),
        ("ngram", 1, {"num_tokens": 6}, True),  # as in older results
        ("eagle", 1, {"num_tokens": 6, "is_tree": True}, False),  # the tree of five nodes side by side
        ("eagle", 1, {"num_tokens": 26, "is_tree": True}, False),
        ("eagle", 1, {"num_tokens": 5, "is_tree": False}, False),
        ("eagle", 16, {"num_tokens": 6, "is_tree": False}, False),
        ("lookahead", 1, {"num_tokens": 6, "is_tree": False}, False),
        ("eagle", 1, None, False),
    ],
)
def test_the_cost_of_verifying_is_aimed_at_for_chains_of_six_tokens(
    method: str, requests: int, whole: dict[str, Any] | None, is_held: bool
) -> None:
    def costing(verify_cost: float) -> list[str]:
        drafts = None if whole is None else whole | {"verify_cost": verify_cost}
        row = {"method": method, "requests": requests, "whole_drafts": drafts}
        return missed_speculation({"card": "Card", "options": {"copying": False}, "results": [row]})

    name = f"verifying 6 tokens ({method} at {requests} requests)"
    assert costing(1.16) == ([f"{name}, 1.16 plain steps instead of 1.15"] if is_held else [])
    assert costing(1.15) == []
