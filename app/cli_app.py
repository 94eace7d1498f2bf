"""`servelab app`: the dashboard, in this very process, so that ending it ends everything."""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from backend.errors import ServeLabError

ADDRESS = "127.0.0.1"
DEFAULT_PORT = 8501

_REPOSITORY = Path(__file__).resolve().parents[1]


def app_command(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port on 127.0.0.1.")] = DEFAULT_PORT,
) -> None:
    """Serve the dashboard until Ctrl-C or SIGTERM."""
    check_port(port)
    _start(port)


def check_port(port: int) -> None:
    """Raise `ServeLabError` when nothing can listen on `port`."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((ADDRESS, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                reason = f"port {port} is in use on {ADDRESS}"
            else:
                reason = f"port {port} cannot be used on {ADDRESS}: {os.strerror(error.errno or 0)}"
            raise ServeLabError(
                f"{reason}; choose another one, with --port 8600 or make run PORT=8600 for instance"
            ) from None


def _start(port: int) -> None:
    from app.services import Services
    from backend.compat import check_kernels_package, configure_cpu_environment

    configure_cpu_environment()
    check_kernels_package()
    Services.open().close()  # a database that cannot be opened is one line here, and a server that gives up there
    # Streamlit looks for .streamlit/config.toml beside what it takes for the script, wherever the user has called us.
    sys.argv = [str(_REPOSITORY / "servelab")]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the server raises it again once it has shut down
    with suppress(KeyboardInterrupt):
        from app.main import app

        typer.echo(f"ServeLab is on http://{ADDRESS}:{port} (Ctrl-C ends it)")
        app.run(config={"server.port": port, "server.address": ADDRESS, "logger.hideWelcomeMessage": True})
