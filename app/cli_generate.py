"""`servelab generate`: one prompt, one answer or several samples of it, nothing recorded."""

from __future__ import annotations

import time
from collections.abc import Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from app import formatting, terminal
from app.cli_models import progress
from app.cli_options import ConfigSetOption, JsonOption
from app.settings_input import engine_config
from backend.core.speculation import is_synthetic
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
    n: Annotated[int, typer.Option("--n", help="Samples of the prompt, which is computed once for all.")] = 1,
    priority: Annotated[
        int,
        typer.Option(
            "--priority", min=-(2**31), max=2**31 - 1, help="Lower is served first, with scheduler.policy=priority."
        ),
    ] = 0,
    settings: ConfigSetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer one prompt; the text appears as it is generated, of several samples one after the other."""
    from app.services import check_engine, new_host
    from backend.sampling_params import SamplingParams

    config = engine_config(None, settings or [])
    if model is not None:
        config = config.with_overrides({"model.name": model})
    sampling = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens, n=n)
    _check_text(prompt)
    if n > 1 and temperature == 0:
        terminal.note("note: at temperature 0 all samples are alike")
    if priority and config.scheduler.policy != "priority":
        terminal.note(
            f"note: --priority is not heeded: scheduler.policy is {config.scheduler.policy!r}, and only 'priority' does"
        )
    with terminal.results() as out:
        check_engine(config)
        host = new_host()
        try:
            _load(host, config)
            token_ids, samples = _answer(host, prompt, raw, sampling, priority, None if as_json else out)
        finally:
            host.close()
        for stats in samples:
            if stats.status == "failed":
                raise EngineError(stats.error or "the request failed")
        if as_json:
            mark = {"synthetic": True} if is_synthetic(config.to_dict()) else {}
            terminal.write_document(out, mark | _document(token_ids, samples, sampling))
    for stats in samples:
        _say_metrics(stats)
        if config.speculative.method != "none":
            _say_speculation(stats)


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
        info = host.load(config, status.show_phase)
    for notice in info.notices:
        terminal.note(f"note: {notice}")


def _answer(
    host: EngineHost, text: str, raw: bool, sampling: SamplingParams, priority: int, stream: TextIO | None
) -> tuple[list[int], list[RequestStats]]:
    """Serve the prompt, writing its text to `stream` as it comes. Returns the prompt's ids and a record for each sample."""
    from backend.engine.in_process_target import InProcessTarget
    from backend.experiments.flight import flights_of
    from backend.workload.datasets import WorkloadRequest
    from backend.workload.targets import Prompt

    prompt = Prompt(text=text, chat=not raw)
    request = WorkloadRequest(index=0, prompt=prompt, sampling=sampling, arrival_s=None, priority=priority)
    arrival_time, n = time.perf_counter(), sampling.n
    flights = flights_of("generate", request, arrival_time, SimpleQueue())
    events: dict[str, SimpleQueue[StreamEvent]] = {key: SimpleQueue() for key in flights}

    def on_event(event: StreamEvent) -> None:
        flights[event.request_id].on_event(event)
        events[event.request_id].put(event)

    token_ids = InProcessTarget(host).encode(prompt)
    host.submit("generate", token_ids, sampling, on_event, arrival_time, priority)
    for index, key in enumerate(flights):
        if n > 1:
            _write(stream, f"--- sample {index + 1} of {n}, seed {sampling.sample(index).seed}\n")
        while (event := events[key].get()).finish_reason is None:
            _write(stream, event.text)
        _write(stream, event.text + "\n")
    return token_ids, [flight.stats() for flight in flights.values()]


def _write(stream: TextIO | None, text: str) -> None:
    if stream is not None:
        stream.write(text)
        stream.flush()


def _document(prompt_token_ids: list[int], samples: Sequence[RequestStats], sampling: SamplingParams) -> dict[str, Any]:
    document: dict[str, Any] = {"prompt_token_ids": prompt_token_ids}
    if len(samples) == 1:
        return document | _answered(samples[0])
    document["samples"] = [
        {"seed": sampling.sample(index).seed, **_answered(stats)} for index, stats in enumerate(samples)
    ]
    return document | {"metrics": _totals(samples)}


def _answered(stats: RequestStats) -> dict[str, Any]:
    return {
        "token_ids": list(stats.token_ids or ()),
        "text": stats.text,
        "finish_reason": stats.finish_reason,
        "metrics": _metrics(stats),
    }


def _metrics(stats: RequestStats) -> dict[str, float | int | None]:
    from backend.metrics.stats import e2el_ms, prefill_ms, queue_ms, tpot_ms, ttft_ms

    totals = _totals([stats])
    return {
        "input_tokens": totals["input_tokens"],
        "output_tokens": totals["output_tokens"],
        "queue_ms": queue_ms(stats),
        "prefill_ms": prefill_ms(stats),
        "ttft_ms": ttft_ms(stats),
        "tpot_ms": tpot_ms(stats),
        "e2el_ms": e2el_ms(stats),
        "output_throughput_tok_s": totals["output_throughput_tok_s"],
        "total_throughput_tok_s": totals["total_throughput_tok_s"],
        "mean_acceptance_length": totals["mean_acceptance_length"],
        "draft_acceptance_rate": totals["draft_acceptance_rate"],
    }


def _totals(samples: Sequence[RequestStats]) -> dict[str, float | int | None]:
    from backend.metrics.summary import summarize

    summary = summarize(samples, slo_limits={})
    return {
        "input_tokens": summary.input_tokens,
        "output_tokens": summary.output_tokens,
        "output_throughput_tok_s": summary.output_throughput_tok_s,
        "total_throughput_tok_s": summary.total_throughput_tok_s,
        "mean_acceptance_length": summary.mean_acceptance_length,
        "draft_acceptance_rate": summary.draft_acceptance_rate,
    }


def _say_metrics(stats: RequestStats) -> None:
    metrics = _metrics(stats)
    names = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "output_throughput_tok_s": "output"}
    figures = [f"{label} {formatting.metric(name, metrics[name])}" for name, label in names.items()]
    no_text = "; this model has no text, --json gives the ids" if stats.token_ids and not stats.text else ""
    tokens = formatting.count(stats.num_output_tokens)
    terminal.note(f"{tokens} tokens, {', '.join(figures)}, ended by {stats.finish_reason}{no_text}")


def _say_speculation(stats: RequestStats) -> None:
    if not stats.num_rounds:
        terminal.note("speculation: no round")
        return
    metrics = _metrics(stats)
    terminal.note(
        f"speculation: {formatting.count(stats.num_rounds)} round{'' if stats.num_rounds == 1 else 's'}, "
        f"{formatting.count(stats.num_draft_tokens)} drafted, {formatting.count(stats.num_accepted_tokens)} accepted "
        f"({formatting.percent(metrics['draft_acceptance_rate'])}), "
        f"{formatting.number(metrics['mean_acceptance_length'])} tokens a round"
    )
