"""`servelab models`: what can be run, and how it gets here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from app import formatting, terminal
from app.cli_options import JsonOption
from backend.experiments.compare import flatten

models = typer.Typer(help="List, fetch and describe models.", no_args_is_help=True)


@models.command("list")
def list_models(as_json: JsonOption = False) -> None:
    """Models by name, and whether they are here."""
    from backend.models import sources

    with terminal.results() as out:
        found = sources.list_models()
        if as_json:
            document = [
                {
                    "name": model.name,
                    "state": model.state,
                    "description": model.description,
                    "path": str(model.path) if model.path else None,
                    "size_bytes": model.size_bytes,
                    "quantization": model.quantization,
                }
                for model in found
            ]
            terminal.write_document(out, document)
        else:
            rows = [
                (
                    model.name,
                    model.state,
                    formatting.file_size(model.size_bytes),
                    f"{model.description}: {model.quantization}" if model.quantization else model.description,
                )
                for model in found
            ]
            terminal.print_table(("Model", "State", "Size", "Description"), rows, "llrl", out)


@models.command()
def pull(name: Annotated[str, typer.Argument(metavar="MODEL", help="A name from `servelab models list`.")]) -> None:
    """Download a model and convert it, once."""
    from backend.models import sources

    with terminal.Status() as status:
        sources.pull_model(name, progress(status))
    terminal.note(f"{name} is ready")


@models.command()
def add(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="A GGUF file of a Llama-architecture model, or a folder in Hugging Face's layout, quantized or not.",
        ),
    ],
    name: Annotated[
        str | None, typer.Option("--name", help="What to call it; by default after the file or folder.")
    ] = None,
) -> None:
    """Make a model of what is already on disk: a GGUF file is converted, a folder is copied."""
    from backend.models import sources

    with terminal.Status() as status:
        source = sources.add_model(path, name, on_progress=progress(status))
    terminal.note(f"{source.name} is ready")


@models.command()
def remove(
    name: Annotated[str, typer.Argument(metavar="MODEL", help="A name from `servelab models list`.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a model's files. One that can be pulled comes back with `servelab models pull`."""
    from backend.models import sources

    found = next((model for model in sources.list_models() if model.name == name and model.path), None)
    if found is not None and not yes:
        typer.confirm(f"Delete {found.path} ({formatting.file_size(found.size_bytes)})?", abort=True, err=True)
    with terminal.Status() as status:
        sources.remove_model(name, progress(status))
    terminal.note(f"{name} is deleted")


@models.command()
def info(
    name: Annotated[str, typer.Argument(metavar="MODEL", help="A name, a Hugging Face folder, or dummy:<shape>.")],
    as_json: JsonOption = False,
) -> None:
    """What a model is made of."""
    from backend.models import sources

    with terminal.results() as out:
        described = sources.model_info(name)
        if as_json:
            terminal.write_document(out, described)
        else:
            described["size_bytes"] = formatting.file_size(described.get("size_bytes"))
            rows = [(key, formatting.setting(value)) for key, value in flatten(described).items()]
            terminal.print_table(("Property", "Value"), rows, "l", out)


def progress(status: terminal.Status) -> Callable[[str, float, float, str], None]:
    """An `on_progress` for pulls that says on `status` what is done of how much."""
    from backend.metrics.stats import Phase

    def on_progress(what: str, done: float, total: float, unit: str) -> None:
        status.show_phase(Phase(what, done, total, unit))

    return on_progress
