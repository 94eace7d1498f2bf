"""`servelab run`: a workload against an engine, recorded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app import cli_labs, formatting, terminal
from app.cli_options import JsonOption, SetOption
from app.cli_summary import print_summaries
from app.settings_input import engine_config_and_workload
from backend.core.speculation import is_synthetic

if TYPE_CHECKING:
    from app.services import Services
    from backend.config import EngineConfig
    from backend.metrics.live import LiveSnapshot
    from backend.metrics.stats import RunEnd
    from backend.workload.spec import Workload


@dataclass(frozen=True, slots=True)
class _EndedRun:
    run_id: int
    status: str
    summary: dict[str, Any] | None
    problem: str | None  # why this run is no success

    def to_dict(self) -> dict[str, Any]:
        return {"run_id": self.run_id, "status": self.status, "summary": self.summary}


def run(
    config_path: Annotated[
        Path | None, typer.Option("--config", "-c", metavar="FILE.toml", help="Engine config; defaults otherwise.")
    ] = None,
    workload_path: Annotated[
        Path | None,
        typer.Option("--workload", "-w", metavar="FILE.toml", help="Workload; the 16 built-in chat prompts otherwise."),
    ] = None,
    settings: SetOption = None,
    label: Annotated[str | None, typer.Option("--label", help="A name for the run.")] = None,
    repeat: Annotated[
        int | None, typer.Option("--repeat", min=1, help="Run it so many times, one after the other.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run a workload and record it. Ctrl-C cancels the run; what is finished by then is kept."""
    from app.services import Services

    config, workload = engine_config_and_workload(config_path, workload_path, settings or [])
    ended: list[_EndedRun] = []
    with terminal.results() as out, terminal.Interruption() as interruption:
        with Services.open() as services:
            for _ in range(repeat or 1):
                ended.append(_run_once(services, config, workload, label, interruption))
                if ended[-1].problem or interruption:
                    break
        if as_json:
            mark = {"synthetic": True} if is_synthetic(config.to_dict()) else {}
            documents = [run.to_dict() | mark for run in ended]
            terminal.write_document(out, documents[0] if repeat is None else {"runs": documents})
        elif any(run.summary for run in ended):
            print_summaries({run.run_id: run.summary for run in ended if run.summary}, out)
        if interruption:
            terminal.fail(ended[-1].problem or "interrupted")
            raise typer.Exit(interruption.exit_code)
        if ended[-1].problem:
            terminal.fail(ended[-1].problem)
            raise typer.Exit(1)


def _run_once(
    services: Services, config: EngineConfig, workload: Workload, label: str | None, interruption: terminal.Interruption
) -> _EndedRun:
    from app.services import start_run
    from backend.metrics.stats import summary_to_dict

    run_id = start_run(services, config, workload, label)
    terminal.note(f"run {formatting.run_name(run_id, label)}")
    with terminal.Status() as status:
        end = cli_labs.wait(services, run_id, interruption, status, _by_phase)
    live = services.queue.live(run_id)
    for notice in live.notices if live else ():
        terminal.note(f"note: {notice}")
    summary = None if end.summary is None else summary_to_dict(end.summary)
    return _EndedRun(run_id, end.status, summary, _problem(run_id, end) or services.recording_error(run_id))


def _by_phase(live: LiveSnapshot) -> tuple[str, str, float | None]:
    text = formatting.phase_text(live.phase)
    if live.output_tok_s is not None:
        text += f", {formatting.metric('output_throughput_tok_s', live.output_tok_s)}"
    return live.phase.name, text, terminal.share_of(live.phase)


def _problem(run_id: int, end: RunEnd) -> str | None:
    """A finished run whose requests partly failed is none either; its error counts them."""
    if end.error is not None:
        return f"run #{run_id} {end.status}: {end.error}"
    return None if end.status == "finished" else f"run #{run_id} was {end.status}"
