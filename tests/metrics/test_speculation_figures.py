"""What several tokens at once do to a run's figures."""

from __future__ import annotations

from queue import SimpleQueue

import pytest

from backend.experiments.flight import Flight
from backend.metrics.stats import RequestStats, itl_ms, tpot_ms, ttft_ms
from backend.metrics.summary import summarize
from backend.sampling_params import SamplingParams
from backend.workload.datasets import WorkloadRequest
from backend.workload.targets import Prompt, SpeculationCounts, StreamEvent


def flown(*deliveries: tuple[float, int], text: str = "", speculation: SpeculationCounts | None = None) -> RequestStats:
    """A request that arrived at 0 and was delivered so many tokens at so many ms."""
    request = WorkloadRequest(index=0, prompt=Prompt(text="hi"), sampling=SamplingParams(), arrival_s=None)
    flight = Flight("a", request, False, 0.0, SimpleQueue())
    for place, (ms, count) in enumerate(deliveries, 1):
        event = StreamEvent("a", ms / 1e3, tuple(range(count)), text)
        if place == len(deliveries):
            event.finish_reason, event.speculation = "length", speculation
        flight.on_event(event)
    return flight.stats()


def test_mb_2_a_delivery_of_several_tokens_is_one_gap_and_counts_by_its_ids() -> None:
    """The text is a hundred spaces, which are few tokens when tokenized again, or nothing at all."""
    for text in (" " * 25, ""):
        stats = flown((100, 3), (150, 1), (170, 4), (200, 2), text=text)
        assert stats.num_output_tokens == 10
        assert ttft_ms(stats) == pytest.approx(100)
        assert tpot_ms(stats) == pytest.approx((200 - 100) / 9)
        assert itl_ms(stats) == pytest.approx([50, 20, 30])
        summary = summarize([stats], slo_limits={})
        assert (summary.output_tokens, summary.itl_ms.count) == (10, 3)


def test_rates_are_of_all_rounds_together() -> None:
    """Requests that drafted nothing, and runs without speculation, are in no denominator.

    By hand, drafted and delivered tokens of each round: a request is stopped at the third of four accepted tokens, so that of
    its last round only those before it are delivered, and its bonus token is cut off; another is stopped at its bonus token.
    """
    drafted = [[5, 5, 2, 5], [3], []]
    delivered = [[5 + 1, 0 + 1, 2 + 1, 2], [3], []]
    accepted = [[5, 0, 2, 2], [3], []]
    num_cut_off = 2
    requests = [
        flown((1, 1), (2, 1), speculation=SpeculationCounts(len(of_one), sum(of_one), sum(accepted[index])))
        for index, of_one in enumerate(drafted)
    ]
    summary = summarize([*requests, flown((1, 1))], slo_limits={})
    assert summary.draft_acceptance_rate == pytest.approx((5 + 0 + 2 + 2 + 3) / (5 + 5 + 2 + 5 + 3))
    assert summary.mean_acceptance_length == pytest.approx((sum(map(sum, delivered)) + num_cut_off) / 5)
    assert summary.mean_acceptance_length == pytest.approx(1 + 12 / 5)
    for others in (requests[2:], [flown((1, 1))]):
        nothing = summarize(others, slo_limits={})
        assert (nothing.draft_acceptance_rate, nothing.mean_acceptance_length) == (None, None)
