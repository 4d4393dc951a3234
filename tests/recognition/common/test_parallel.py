import threading
import time

import pytest

from dsoftmax.recognition.common.parallel import AHEAD_PER_THREAD, map_ordered


def test_results_come_in_order_from_several_threads():
    seen = set()

    def work(number):
        seen.add(threading.get_ident())
        time.sleep(0.001 * (number % 3))
        return number * number

    assert list(map_ordered(work, range(50), threads=4)) == [number**2 for number in range(50)]
    assert len(seen) > 1


def test_only_a_few_items_are_taken_ahead():
    taken = []
    items = (taken.append(number) or number for number in range(1000))
    results = map_ordered(lambda number: number, items, threads=2)
    next(results)
    assert len(taken) <= 2 * AHEAD_PER_THREAD + 1
    results.close()


def test_an_exception_comes_where_its_result_would():
    results = map_ordered(lambda number: 1 // (number - 2), range(5), threads=2)
    assert [next(results), next(results)] == [-1, -1]
    with pytest.raises(ZeroDivisionError):
        next(results)
