"""`servelab quantization`: variants of a model beside each other, recorded as a run like those of the Quantization page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from app import cli_labs, formatting, terminal
from app.cli_options import JsonOption
from backend.config import DEFAULT_MODEL

if TYPE_CHECKING:
    from db.run_rows import Run


def quantization(
    model: Annotated[
        str, typer.Argument(metavar="[MODEL]", help="A pulled model, a Hugging Face folder, or dummy:<shape>.")
    ] = DEFAULT_MODEL,
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            metavar="METHOD[:KEY=VALUE,...]",
            help="A variant, as int8, int4:bits=3,group_size=32, int4:head=int8,skip=*.down_proj, gptq or none:kv=int4; or a "
            "quantized model of the same shape, as its name or as ./folder. Repeatable; a range of them otherwise.",
        ),
    ] = None,
    text: Annotated[
        Path | None, typer.Option("--text", metavar="FILE", help="A UTF-8 text file to predict. One ships.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens of the text to read; 2,048 by default.")] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A text, or JSON lines with text or prompt, for gptq and awq. One ships."),
    ] = None,
    layers: Annotated[bool, typer.Option(help="Also the error of each layer's output.")] = True,
    speed: Annotated[bool, typer.Option(help="Also tokens per second, where they are not emulated.")] = True,
    label: Annotated[str | None, typer.Option("--label", help="A name for the run.")] = None,
    no_store: Annotated[bool, typer.Option("--no-store", help="Do not record it as a run.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure what a model gains and loses by fewer bits: size, perplexity, divergence, speed, method beside method.

    KL is in nats, delta p in percent. Exit code 1 when a variant fails; the others are measured and recorded.
    """
    from app.services import start_quantization_run
    from backend.experiments.quantization_config import QuantizationLabConfig

    values: dict[str, Any] = {
        "model": model,
        "text": None if text is None else str(text.absolute()),
        "calibration": None if calibration is None else str(calibration.absolute()),
        "layers": layers,
        "speed": speed,
    }
    values |= {name: value for name, value in (("variants", method), ("max_tokens", max_tokens)) if value is not None}
    config = QuantizationLabConfig.from_dict(values)
    with (
        terminal.results() as out,
        terminal.Interruption() as interruption,
        cli_labs.services(not no_store) as services,
    ):
        run_id = start_quantization_run(services, config, label)
        if not no_store:
            terminal.note(f"run {formatting.run_name(run_id, label)}")
        with terminal.Status() as status:
            end = cli_labs.wait(services, run_id, interruption, status)
        run, results = services.repository.get_all([run_id])[0], services.repository.quantization_results(run_id)
        if as_json:
            terminal.write_document(out, _document(run, results, not no_store))
        else:
            _print(results, out)
            for notice in run.notices:
                terminal.note(notice)
        cli_labs.exit_unless_finished(services, run_id, end, interruption)


def _document(run: Run, results: Sequence[dict[str, Any]], store: bool) -> dict[str, Any]:
    return {
        "run_id": run.run_id if store else None,
        "status": run.status,
        "error": run.error,
        "model": run.model,
        "config": run.config,
        "environment": run.environment,
        "load": run.load,
        "notices": run.notices,
        "results": [{name: value for name, value in row.items() if name != "run_id"} for row in results],
    }


def _print(results: Sequence[dict[str, Any]], out: TextIO) -> None:
    from app.quantization_texts import COLUMNS, value_text
    from backend.experiments.quantization_config import variant_name
    from backend.experiments.quantization_results import EMULATED, PEAK, columns

    names = columns(results)
    rows = [
        (variant_name(row["variant"]), *(value_text(name, row) for name in names))
        for row in results
        if not row["problem"]
    ]
    if rows:
        terminal.print_table(("Variant", *(COLUMNS[name][0] for name in names)), rows, "lr", out)
    if any(row["emulated"] for row in results):
        missing = "no speed or peak memory" if PEAK in names else "no speed"
        terminal.note(f"{missing}: {EMULATED[0].lower()}{EMULATED[1:]}")
