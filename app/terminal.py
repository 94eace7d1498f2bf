"""Where the command line writes: results on stdout, everything else on stderr.

Nothing here imports the engine, and rich only where something is drawn.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, TextIO

import typer

from app import formatting
from backend.errors import ServeLabError

if TYPE_CHECKING:
    from backend.metrics.stats import Phase

PLAIN_WIDTH = 200  # columns of a table that goes into a file or a pipe, where nothing wraps
_SECONDS_BETWEEN_LINES = 1.0  # of a status without a terminal: what is quick has no tenths


def open_closed_streams() -> None:
    """Put the null device where standard streams were closed, so that no file opened later gets their numbers.

    A closed stdin is then empty; stdout's is opened for reading, so that writing to it still fails.
    """
    for number, name, flags in ((0, "stdin", os.O_RDONLY), (1, "stdout", os.O_RDONLY), (2, "stderr", os.O_WRONLY)):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, flags)  # the lowest free number, which is this stream's
            stream = open(descriptor, "w" if number else "r", closefd=False)  # noqa: SIM115  for the process's life
            setattr(sys, name, stream)


@contextmanager
def checked_stdout() -> Iterator[None]:
    """Within, output that cannot be written to stdout raises one `ServeLabError`, by the end of the block at the latest.

    Python would say so only when it exits, in a traceback and with a code of its own.
    """
    stdout = sys.stdout
    if not _is_descriptor(stdout, 1):
        yield  # a test's or an embedder's
        return
    stdout.flush()
    sys.stdout = checked = _text_file(1, stdout.encoding, stdout.errors or "strict")
    try:
        yield
    finally:
        sys.stdout = stdout
        checked.flush()


@contextmanager
def results() -> Iterator[TextIO]:
    """Yield the real stdout, and send to stderr whatever else prints meanwhile: libraries, child processes."""
    stdout = sys.stdout
    stdout.flush()
    real = None
    if _is_descriptor(stdout, 1):
        real = os.dup(1)
        os.dup2(2, 1)
    sys.stdout = sys.stderr
    try:
        if real is None:
            yield stdout
        else:
            # "replace": a dash that an old locale cannot show is no reason to fail.
            with _text_file(real, stdout.encoding, "replace") as out:
                yield out
    finally:
        sys.stdout = stdout
        if real is not None:
            os.dup2(real, 1)
            os.close(real)


class _Stdout(io.FileIO):
    """A descriptor whose first failing write raises `ServeLabError`; what comes later is dropped, as there is no place for it."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._has_failed = False

    def write(self, data: Any, /) -> int | None:
        if self._has_failed:
            return len(data)
        try:
            return super().write(data)
        except OSError as error:
            self._has_failed = True
            if isinstance(error, BrokenPipeError):
                raise  # who reads has enough: no error, and typer ends the command quietly
            raise ServeLabError(f"cannot write to stdout: {error.strerror}") from None


def _text_file(descriptor: int, encoding: str, errors: str) -> io.TextIOWrapper:
    raw = _Stdout(descriptor)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, errors, line_buffering=raw.isatty())


def _is_descriptor(stream: TextIO, number: int) -> bool:
    try:
        return stream.fileno() == number
    except (OSError, ValueError):
        return False


def write_document(out: TextIO, document: Any) -> None:
    """Write one JSON document. It is plain ASCII, whatever the terminal's encoding."""
    out.write(json.dumps(document, allow_nan=False) + "\n")
    out.flush()


def note(message: str) -> None:
    """One line on stderr."""
    typer.echo(" ".join(message.split()), err=True)


def fail(message: str) -> None:
    """One line on stderr that says what went wrong."""
    typer.secho("error: ", fg=typer.colors.RED, nl=False, err=True)
    note(message)


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]], align: str, out: TextIO) -> None:
    """Write a table.

    Args:
        align: a letter per column, `l` or `r`; the last one goes on for the rest.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, header in enumerate(headers):
        right = align[min(index, len(align) - 1)] == "r"
        table.add_column(Text(header), justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # Text: labels and prompts are not markup
    Console(file=out, width=None if out.isatty() else PLAIN_WIDTH).print(table)


class Status:
    """What is going on, on stderr: one line that changes on a terminal, otherwise one for each topic and tenth of it."""

    def __init__(self) -> None:
        self._stream: TextIO = sys.stderr
        self._topic: str | None = None
        self._tenths = 0  # of the topic, that were done when the last line was written
        self._written_at = 0.0
        self._live: Any = None

    def __enter__(self) -> Status:
        if self._stream.isatty():
            from rich.console import Console
            from rich.live import Live

            # No refresh thread: it would take the interpreter from the step loop. `show` draws.
            self._live = Live(console=Console(file=self._stream), auto_refresh=False, transient=True)
            self._live.start()
        return self

    def show(self, topic: str, text: str | None = None, share: float | None = None) -> None:
        """Say `text` (by default the topic).

        Without a terminal a new topic is printed, and the text of one that goes on at each further tenth of it, but no more
        often than once a second.

        Args:
            share: of the topic that is done, 0 to 1; None where that cannot be told.
        """
        tenths = int(10 * (share or 0) + 1e-9)
        if self._live is not None:
            from rich.text import Text

            self._live.update(Text(text or topic), refresh=True)
        elif topic != self._topic:
            self._write(topic, tenths)
        elif tenths < self._tenths:
            self._tenths = tenths  # the topic has begun again
        elif tenths > self._tenths and time.monotonic() - self._written_at >= _SECONDS_BETWEEN_LINES:
            self._write(text or topic, tenths)
        self._topic = topic

    def show_phase(self, phase: Phase) -> None:
        """`show` what a phase says of itself, its name being the topic."""
        self.show(phase.name, formatting.phase_text(phase), share_of(phase))

    def _write(self, line: str, tenths: int) -> None:
        self._stream.write(f"{line}\n")
        self._stream.flush()
        self._tenths, self._written_at = tenths, time.monotonic()

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def share_of(phase: Phase) -> float | None:
    """How much of a phase is done, 0 to 1; None where it does not tell."""
    return phase.done / phase.total if phase.done is not None and phase.total else None


class Interruption:
    """Ctrl-C and SIGTERM as a flag, so that what runs is cancelled and recorded rather than torn down.

    The second signal ends the process at once.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def __bool__(self) -> bool:
        return self.signal_number is not None

    @property
    def exit_code(self) -> int:
        """128 + signal number, as shells report it: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + (self.signal_number or signal.SIGINT)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number is not None:
            os._exit(128 + number)
        self.signal_number = number
