"""Files and folders that are complete or absent: made under a temporary name, then renamed."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from typing import IO, Iterator

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PARTIAL = re.compile(r".+\.(\d+)\.part")  # the temporary names below, with the process's number


class FullDiskError(OSError):
    """A disk is full. The message names the file, its size and the free space."""

    def __str__(self) -> str:
        return self.strerror


@contextlib.contextmanager
def explain_full_disk(path: str, needed: int | None = None) -> Iterator[None]:
    """Raise a `FullDiskError` if the disk is full.

    Parameters
    ----------
    path : str
        The file that is written.
    needed : int, optional
        Its size in bytes.
    """
    try:
        yield
    except FullDiskError:
        raise
    except OSError as error:
        if error.errno not in FULL:
            raise
        folder = os.path.abspath(path)
        while not os.path.exists(folder):
            folder = os.path.dirname(folder)
        room = f"{shutil.disk_usage(folder).free:,} bytes are free"
        if needed is not None:
            room = f"{needed:,} bytes are needed, {room}"
        raise FullDiskError(error.errno, f"{path}: {os.strerror(error.errno)}: {room}") from None


@contextlib.contextmanager
def open_text(path: str | os.PathLike, newline: str | None = None) -> Iterator[IO[str]]:
    """Open a text file of a user's for reading; a mark at its beginning that says UTF-8 is skipped.

    Parameters
    ----------
    path : path
    newline : str, optional
        As of ``open``.

    Raises
    ------
    ValueError
        While it is read: it is no UTF-8. The message names the file.
    """
    with open(path, encoding="utf-8-sig", newline=newline) as file:
        try:
            yield file
        except UnicodeDecodeError as error:
            wrong = error.object[error.start]
            raise ValueError(
                f"{os.fspath(path)}: it is not text in UTF-8, it has the byte {wrong:#04x}; save "
                "it as UTF-8"
            ) from None


def sync(stream: IO) -> None:
    """Sync a file to disk; an error names it, which the system's does not."""
    try:
        stream.flush()
        os.fsync(stream.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, stream.name) from None


class AtomicFile:
    """A file that appears under its name only when it is complete.

    As a context manager it commits on a clean exit and leaves nothing behind on an exception.

    Parameters
    ----------
    path : str
        The file's path; an existing file is replaced at the commit.
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
            sync(self.stream)
            self.stream.close()
            os.replace(self._temporary, self.path)
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Remove the temporary file; an existing file stays as it was."""
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


def clean_partial(folder: str) -> list[str]:
    """Remove half-written files of killed processes from a folder; return their paths.

    Files of other processes that are still alive stay. Call it before this process writes.
    """
    removed = []
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
        match = _PARTIAL.fullmatch(name)
        if match and not _is_other(int(match.group(1))):
            path = os.path.join(folder, name)
            if os.path.isdir(path):
                shutil.rmtree(path, ignore_errors=True)
            else:
                os.unlink(path)
            removed.append(path)
    return removed


def _is_other(process: int) -> bool:
    """Say whether this is the number of another process that is alive."""
    if process in (0, os.getpid()):
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True
