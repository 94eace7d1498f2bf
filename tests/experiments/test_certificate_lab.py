from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from backend.config import EngineConfig
from backend.engine.llm_engine import LLMEngine
from backend.engine.loading import load_engine
from backend.errors import RequestError
from backend.experiments import certificate_lab
from backend.experiments.certificate import Question, Verdict, certify, read_verdict
from backend.experiments.certificate_config import CertificateConfig
from backend.experiments.certificate_lab import answer_questions, run_lab
from backend.metrics.stats import Phase, RunEnd, RunStart
from backend.sample.rejection_sampler import RejectionSampler, VerifiedRound
from backend.sampling_params import SamplingParams
from tests.helpers import dense_logits, make_tiny_llama

ALWAYS = {"speculative.method": "ngram", "speculative.adaptive": False}
NGRAM = EngineConfig().with_overrides(ALWAYS)


@pytest.fixture(scope="module")
def engines() -> Iterator[tuple[LLMEngine, LLMEngine]]:
    """Plain, and with n-grams."""
    config = EngineConfig().with_overrides({"model.name": "dummy:tiny", "scheduler.max_num_seqs": 64})
    loaded = [load_engine(each, lambda phase: None).engine for each in (config, config.with_overrides(ALWAYS))]
    yield loaded[0], loaded[1]
    for engine in loaded:
        engine.executor.shutdown()


def certify_engines(plain: LLMEngine, speculative: LLMEngine, **settings: Any) -> Verdict:
    """The prompt holds every token of the vocabulary, so that whatever is sampled has been there and something is drafted."""
    generator = torch.Generator().manual_seed(0)
    prompt = tuple(torch.randperm(512, generator=generator).tolist())
    config = CertificateConfig.from_dict(
        {"engine": NGRAM.to_dict(), "num_samples": 256, "max_tokens": 12, "top_k": 8} | settings
    )
    return certify(
        config,
        [prompt],
        plain=lambda questions: answer_questions(plain, questions),
        speculative=lambda questions: answer_questions(speculative, questions),
        logit_gap=lambda token_ids: 1.0,
        logit_gap_bound=1e-3,
    )


def test_an_engine_with_ngrams_is_certified(engines: tuple[LLMEngine, LLMEngine]) -> None:
    verdict = certify_engines(*engines)
    assert (verdict.result, verdict.reasons) == ("exact", [])
    assert verdict.sampled_origins["recovered"] > 200
    assert verdict.greedy[0].num_tokens == 12


def test_an_engine_whose_sampler_accepts_everything_is_rejected(
    engines: tuple[LLMEngine, LLMEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    verify = RejectionSampler.__call__

    def accept_all(sampler: RejectionSampler, logits: torch.Tensor, *inputs: Any) -> VerifiedRound:
        draft_token_ids, num_draft_tokens = inputs[:2]
        last = logits.argmax(dim=-1).gather(1, num_draft_tokens[:, None])
        columns = torch.arange(logits.shape[1])
        tokens = torch.nn.functional.pad(draft_token_ids, (0, 1)).where(columns < num_draft_tokens[:, None], last)
        tokens = tokens.where(columns <= num_draft_tokens[:, None], -1)
        return replace(verify(sampler, logits, *inputs), token_ids=tokens, num_accepted=num_draft_tokens)

    monkeypatch.setattr(RejectionSampler, "__call__", accept_all)
    verdict = certify_engines(*engines)
    assert verdict.result == "rejected"
    assert [reason.split(":")[0] for reason in verdict.reasons][:2] == ["prompt 0", "sampled tokens"]


def test_answers_are_the_same_in_any_company(engines: tuple[LLMEngine, LLMEngine]) -> None:
    """Samples of a prompt together, or at most three requests at a time, each as one of its own."""
    questions = [
        Question((5, 6, 7, 5, 6), SamplingParams(max_tokens=4)),
        Question((8, 9, 8, 9, 8), SamplingParams(max_tokens=4, temperature=1.0, n=5, seed=3)),
    ]
    for engine in engines:
        done: list[int] = []
        together = answer_questions(engine, questions, on_step=done.append)
        assert [len(answer.token_ids) for answer in together] == [4] * 6
        assert all(len(answer.origins) == len(answer.token_ids) for answer in together)
        assert done == sorted(done)
        assert done[-1] == 6
        apart = answer_questions(engine, questions, max_requests=3)
        assert [answer.token_ids for answer in apart] == [answer.token_ids for answer in together]
    with pytest.raises(RequestError, match="the prompt is empty"):
        answer_questions(engines[0], [Question((), SamplingParams())])


class Sink:
    """Keeps what comes, and sets `cancel` at a phase."""

    def __init__(self, cancel: threading.Event, at: str = "") -> None:
        self.cancel, self.at = cancel, at
        self.phases: list[str] = []
        self.starts: list[RunStart] = []
        self.chunks: list[tuple[str, bytes]] = []

    def on_phase(self, phase: Phase) -> None:
        self.phases.append(phase.name)
        if phase.name == self.at:
            self.cancel.set()

    def on_run_start(self, start: RunStart) -> None:
        self.starts.append(start)

    def on_chunk(self, kind: str, encode: Callable[[], bytes], first_step: int, last_step: int) -> None:
        self.chunks.append((kind, encode()))


@pytest.fixture
def small(tmp_path: Path) -> CertificateConfig:
    """One prompt in which every letter occurs: whatever comes has been there, and something is drafted."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "".join(map(chr, range(32, 127)))}) + "\n")
    engine = NGRAM.with_overrides({"scheduler.max_num_seqs": 64})
    settings = {"model": "dummy:tiny", "num_samples": 64, "max_tokens": 8, "prompts": str(file)}
    return CertificateConfig.from_dict({**settings, "engine": engine.to_dict()})


def run(config: CertificateConfig, sink: Any) -> RunEnd:
    return run_lab(config, sink, sink.cancel)


def test_what_would_lose_is_certified_all_the_same(small: CertificateConfig) -> None:
    """On a CPU with 64 requests hardly any draft pays: the certificate is of rounds, and says so."""
    engine = small.engine.with_overrides({"speculative.adaptive": True})
    asked = CertificateConfig.from_dict(small.to_dict() | {"engine": engine.to_dict()})
    sink = Sink(threading.Event())
    run(asked, sink)
    ((_, data),) = sink.chunks
    assert read_verdict(data).sampled_origins.get("recovered", 0) > 0
    (start,) = sink.starts
    assert any("speculative.adaptive was turned off" in notice for notice in start.notices)
    assert start.resolved_config["engine"]["speculative"]["adaptive"] is False
    assert start.resolved_config["num_samples"] == 64


def test_a_run_gives_its_verdict_as_a_chunk(small: CertificateConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = Sink(threading.Event())
    end = run(small, sink)
    ((kind, data),) = sink.chunks
    verdict = read_verdict(data)
    assert kind == "certificate"
    assert verdict.result != "rejected"
    assert verdict.logit_gap_bound == 1e-3
    assert (end.status, end.error is None) == ("finished", verdict.result == "exact")
    (start,) = sink.starts
    assert start.notices[-1].startswith("64 samples are fewer than the 4,096 that show known faults")
    assert start.resolved_config["engine"]["speculative"]["method"] == "ngram"
    assert start.resolved_config["engine"]["scheduler"]["max_num_batched_tokens"] is not None
    assert list(dict.fromkeys(sink.phases))[-2:] == ["speculative decoding", "plain decoding"]
    # What is not exact is the error of a run that went through.
    rejected = replace(verdict, result="rejected", reasons=["one", "another"])
    monkeypatch.setattr(certificate_lab, "certify", lambda *inputs, **others: rejected)
    end = run(small, sink)
    assert (end.status, end.error) == ("finished", "rejected: one; another")


@pytest.mark.parametrize("phase", ["pulling", "loading", "speculative decoding", "plain decoding"])
def test_a_run_can_be_cancelled_at_any_time(small: CertificateConfig, phase: str) -> None:
    sink = Sink(threading.Event(), at=phase)
    assert run(small, sink).status == "cancelled"
    assert sink.phases[-1] == phase
    assert not sink.chunks


def test_the_gap_of_two_logits_is_that_of_transformers(tmp_path: Path) -> None:
    folder = make_tiny_llama(tmp_path / "model")
    token_ids = [5, 300, 7, 258, 11]
    config = CertificateConfig(model=str(folder), engine=NGRAM)
    gap = certificate_lab.LogitGaps(config)(token_ids)
    best, second = dense_logits(folder, token_ids)[-1].topk(2).values.tolist()
    assert gap == pytest.approx(best - second, abs=1e-4)
