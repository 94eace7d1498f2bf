"""Settings as they are typed: TOML files and `SECTION.KEY=VALUE` lines, read alike for the command line and the Run form."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backend.errors import ConfigError

if TYPE_CHECKING:
    from backend.config import EngineConfig
    from backend.workload.spec import Workload

WORKLOAD_PREFIX = "workload"
_MAX_LEVELS = 16  # of nesting; the settings have four
_MAX_BITS = 1024  # of a whole number, 308 digits; no setting takes more than 64, and much longer ones cannot be shown


def engine_config(path: Path | None, settings: Sequence[str]) -> EngineConfig:
    """The config from a TOML file (default: `EngineConfig()`) with `--set` applied; workload settings are refused."""
    return _engine_config(path, _parse(settings, with_workload=False))


def engine_config_and_workload(
    config_path: Path | None, workload_path: Path | None, settings: Sequence[str]
) -> tuple[EngineConfig, Workload]:
    """Both objects of a run, from their TOML files or defaults, with `--set` applied. Raises `ConfigError`."""
    from backend.workload.spec import Workload

    overrides = _parse(settings, with_workload=True)
    prefix = f"{WORKLOAD_PREFIX}."
    config = _engine_config(config_path, {key: value for key, value in overrides.items() if not key.startswith(prefix)})
    workload = Workload.from_toml(workload_path) if workload_path else Workload()
    return config, workload.with_overrides(
        {key.removeprefix(prefix): value for key, value in overrides.items() if key.startswith(prefix)}
    )


def _engine_config(path: Path | None, overrides: dict[str, Any]) -> EngineConfig:
    from backend.config import EngineConfig
    from backend.core.speculation import HEAD_METHODS

    config = EngineConfig.from_toml(path) if path else EngineConfig()
    config = config.with_overrides(overrides)
    head = config.speculative.model
    if head is None or config.speculative.method not in HEAD_METHODS:
        return config
    # A run is repeated from what is stored of it, wherever that is done.
    return config.with_overrides({"speculative.model": str(Path(head).expanduser().absolute())})


def _parse(settings: Sequence[str], *, with_workload: bool) -> dict[str, Any]:
    """`a.b=c` each; the last of a repeated key wins."""
    from backend.config import EngineConfig

    sections = list(EngineConfig.model_fields) + [WORKLOAD_PREFIX] * with_workload
    overrides: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        section, dot, rest = key.partition(".")
        if not equals or not dot or not rest:
            raise ConfigError(f"--set {_shortened(setting)}: expected SECTION.KEY=VALUE, as in cache.block_size=32")
        if section not in sections:
            raise ConfigError(
                f"--set {_shortened(setting)}: unknown section {section!r}; allowed: {', '.join(sections)}"
            )
        try:
            overrides[key] = _checked(_parse_value(value), _MAX_LEVELS - key.count("."))
        except (ValueError, RecursionError) as error:
            too_deep = f"nested too deeply; at most {_MAX_LEVELS} levels are read"
            too_long = "a number has too many digits; at most 300 are read"
            reason = too_deep if isinstance(error, RecursionError) else too_long
            raise ConfigError(f"--set {_shortened(key)}: {reason}") from None
    return overrides


def _parse_value(text: str) -> Any:
    """A TOML value where the text is one, else the text itself: 32, 0.5, true, [1, 2], {kind = "fixed"}, bfloat16."""
    try:
        document = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = document["value"]
    # A second line would be a second key, and TOML's dates and times are no setting's type.
    return value if len(document) == 1 and isinstance(value, bool | int | float | str | list | dict) else text


def _checked(value: Any, levels: int) -> Any:
    """`value`, unless it has parts that an error message could not show. Raises `RecursionError` or `ValueError`."""
    if levels < 0:
        raise RecursionError
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise ValueError
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _checked(part, levels - 1)
    return value


def _shortened(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:100]}..."
