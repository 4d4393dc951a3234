"""What a run needs, by its settings; the memory is compared with that of runs."""

import json
import subprocess
import sys

import pytest

from dsoftmax.recognition.common.speed import Speed
from dsoftmax.recognition.estimate import PROCESS_BYTES
from dsoftmax.recognition.needs import (
    Layout,
    head_seconds,
    head_size,
    needs_of,
    network_seconds,
    network_size,
)
from dsoftmax.recognition.settings import parse

DATA = ["--dataset", "faces", "--data-dir", "faces"]


def settings_of(*flags):
    return parse(["--network", "tiny", "--per-batch-size", "4", *flags, *DATA])


def test_the_head_of_several_devices_and_hosts():
    flags = ("--loss", "dsoftmax_k", "--sample-rate", "1/8", "--accumulate", "3")
    head = head_size(settings_of(*flags), 80_000, Layout(2, 5))
    assert head.batch_size == 4 * 2 * 5 * 3
    assert (head.devices, head.processes, head.sampled_share) == (10, 5, 1 / 8)
    assert not head.keeps_logits
    assert head_size(settings_of("--class-parallel", "0"), 80_000, Layout(2)).devices == 1
    assert head_size(settings_of(), 9_999, Layout(2)).devices == 1  # too few to be split


def test_where_memory_is_needed():
    settings = settings_of("--loss", "dsoftmax_k", "--store", "host", "--emb-size", "128")
    network = network_size(settings)
    on_gpu = needs_of(settings, 1_000_000, Layout(2, 1, on_cpu=False), network)
    assert on_gpu.host == PROCESS_BYTES + 4 * 128 * 2 * 1_000_000
    on_cpu = needs_of(settings, 1_000_000, Layout(2, 1), network)
    assert on_cpu.host == on_gpu.host + 2 * on_cpu.device.total
    assert on_cpu.parameters == network.parameters


def test_the_time_of_the_head_is_products_and_passes():
    settings = settings_of("--loss", "dsoftmax_k", "--emb-size", "128")
    needs = needs_of(settings, 640_000, Layout(1), network_size(settings))
    rows = 10_000 + 4
    assert needs.traffic.rows == rows
    only_products = head_seconds(needs, Speed(1e9, float("inf")))
    assert only_products == pytest.approx(6 * 4 * 128 * rows / 1e9)
    only_copies = head_seconds(needs, Speed(float("inf"), 1e9))
    assert only_copies == pytest.approx(9 * 4 * 128 * rows / 1e9)
    settings = settings_of("--loss", "arcface", "--emb-size", "128")
    of_all = needs_of(settings, 640_000, Layout(1), network_size(settings))
    seconds = head_seconds(of_all, Speed(float("inf"), 1e9))
    assert seconds == pytest.approx(4 * 4 * 128 * 640_000 / 1e9)


@pytest.mark.parametrize("network", ["tiny", "y1", "r18"])
def test_the_network_is_measured(network):
    settings = settings_of("--network", network, "--image-size", "112" if network == "y1" else "56")
    assert 0 < network_seconds(settings, network_size(settings)) < 60


MEASURE = """
import json, sys, tempfile
import mxnet as mx
from dsoftmax.recognition.common.memory import forget_peak, peak_bytes
from dsoftmax.recognition.loop import Run
from dsoftmax.recognition.needs import Layout, needs_of, network_size
from dsoftmax.recognition.settings import parse

settings = parse(sys.argv[1:])
run = Run(settings)
forget_peak()
for number, batch in enumerate(run.plan.pipeline.epoch(0, 0)):
    run.train_step(batch)
    run.step += 1
    if number == 2:
        break
mx.nd.waitall()
layout = Layout(len(run.plan.contexts))
needs = needs_of(settings, run.plan.num_classes, layout, network_size(settings))
print(json.dumps({"peak": peak_bytes(), "estimate": needs.host}))
run.release()
"""
CASES = {
    "all classes": "--network tiny --emb-size 512 --loss arcface --num-classes 100000 "
    "--per-batch-size 64",
    "sampled classes": "--network y1 --loss dsoftmax_k --num-classes 1000000 --per-batch-size 32",
    "half precision": "--network tiny --emb-size 256 --loss dsoftmax_k --num-classes 1000000 "
    "--per-batch-size 32 --store host --class-dtype float16",
    "chunks": "--network tiny --emb-size 512 --loss dsoftmax --num-classes 300000 "
    "--per-batch-size 64 --chunk 16384",
    "a residual network": "--network r18 --loss arcface --num-classes 20000 --per-batch-size 16",
    "host memory": "--network r34 --loss dsoftmax_k --num-classes 500000 --per-batch-size 8 "
    "--store host",
    "micro-batches": "--network tiny --loss dsoftmax --num-classes 200000 --per-batch-size 32 "
    "--accumulate 2",
    "two contexts": "--network y1 --loss nsoftmax --num-classes 85742 --per-batch-size 16 "
    "--devices cpu:2",
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_the_estimate_is_within_a_tenth_of_the_measured_peak(case, dataset, tmp_path):
    folder, _ = dataset(counts=(100, 100), size=(112, 112))
    flags = [*CASES[case].split(), "--dataset", "faces", "--data-dir", str(folder)]
    flags += ["--target", "none", "--models-root", str(tmp_path), "--max-steps", "4"]
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *flags], capture_output=True, text=True, check=True
    )
    measured = json.loads(done.stdout.splitlines()[-1])
    print(
        f"{case}: peak {measured['peak'] / 1e9:.2f} GB, estimate {measured['estimate'] / 1e9:.2f}"
    )
    assert measured["estimate"] == pytest.approx(measured["peak"], rel=0.1)
