"""Stored runs: `servelab runs list|show|delete`, `compare`, `export`. No engine, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from app import formatting, terminal
from app.cli_certificate import print_verdict
from app.cli_ledger import ledger
from app.cli_options import JsonOption, RunArgument, RunsArgument, run_ids
from app.cli_output import OutputFile
from app.cli_summary import print_summaries
from backend.core.speculation import is_synthetic
from backend.errors import DatabaseError
from backend.experiments.compare import compare_runs, flatten, metric_value

if TYPE_CHECKING:
    from app.services import Services
    from backend.experiments.certificate import Verdict
    from db.run_rows import Run

_TABLE_ROWS = 50
_MAX_LIMIT = 10**9
_ROW_NAMES = {"rounds": "rounds of speculation", "kernels": "kernel results", "quantization": "quantization results"}

runs = typer.Typer(help="List, show and delete stored runs; read their step ledgers.", no_args_is_help=True)
runs.command()(ledger)


@runs.command("list")
def list_runs(
    limit: Annotated[
        int | None,
        typer.Option(min=1, max=_MAX_LIMIT, help="Most runs to list. Otherwise: 50 in a table, all with --json."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Stored runs, newest first."""
    with terminal.results() as out, _services() as services:
        if limit is None and not as_json:
            limit = _TABLE_ROWS
        found = services.repository.list(limit=limit)
        if as_json:
            document = [
                {
                    "run_id": run.run_id,
                    "kind": run.kind,
                    "status": run.status,
                    "label": run.label,
                    "created_at": run.created_at.isoformat(),
                    "model": run.model,
                }
                for run in found
            ]
            terminal.write_document(out, document)
            return
        if not found:
            terminal.note("no runs yet; `servelab run` makes one")
            return
        rows = [
            (
                f"#{run.run_id}",
                run.status,
                formatting.timestamp(run.created_at),
                run.model or "kernel lab",
                _metric("output_throughput_tok_s", run.summary),
                _metric("ttft_ms.p50", run.summary),
                run.label or "",
            )
            for run in found
        ]
        headers = ("Run", "Status", "Created", "Model", "Output", "TTFT p50", "Label")
        terminal.print_table(headers, rows, "llllrrl", out)
        more = services.repository.count() - len(found)
        if more > 0:
            terminal.note(f"{formatting.count(more)} more; --limit {len(found) + more} shows all")


@runs.command()
def show(run: RunArgument, as_json: JsonOption = False) -> None:
    """Everything stored of one run but its requests and steps."""
    with terminal.results() as out, _services() as services:
        stored = services.repository.get_all(run_ids([run]))[0]
        verdict = _verdict(services, stored)
        if as_json:
            document = {field.name: _plain(getattr(stored, field.name)) for field in fields(stored)}
            if stored.kind == "certificate":
                document["verdict"] = None if verdict is None else verdict.to_dict()
            terminal.write_document(out, document)
            return
        facts = {
            "Status": stored.status,
            "Error": stored.error,
            "Model": stored.model or "none, the kernel lab",
            "Label": stored.label,
            "Notes": stored.notes,
            "Created": formatting.timestamp(stored.created_at),
            "Host": stored.owner_host,
            "Notices": "; ".join(notice.rstrip(".") for notice in stored.notices),
        }
        terminal.print_table(
            ("Run", f"#{stored.run_id}"), [(key, text) for key, text in facts.items() if text], "l", out
        )
        if stored.summary:
            out.write("\n")
            print_summaries({stored.run_id: stored.summary}, out)
        if verdict is not None:
            out.write("\n")
            print_verdict(("Certificate", verdict.result), verdict, out)
        sections = {
            "Config": (stored.resolved_config or stored.config, _setting),
            "Workload": (stored.workload, _setting),
            "Environment": (stored.environment, _fact),
            "Load": (stored.load, _fact),
        }
        for title, (values, show_value) in sections.items():
            if values:
                out.write("\n")
                rows = [(key, show_value(key, value)) for key, value in flatten(values).items()]
                terminal.print_table((title, ""), rows, "l", out)


@runs.command()
def delete(names: RunsArgument, yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False) -> None:
    """Delete runs with their requests and steps, for good."""
    with terminal.results(), _services() as services:
        stored = services.repository.get_all(list(dict.fromkeys(run_ids(names))))
        if not yes:
            listed = ", ".join(run.title for run in stored)
            typer.confirm(f"Delete {listed} with all records?", abort=True, err=True)
        services.repository.delete([run.run_id for run in stored])
    terminal.note(f"deleted {', '.join(f'#{run.run_id}' for run in stored)}")


def compare(
    names: RunsArgument,
    baseline: Annotated[
        str | None, typer.Option(metavar="RUN", help="Run to compare with; by default the first.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Finished runs side by side: metrics against a baseline, and the settings that differ."""
    with terminal.results() as out, _services() as services:
        stored = services.repository.get_all(run_ids(names))
        comparison = compare_runs(stored, run_ids([baseline])[0] if baseline else None)
        if failures := formatting.failed_requests({run.run_id: run.summary for run in stored}):
            terminal.note(failures)
        if synthetic := formatting.synthetic_runs({run.run_id: run.config for run in stored}):
            terminal.note(synthetic)
        if as_json:
            synthetic_ids = [run.run_id for run in stored if is_synthetic(run.config)]
            terminal.write_document(out, comparison.to_dict() | ({"synthetic": synthetic_ids} if synthetic_ids else {}))
            return
        headers = [run.title + (" (baseline)" if run.run_id == comparison.baseline else "") for run in stored]
        rows = [
            (formatting.metric_label(row.metric), *(_compared(row, index) for index in range(len(stored))))
            for row in comparison.metrics
        ]
        terminal.print_table(("Metric", *headers), rows, "lr", out)
        out.write("\n")
        if comparison.settings:
            rows = [(row.key, *(formatting.setting(value) for value in row.values)) for row in comparison.settings]
            terminal.print_table(("Setting", *headers), rows, "lr", out)
        else:
            out.write("The settings are the same.\n")


def export(
    names: RunsArgument,
    output: Annotated[str, typer.Option("--output", "-o", metavar="PATH", help="File to write; - is stdout.")],
    file_format: Annotated[Literal["json", "csv"], typer.Option("--format", help="json or csv.")],
    table: Annotated[
        Literal["requests", "steps", "rounds", "runs", "kernels", "quantization"] | None,
        typer.Option(
            "--table",
            help="What to export; rounds are of speculation, each with its drafts and what became of them. Otherwise: requests "
            "(of a lab's runs, their results) in CSV, runs with their requests and steps in JSON.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that exists.")] = False,
) -> None:
    """Write stored runs to a file."""
    from app.run_export import export_stored_runs, runs_without

    # Within `results` the device named /dev/stdout is stderr.
    file = None if output in ("-", "/dev/stdout") else OutputFile.find(output, force=force)
    with terminal.results() as out, _services() as services:
        ids = run_ids(names)
        data = export_stored_runs(services, ids, file_format, table)
        if table and (empty := runs_without(services, ids, table)):
            named = ", ".join(f"#{run_id}" for run_id in empty)
            terminal.note(f"note: no {_ROW_NAMES.get(table, table)} in {'runs' if len(empty) > 1 else 'run'} {named}")
        if file is None:
            out.buffer.write(data)
            return
    file.write(data)
    terminal.note(f"wrote {output} ({formatting.file_size(len(data))})")


def _services() -> Services:
    from app.services import Services

    return Services.open()


def _verdict(services: Services, run: Run) -> Verdict | None:
    """Of a certificate; one that is damaged is said and shown without."""
    from app.services import stored_verdict

    if run.kind != "certificate":
        return None
    try:
        return stored_verdict(services, run.run_id)
    except DatabaseError as error:
        terminal.note(f"note: {error}")
        return None


def _metric(name: str, summary: Mapping[str, Any] | None) -> str:
    return formatting.metric(name, metric_value(summary, name))


def _compared(row: Any, index: int) -> str:
    text = formatting.metric(row.metric, row.values[index])
    change = row.differences[index]
    return text if change is None else f"{text} ({formatting.difference(change)})"


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, datetime) else value


def _setting(_key: str, value: Any) -> str:
    """Exact, so that it can be typed again."""
    return formatting.setting(value)


def _fact(key: str, value: Any) -> str:
    if key.endswith("_bytes"):
        return formatting.memory(value)
    return formatting.duration(value) if key.endswith("_seconds") else formatting.setting(value)
