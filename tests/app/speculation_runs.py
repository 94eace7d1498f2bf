"""Runs with a speculation ledger, made by hand and written by the real recorder; the truth beside their ids."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from app.services import Services
from backend.config import EngineConfig
from backend.core.output import DraftRounds
from backend.metrics.speculation_ledger import SPECULATION_KIND, Round, SpeculationLedger
from backend.metrics.stats import RequestStats, RunEnd, RunStart, StepStats
from backend.metrics.summary import summarize
from backend.workload.spec import Workload
from db.recorder import RunRecorder

NGRAM = {"model.name": "dummy:tiny", "speculative.method": "ngram", "speculative.num_speculative_tokens": 3}
PLAIN = {"model.name": "dummy:tiny"}
K = 3
LENGTHS = (30, 12, 170)  # output tokens of the measured requests
DRAFT_MS, VERIFY_MS, OTHER_MS = 1.5, 6.0, 0.5  # of a step with rounds
PLAIN_MS, PLAIN_OTHER_MS = 4.0, 1.0  # of a step of a run without
START = 100.0  # on the clock


class Made(NamedTuple):
    rounds: list[Round]  # of measured requests, in the order of the ledger
    warmup: list[Round]
    requests: list[RequestStats]
    steps: list[StepStats]
    chunks: list[Any]


def request_id(index: int) -> str:
    return f"run-{index}"


def make_run(*, lengths: Sequence[int] = LENGTHS, speculates: bool = True, seed: int = 3) -> Made:
    """One request behind the other, after one to warm up: a prefill, then rounds of letters, or plain steps."""
    rng = random.Random(seed)
    made = Made([], [], [], [], [])
    ledger, clock, step = SpeculationLedger(), START, 0
    for place, length in enumerate((5, *lengths)):
        warmup, name = place == 0, "run-warmup-0" if place == 0 else request_id(place - 1)
        arrival, emissions = clock, []
        for is_prefill in (True, *([False] * length)):
            position = sum(count for _, count in emissions)
            if position >= length:
                break
            duration, execute, emitted = PLAIN_MS + PLAIN_OTHER_MS, PLAIN_MS, 1
            if speculates and not is_prefill:
                duration, execute = DRAFT_MS + VERIFY_MS + OTHER_MS, DRAFT_MS + VERIFY_MS
                each = _draft(rng, step, name, position, length - position)
                emitted = each.num_emitted
                (made.warmup if warmup else made.rounds).append(each)
                ledger.append(step, _to_draft_rounds(each), {name: position}, {name: emitted})
            clock += duration / 1e3
            emissions.append((clock, emitted))
            made.steps.append(_step(step, clock, duration, execute, is_prefill, emitted))
            step += 1
            if step % 40 == 0 and (chunk := ledger.flush()):
                made.chunks.append(chunk)
        rounds = [each for each in (*made.warmup, *made.rounds) if each.request_id == name]
        made.requests.append(_request(name, max(0, place - 1), warmup, arrival, emissions, rounds, speculates))
    if chunk := ledger.flush():
        made.chunks.append(chunk)
    return made


def start_speculation_run(
    services: Services, settings: dict[str, Any] = NGRAM, label: str | None = None
) -> tuple[int, RunRecorder]:
    """A run under way that has no step yet."""
    config = EngineConfig().with_overrides(settings)
    run_id = services.repository.create(config.to_dict(), Workload().to_dict(), label)
    recorder = RunRecorder(services.database, run_id)
    recorder.on_run_start(
        RunStart(
            start_time=START,
            resolved_config=config.resolve(device="cpu", max_model_len=1000).to_dict(),
            environment={},
            load={"num_blocks": 30},
            notices=(),
            cache_state={"state": "cold", "num_cached_tokens": 0},
            num_requests=len(LENGTHS),
        )
    )
    recorder.flush()
    return run_id, recorder


def feed(recorder: RunRecorder, made: Made, *, num_chunks: int | None = None, requests: bool = True) -> None:
    for chunk in made.chunks[:num_chunks]:
        recorder.on_chunk(SPECULATION_KIND, *chunk)
    for step in made.steps:
        recorder.on_step(step)
    for request in made.requests if requests else ():
        recorder.on_request_finished(request)
    recorder.flush()


def end(recorder: RunRecorder, made: Made) -> None:
    measured = [request for request in made.requests if not request.warmup]
    recorder.on_run_end(RunEnd("finished", made.steps[-1].end_time, summarize(measured, slo_limits={}), None))
    recorder.close()


def add_speculation_run(
    services: Services, settings: dict[str, Any] = NGRAM, *, label: str | None = None, **options: Any
) -> tuple[int, Made]:
    """A run that is over. For `options` see `make_run`."""
    made = make_run(**options)
    run_id, recorder = start_speculation_run(services, settings, label)
    feed(recorder, made)
    end(recorder, made)
    return run_id, made


def add_plain_run(services: Services, settings: dict[str, Any] = PLAIN, label: str | None = None) -> tuple[int, Made]:
    return add_speculation_run(services, settings, label=label, speculates=False)


def _draft(rng: random.Random, step: int, name: str, position: int, remaining: int) -> Round:
    """Probabilities are multiples of 1/64, which the ledger keeps to the last bit."""
    drafted = rng.randint(1, K)
    accepted = rng.choice((0, 0, *range(drafted + 1)))
    return Round(
        step=step,
        request_id=name,
        position=position,
        draft_token_ids=tuple(rng.randrange(65, 91) for _ in range(drafted)),
        draft_probs=(1.0,) * drafted,
        target_probs=tuple(rng.randint(1, 64) / 64 for _ in range(drafted)),
        accept_probs=tuple(rng.randint(1, 64) / 64 for _ in range(drafted)),
        num_accepted=accepted,
        token_id=rng.randrange(97, 123),
        num_emitted=min(accepted + 1, remaining),
        draft_ms=DRAFT_MS,
        verify_ms=VERIFY_MS,
    )


def _to_draft_rounds(each: Round) -> DraftRounds:
    padding = K - len(each.draft_token_ids)
    probs = [[[*values, *[0.0] * padding]] for values in (each.target_probs, each.accept_probs, each.draft_probs)]
    return DraftRounds(
        request_ids=[each.request_id],
        num_draft_tokens=[len(each.draft_token_ids)],
        num_accepted=[each.num_accepted],
        token_ids=[each.token_id],
        draft_token_ids=np.array([[*each.draft_token_ids, *[0] * padding]]),
        probs=np.array(probs, dtype=np.float32),
        draft_ms=each.draft_ms,
        verify_ms=each.verify_ms,
    )


def _step(number: int, end_time: float, duration: float, execute: float, is_prefill: bool, emitted: int) -> StepStats:
    return StepStats(
        step=number,
        end_time=end_time,
        duration_ms=duration,
        schedule_ms=(duration - execute) / 2,
        execute_ms=execute,
        process_ms=(duration - execute) / 2,
        num_scheduled_requests=1,
        num_prefill_tokens=20 if is_prefill else 0,
        num_decode_tokens=0 if is_prefill else emitted,
        num_output_tokens=emitted,
        num_running=1,
        num_waiting=0,
        num_preempted=0,
        num_referenced_blocks=3,
        num_evictable_blocks=0,
        num_free_blocks=27,
    )


def _request(
    name: str,
    index: int,
    warmup: bool,
    arrival: float,
    emissions: Sequence[tuple[float, int]],
    rounds: Sequence[Round],
    speculates: bool,
) -> RequestStats:
    num_tokens = sum(count for _, count in emissions)
    accepted = sum(min(each.num_accepted, each.num_emitted) for each in rounds)
    return RequestStats(
        request_id=name,
        index=index,
        warmup=warmup,
        status="finished",
        finish_reason="length",
        error=None,
        arrival_time=arrival,
        scheduled_time=arrival,
        emission_times=tuple(time for time, _ in emissions),
        emission_tokens=tuple(count for _, count in emissions),
        finish_time=emissions[-1][0],
        num_prompt_tokens=20,
        num_output_tokens=num_tokens,
        num_cached_tokens=0,
        num_preemptions=0,
        prompt="a prompt",
        text="letters",
        token_ids=tuple(range(65, 65 + num_tokens)),
        num_rounds=len(rounds) if speculates else None,
        num_draft_tokens=sum(len(each.draft_token_ids) for each in rounds) if speculates else None,
        num_accepted_tokens=accepted if speculates else None,
    )
