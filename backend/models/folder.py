"""What belongs to a model's folder, and models made of a folder that is there: a copy under a name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

from backend.errors import ModelError
from backend.models import store
from backend.models.model_config import load_decoder_config
from backend.models.pull import PULLABLE, ProgressCallback
from backend.models.safetensors_file import WEIGHTS_INDEX, count_tensors, find_parts

_CONFIG = "config.json"
# What belongs to a model besides its config and weights. A stored model's own manifest does not: it lists other files.
_COMPANIONS = (
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
    "LICENSE*",
    "NOTICE*",
)
_PIECE = 2**22  # bytes


class Provenance(TypedDict):
    """What a manifest says of a model that its files do not."""

    description: str
    license: str | None
    origin: str


def companions(folder: Path) -> list[Path]:
    """Files of a model's folder besides its config and weights: tokenizer, chat template, license."""
    return [path for pattern in _COMPANIONS for path in sorted(folder.glob(pattern)) if path.is_file()]


def model_files(folder: Path) -> list[Path]:
    """All files that make a model of a folder in Hugging Face's layout, each once.

    Raises:
        ModelError: it is no model, or one that the decoder does not have; or a file is missing, foreign or truncated.
    """
    load_decoder_config(folder)
    parts = list(find_parts(folder))
    for part in parts:
        if not part.is_file():
            raise ModelError(f"{part} is missing, though the index names it")
        count_tensors(part)
    indices = [path for path in folder.glob(f"*{WEIGHTS_INDEX.removeprefix('model')}") if path.is_file()]
    return list(dict.fromkeys((folder / _CONFIG, *parts, *(indices if len(parts) > 1 else ()), *companions(folder))))


def check_new_name(name: str) -> None:
    """Raise `ModelError` for a name that no new model can have: malformed, a pullable model's, or another model's."""
    store.check_name(name)
    if name in PULLABLE:
        raise ModelError(f"the name {name!r} stands for {PULLABLE[name].description}; choose another one")
    if store.is_complete(name):
        raise ModelError(
            f"there is already a model {name!r}; choose another name, or remove it with: servelab models remove {name}"
        )


def add_folder(folder: Path, name: str, on_progress: ProgressCallback, provenance: Provenance | None = None) -> None:
    """Copy a model's folder, quantized or not, into a model of its own. What had the name and is damaged is replaced.

    Args:
        on_progress: called with "copying" and bytes; an exception from it ends the copy, which leaves nothing.
        provenance: by default it names the folder.
    Raises:
        ModelError: the folder is no model, the name cannot be had, or the copy cannot be written.
    """
    check_new_name(name)
    files = model_files(folder)
    total = sum(path.stat().st_size for path in files)
    with store.building(name, lambda: on_progress("waiting for another process", 0, 0, "")) as place:
        check_new_name(name)
        built = place / "model"
        built.mkdir()
        done = 0
        for path in files:
            for piece_size in _copy(path, built / path.name):
                done += piece_size
                on_progress("copying", done, total, "bytes")
        said = provenance or Provenance(
            description=f"{load_decoder_config(built).architecture} from {folder.name}",
            license=None,
            origin=str(folder),
        )
        store.publish(built, name, describe(built, said))


def describe(folder: Path, provenance: Provenance) -> store.Manifest:
    """The manifest of a folder that holds a model's files and nothing else.

    Raises:
        ModelError: it is no model.
    """
    config = load_decoder_config(folder)
    files = sorted(path for path in folder.iterdir() if path.is_file())
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        for piece in _pieces(path):
            digest.update(piece)
    stored = config.stored_quantization
    return store.Manifest(
        description=provenance["description"],
        license=provenance["license"],
        origin=provenance["origin"],
        gguf_sha256=None,
        num_tensors=sum(count_tensors(path).num_tensors for path in files if path.suffix == ".safetensors"),
        num_parameters=config.count_parameters(),
        files={path.name: path.stat().st_size for path in files},
        files_sha256=digest.hexdigest(),
        quantization=None if stored is None else str(stored),
    )


def _copy(source: Path, target: Path) -> Iterator[int]:
    """Piece by piece, giving the size of each. What cannot be read is no fault of the models' place."""
    with target.open("wb") as written:
        for piece in _pieces(source):
            yield written.write(piece)


def _pieces(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while piece := file.read(_PIECE):
                yield piece
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from None
