"""Writing a result to the path that `--output` names."""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from dataclasses import dataclass

from backend.errors import ServeLabError


@dataclass(frozen=True, slots=True)
class OutputFile:
    """A place to write to, as found before the work for it is done.

    Attributes:
        name: as the user wrote it.
        target: what a regular file, existing or not, is called once symbolic links are followed; None for a device, FIFO
            or socket, which is written through and never replaced.
        mode: permissions of the file that is replaced; None where there is none.
    """

    name: str
    target: str | None
    mode: int | None

    @classmethod
    def find(cls, name: str, *, force: bool) -> OutputFile:
        """Raises `ServeLabError` for an empty path, a folder, and a file that exists unless `force` permits to replace it."""
        if not name:
            raise ServeLabError("the output path is empty; name a file, or - for stdout")
        try:
            found = os.stat(name)
        except FileNotFoundError:
            found = None
        except OSError as error:
            raise _cannot_be_written(name, error) from None
        if name.endswith(os.sep) or (found is not None and stat.S_ISDIR(found.st_mode)):
            raise ServeLabError(f"{name} names a folder; name a file in it")
        if found is None:
            return cls(name, os.path.realpath(name), None)
        is_regular = stat.S_ISREG(found.st_mode)
        if (is_regular or stat.S_ISBLK(found.st_mode)) and not force:
            raise ServeLabError(f"{name} exists; name another file, or overwrite it with --force")
        if is_regular:
            return cls(name, os.path.realpath(name), stat.S_IMODE(found.st_mode))
        return cls(name, None, None)

    def write(self, data: bytes) -> None:
        """A file gets all of `data` or stays as it was: an export that breaks off must not look like one.

        Raises `ServeLabError`.
        """
        try:
            if self.target is None:
                with open(self.name, "wb") as file:
                    file.write(data)
            else:
                self._replace(self.target, data)
        except OSError as error:
            raise _cannot_be_written(self.name, error) from None

    def _replace(self, target: str, data: bytes) -> None:
        descriptor, temporary = tempfile.mkstemp(dir=os.path.dirname(target), prefix=".servelab-")
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
            os.chmod(temporary, 0o666 & ~_umask() if self.mode is None else self.mode)
            os.replace(temporary, target)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise


def _cannot_be_written(name: str, error: OSError) -> ServeLabError:
    return ServeLabError(f"{name} cannot be written: {error.strerror}")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
