"""A run of thousands of steps takes no more memory, files or threads than one of hundreds."""

import os
import subprocess
import sys

import pytest

from dsoftmax.recognition import train

STEPS, EVERY = 2100, 100
MEGABYTES = 20  # 0.013 per step; a leak of the batch's embeddings alone would be 30


def usage(pid):
    """Return the megabytes, open files and threads of a process."""
    with open(f"/proc/{pid}/statm") as file:
        memory = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    return memory, len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    ("loss", "accumulate"), [("dsoftmax", 1), ("dsoftmax_k", 1), ("dsoftmax_k", 2)]
)
def test_flat_over_2000_steps(loss, accumulate, dataset, tmp_path):
    folder, _ = dataset((12,) * 20)
    command = [sys.executable, "-u", train.__file__, "--network", "tiny", "--loss", loss]
    command += ["--dataset", "few", "--data-dir", folder]
    command += ["--per-batch-size", 32 // accumulate, "--accumulate", accumulate]
    command += ["--max-steps", STEPS, "--frequent", EVERY, "--verbose", "500"]
    command += ["--emb-size", "128", "--threads", "1", "--models-root", tmp_path / "models"]
    found = []
    with subprocess.Popen(
        list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        for line in process.stderr:
            if "Batch [" in line:
                found.append(usage(process.pid))
    assert process.returncode == 0
    assert len(found) == STEPS // EVERY
    (memory, files, threads), (memory_later, files_later, threads_later) = found[6], found[-2]
    assert memory_later - memory < MEGABYTES
    assert files_later == files
    assert abs(threads_later - threads) <= 1  # each epoch has a thread of its own
