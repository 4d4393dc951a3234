"""States are saved while training goes on: a step waits for a copy in memory, not for the disk."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Callable

from dsoftmax.recognition.checkpoint import collect_state
from dsoftmax.recognition.common.distributed.group import ALONE, Group
from dsoftmax.recognition.common.memory import available_bytes
from dsoftmax.recognition.states import is_whole, list_states, path_of, prune_states, update_facts
from dsoftmax.recognition.trained import Trained

MOST_FAILURES = 2  # in a row; after one more the newest state is too old to go on
MEMORY_SHARE = 0.5  # of the free memory, which a copy may take


class StateSaver:
    """Saves the states of a run on a thread, one after the other.

    There is one copy in memory at most: the next state waits until the last one is on disk. A state
    whose copy takes too much memory is written before `save` returns. A write that fails is a
    warning as long as an earlier state is there and not too old.

    As a context manager it waits for the thread at the end.

    Parameters
    ----------
    folder : str
        The folder of all states of the run.
    keep : int
        How many states are kept.
    say : callable
        Takes lines for the log.
    group : Group
        All processes make a saver and call `save` together; the first one writes.
    """

    def __init__(self, folder: str, keep: int, say: Callable[[str], None], group: Group = ALONE):
        self._folder, self._keep, self._say, self._group = folder, keep, say, group
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="saving")
        self._pending: list[Future] = []
        self._error: Exception | None = None  # of the state that is being written
        self._failures = 0

    def __enter__(self) -> StateSaver:
        return self

    def __exit__(self, *_) -> None:
        self._thread.shutdown(wait=True)

    def save(self, step: int, trained: Trained, facts: dict[str, Any], at_once=False) -> None:
        """Save the state after `step` steps, unless it is on disk already.

        Parameters
        ----------
        step : int
        trained : Trained
        facts : dict
            Anything else to save.
        at_once : bool
            Write it before returning, and raise what fails.
        """
        self.wait()
        state = collect_state(self._folder, step, trained, facts, self._group)
        if state is None:
            return
        if at_once or state.size > MEMORY_SHARE * available_bytes():
            state.write()
            prune_states(self._folder, self._keep)
            return
        self._submit(state.copy().write)
        self._submit(prune_states, self._folder, self._keep)

    def update(self, step: int, facts: dict[str, Any]) -> None:
        """Change some facts of the state that was saved last."""
        if self._group.is_first:
            self._submit(update_facts, path_of(self._folder, step), facts)

    def notice(self) -> None:
        """Tell of a write that has failed in the meantime, without waiting for any."""
        if self._pending and all(task.done() for task in self._pending):
            self.wait()

    def wait(self) -> None:
        """Wait until all is on disk.

        Raises
        ------
        OSError
            A state could not be written, and there is none or only an old one to go on from.
        """
        if not self._pending:
            return
        for task in self._pending:
            task.result()
        self._pending = []
        error, self._error = self._error, None
        self._failures = self._failures + 1 if error else 0
        if not error:
            return
        newest = next(filter(is_whole, list_states(self._folder)), None)
        if newest is None or self._failures > MOST_FAILURES:
            raise error
        left = MOST_FAILURES - self._failures
        self._say(
            f"warning: a state could not be saved: {error}. The run goes on, with {newest} to "
            f"resume from; {f'{left} more such failures are' if left else 'no other one is'} "
            "tolerated"
        )

    def _submit(self, task: Callable, *args: Any) -> None:
        self._pending.append(self._thread.submit(self._run, task, *args))

    def _run(self, task: Callable, *args: Any) -> None:
        """Run a task on the thread, unless one before it has failed: it has no state then."""
        if self._error is None:
            try:
                task(*args)
            except OSError as error:
                self._error = error
