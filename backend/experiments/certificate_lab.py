"""A certificate of two engines, plain and speculative, one after the other, as one run of the queue. No torch at module level."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from backend.config import EngineConfig
from backend.errors import ConfigError, EngineError
from backend.experiments.certificate import CHUNK_KIND, Question, Verdict, certify
from backend.experiments.certificate_config import DEFAULT_NUM_SAMPLES, DEFAULT_PROMPTS, CertificateConfig
from backend.experiments.certificate_greedy import Answer, Choice
from backend.experiments.certificate_teacher import LOGIT_GAP_BOUNDS, PlainTeacher
from backend.metrics.environment import environment
from backend.metrics.stats import Phase, RunEnd, RunStart, StatsSink
from backend.models.sources import ensure_model, resolve_source
from backend.workload.files import kind_of, read_objects, value_at

if TYPE_CHECKING:
    from backend.engine.llm_engine import LLMEngine
    from backend.engine.loading import LoadedEngine

MAX_PROMPTS = 1000


class _Cancelled(Exception):
    """Leaves an engine's work from within."""


def check_lab(config: CertificateConfig) -> None:
    """Find what would fail the run and is known without the model. Raises `ModelError` or `ConfigError`."""
    from backend.models.sources import is_pullable

    _ = config.plain_engine
    read_prompts(config)
    if not is_pullable(config.model):
        resolve_source(config.model)


def read_prompts(config: CertificateConfig) -> list[str]:
    """Raises `ConfigError` for a file that cannot be read or holds no prompt."""
    if config.prompts is None:
        return list(DEFAULT_PROMPTS)
    prompts = []
    for where, record in read_objects(config.prompts, "the key 'prompt'"):
        prompt = value_at(record, "prompt", where)
        if not isinstance(prompt, str) or not prompt:
            raise ConfigError(f"{where}: 'prompt' is {kind_of(prompt) if prompt != '' else 'empty'}; expected a text")
        prompts.append(prompt)
        if len(prompts) > MAX_PROMPTS:
            raise ConfigError(f"{config.prompts} holds more than {MAX_PROMPTS:,} prompts")
    if not prompts:
        raise ConfigError(f"{config.prompts} holds no prompt")
    return prompts


def run_lab(config: CertificateConfig, sink: StatsSink, cancel: threading.Event) -> RunEnd:
    """Certify, and give the verdict to the sink as a chunk; returns within a step of an engine after `cancel`.

    A verdict other than "exact" is the error of a run that has finished.

    Raises:
        ServeLabError: an engine cannot be loaded, or does not answer.
    """
    try:
        verdict = _Lab(config, sink, cancel).run()
    except _Cancelled:
        return RunEnd("cancelled", time.perf_counter())
    sink.on_chunk(CHUNK_KIND, verdict.encode, 0, 0)
    error = None if verdict.result == "exact" else f"{verdict.result}: {'; '.join(verdict.reasons)}"
    return RunEnd("finished", time.perf_counter(), error=error)


def answer_questions(
    engine: LLMEngine,
    questions: Sequence[Question],
    *,
    max_requests: int | None = None,
    on_step: Callable[[int], None] = lambda num_answers: None,
) -> list[Answer]:
    """Drive an engine that has nothing else to do until all is answered, one batch of questions after another.

    Greedy questions that stand together are a batch, and so are the samples of each other one: so drafts are not held up by
    the prompts of others, as far as those of a batch fit one step, nor, where only greedy rounds have CUDA graphs, by sampling.

    Args:
        max_requests: that it has at once; None: it takes of a batch what it can.
        on_step: called after every step with the number of answers that are complete.
    Raises:
        RequestError: a question cannot be served.
        EngineError: one was not answered to its end.
    """
    token_ids: dict[str, list[int]] = {}
    origins: dict[str, list[str]] = {}
    stopped: set[str] = set()
    num_open = num_answers = num_questions = 0
    for batch in _batches(questions, max_requests):
        for question in batch:
            prompt, sampling = list(question.token_ids), question.sampling
            engine.check_request(prompt, sampling)
            for request_id in engine.add_request(str(num_questions), prompt, sampling, time.perf_counter()):
                token_ids[request_id], origins[request_id] = [], []
                num_open += 1
            num_questions += 1
        while num_open:
            for event in engine.step():
                request_id, count = event.request_id, len(event.token_ids)
                token_ids[request_id] += event.token_ids
                origins[request_id] += (event.origins or ["plain"] * count)[:count]
                if event.finish_reason is not None:
                    if event.finish_reason not in ("stop", "length"):
                        raise EngineError(event.error or f"a request ended by {event.finish_reason}")
                    if event.finish_reason == "stop":
                        stopped.add(request_id)
                    num_open, num_answers = num_open - 1, num_answers + 1
            on_step(num_answers)
    return [
        Answer(tuple(ids), tuple(origins[request_id]), request_id in stopped) for request_id, ids in token_ids.items()
    ]


def _batches(questions: Sequence[Question], max_requests: int | None) -> Iterator[list[Question]]:
    """What is asked together; samples count each by itself where there are at most `max_requests` of them."""
    for _, members in groupby(
        enumerate(questions), key=lambda each: each[0] if each[1].sampling.temperature > 0 else -1
    ):
        batch = [question for _, question in members]
        if max_requests is None:
            yield batch
            continue
        batch = [
            Question(question.token_ids, question.sampling.sample(index))
            for question in batch
            for index in range(question.sampling.n)
        ]
        yield from (batch[start : start + max_requests] for start in range(0, len(batch), max_requests))


@dataclass(slots=True)
class _Lab:
    config: CertificateConfig
    sink: StatsSink
    cancel: threading.Event

    def run(self) -> Verdict:
        from backend.tokenizer import load_tokenizer
        from backend.worker.device import choose_device

        config, engine = self.config, self.config.speculative_engine
        self._say(Phase("pulling"))
        source = ensure_model(config.model, self._on_pull)
        tokenizer = load_tokenizer(source)
        prompts = [tuple(tokenizer.encode(prompt)) for prompt in read_prompts(config)]
        teacher = PlainTeacher(config, tokenizer.eos_token_ids)
        dtype = engine.resolve(device=choose_device(engine), max_model_len=2**31 - 1).model.dtype
        return certify(
            config,
            prompts,
            speculative=lambda questions: self._answer("speculative", engine, questions),
            plain=lambda questions: self._answer("plain", config.plain_engine, questions),
            teacher=lambda text, token_ids: self._judge(teacher, text, token_ids),
            logit_gap_bound=None if engine.kernels.batch_invariant else LOGIT_GAP_BOUNDS[dtype],
        )

    def _answer(self, name: str, config: EngineConfig, questions: Sequence[Question]) -> list[Answer]:
        from backend.engine.loading import load_engine

        loaded = load_engine(config, self._say)
        total = sum(question.sampling.n for question in questions)
        try:
            if name == "speculative":
                self._start(loaded)
            # Both have the same batches, and those with speculation never too many requests for it.
            return answer_questions(
                loaded.engine,
                questions,
                max_requests=self.config.engine.speculative.max_batch,
                on_step=lambda done: self._say(Phase(f"{name} decoding", done, total, "answers")),
            )
        finally:
            loaded.engine.executor.shutdown()
            del loaded
            gc.collect()

    def _judge(self, teacher: PlainTeacher, text: Sequence[int], token_ids: Sequence[int]) -> list[Choice]:
        self._say(Phase("comparing answers"))
        return teacher(text, token_ids)

    def _start(self, loaded: LoadedEngine) -> None:
        info = loaded.info
        self.sink.on_run_start(
            RunStart(
                start_time=time.perf_counter(),
                resolved_config={**self.config.to_dict(), "engine": info.resolved_config.to_dict()},
                environment=environment(info.resolved_config.kernels.cpu_threads),
                load={**info.load, "model": dict(info.model)},
                notices=(*info.notices, *self._notices()),
                cache_state={},
                num_requests=0,
            )
        )

    def _notices(self) -> tuple[str, ...]:
        notices = ()
        if self.config.engine.speculative.adaptive:
            notices = (
                "speculative.adaptive was turned off: a certificate is of all that can be drafted, whether it pays or not.",
            )
        if self.config.num_samples >= DEFAULT_NUM_SAMPLES:
            return notices
        return (
            *notices,
            f"{self.config.num_samples:,} samples are fewer than the default of {DEFAULT_NUM_SAMPLES:,}: fewer find less. What a "
            "number of samples finds was measured on a sampler over eight tokens only, not on this model.",
        )

    def _on_pull(self, what: str, done: float, total: float, unit: str) -> None:
        self._say(Phase("pulling", done, total, unit) if total else Phase("pulling"))

    def _say(self, phase: Phase) -> None:
        if self.cancel.is_set():
            raise _Cancelled
        self.sink.on_phase(phase)
