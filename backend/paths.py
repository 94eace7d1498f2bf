"""Where ServeLab keeps its files. Read from the environment at every call, so that a change of it is seen at once.

| variable | moves | otherwise |
|---|---|---|
| `SERVELAB_HOME` | data (`$SERVELAB_HOME`) and models (`$SERVELAB_HOME/models`) | the two below |
| – | data | `~/.local/share/servelab` |
| – | models | `~/.cache/servelab/models` |
| `SERVELAB_DATABASE_URL` | the database, as any SQLAlchemy URL | `servelab.db` in the data folder |
"""

from __future__ import annotations

import os
from pathlib import Path


def data_home() -> Path:
    """Folder of what must be kept: the database. It need not exist yet."""
    home = _servelab_home()
    return home if home is not None else Path.home() / ".local" / "share" / "servelab"


def models_home() -> Path:
    """Folder of models by name: pulled, added, or made by quantizing another. It need not exist yet."""
    home = _servelab_home()
    return home / "models" if home is not None else Path.home() / ".cache" / "servelab" / "models"


def database_url() -> str | None:
    """SQLAlchemy URL of the run database, or None where none is set: it is then the SQLite file `database_file()`."""
    return os.environ.get("SERVELAB_DATABASE_URL") or None


def database_file() -> Path:
    """The run database unless `database_url()` names another. A path and no URL: a folder's name may hold `?` or `%`."""
    return data_home() / "servelab.db"


def _servelab_home() -> Path | None:
    value = os.environ.get("SERVELAB_HOME")
    return Path(value).expanduser().absolute() if value else None
