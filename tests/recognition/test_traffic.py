"""Bytes per step, against those that are known."""

import pytest

from dsoftmax.recognition import traffic
from dsoftmax.recognition.estimate import HeadSize

HEAD = HeadSize(
    757_000, 512, 256, devices=2, processes=2, store="server", sampled_share=1 / 64, momentum=0.9
)


def test_a_worker_of_two_with_parameter_servers():
    """recognition/README.md has what the loopback device counted: 11.9 MiB of rows each way."""
    moved = traffic.of_process(HEAD, parameters=0)
    assert moved.rows == round(757_000 / 2 / 64) + 128
    assert moved.fetched == moved.returned == 4 * 512 * moved.rows
    assert moved.fetched / 2**20 == pytest.approx(11.9, rel=0.02)
    assert moved.sums == 4 * (3 * 256 * 512 + 256 + 3 * 256 * 2)
    assert moved.between_hosts(has_servers=True) == moved.sums + moved.returned


def test_gradients_of_the_network_are_added_up():
    assert traffic.of_process(HEAD, 1000).sums - traffic.of_process(HEAD, 0).sums == 4000


def test_one_process_exchanges_nothing():
    alone = traffic.of_process(HEAD._replace(processes=1, devices=2, store="host"), 1000)
    assert alone.sums == 0
    assert alone.rows == 2 * (round(757_000 / 2 / 64) + 128)
    assert alone.fetched == 4 * 512 * alone.rows
    on_device = traffic.of_process(HEAD._replace(processes=1, store="device"), 1000)
    assert on_device.fetched == on_device.returned == 0
