"""What a run says of its speculation before it begins: where it is off, and what to expect of the drafts."""

from __future__ import annotations

from typing import Any

import pytest

from backend.config import EngineConfig
from backend.core.draft_cost import DraftCost
from backend.core.draft_length import MOST_PROBE_STEPS, PROBE_STEPS
from backend.core.speculation import resolve_speculation


def notices(draft: float = 0.0, round_cost: float = 0.0, **settings: Any) -> str:
    dotted = {key.replace("__", "."): value for key, value in settings.items()}
    config = EngineConfig().with_overrides({"speculative.method": "ngram"} | dotted)
    resolved, said = resolve_speculation(
        config.resolve(device="cpu", max_model_len=100), None, DraftCost(draft, "cpu", round_cost)
    )
    assert resolved.speculative == config.speculative
    return " ".join(said)


def test_a_run_says_what_drafts_cost_and_that_it_leaves_them_out_where_they_lose() -> None:
    """On a CPU six tokens take 2.1 plain steps: 0.22 for each drafted one; and 16 x 0.22 / (1 + 15 x 0.22) in a batch of 16."""
    assert EngineConfig().speculative.adaptive
    said = notices()
    assert "off in steps in which it would lose (speculative.adaptive)" in said
    assert "about 0.22 plain steps with one request, 0.82 with 16, and drafts pay that are accepted more often" in said
    assert f"One step in {PROBE_STEPS} to {MOST_PROBE_STEPS} drafts a token all the same" in said
    assert "switched off" not in said
    alone = notices(scheduler__max_num_seqs=1)
    assert "about 0.22 plain steps with one request, and drafts pay" in alone


def test_drafts_from_the_target_s_first_layers_begin_switched_off() -> None:
    """A third of the layers and the whole output head: 0.47 of a step to draft, more than the first guess of the rate allows."""
    said = notices(0.47, speculative__method="draft_model")
    assert "about 0.69 plain steps with one request" in said
    assert "It begins switched off." in said
    assert "the target's first layers, which were not trained to predict tokens by themselves" in said
    assert "first layers" not in notices(0.2, speculative__method="draft_model", speculative__model="other")


def test_what_a_round_costs_beside_its_tokens_is_told() -> None:
    """With 1.1 plain steps more, the 2.3 tokens that a rate of 0.6 makes of five drafts are not worth 1 + 1.1 + 5 x 0.22."""
    said = notices(round_cost=1.1)
    assert "a round 1.10 plain steps more than such a step, and a drafted token costs about 0.22 plain steps" in said
    assert "It begins switched off." in said
    assert "switched off" not in notices(round_cost=0.05)


@pytest.mark.parametrize(("draft", "round_cost", "k"), [(2.46, 0.0, 5), (0.78, 0.0, 5), (0.0, 4.0, 5), (0.3, 0.5, 1)])
def test_no_rate_is_named_that_cannot_be(draft: float, round_cost: float, k: int) -> None:
    """k drafts that are all accepted save k plain steps, and here cost as many even of a single request."""
    assert round_cost + k * (draft + 0.22) >= k
    said = notices(draft, round_cost, speculative__num_speculative_tokens=k)
    assert (
        f"about {draft + 0.22:.2f} plain steps with one request, {draft + 0.82:.2f} with 16: drafts never pay" in said
    )
    assert "more often" not in said
    assert "It begins switched off. Nothing is drafted then, unless speculative.adaptive is false." in said


def test_drafts_that_pay_with_one_request_only_are_told_apart() -> None:
    said = notices(0.3)
    assert "about 0.52 plain steps with one request, 1.12 with 16, where drafts never pay" in said
    assert "With one request those pay that are accepted more often than 0.52." in said
    assert "switched off" not in said
    assert "never" not in notices(0.3, scheduler__max_num_seqs=1)


def test_who_turns_that_off_is_told() -> None:
    said = notices(speculative__adaptive=False)
    assert "speculation goes on where it loses: speculative.adaptive is off" in said
    assert "plain steps" not in said


@pytest.mark.parametrize("method", ["llm_int8", "int8", None])
def test_outlier_columns_depend_on_the_drafts_beside_them(method: str | None) -> None:
    said = notices(quantization__method=method)
    assert ("takes its outlier columns from all tokens of a step" in said) == (method == "llm_int8")


@pytest.mark.parametrize("granularity", ["tensor", "channel"])
def test_a_scale_of_all_activations_depends_on_the_drafts_beside_them(granularity: str) -> None:
    said = notices(quantization__method="fp8", quantization__granularity=granularity)
    assert ("takes the scale of fp8 activations from all tokens of a step" in said) == (granularity == "tensor")


def test_without_speculation_nothing_is_said() -> None:
    assert notices(speculative__method="none", quantization__method="llm_int8") == ""
