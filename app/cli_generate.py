"""`servelab generate`: one prompt, one answer, nothing recorded."""

from __future__ import annotations

import time
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from app import formatting, terminal
from app.cli_models import progress
from app.cli_options import ConfigSetOption, JsonOption
from app.settings_input import engine_config
from backend.errors import EngineError, RequestError

if TYPE_CHECKING:
    from backend.config import EngineConfig
    from backend.engine.engine_host import EngineHost
    from backend.metrics.stats import RequestStats
    from backend.sampling_params import SamplingParams
    from backend.workload.targets import StreamEvent


def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask.")],
    model: Annotated[
        str | None, typer.Option("--model", help="A pulled model, a Hugging Face folder, or dummy:<shape>.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy; higher is more varied.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="Same seed, same answer.")] = 0,
    settings: ConfigSetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer one prompt; the text appears as it is generated."""
    from app.services import new_host
    from backend.sampling_params import SamplingParams

    config = engine_config(None, settings or [])
    if model is not None:
        config = config.with_overrides({"model.name": model})
    sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens)
    _check_text(prompt)
    with terminal.results() as out:
        host = new_host()
        try:
            _load(host, config)
            token_ids, stats = _answer(host, prompt, raw, sampling, None if as_json else out)
        finally:
            host.close()
        if stats.status == "failed":
            raise EngineError(stats.error or "the request failed")
        if as_json:
            terminal.write_document(out, _document(token_ids, stats))
    _say_metrics(stats)


def _check_text(prompt: str) -> None:
    """What can be refused before a model is loaded."""
    if not prompt:
        raise RequestError("the prompt is empty: it must hold at least one character")
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise RequestError("the prompt is not valid UTF-8 text") from None


def _load(host: EngineHost, config: EngineConfig) -> None:
    from backend.models.sources import ensure_model

    with terminal.Status() as status:
        ensure_model(config.model.name, progress(status))
        info = host.load(config, lambda phase: status.show(phase.name, formatting.phase_text(phase)))
    for notice in info.notices:
        terminal.note(f"note: {notice}")


def _answer(
    host: EngineHost, text: str, raw: bool, sampling: SamplingParams, stream: TextIO | None
) -> tuple[list[int], RequestStats]:
    """Serve the prompt, writing its text to `stream` as it comes. Returns the prompt's ids and the request's record."""
    from backend.engine.in_process_target import InProcessTarget
    from backend.experiments.flight import Flight
    from backend.workload.datasets import WorkloadRequest
    from backend.workload.targets import Prompt

    request = WorkloadRequest(index=0, prompt=Prompt(text=text, chat=not raw), sampling=sampling, arrival_s=None)
    flight = Flight("generate", request, warmup=False, arrival_time=time.perf_counter(), ended=SimpleQueue())
    events: SimpleQueue[StreamEvent] = SimpleQueue()

    def on_event(event: StreamEvent) -> None:
        flight.on_event(event)
        events.put(event)

    token_ids = InProcessTarget(host).encode(request.prompt)
    host.submit(flight.request_id, token_ids, sampling, on_event, flight.arrival_time)
    while (event := events.get()).finish_reason is None:
        _write(stream, event.text)
    _write(stream, event.text + "\n")
    return token_ids, flight.stats()


def _write(stream: TextIO | None, text: str) -> None:
    if stream is not None:
        stream.write(text)
        stream.flush()


def _document(prompt_token_ids: list[int], stats: RequestStats) -> dict[str, Any]:
    return {
        "prompt_token_ids": prompt_token_ids,
        "token_ids": list(stats.token_ids or ()),
        "text": stats.text,
        "finish_reason": stats.finish_reason,
        "metrics": _metrics(stats),
    }


def _metrics(stats: RequestStats) -> dict[str, float | int | None]:
    from backend.metrics.stats import e2el_ms, prefill_ms, queue_ms, summarize, tpot_ms, ttft_ms

    summary = summarize([stats], slo_limits={})
    return {
        "input_tokens": summary.input_tokens,
        "output_tokens": summary.output_tokens,
        "queue_ms": queue_ms(stats),
        "prefill_ms": prefill_ms(stats),
        "ttft_ms": ttft_ms(stats),
        "tpot_ms": tpot_ms(stats),
        "e2el_ms": e2el_ms(stats),
        "output_throughput_tok_s": summary.output_throughput_tok_s,
        "total_throughput_tok_s": summary.total_throughput_tok_s,
    }


def _say_metrics(stats: RequestStats) -> None:
    metrics = _metrics(stats)
    names = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "output_throughput_tok_s": "output"}
    figures = [f"{label} {formatting.metric(name, metrics[name])}" for name, label in names.items()]
    no_text = "; this model has no text, --json gives the ids" if stats.token_ids and not stats.text else ""
    tokens = formatting.count(stats.num_output_tokens)
    terminal.note(f"{tokens} tokens, {', '.join(figures)}, ended by {stats.finish_reason}{no_text}")
