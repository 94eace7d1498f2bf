"""`WorkFolder`: a checkpoint that is being written, a file per decoder layer, until it is whole and gets its name."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from backend.errors import ConfigError, ModelError
from backend.models.folder import Provenance, check_new_name, companions, describe
from backend.models.store import flush, model_folder, read_manifest, write_manifest
from backend.quantization.formats.scheme import HEAD, StoredQuantization

_NOTE = "quantize.json"
_CONFIG = "config.json"


class WorkFolder:
    """Beside the output's place, one run's at a time. Use `finished` to see how far an earlier run got."""

    def __init__(self, output: Path, *, force: bool, seal: Callable[[Path], None] | None = None) -> None:
        """Raise `ConfigError` for an output that exists, unless it is empty or `force` permits to replace a model there.

        Args:
            seal: called with the folder once it is whole, before it gets the output's name; it may add a file.
        """
        self.output = output.absolute()
        self.path = self.output.with_name(f".{self.output.name}.partial")
        self._force = force
        self._seal = seal
        self._key = ""
        self._reports: list[Any] = []
        self._lock: int | None = None  # the folder's descriptor: the system lets go of it when this process dies
        self._check_output()

    def open(self, key: str) -> None:
        """Go on where a run with the same key stopped, or start afresh.

        Raises:
            ConfigError: another run writes here, or has just made the output.
            ModelError: nothing can be written.
        """
        with _disk_errors(self.path):
            self._acquire()
        self._key = key
        try:
            note = json.loads((self.path / _NOTE).read_text(encoding="utf-8"))
            self._reports = list(note["layers"]) if note["key"] == key else []
        except (OSError, ValueError, KeyError, TypeError):
            self._reports = []
        self._check_output()
        if not self._reports:
            with _disk_errors(self.path):
                for path in self.path.iterdir():
                    path.unlink()
                self._write_note()

    def close(self) -> None:
        """Let others write here. A folder without a layer goes: there is nothing to go on with."""
        if self._lock is None:
            return
        if not self._reports:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = None

    def _acquire(self) -> None:
        while self._lock is None:
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                lock = os.open(self.path, os.O_RDONLY)
            except FileNotFoundError:  # another run has just ended
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(lock, self.path):  # else another run has renamed or removed it since
                    self._lock = lock
            except BlockingIOError:
                raise ConfigError(
                    f"another run is making {self.output}; wait until it has ended, or name another folder"
                ) from None
            finally:
                if self._lock is None:
                    os.close(lock)

    def _check_output(self) -> None:
        if self.output.is_dir():
            if any(self.output.iterdir()):
                if not self._force:
                    raise ConfigError(
                        f"{self.output} exists and is not empty; name another folder, or replace it with --force"
                    )
                if not (self.output / _CONFIG).is_file():
                    raise ConfigError(
                        f"{self.output} holds no model: --force replaces models only; name another folder"
                    )
        elif self.output.exists() or self.output.is_symlink():
            raise ConfigError(f"{self.output} exists and is not a folder; name another")

    @property
    def finished(self) -> list[Any]:
        """What was reported of each layer that is written, the first ones of the model."""
        return list(self._reports)

    def write_layer(self, index: int, tensors: Mapping[str, Tensor], report: Any) -> None:
        """Args:
        report: JSON-safe, what is to be known of the layer in a later run.
        """
        self._save(f"layer-{index}", tensors)
        self._reports.append(report)
        with _disk_errors(self.path):
            self._write_note()

    def read_layer(self, index: int) -> dict[str, Tensor]:
        path = self.path / f"layer-{index}.safetensors"
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{path} is damaged ({error}); remove {self.path} to start afresh") from None

    def publish(self, source: Path, others: Mapping[str, Tensor], quantization: StoredQuantization) -> None:
        """Add what is not in a layer, config and tokenizer, and give the folder the output's name.

        Args:
            source: the model's folder.
            quantization: what config.json is to say of the layers; a head that it names is no embedding's any more.
        Raises:
            ConfigError: something else has got the output's name since.
            ModelError: the folder cannot be written.
        """
        self._save("others", others)
        with _disk_errors(self.path):
            self._name_parts(["others", *(f"layer-{index}" for index in range(len(self._reports)))])
            for path in companions(source):
                shutil.copyfile(path, self.path / path.name)
            config = json.loads((source / _CONFIG).read_text(encoding="utf-8"))
            config["quantization_config"] = quantization.to_dict()
            if quantization.scheme_of(HEAD) is not None:
                config["tie_word_embeddings"] = False
            (self.path / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            self._check_output()  # while a later run can still go on behind the layers
            for left_over in (self.path / _NOTE, *self.path.glob("*.unfinished")):
                left_over.unlink()
            if self._seal is not None:
                self._seal(self.path)
            for path in (*self.path.iterdir(), self.path):
                flush(path)
            replaced = self.output.with_name(f".{self.output.name}.replaced")
            shutil.rmtree(replaced, ignore_errors=True)
            if self.output.exists():
                os.rename(self.output, replaced)
            os.rename(self.path, self.output)
            shutil.rmtree(replaced, ignore_errors=True)

    def _name_parts(self, parts: list[str]) -> None:
        """As Hugging Face names the parts of a checkpoint, with an index of what is in which."""
        weight_map, total = {}, 0
        for number, part in enumerate(parts, start=1):
            name = f"model-{number:05}-of-{len(parts):05}.safetensors"
            if (self.path / f"{part}.safetensors").exists():  # else a run stopped behind this
                os.replace(self.path / f"{part}.safetensors", self.path / name)
            with safe_open(self.path / name, framework="pt") as file:
                for tensor in file.keys():  # noqa: SIM118  a file of tensors is no mapping
                    weight_map[tensor] = name
                    total += file.get_tensor(tensor).nbytes
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (self.path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _save(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        unfinished = self.path / f"{name}.unfinished"
        with _disk_errors(self.path):
            save_file(dict(tensors), unfinished, metadata={"format": "pt"})  # transformers refuses a file without it
            os.chmod(unfinished, 0o666 & ~_umask())  # the library makes it the owner's alone
            flush(unfinished)
            os.replace(unfinished, self.path / f"{name}.safetensors")

    def _write_note(self) -> None:
        unfinished = self.path / f"{_NOTE}.unfinished"
        unfinished.write_text(json.dumps({"key": self._key, "layers": self._reports}), encoding="utf-8")
        flush(unfinished)
        os.replace(unfinished, self.path / _NOTE)


def named_work_folder(name: str, model: str, method: str) -> WorkFolder:
    """That of a quantized model which is to be stored under a name, as one like any other.

    Args:
        model: what is quantized, by name or folder.
    Raises:
        ModelError: the name cannot be had.
    """
    check_new_name(name)

    def seal(folder: Path) -> None:
        write_manifest(folder, describe(folder, provenance(model, method)))

    # What is there by now is no model: damaged, or left by something else.
    return WorkFolder(model_folder(name), force=model_folder(name).exists(), seal=seal)


def provenance(model: str, method: str) -> Provenance:
    """What a stored model's manifest says of where it came from."""
    try:
        license = read_manifest(model_folder(model)).license
    except ModelError:  # a folder of the user's own
        license = None
    return Provenance(description=f"{model} by {method}", license=license, origin=f"{model}, quantized by {method}")


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@contextlib.contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be written: {getattr(error, 'strerror', None) or error}") from None
