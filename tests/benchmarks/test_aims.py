from __future__ import annotations

from dataclasses import asdict
from typing import Any

from benchmarks.aims import LARGE, SMALL, missed, missed_speculation
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


def test_what_was_not_measured_or_has_no_peer_is_not_short() -> None:
    failed = asdict(Figure(LARGE, "mix 256", "tok/s", error="EngineError: out of memory"))
    assert missed([failed, figure(LARGE, "decode 8", "tok/s", 1.0), figure("dummy:x", "mix 256", "tok/s", 1.0)]) == []


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
