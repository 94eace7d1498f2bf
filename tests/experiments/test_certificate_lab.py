from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
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
from backend.experiments.certificate_greedy import NO_TOKEN, Answer, Choice, Greedy, compare_greedy
from backend.experiments.certificate_lab import answer_questions, run_lab
from backend.experiments.certificate_teacher import PlainTeacher
from backend.metrics.stats import Phase, RunEnd, RunStart
from backend.sample.rejection_sampler import RejectionSampler, VerifiedRound
from backend.sample.speculative_sampling import SpeculativeSampling
from backend.sampling_params import SamplingParams
from tests.engine.heads import let_draft_only_where_graphs_do
from tests.helpers import dense_greedy, dense_logits, make_tiny_llama

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


def certify_engines(plain: LLMEngine, speculative: LLMEngine, asked: EngineConfig = NGRAM, **settings: Any) -> Verdict:
    """The prompt holds every token of the vocabulary, so that whatever is sampled has been there and something is drafted."""
    generator = torch.Generator().manual_seed(0)
    prompt = tuple(torch.randperm(512, generator=generator).tolist())
    config = CertificateConfig.from_dict(
        {"engine": asked.to_dict(), "num_samples": 256, "max_tokens": 12, "top_k": 8} | settings
    )
    return certify(
        config,
        [prompt],
        plain=lambda questions: answer_questions(plain, questions),
        speculative=lambda questions: answer_questions(speculative, questions),
        teacher=lambda text, token_ids: [Choice(NO_TOKEN, 1.0)] * len(token_ids),
        logit_gap_bound=1e-3,
    )


def test_an_engine_with_ngrams_is_certified(engines: tuple[LLMEngine, LLMEngine]) -> None:
    verdict = certify_engines(*engines)
    assert (verdict.result, verdict.reasons) == ("exact", [])
    assert verdict.sampled_origins["recovered"] > 200
    assert verdict.greedy[0].num_checked == 12


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


def test_an_engine_whose_sampler_accepts_everything_from_the_third_drafted_token_on_is_rejected(
    engines: tuple[LLMEngine, LLMEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafts are of the target's first layer, which a third token of one seldom agrees with although it gets that far."""
    build, widths = SpeculativeSampling.build, set()

    def accept_late(*inputs: Any) -> SpeculativeSampling | None:
        sampling = build(*inputs)
        if sampling is None or not sampling.samples:
            return sampling
        draws = sampling.accept_draws.clone()
        widths.add(draws.shape[1])
        draws[:, 2:] = -1.0
        return replace(sampling, accept_draws=draws)

    drafting = EngineConfig().with_overrides(ALWAYS | {"speculative.method": "draft_model"})
    settings = {"model.name": "dummy:tiny", "scheduler.max_num_seqs": 64}
    speculative = load_engine(drafting.with_overrides(settings), lambda phase: None).engine
    try:
        right = certify_engines(engines[0], speculative, drafting, num_samples=512, top_k=2)
        monkeypatch.setattr(SpeculativeSampling, "build", staticmethod(accept_late))
        wrong = certify_engines(engines[0], speculative, drafting, num_samples=512, top_k=2)
    finally:
        speculative.executor.shutdown()
    assert (right.result, wrong.result) == ("exact", "rejected")
    assert max(widths) == 5
    # Nothing else is wrong with it.
    assert [reason.split(":")[0] for reason in wrong.reasons] == ["sampled tokens"]
    assert right.sampled_origins.keys() == {"accepted", "recovered", "bonus", "plain"}


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


def test_where_prompts_would_keep_drafts_back_every_token_behind_the_first_is_still_of_a_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More answers than requests that run at a time, by the rule of a card whose rounds have CUDA graphs."""
    let_draft_only_where_graphs_do(monkeypatch)
    settings = {"model.name": "dummy:tiny", "scheduler.max_num_seqs": 64, "scheduler.max_num_batched_tokens": 2048}
    engine = load_engine(NGRAM.with_overrides(settings), lambda phase: None).engine
    every_token = tuple(torch.randperm(512, generator=torch.Generator().manual_seed(0)).tolist())
    sampled = SamplingParams(max_tokens=4, temperature=1.0, n=16, seed=3)
    questions = [
        *(Question((*every_token, token_id), SamplingParams(max_tokens=12)) for token_id in range(3)),
        Question(every_token, sampled),
        Question(every_token, sampled),
    ]
    try:
        answers = answer_questions(engine, questions, max_requests=8)
    finally:
        engine.executor.shutdown()
    assert len(answers) == 3 + 2 * 16
    # The last token of an answer has no room for a draft.
    assert all("plain" not in answer.origins[1:-1] for answer in answers)


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
    assert start.notices[-1].startswith("64 samples are fewer than the default of 4,096")
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


def test_the_teacher_says_what_transformers_says(tmp_path: Path) -> None:
    """Of tokens behind a text, at the end of which one that ends texts; two tokens do, of which the likelier counts."""
    folder = make_tiny_llama(tmp_path / "model", eos_token_id=511)
    text, token_ids = [5, 300, 7, 258, 11], [17, 400, 3, 99]
    logits = dense_logits(folder, text + token_ids)[len(text) - 1 :]
    best = logits.max(dim=-1).values
    teacher = PlainTeacher(CertificateConfig(model=str(folder), engine=NGRAM), frozenset({80}))
    choices = teacher(text, [*token_ids, NO_TOKEN])
    gaps = [float(best[row] - logits[row, token_id]) for row, token_id in enumerate(token_ids)]
    gaps.append(float(best[4] - max(logits[4, 80], logits[4, 511])))
    assert [choice.gap for choice in choices] == pytest.approx(gaps, abs=1e-4)
    assert [choice.token_id for choice in choices] == logits.argmax(dim=-1).tolist()
    # Where plain decoding would end itself.
    ends = PlainTeacher(CertificateConfig(model=str(folder), engine=NGRAM), frozenset({int(logits[0].argmax())}))
    assert ends(text, [NO_TOKEN]) == [Choice(NO_TOKEN, 0.0)]


def test_all_tokens_behind_a_divergence_are_held_against_the_model(tmp_path: Path) -> None:
    """An answer that parts from plain decoding at its second best token, and goes on as transformers does behind that."""
    folder = make_tiny_llama(tmp_path / "model", eos_token_id=511)
    prompt = (5, 300, 7, 258, 11)
    whole = dense_greedy(folder, list(prompt), 70)
    logits = dense_logits(folder, [*prompt, *whole[:2]])[-1]
    second = int(logits.topk(2).indices[1])
    gap = float(logits.max() - logits[second])
    parted = [*whole[:2], second]
    parted += dense_greedy(folder, [*prompt, *parted], 67)
    assert len(whole) == len(parted) == 70, "no answer ends early"
    teacher = PlainTeacher(CertificateConfig(model=str(folder), engine=NGRAM), frozenset())

    def compare(token_ids: list[int]) -> Greedy:
        plain, other = (Answer(tuple(ids), ("plain",) * 70) for ids in (whole, token_ids))
        return compare_greedy(0, prompt, plain, other, teacher, 1.01 * gap)

    found = compare(parted)
    assert [astuple(each) for each in found.divergences] == [(2, whole[2], second, pytest.approx(gap, abs=1e-4), True)]
    assert (found.num_checked, found.num_forced) == (70, 68)
    worst = int(dense_logits(folder, [*prompt, *parted[:69]])[-1].argmin())
    found = compare([*parted[:69], worst])
    (excused, error) = found.divergences
    assert (excused.excused, found.error) == (True, error)
    assert (error.position, error.plain_token_id, error.token_id) == (69, parted[69], worst)
    assert found.num_checked == 69
