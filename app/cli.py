"""`servelab`: the command line. Every command imports what it needs when it runs, so that help and lists answer at once."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType

import typer

from app import terminal
from app.cli_app import app_command
from app.cli_doctor import doctor
from app.cli_generate import generate
from app.cli_heads import heads
from app.cli_kernels import kernels
from app.cli_kv_quality import kv_quality
from app.cli_models import models
from app.cli_quality import quality
from app.cli_quantization import quantization
from app.cli_quantize import quantize
from app.cli_run import run
from app.cli_runs import compare, export, runs
from app.cli_spec import spec
from backend.errors import ServeLabError

cli = typer.Typer(
    name="servelab",
    help="An LLM-inference laboratory: a dashboard that drives an in-process engine and records every run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
cli.add_typer(models, name="models")
cli.command()(generate)
cli.command()(run)
cli.add_typer(runs, name="runs")
cli.command()(compare)
cli.command()(export)
cli.add_typer(kernels, name="kernels")
cli.command(name="kv-quality")(kv_quality)
cli.command()(quality)
cli.command()(quantization)
cli.command()(quantize)
cli.add_typer(heads, name="heads")
cli.add_typer(spec, name="spec")
cli.command()(doctor)
cli.command(name="app")(app_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code: 0 on success, 1 on failure, 2 for wrong usage, 128 + n for signal n.

    Every failure is one line on stderr; SERVELAB_DEBUG=1 adds the traceback, and the engine checks its blocks at every step.
    """
    terminal.open_closed_streams()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        with terminal.checked_stdout():
            return cli(args=arguments, prog_name="servelab", standalone_mode=False) or 0
    except ServeLabError as error:
        _print_traceback()
        terminal.fail(str(error))
        return 1
    except typer.TyperException as error:  # wrong usage: an unknown option, a missing argument
        if error.format_message():  # empty where the help was asked for and has been shown
            terminal.fail(_usage_message(error))
        return error.exit_code
    except typer.Abort:
        terminal.fail("not confirmed; nothing was done")
        return 1
    except Exception as error:
        _print_traceback()
        terminal.fail(f"{type(error).__name__}: {error}")
        return 1


def _usage_message(error: typer.TyperException) -> str:
    context = getattr(error, "ctx", None)
    hint = f" (see {context.command_path} --help)" if context is not None else ""
    return error.format_message().replace("Value error, ", "") + hint  # pydantic's, by way of typer


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _print_traceback() -> None:
    if os.environ.get("SERVELAB_DEBUG"):
        traceback.print_exc()


if __name__ == "__main__":
    sys.exit(main())
