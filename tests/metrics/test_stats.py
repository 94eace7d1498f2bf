"""Every formula against hand-made times: known-good numbers, numpy, and the cases that trip other tools."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from backend.metrics.stats import (
    DEFINITIONS,
    Distribution,
    RequestStats,
    RunSummary,
    StepStats,
    e2el_ms,
    itl_ms,
    meets_slo,
    prefill_ms,
    queue_ms,
    summary_to_dict,
    tpot_ms,
    ttft_ms,
)
from backend.metrics.summary import SwapTotals, distribution, measured_duration_s, summarize


def make_request(times: list[float], tokens: list[int], **changes: Any) -> RequestStats:
    """A finished request that arrived at 10.0 and ran from 10.02; `times` are seconds after its arrival."""
    stats = RequestStats(
        request_id="r",
        index=0,
        warmup=False,
        status="finished",
        finish_reason="length",
        error=None,
        arrival_time=10.0,
        scheduled_time=10.02,
        emission_times=tuple(10.0 + time for time in times),
        emission_tokens=tuple(tokens),
        finish_time=10.0 + (times[-1] if times else 0.05),
        num_prompt_tokens=7,
        num_output_tokens=sum(tokens),
        num_cached_tokens=0,
        num_preemptions=0,
        prompt="hello",
        text="",
        token_ids=None,
    )
    return replace(stats, **changes)


def decode(count: int, first: float = 0.1, gap: float = 0.01) -> RequestStats:
    """`count` tokens, one per delivery."""
    return make_request([first + gap * i for i in range(count)], [1] * count)


def failed(**changes: Any) -> RequestStats:
    return make_request([], [], status="failed", finish_reason="error", error="refused", scheduled_time=None, **changes)


def test_deliveries_of_several_tokens():
    """Chunks of 3, 1, 4, 2 tokens at 100, 150, 170, 200 ms, of which one has no printable text.

    The time between chunks is no time between tokens, and tokens are counted by id, not by reading the text again
    (vllm-project/vllm#42661, CentML/flexible-inference-bench#66).
    """
    stats = make_request([0.1, 0.15, 0.17, 0.2], [3, 1, 4, 2], text=" " * 100)
    assert stats.num_output_tokens == 10
    assert tpot_ms(stats) == pytest.approx(100 / 9)
    assert itl_ms(stats) == pytest.approx([50, 20, 30])
    assert sum(itl_ms(stats)) == pytest.approx(100)
    assert ttft_ms(stats) == pytest.approx(100)
    assert e2el_ms(stats) == pytest.approx(200)
    assert summarize([stats], slo_limits={}).output_tokens == 10


def test_queue_and_prefill_add_up_to_ttft():
    stats = decode(3)
    assert queue_ms(stats) == pytest.approx(20)
    assert prefill_ms(stats) == pytest.approx(80)
    assert ttft_ms(stats) == pytest.approx(100)


def test_what_was_not_seen_is_none():
    untold = decode(2)
    assert queue_ms(replace(untold, scheduled_time=None)) is None
    assert prefill_ms(replace(untold, scheduled_time=None)) is None
    nothing = make_request([], [])
    assert (ttft_ms(nothing), tpot_ms(nothing), e2el_ms(nothing), itl_ms(nothing)) == (None, None, None, [])


def test_tpot_needs_two_tokens_at_two_times():
    assert tpot_ms(decode(1)) is None
    assert tpot_ms(make_request([0.1], [5])) is None  # all at once: no time between tokens was seen
    assert tpot_ms(decode(2, gap=0.03)) == pytest.approx(30)


def test_short_outputs_leave_the_mean_alone():
    """Output lengths 0, 1, 1, 2, 100: only the last two have a TPOT.

    The others divide by zero, or a 0 in their place drags the mean down (CentML/flexible-inference-bench#68).
    """
    summary = summarize([decode(n) for n in (0, 1, 1, 2, 100)], slo_limits={})
    assert summary.tpot_ms.count == 2
    assert summary.tpot_ms.mean == pytest.approx(10)
    assert summary.tpot_ms.min == pytest.approx(10)
    assert summary.ttft_ms.count == 4
    assert summary.itl_ms.count == 1 + 99
    assert summary.e2el_ms.count == 4
    assert summary.output_tokens == 104
    assert summary.input_tokens == 5 * 7


def test_percentiles_and_std_are_numpys():
    values = [float(value) for value in range(1, 101)]
    got = distribution(values)
    assert (got.p50, got.p95, got.p99) == pytest.approx((50.5, 95.05, 99.01))
    assert got.p90 == pytest.approx(np.percentile(values, 90))
    assert got.std == pytest.approx(np.std(values))
    assert (got.mean, got.min, got.max, got.count) == (50.5, 1.0, 100.0, 100)


def test_one_sample_is_all_percentiles():
    got = distribution([3.0])
    assert got == Distribution(mean=3, std=0, p50=3, p90=3, p95=3, p99=3, min=3, max=3, count=1)


def test_nothing_sampled_is_none_and_valid_json():
    assert distribution([None, None]) == Distribution()
    summary = summarize([], slo_limits={"ttft_ms": 200})
    assert summary.duration_s == 0
    json.dumps(summary_to_dict(summary), allow_nan=False)


def test_all_failed():
    summary = summarize([failed(), failed()], slo_limits={"ttft_ms": 200})
    assert (summary.num_requests, summary.num_failed) == (2, 2)
    assert summary.output_throughput_tok_s is None
    assert summary.total_throughput_tok_s is None
    assert summary.request_throughput_req_s is None
    assert summary.goodput_req_s is None
    assert summary.input_tokens is None
    assert summary.ttft_ms == summary.e2el_ms == Distribution()
    assert json.loads(json.dumps(summary_to_dict(summary), allow_nan=False))["ttft_ms"]["p50"] is None


def test_failed_requests_are_counted_apart():
    """3 of 10 fail, two of them after some output: none of it enters a figure (vllm-project/vllm#26478)."""
    late = make_request([0.5, 3.0], [4, 4], status="failed", finish_reason="error", error="not finite")
    summary = summarize([decode(11)] * 7 + [failed(), late, late], slo_limits={})
    assert (summary.num_requests, summary.num_failed) == (10, 3)
    assert summary.ttft_ms.count == 7
    assert summary.ttft_ms.max == pytest.approx(100)
    assert summary.output_tokens == 77
    assert summary.input_tokens == 49
    assert summary.duration_s == pytest.approx(3.0)
    assert summary.request_throughput_req_s == pytest.approx(7 / 3)


def test_cancelled_requests_enter_no_distribution():
    cut = make_request([0.5], [1], status="cancelled", finish_reason="abort")
    summary = summarize([decode(3), cut], slo_limits={})
    assert (summary.num_requests, summary.num_failed, summary.ttft_ms.count) == (2, 0, 1)


def test_throughput_is_over_first_arrival_to_last_delivery():
    second = replace(decode(11), arrival_time=10.5, emission_times=tuple(11.0 + 0.1 * i for i in range(11)))
    second = replace(second, finish_time=12.5)  # a final EOS step that delivered nothing
    requests = [second, decode(11)]
    assert measured_duration_s(requests) == pytest.approx(2.5)
    summary = summarize(requests, slo_limits={})
    assert summary.output_throughput_tok_s == pytest.approx(22 / 2.5)
    assert summary.total_throughput_tok_s == pytest.approx((22 + 14) / 2.5)
    assert summary.request_throughput_req_s == pytest.approx(2 / 2.5)
    assert summary.e2el_ms.max == pytest.approx(1500)  # to the last token, not to the end of the last step


def test_no_time_passed_gives_no_rates():
    instant = make_request([0.0], [1])
    summary = summarize([instant], slo_limits={"ttft_ms": 1})
    assert summary.duration_s == 0
    assert summary.output_throughput_tok_s is None
    assert summary.goodput_req_s is None


def test_warmup_is_left_out():
    slow = replace(decode(5, first=60.0), warmup=True, arrival_time=-100.0, num_preemptions=9)
    measured = decode(5)
    assert summarize([slow, measured], slo_limits={}) == summarize([measured], slo_limits={})


def test_goodput_counts_requests_that_meet_every_limit():
    good, late, slow = decode(11), decode(11, first=0.3), decode(11, gap=0.06)
    limits = {"ttft_ms": 200.0, "tpot_ms": 50.0}
    assert [meets_slo(request, limits) for request in (good, late, slow)] == [True, False, False]
    summary = summarize([good, late, slow, failed()], slo_limits=limits)
    assert summary.goodput_req_s == pytest.approx(1 / summary.duration_s)
    assert summarize([good], slo_limits={}).goodput_req_s is None


def test_a_missing_metric_meets_no_limit():
    assert meets_slo(decode(1), {"ttft_ms": 200.0})
    assert not meets_slo(decode(1), {"tpot_ms": 50.0})
    assert not meets_slo(decode(0), {"ttft_ms": 200.0})
    assert not meets_slo(failed(), {})


def test_what_a_target_cannot_tell_is_none():
    silent = replace(decode(3), num_prompt_tokens=None, num_preemptions=None)
    summary = summarize([silent], slo_limits={})
    assert summary.input_tokens is None
    assert summary.total_throughput_tok_s is None
    assert summary.preemptions is None
    assert summary.output_throughput_tok_s is not None
    assert summarize([replace(silent, num_preemptions=2), decode(1)], slo_limits={}).preemptions == 2


def test_ttft_of_each_priority():
    """Of finished requests; a class that had none is there with nothing, and a single one is no class."""
    late = make_request([0.9], [1], status="cancelled", finish_reason="abort", priority=10)
    requests = [decode(2, first=0.1), decode(2, first=0.3), replace(decode(2, first=0.5), priority=-2), late]
    summary = summarize([*requests, replace(decode(1), warmup=True, priority=99)], slo_limits={})
    classes = summary.ttft_ms_by_priority
    assert classes is not None
    assert list(classes) == ["-2", "0", "10"]
    assert (classes["0"].count, classes["0"].p50, classes["0"].max) == (2, pytest.approx(200), pytest.approx(300))
    assert (classes["-2"].p50, classes["10"]) == (pytest.approx(500), Distribution())
    assert json.loads(json.dumps(summary_to_dict(summary)))["ttft_ms_by_priority"]["-2"]["count"] == 1
    assert summarize(requests[:2], slo_limits={}).ttft_ms_by_priority is None


def test_what_was_swapped_is_told_where_anything_was():
    summary = summarize([decode(2)], slo_limits={}, swapped=SwapTotals(2, 300, 200))
    assert (summary.preemptions_swapped, summary.swapped_out_bytes, summary.swapped_in_bytes) == (2, 300, 200)
    for nothing in (None, SwapTotals()):
        summary = summarize([decode(2)], slo_limits={}, swapped=nothing)
        assert (summary.preemptions_swapped, summary.swapped_out_bytes, summary.swapped_in_bytes) == (None,) * 3


def test_every_figure_has_a_definition():
    names = {field.name for field in fields(RunSummary)} | {"queue_ms", "prefill_ms"}
    assert set(DEFINITIONS) == names
    for label, _, formula in DEFINITIONS.values():
        assert label
        assert formula.endswith(".")


def test_kv_cache_usage_leaves_evictable_blocks_out():
    step = StepStats(0, 2.0, 500.0, 1, 1, 1, 1, 0, 1, 1, 1, 0, 0, 3, 1, 4)
    assert step.kv_cache_usage == 3 / 8
    assert step.start_time == 1.5
    assert StepStats(0, 2.0, 500.0, 1, 1, 1, 1, 0, 1, 1, 1, 0, 0, 0, 0, 0).kv_cache_usage == 0
