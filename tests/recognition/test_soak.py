"""A run of thousands of steps takes no more memory, files or threads than one of hundreds.

``DSOFTMAX_SOAK_STEPS=20000 pytest -m slow tests/recognition/test_soak.py -s`` prints the slopes.
"""

import contextlib
import os
import subprocess
import sys

import numpy as np
import pytest

from dsoftmax.recognition import train
from dsoftmax.recognition.data.packs import write_pack

STEPS, EVERY = int(os.environ.get("DSOFTMAX_SOAK_STEPS", "3000")), 50
WARM_UP = STEPS // 5  # until memory pools and caches are filled
MEGABYTES = 4  # per 1000 steps; a leak of the batch's embeddings alone would be 16


def usage(pid):
    """Return the megabytes, open files and threads of a process."""
    with open(f"/proc/{pid}/statm") as file:
        memory = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    files = 0
    for number in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since
            # Matplotlib keeps each font open that it has ever used.
            files += not os.readlink(f"/proc/{pid}/fd/{number}").endswith(".ttf")
    return memory, files, len(os.listdir(f"/proc/{pid}/task"))


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(
    "flags",
    [
        "--loss dsoftmax",
        "--loss dsoftmax_k",
        "--loss dsoftmax_k --accumulate 2 --per-batch-size 16",
        "--loss hf_softmax --sample-rate 0.3 --store host --target val --verbose 250 --ckpt 2",
    ],
)
def test_flat_over_thousands_of_steps(flags, dataset, jpeg, tmp_path):
    folder, _ = dataset((12,) * 20)
    write_pack(folder / "val.bin", [jpeg() for _ in range(40)], [True, False] * 10)
    command = [sys.executable, "-u", train.__file__, "--network", "tiny", "--emb-size", "128"]
    command += ["--dataset", "few", "--data-dir", folder, "--target", "", "--threads", "1"]
    command += ["--per-batch-size", "32", "--verbose", "500", "--max-steps", STEPS]
    command += ["--frequent", EVERY, "--models-root", tmp_path / "models", *flags.split()]
    found = []
    with subprocess.Popen(
        list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        for line in process.stderr:
            if "Batch [" in line:
                found.append(usage(process.pid))
    assert process.returncode == 0
    assert len(found) == STEPS // EVERY
    memory, files, threads = np.array(found[WARM_UP // EVERY : -1]).T
    slope = np.polyfit(EVERY / 1000 * np.arange(len(memory)), memory, 1)[0]
    print(
        f"{flags}: {slope:+.2f} MB per 1000 steps at {memory[-1]:.0f} MB, "
        f"{np.median(files):.0f} files, {np.median(threads):.0f} threads"
    )
    assert slope < MEGABYTES
    # The run may be about to save or verify when a line of it is read, hence the medians.
    for part, most in ((files, 0), (threads, 1)):  # each epoch has a thread of its own
        early, late = np.array_split(part, 2)
        assert abs(np.median(late) - np.median(early)) <= most
