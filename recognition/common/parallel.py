"""Compute on threads, and take the results in order."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Callable, Iterable, Iterator, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

AHEAD_PER_THREAD = 8


def map_ordered(
    function: Callable[[Item], Result], items: Iterable[Item], threads: int
) -> Iterator[Result]:
    """Yield ``function(item)`` for each item, in order, computed a few items ahead on threads.

    Unlike ``ThreadPoolExecutor.map`` it holds only a few results at a time, however many items
    there are. An exception is raised in the place of its result.
    """
    pending: deque[Future] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                pending.append(pool.submit(function, item))
                if len(pending) > threads * AHEAD_PER_THREAD:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:  # the caller may leave early
            for future in pending:
                future.cancel()
