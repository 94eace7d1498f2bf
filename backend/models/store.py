"""Models by name on disk: one folder each in `models_home()`, complete or not used.

A model is written to a folder beside its place (`.partial/<name>/<random>`), flushed, given its manifest last, and renamed
into place. The manifest lists every file with its size: a folder without one, or with a file of another size, is never
used. A lock per name (released by the system when its owner dies) lets one process at a time build a model; what a dead
one left behind is removed by the next.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from backend.errors import ModelError
from backend.paths import models_home

MANIFEST_NAME = "servelab.json"
# To be raised when a conversion gives other files than before: older folders are then built afresh.
_FORMAT = 1
_LOCK_POLL_S = 0.2
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class Manifest:
    """What a model folder holds and where it came from.

    Attributes:
        gguf_sha256: of the file that it was converted from; None for a model that was no GGUF file.
        files: name -> bytes.
        files_sha256: of the files' names and contents, for a model that was no GGUF file.
        quantization: in words, how its layers are stored; None: as they are.
    """

    description: str
    license: str | None
    origin: str
    gguf_sha256: str | None
    num_tensors: int
    num_parameters: int
    files: dict[str, int]
    format: int = _FORMAT
    files_sha256: str | None = None
    quantization: str | None = None

    @property
    def size_bytes(self) -> int:
        return sum(self.files.values())

    @property
    def sha256(self) -> str | None:
        """What tells two contents apart."""
        return self.gguf_sha256 or self.files_sha256


def check_name(name: str) -> None:
    """Raise `ModelError` for what cannot name a model."""
    if not _NAME.fullmatch(name):
        raise ModelError(
            f"{name!r} cannot name a model; allowed: letters, digits, and . _ - after the first of them, 100 in all"
        )


def model_folder(name: str) -> Path:
    return models_home() / name


def stored_names() -> list[str]:
    """Names of all model folders, damaged ones included."""
    try:
        return sorted(entry.name for entry in models_home().iterdir() if entry.is_dir() and entry.name[0] != ".")
    except OSError:  # missing, or not to be read: what needs the folder says so
        return []


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a complete model folder.

    Raises:
        ModelError: it lacks a manifest, or a file is missing or of another size; the message is what is wrong, without
            the remedy.
    """
    path = folder / MANIFEST_NAME
    try:
        manifest = Manifest(**json.loads(path.read_text(encoding="utf-8")))
        files = list(manifest.files.items())
    except (OSError, ValueError, TypeError, AttributeError):
        raise ModelError(f"{folder} is incomplete: {MANIFEST_NAME} is missing or unreadable") from None
    if manifest.format != _FORMAT:
        raise ModelError(f"{folder} was converted by another version of ServeLab")
    for name, size in files:
        try:
            found = (folder / name).stat().st_size
        except OSError:
            raise ModelError(f"{folder} is damaged: {name} is missing") from None
        if found != size:
            raise ModelError(f"{folder} is damaged: {name} has {found:,} bytes instead of {size:,}")
    return manifest


def is_complete(name: str) -> bool:
    try:
        read_manifest(model_folder(name))
    except ModelError:
        return False
    return True


@contextlib.contextmanager
def building(name: str, on_wait: Callable[[], None]) -> Iterator[Path]:
    """Hold the lock on `name` and lend an empty folder to build the model in; both are gone afterwards.

    Args:
        name: the model's name.
        on_wait: called repeatedly while another process holds the lock.

    Raises:
        ModelError: the models' folder cannot be written.
    """
    home = models_home()
    with _disk_errors(home):
        partial = home / ".partial" / name
        (home / ".locks").mkdir(parents=True, exist_ok=True)
        with (home / ".locks" / name).open("w") as lock:
            _acquire(lock.fileno(), on_wait)
            partial.mkdir(parents=True, exist_ok=True)
            for stale in partial.iterdir():
                shutil.rmtree(stale, ignore_errors=True)
            folder = Path(tempfile.mkdtemp(dir=partial))
            try:
                yield folder
            finally:
                shutil.rmtree(folder, ignore_errors=True)
                with contextlib.suppress(OSError):
                    partial.rmdir()


def publish(folder: Path, name: str, manifest: Manifest) -> None:
    """Flush the files in `folder`, add the manifest and move the folder to the model's place. Needs the lock.

    A folder already there is replaced. Readers see the old one, none, or the new one, each whole.
    """
    for path in folder.iterdir():
        flush(path)
    write_manifest(folder, manifest)
    flush(folder / MANIFEST_NAME)
    flush(folder)
    target = model_folder(name)
    if target.exists():
        # Moved aside first: removing takes a while, and a half removed folder would still have its manifest.
        os.rename(target, folder.parent / "replaced")
        shutil.rmtree(folder.parent / "replaced")
    os.rename(folder, target)
    flush(target.parent)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """The last file of a folder: with it, it is a model."""
    (folder / MANIFEST_NAME).write_text(json.dumps(asdict(manifest), indent=2) + "\n", encoding="utf-8")


def remove(name: str, on_wait: Callable[[], None]) -> None:
    """Remove a model's folder, whole or damaged. Who has it open keeps what is mapped of it.

    Args:
        on_wait: called repeatedly while another process builds it.
    Raises:
        ModelError: there is none of that name, or it cannot be removed.
    """
    if name not in stored_names():
        stored = f"; there are: {', '.join(stored_names())}" if stored_names() else ""
        raise ModelError(f"there is no stored model {name[:100]!r}{stored}")
    with building(name, on_wait) as folder:
        # Out of its place in one step: whoever resolves the name finds all of it, or nothing.
        os.rename(model_folder(name), folder / "removed")


def _acquire(descriptor: int, on_wait: Callable[[], None]) -> None:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            on_wait()
            time.sleep(_LOCK_POLL_S)


def flush(path: Path) -> None:
    """Force a file's or folder's content to the disk, so that no crash can leave the manifest but not the files."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _disk_errors(home: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelError(
            f"a model cannot be written to {home}: {error.strerror or error}; "
            "make room or permit it there, or set SERVELAB_HOME to another folder"
        ) from None
