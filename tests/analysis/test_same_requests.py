from __future__ import annotations

from typing import Any

from backend.analysis.same_requests import request_differences


def rows(start: float, *arrivals: float, prompt: int = 10, output: int = 5) -> list[dict[str, Any]]:
    made = [
        {"index": index, "warmup": False, "arrival_time": start + arrival, "num_prompt_tokens": prompt + index,
         "num_output_tokens": output}
        for index, arrival in enumerate(arrivals)
    ]  # fmt: skip
    warmup = {"index": 0, "warmup": True, "arrival_time": 0.0, "num_prompt_tokens": 1, "num_output_tokens": 1}
    return [warmup, *made]


def test_runs_that_began_at_other_times_are_the_same() -> None:
    assert request_differences(rows(3.0, 0.0, 0.5, 2.0), rows(11.0, 0.0, 0.5, 2.0 + 1e-6)) == []


def test_what_differs_is_counted() -> None:
    assert request_differences(rows(1.0, 0.0, 0.5, 2.0), rows(2.0, 0.0, 0.75, 2.5)) == [
        "2 of 3 requests arrived at other times, up to 0.5 s apart"
    ]
    assert request_differences(rows(1.0, 0.0, 0.5), rows(1.0, 0.0, 0.5, 0.9, prompt=11, output=6)) == [
        "one has 2 requests and the other 3",
        "2 of 2 requests have other prompt lengths",
        "2 of 2 requests have other answer lengths",
    ]


def test_without_records_nothing_is_claimed() -> None:
    assert request_differences([], rows(1.0, 0.0)) == []
