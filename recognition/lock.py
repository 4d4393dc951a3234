"""A lock that keeps a second run out of a run's folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import time

NAME = "run.lock"
# The errors of file systems without locks.
UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)


class FolderInUseError(OSError):
    """Another run holds the lock."""


class RunLock:
    """Locks a run's folder until `release`, or until the process ends in any way.

    The kernel holds the lock, on a file in the folder: the file that a killed run leaves behind
    locks nobody out. Over NFSv4 the lock also holds for other hosts.

    Parameters
    ----------
    folder : str
        Created if it does not exist.

    Attributes
    ----------
    warning : str
        Why the folder could not be locked, where its file system has no locks; else empty.

    Raises
    ------
    FolderInUseError
        Another run holds the lock; the message says which.
    """

    def __init__(self, folder: str):
        self._handle = -1
        self.warning = ""
        self._folder = os.path.abspath(folder)
        self._path = os.path.join(self._folder, NAME)
        self._made = _missing_folders(self._folder)
        while self._handle < 0:
            self._handle = self._open()
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        holder = f"process {os.getpid()} on {socket.gethostname()} since {since}\n"
        # Written in place: an atomic replacement would be another file, which is not locked.
        os.ftruncate(self._handle, 0)
        os.write(self._handle, holder.encode())

    def _open(self) -> int:
        """Open and lock the file; return -1 if another run has removed it in the meantime."""
        os.makedirs(self._folder, exist_ok=True)
        try:
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
        except FileNotFoundError:  # the folder is gone
            return -1
        try:
            self._lock(handle)
            if os.path.samestat(os.fstat(handle), os.stat(self._path)):
                return handle
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)
        return -1

    def _lock(self, handle: int) -> None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(handle, 1000).decode(errors="replace").strip()
            raise FolderInUseError(
                f"{self._folder} is in use by {holder or 'another run'}: wait until that ends, or "
                "give this run another name by --extra-model-name"
            ) from None
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            self.warning = (
                f"warning: {self._folder} can't be locked ({error.strerror}): nothing keeps a "
                "second run out of it"
            )

    def release(self) -> None:
        """Unlock the folder; remove it if it was made for the lock and holds nothing else."""
        if self._handle < 0:
            return
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)  # while it is still locked, so that nobody else can hold it
        self._close()
        with contextlib.suppress(OSError):  # it holds a run
            for folder in self._made:
                os.rmdir(folder)

    def _close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    __del__ = _close


def _missing_folders(path: str) -> list[str]:
    """List a folder and those above it that do not exist, the innermost first."""
    missing = []
    while not os.path.exists(path):
        missing.append(path)
        path = os.path.dirname(path)
    return missing
