"""The text prompts of a workload: the built-in ones, a list, or a JSONL file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice

from backend.errors import ConfigError
from backend.workload.files import kind_of, read_objects, value_at
from backend.workload.prompts import BUILT_IN_PROMPTS
from backend.workload.spec import PromptsSource


def prompt_texts(source: PromptsSource) -> list[str]:
    """The first `source.limit` prompts. Raises `ConfigError` for a file or a list that cannot be used."""
    limit = None if source.limit is None else min(source.limit, sys.maxsize)  # more is no number of items to Python
    if source.file is not None:
        texts = list(islice(_read(source.file, source.field), limit))
        if not texts:
            raise ConfigError(
                f"{source.file} holds no prompts; expected one JSON object per line with the key {source.field!r}"
            )
        return texts
    prompts = list(islice(BUILT_IN_PROMPTS if source.prompts is None else source.prompts, limit))
    for index, text in enumerate(prompts):
        _check(text, f"source.prompts[{index}]")
    return prompts


def _read(file: str, field: str) -> Iterator[str]:
    for where, record in read_objects(file, f"the key {field!r}"):
        value = value_at(record, field, where)
        if isinstance(value, list) and value:
            value = value[0]
        if not isinstance(value, str):
            raise ConfigError(f"{where}: {field!r} is {kind_of(value)}; expected a string or a list beginning with one")
        _check(value, where)
        yield value


def _check(text: str, where: str) -> None:
    if not text:
        raise ConfigError(f"{where}: the prompt is empty; a prompt needs at least one character")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{where}: the prompt holds half of a surrogate pair, which is no character") from None
