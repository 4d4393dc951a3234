"""Files and folders that are complete or absent: made under a temporary name, then renamed."""

from __future__ import annotations

import contextlib
import os
import shutil
from typing import IO, Iterator


class AtomicFile:
    """A file that appears under its name only when it is whole.

    As a context manager it commits on a clean exit and leaves nothing behind on an exception.

    Parameters
    ----------
    path : str
        Where the file shall be; an existing one is replaced at the commit.
    mode : {"wb", "w"}
        Binary, or text in UTF-8.

    Examples
    --------
    >>> with AtomicFile(f"{tmp}/property", "w") as file:
    ...     _ = file.write("85742,112,112")
    """

    def __init__(self, path: str, mode: str = "wb"):
        self.path = os.fspath(path)
        folder, name = os.path.split(self.path)
        os.makedirs(folder or ".", exist_ok=True)
        self._temporary = os.path.join(folder, f".{name}.{os.getpid()}.part")
        encoding = None if "b" in mode else "utf-8"
        self.stream: IO = open(self._temporary, mode, encoding=encoding)  # noqa: SIM115

    def commit(self) -> None:
        """Sync the content to disk and give the file its name."""
        try:
            self.stream.flush()
            os.fsync(self.stream.fileno())
            self.stream.close()
            os.replace(self._temporary, self.path)
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Remove what was written; the former file, if any, stays."""
        with contextlib.suppress(OSError):  # a full disk may refuse the last flush
            self.stream.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._temporary)

    def __enter__(self) -> IO:
        return self.stream

    def __exit__(self, kind, *_) -> None:
        if kind is None:
            self.commit()
        else:
            self.abort()


@contextlib.contextmanager
def atomic_folder(path: str) -> Iterator[str]:
    """Yield a temporary folder that gets the name `path` on a clean exit and is removed otherwise.

    `path` may exist as an empty folder.
    """
    path = os.path.abspath(path)
    if os.path.exists(path) and (not os.path.isdir(path) or os.listdir(path)):
        raise FileExistsError(f"{path} exists and is not an empty folder; choose another one")
    temporary = f"{path}.{os.getpid()}.part"
    shutil.rmtree(temporary, ignore_errors=True)  # of a killed process that had the same number
    os.makedirs(temporary)
    try:
        yield temporary
        os.replace(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
