"""`servelab spec`: whether speculation gives what plain decoding gives."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app import cli_labs, formatting, terminal
from app.cli_certificate import print_verdict
from app.cli_options import ConfigSetOption, JsonOption
from app.settings_input import engine_config
from backend.errors import ConfigError

if TYPE_CHECKING:
    from backend.experiments.certificate import Verdict
    from backend.experiments.certificate_config import CertificateConfig
    from backend.metrics.live import LiveSnapshot
    from db.run_rows import Run

spec = typer.Typer(help="Speculative decoding, checked.", no_args_is_help=True)


@spec.callback()
def _group() -> None:
    """Keeps `verify` a command of its own while it is the only one."""


@spec.command()
def verify(
    model: Annotated[
        str | None,
        typer.Argument(help="A pulled model, a Hugging Face folder, or dummy:<shape>; by default model.name."),
    ] = None,
    settings: ConfigSetOption = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts", metavar="FILE", help="JSON lines with a prompt each, continued as it is. Eight ship."
        ),
    ] = None,
    samples: Annotated[
        int | None, typer.Option("--samples", help="Sampled answers by each of both; 4,096 by default.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Of a greedy answer; 48 by default.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Of sampled answers; 1 by default.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Likewise; 20.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Likewise; 0.95.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same verdict.")] = None,
    label: Annotated[str | None, typer.Option("--label", help="A name for the run.")] = None,
    no_store: Annotated[bool, typer.Option("--no-store", help="Do not record it as a run.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Compare an engine that speculates with plain decoding: equal greedy tokens, and one distribution of sampled ones.

    For example `servelab spec verify --set speculative.method=ngram`. Exit code 1 when it is rejected, and when nothing was
    drafted that could have been verified.
    """
    from app.services import start_certificate_run, stored_verdict
    from backend.experiments.certificate_config import CertificateConfig

    values: dict[str, Any] = {
        "prompts": None if prompts is None else str(prompts.absolute()),
        "num_samples": samples,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "seed": seed,
    }
    given = {name: value for name, value in values.items() if value is not None}
    engine = engine_config(None, settings or [])
    named = any(setting.partition("=")[0] == "model.name" for setting in settings or [])
    if named and model not in (None, engine.model.name):
        raise ConfigError(f"MODEL is {model!r} and model.name is {engine.model.name!r}: name one of them")
    config = CertificateConfig.from_dict({"model": model or engine.model.name, "engine": engine.to_dict(), **given})
    with (
        terminal.results() as out,
        terminal.Interruption() as interruption,
        cli_labs.services(not no_store) as services,
    ):
        run_id = start_certificate_run(services, config, label)
        if not no_store:
            terminal.note(f"run {formatting.run_name(run_id, label)}")
        terminal.note(_extent(config))
        with terminal.Status() as status:
            end = cli_labs.wait(services, run_id, interruption, status, _by_engine)
        run, verdict = services.repository.get_all([run_id])[0], stored_verdict(services, run_id)
        if as_json:
            terminal.write_document(out, _document(run, verdict, not no_store))
        elif verdict is not None:
            print_verdict(("", ""), verdict, out)
            out.write(f"{verdict.result}\n")
        for notice in run.notices:
            terminal.note(f"note: {notice}")
        cli_labs.exit_unless_finished(services, run_id, end, interruption)


def _by_engine(live: LiveSnapshot) -> tuple[str, str, float | None]:
    return live.phase.name, formatting.phase_text(live.phase), terminal.share_of(live.phase)


def _extent(config: CertificateConfig) -> str:
    """What is to be answered, for who wonders how long that takes."""
    from backend.experiments.certificate_lab import read_prompts

    num_prompts = len(read_prompts(config))
    num_sampled = min(num_prompts, config.num_sampled_prompts)
    return (
        f"each of two engines, plain and speculative, gives a greedy answer of up to {config.max_tokens:,} tokens to "
        f"{_counted(num_prompts, 'prompt')}, and {config.num_samples:,} samples in all of {_counted(num_sampled, 'prompt')}"
    )


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _document(run: Run, verdict: Verdict | None, store: bool) -> dict[str, Any]:
    return {
        "run_id": run.run_id if store else None,
        "status": run.status,
        "error": run.error,
        "model": run.model,
        "config": run.config,
        "environment": run.environment,
        "notices": run.notices,
        "verdict": None if verdict is None else verdict.to_dict(),
    }
