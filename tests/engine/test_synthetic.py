"""Synthetic drafts in a real engine: accepted at the rate that was set, and nowhere taken for tokens of a model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from backend.analysis.speculation import accepted_distribution, constant_rate_length
from backend.config import EngineConfig
from backend.engine.engine_host import EngineHost
from backend.errors import ConfigError
from backend.experiments.certificate_config import CertificateConfig
from backend.experiments.certificate_lab import check_lab
from backend.experiments.quality import load_pair
from backend.metrics.speculation_ledger import Round, read_rounds
from backend.models.sources import resolve_source
from tests.engine.driving import Answer, answers, check_idle, config_of, held, submit_to
from tests.engine.test_engine_host import StepSink

LENGTH = 240  # output tokens of a request
NUM_REQUESTS = 8


def synthetic(acceptance: float, k: int, **overrides: Any) -> EngineConfig:
    settings = {"method": "synthetic", "synthetic_acceptance": acceptance, "num_speculative_tokens": k}
    speculative = {f"speculative__{key}": value for key, value in settings.items()}
    return config_of("dummy:tiny", **speculative, **overrides)


def rounds_with(host: EngineHost, config: EngineConfig, **sampling: Any) -> tuple[list[Round], list[Answer]]:
    """Those of requests with a seed each, and their answers."""
    host.load(config)
    sink = StepSink()
    host.set_sink(sink)  # type: ignore[arg-type]
    with held(host):
        collected = [
            submit_to(Answer(), host, str(seed), [10, 20, 30], seed=seed, max_tokens=LENGTH, **sampling)
            for seed in range(NUM_REQUESTS)
        ]
    assert [answer.last.finish_reason for answer in collected] == ["length"] * NUM_REQUESTS
    check_idle(host)
    host.set_sink(None)
    return [each for kind, data, *_ in sink.chunks if kind == "speculation" for each in read_rounds(data)], collected


@pytest.mark.parametrize(
    ("acceptance", "k", "sampling"),
    [(0.7, 5, {}), (0.4, 3, {"temperature": 1.0}), (0.9, 8, {})],
    ids=["greedy", "sampled", "long drafts"],
)
def test_the_acceptance_length_is_that_of_the_closed_form(
    host: EngineHost, acceptance: float, k: int, sampling: dict[str, Any]
) -> None:
    """(1 - a^(k+1)) / (1 - a), within three and a half standard errors of as many rounds. The seeds are fixed."""
    rounds, collected = rounds_with(host, synthetic(acceptance, k), **sampling)
    whole = [each for each in rounds if len(each.draft_token_ids) == k]  # the last of a request may draft fewer
    assert len(whole) > 300
    expected = constant_rate_length(acceptance, k)
    shares = accepted_distribution([acceptance] * k)
    variance = sum(share * (accepted + 1 - expected) ** 2 for accepted, share in enumerate(shares))
    measured = sum(each.num_accepted + 1 for each in whole) / len(whole)
    assert abs(measured - expected) < 3.5 * math.sqrt(variance / len(whole))
    # What is said of a round is what was delivered.
    assert all(prob == pytest.approx(acceptance, abs=2**-11) for each in rounds for prob in each.accept_probs)
    for answer in collected:
        assert len(answer.token_ids) == LENGTH
        counts = answer.last.speculation
        assert counts is not None
        origins = [origin for event in answer.events for origin in event.origins or ()]
        assert counts.num_rounds + counts.num_accepted_tokens == LENGTH - origins.count("plain")
        assert origins.count("plain") <= 2, "the prompt's, and one behind which there is nothing left to draft"


@pytest.mark.parametrize("acceptance", [0.0, 1.0])
def test_none_and_all(host: EngineHost, acceptance: float) -> None:
    rounds, _ = rounds_with(host, synthetic(acceptance, 4))
    assert rounds
    assert all(each.num_accepted == acceptance * len(each.draft_token_ids) for each in rounds)


def test_what_is_accepted_depends_on_the_seed_alone(host: EngineHost) -> None:
    """Not on the batch, not on preemption; with another seed it is something else."""

    def lengths(config: EngineConfig) -> tuple[list[list[int]], int]:
        _, collected = rounds_with(host, config)
        preemptions = sum(answer.last.num_preemptions or 0 for answer in collected)
        return [[len(event.token_ids) for event in answer.events] for answer in collected], preemptions

    free, _ = lengths(synthetic(0.6, 5))
    alone, _ = lengths(synthetic(0.6, 5, scheduler__max_num_seqs=1))
    assert alone == free
    assert len({tuple(each) for each in free}) == NUM_REQUESTS
    tight = synthetic(0.6, 5, cache__num_blocks=24, model__max_model_len=300)
    host.load(tight)
    with held(host):
        collected = [
            submit_to(Answer(), host, str(seed), [10, 20, 30], seed=seed, max_tokens=LENGTH)
            for seed in range(NUM_REQUESTS)
        ]
    assert all(len(answer.token_ids) == LENGTH for answer in collected if answer.last)
    assert sum(answer.last.num_preemptions or 0 for answer in collected) > 0
    check_idle(host)


def test_a_stop_id_ends_a_request_within_a_block(host: EngineHost) -> None:
    """Its tokens mean nothing, and are tokens like any others to what comes behind."""
    host.load(synthetic(1.0, 5))
    whole = answers(host, {"a": [1, 2, 3]}, max_tokens=30)["a"].token_ids
    at = next(index for index in range(8, 20) if whole[index] not in whole[:index])
    stopped = answers(host, {"a": [1, 2, 3]}, max_tokens=30, stop_token_ids=(whole[at],))["a"]
    assert (stopped.token_ids, stopped.finish_reason) == (whole[:at], "stop")


def test_a_run_says_that_it_is_synthetic_and_always_drafts_as_many(host: EngineHost) -> None:
    info = host.load(synthetic(0.7, 5, speculative__adaptive=True))
    assert info.resolved_config.speculative.adaptive is False
    said = [notice for notice in info.notices if "synthetic" in notice]
    assert len(said) == 1
    assert "accepted with probability 0.7" in said[0]
    assert "the tokens mean nothing" in said[0]


def test_a_model_with_tokens_that_mean_something_is_refused(host: EngineHost, tiny_llama: Path) -> None:
    config = synthetic(0.7, 5).with_overrides({"model.name": str(tiny_llama)})
    with pytest.raises(ConfigError, match="allowed are models named dummy:<shape>"):
        host.load(config)


def test_there_is_no_certificate_and_no_quality_of_it() -> None:
    engine = synthetic(0.7, 5)
    with pytest.raises(ConfigError, match="has no exactness that a certificate could test"):
        check_lab(CertificateConfig(model="dummy:tiny", engine=engine))
    with pytest.raises(ConfigError, match="'synthetic' has no quality"):
        load_pair(resolve_source("dummy:tiny"), engine, None)


def test_a_rate_and_its_method_go_together() -> None:
    with pytest.raises(ConfigError, match="needs synthetic_acceptance, from 0 to 1"):
        EngineConfig().with_overrides({"speculative.method": "synthetic"})
    with pytest.raises(ConfigError, match=r"synthetic_acceptance = 0.5 belongs to method = 'synthetic'"):
        EngineConfig().with_overrides({"speculative.method": "ngram", "speculative.synthetic_acceptance": 0.5})
    with pytest.raises(ConfigError, match=r"speculative.synthetic_acceptance = 1.5"):
        synthetic(1.5, 5)
