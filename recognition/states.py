"""The folders of saved states: their files, and whether these are still what was written.

A state is a folder ``states/state-<step>``:

    backbone.params   the network's parameters, by name
    momenta.params    the states of its optimizer
    classes.npy       all class weights, (K, D), however they were split
    head.states       momenta of the class weights, states of the sampler and the criterion
    state.json        step, position in the epoch, best scores, and the settings of the run

``state.json`` also holds the size of each file, a CRC-32 of each of its blocks, and one of itself.
States of early versions have sizes alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import zlib
from typing import Any, Callable, Iterator, NamedTuple

from dsoftmax.recognition.common.arrays import load_arrays, map_npy
from dsoftmax.recognition.common.distributed.heartbeat import beat
from dsoftmax.recognition.common.files import AtomicFile, FullDiskError, sync

FORMAT = 1
FILES = ("backbone.params", "momenta.params", "classes.npy", "head.states")
DESCRIPTION = "state.json"
BLOCK_SIZE = 1 << 26  # bytes per checksum
READ_AT_ONCE = 1 << 20  # bytes
_NAME = re.compile(r"state-(\d{8,})")


class DamagedStateError(ValueError):
    """The files of a state are not what was written, or no state is sound."""


class UnknownFormatError(ValueError):
    """A state was written by another version of this software."""


class Problem(NamedTuple):
    """What is wrong with a file of a state; `block` counts from 0, None is the whole file."""

    file: str
    block: int | None
    why: str

    def __str__(self) -> str:
        return f"{self.file}: {self.why}"


class Check(NamedTuple):
    """The result of checking a state."""

    path: str
    step: int | None
    size: int
    has_checksums: bool
    problems: list[Problem]

    @property
    def is_sound(self) -> bool:
        """Whether no problem was detected."""
        return not self.problems


class BlockChecksums:
    """Computes the CRC-32 of each block of a stream of bytes.

    Parameters
    ----------
    block_size : int
    """

    def __init__(self, block_size: int):
        self._block_size = block_size
        self._sums: list[int] = []
        self._room = 0  # bytes left in the last block

    def update(self, content) -> None:
        """Add the next bytes."""
        content = memoryview(content).cast("B")
        while content:
            if not self._room:
                self._sums.append(0)
                self._room = self._block_size
            part, content = content[: self._room], content[self._room :]
            self._sums[-1] = zlib.crc32(part, self._sums[-1])
            self._room -= len(part)

    @property
    def sums(self) -> list[str]:
        """The checksums so far, as hexadecimal digits."""
        return [f"{value:08x}" for value in self._sums]


class StateWriter:
    """Writes the files of a state into a folder, each synced to disk, and then describes them.

    Parameters
    ----------
    folder : str
    """

    def __init__(self, folder: str):
        self._folder = folder
        self._sizes: dict[str, int] = {}
        self._sums: dict[str, list[str]] = {}

    @contextlib.contextmanager
    def file(self, name: str) -> Iterator[_SummedFile]:
        """Yield a file to write from its beginning to its end."""
        with open(os.path.join(self._folder, name), "wb") as stream:
            summed = _SummedFile(stream)
            yield summed
            sync(stream)
        self._sizes[name], self._sums[name] = summed.size, summed.checksums.sums

    def describe(self, facts: dict[str, Any]) -> None:
        """Write ``state.json`` about all files, and sync the folder."""
        sums = {"block_size": BLOCK_SIZE, **self._sums}
        described = {"format": FORMAT, "files": self._sizes, **facts, "checksums": sums}
        with self.file(DESCRIPTION) as file:
            file.write(_text_of(described).encode())
        sync_folder(self._folder)


class _SummedFile:
    def __init__(self, stream):
        self._stream = stream
        self.checksums = BlockChecksums(BLOCK_SIZE)
        self.size = 0

    def write(self, content) -> int:
        self.checksums.update(content)
        written = self._stream.write(content)
        self.size += written
        return written


def sync_folder(path: str) -> None:
    """Sync the names in a folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def path_of(folder: str, step: int) -> str:
    """Return where the state after `step` steps is, or would be."""
    return os.path.join(folder, f"state-{step:08d}")


def update_facts(path: str, facts: dict[str, Any]) -> None:
    """Change some facts of a saved state."""
    with AtomicFile(os.path.join(path, DESCRIPTION), "w") as file:
        file.write(_text_of({**read_facts(path), **facts}))


def _text_of(facts: dict[str, Any]) -> str:
    """Return the text of a description, with its checksum if it has others."""
    facts = json.loads(json.dumps(facts))  # as it will be read
    if "checksums" in facts:
        facts["checksums"][DESCRIPTION] = _checksum_of(facts)
    return json.dumps(facts, indent=2)


def _checksum_of(facts: dict[str, Any]) -> str:
    """Return the checksum of a description, without itself."""
    sums = {name: value for name, value in facts["checksums"].items() if name != DESCRIPTION}
    text = json.dumps({**facts, "checksums": sums}, sort_keys=True)
    return f"{zlib.crc32(text.encode()):08x}"


def list_states(folder: str) -> list[str]:
    """Return the paths of all states, sound or not, the newest first."""
    paths = []
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(folder):
            match = _NAME.fullmatch(name)
            if match and os.path.isdir(os.path.join(folder, name)):
                paths.append((int(match.group(1)), os.path.join(folder, name)))
    return [path for _, path in sorted(paths, reverse=True)]


def read_facts(path: str) -> dict[str, Any]:
    """Read the facts of a state.

    Raises
    ------
    UnknownFormatError, DamagedStateError
    """
    name = os.path.join(path, DESCRIPTION)
    try:
        with open(name, encoding="utf-8") as file:
            facts = json.load(file)
    except FileNotFoundError:
        raise DamagedStateError(f"{name}: there is no such file") from None
    except ValueError as error:
        raise DamagedStateError(f"{name}: it is no JSON ({error})") from None
    if not isinstance(facts, dict) or "format" not in facts:
        raise DamagedStateError(f"{name}: it does not describe a state")
    if facts["format"] != FORMAT:
        raise UnknownFormatError(
            f"{path}: a state of format {facts['format']}, this version reads format {FORMAT}: go "
            "on with the version that wrote it, or begin another run by --extra-model-name"
        )
    sums = facts.get("checksums")
    is_written = isinstance(sums, dict) and sums.get(DESCRIPTION) == _checksum_of(facts)
    # States of early versions have no checksums at all, under whatever name.
    is_early = sums is None and not any(
        isinstance(value, dict) and DESCRIPTION in value for value in facts.values()
    )
    if not (is_written or is_early):
        raise DamagedStateError(f"{name}: it is not what was written, its checksum differs")
    sizes = facts.get("files")
    numbers = [sizes.get(file) for file in FILES] if isinstance(sizes, dict) else [None]
    numbers += [facts.get(key) for key in ("step", "num_classes", "embedding_size")]
    if not all(isinstance(number, int) for number in numbers):
        raise DamagedStateError(f"{name}: it does not describe all of a state")
    return facts


def shape_of_classes(facts: dict[str, Any]) -> tuple[int, int]:
    """Return the shape of a state's class weights, of which a class may have several."""
    return facts["num_classes"] * facts.get("subcentres", 1), facts["embedding_size"]


def check_state(path: str, report: Callable[[int], Any] = lambda _: None) -> Check:
    """Compare a state with its checksums; if it has none, only try to read its files.

    Parameters
    ----------
    path : str
    report : callable
        Called with the number of bytes after each read.

    Raises
    ------
    UnknownFormatError
    """
    try:
        facts = read_facts(path)
    except DamagedStateError as error:
        _, _, why = str(error).partition(f"{DESCRIPTION}: ")
        return Check(path, None, 0, False, [Problem(DESCRIPTION, None, why)])
    sums = facts.get("checksums")
    problems = list(_wrong_sizes(path, facts))
    for name in set(FILES).difference(problem.file for problem in problems):
        try:
            if sums:
                problems += _wrong_blocks(path, name, sums[name], sums["block_size"], report)
            else:
                _read_without_checksums(os.path.join(path, name), facts)
        except PermissionError:
            raise
        except OSError as error:  # a disk's bad block, too
            problems.append(Problem(name, None, f"it can't be read: {error.strerror}"))
        except ValueError as error:
            problems.append(Problem(name, None, str(error)))
    problems.sort(key=lambda problem: (FILES.index(problem.file), problem.block or 0))
    size = sum(facts["files"][name] for name in FILES)
    return Check(path, facts["step"], size, sums is not None, problems)


def _wrong_sizes(path: str, facts: dict[str, Any]) -> Iterator[Problem]:
    for name in FILES:
        expected = facts["files"][name]
        try:
            size = os.path.getsize(os.path.join(path, name))
        except FileNotFoundError:
            yield Problem(name, None, "there is no such file")
            continue
        if size != expected:
            yield Problem(name, None, f"it has {size:,} bytes instead of {expected:,}")


def _wrong_blocks(
    path: str, name: str, expected: list[str], block_size: int, report: Callable[[int], Any]
) -> Iterator[Problem]:
    checksums = BlockChecksums(block_size)
    with open(os.path.join(path, name), "rb") as file:
        for content in iter(lambda: file.read(READ_AT_ONCE), b""):
            checksums.update(content)
            report(len(content))
            beat()
    for block, (actual, written) in enumerate(zip(checksums.sums, expected)):
        if actual != written:
            start = block * block_size
            yield Problem(
                name,
                block,
                f"block {block + 1} of {len(expected)}, from byte {start:,} on, is not what was "
                f"written: its checksum is {actual} instead of {written}",
            )


def _read_without_checksums(path: str, facts: dict[str, Any]) -> None:
    """Raise a ValueError if a file of the right size can't be what was saved."""
    try:
        if not path.endswith(".npy"):
            load_arrays(path)
            return
        shape = map_npy(path).shape
    except ValueError as error:
        raise ValueError(str(error).partition(": ")[2]) from None  # the problem names the file
    if shape != shape_of_classes(facts):
        raise ValueError(f"it is an array of shape {shape}")


def is_whole(path: str) -> bool:
    """Return whether this version can read a state and its files have the right sizes."""
    try:
        return not list(_wrong_sizes(path, read_facts(path)))
    except (ValueError, OSError):
        return False


def choose_state(folder: str) -> tuple[Check | None, list[Check]]:
    """Find the newest sound state of a run.

    Returns
    -------
    chosen : Check or None
        None if there are no states.
    damaged : list of Check
        The newer states, which are not sound.

    Raises
    ------
    UnknownFormatError
        Another version has written a state that is newer than all sound ones.
    DamagedStateError
        There are states, but no sound one.
    """
    damaged = []
    for path in list_states(folder):
        check = check_state(path)
        if check.is_sound:
            return check, damaged
        damaged.append(check)
    if damaged:
        reasons = "; ".join(
            f"{os.path.basename(check.path)}: {check.problems[0]}" for check in damaged
        )
        raise DamagedStateError(
            f"{folder}: there is no sound state to go on from ({reasons}). Begin another run by "
            "--extra-model-name, or move the states elsewhere to begin this one again"
        )
    return None, []


def find_sound_state(folder: str) -> str:
    """Return the state that a folder is, or the newest one of a run, if it is sound.

    Parameters
    ----------
    folder : str
        Of a state, of a run, or of all states of a run.

    Raises
    ------
    FileNotFoundError
        There is no state.
    DamagedStateError, UnknownFormatError
        It is damaged, or another version wrote it.
    """
    path = folder
    if not os.path.exists(os.path.join(folder, DESCRIPTION)):
        inner = os.path.join(folder, "states")
        path = next(iter(list_states(inner) + list_states(folder)), None)
        if path is None:
            raise FileNotFoundError(
                f"{folder}: there are no states in it; give the folder of a state or of a run"
            )
    check = check_state(path)
    if not check.is_sound:
        raise DamagedStateError(
            f"{path} is damaged ({check.problems[0]}); give the folder of another state"
        )
    return path


def set_aside(path: str) -> str:
    """Rename a damaged state, so that it is kept but no run resumes from it."""
    kept, number = f"{path}.damaged", 1
    while os.path.exists(kept):
        number += 1
        kept = f"{path}.damaged-{number}"
    os.rename(path, kept)
    return kept


def prune_states(folder: str, keep: int) -> None:
    """Remove all but the newest `keep` whole states; leave those this version can't read."""
    for path in list(filter(is_whole, list_states(folder)))[max(keep, 1) :]:
        # Renamed first: a kill in the middle must not leave half a state under its name.
        part = f"{path}.{os.getpid()}.part"
        os.rename(path, part)
        shutil.rmtree(part, ignore_errors=True)


@contextlib.contextmanager
def name_newest_state(folder: str) -> Iterator[None]:
    """Add to the error of a full disk which state is left to resume from."""
    try:
        yield
    except FullDiskError as error:
        newest = next(filter(is_whole, list_states(folder)), None)
        advice = (
            f"the newest whole state is {newest}: make room and go on from it by --resume"
            if newest
            else "no state has been saved yet: make room and begin again, with --resume"
        )
        raise FullDiskError(error.errno, f"{error}; {advice}") from None
