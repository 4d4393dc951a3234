"""Jobs of several processes on MXNet's parameter server, by the real launcher, on loopback."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from mxnet import nd

from dsoftmax.losses import operators
from dsoftmax.recognition import plan, states, train
from dsoftmax.recognition.common.distributed import job
from dsoftmax.recognition.common.distributed.group import Group
from dsoftmax.recognition.common.distributed.parameter_server import server
from dsoftmax.recognition.common.distributed.parameter_server.keys import (
    FIRST_CLASS_KEY,
    weights_key,
    weights_of_momenta,
)
from dsoftmax.recognition.common.distributed.parameter_server.rows import ServerRows
from dsoftmax.recognition.data.packs import write_pack
from dsoftmax.recognition.settings import parse
from tests import faults
from tests.recognition.common.distributed import job_of_heads, job_of_steps
from tests.recognition.common.distributed.jobs import (
    PYTHON,
    SPLIT,
    assert_same_bits,
    launched,
    run,
    states_of,
)
from tests.waits import counted_waits


class TestHeads:
    @pytest.fixture(scope="class")
    def found(self, tmp_path_factory):
        """Run all heads in one job of two workers and two servers."""
        folder = tmp_path_factory.mktemp("heads")
        command = [*PYTHON, job_of_heads.__file__, folder, "dist_sync"]
        code, output = run(launched(2, 2, command, *SPLIT))
        assert code == 0, output[-3000:]
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]

    def test_what_is_exchanged(self, found):
        for one in found:
            assert (one["rank"], one["size"]) == (found.index(one), 2)
            exchanged = one["exchanged"]
            assert exchanged["sum"] == [[3.0] * 3] * 2
            assert exchanged["repeated"] == [[10.0 * turn, 10.0 * turn + 1] for turn in range(30)]
            assert exchanged["integers"] == [(1 << 40) - 1, -1, (1 << 40) + 2, -1]
            assert exchanged["json"] == [{"rank": 0, "text": ""}, {"rank": 1, "text": "é"}]
            assert exchanged["odd sizes"] == [[3.0], [3.0] * 3, [3.0] * 5]
            assert exchanged["broadcast"] == {
                "a": ["int64", [0, 1, 2]],
                "b": ["float64", [[0.1]]],
            }

    @pytest.mark.parametrize("case", job_of_heads.CASES)
    def test_as_one_process_with_two_devices(self, found, case):
        # Servers update by MXNet's operators, which round in another way than ours.
        rounds = operators.load() and case.endswith("servers")
        for one in found:
            for what, difference in one[case].items():
                assert difference <= (1e-4 if rounds else 0.0), what


def test_steps_leave_nothing_behind(tmp_path):
    """No memory, objects, files or threads; leaked embeddings would be 26 MB in 400 steps."""
    command = [*PYTHON, job_of_steps.__file__, tmp_path / "usage.json"]
    code, output = run(launched(1, 1, command))
    assert code == 0, output[-3000:]
    (memory, *early), (memory_later, *late) = json.loads((tmp_path / "usage.json").read_text())
    assert memory_later - memory < 6
    assert late == early


class TestTraining:
    def test_servers_then_other_numbers_then_alone(self, flags, monkeypatch, tmp_path, rng):
        """Weights, momenta, position: all is taken up exactly by another number of everything."""
        monkeypatch.setenv(operators.SWITCH, "0")  # all round alike
        np.save(tmp_path / "classes.npy", rng.normal(size=(12, 16)))
        begun = ("--class-weights", tmp_path / "classes.npy")
        sampled = ("--loss", "dsoftmax_k", "--sample-rate", "0.25", *begun)
        alone = ("--devices", "cpu:2", "--class-parallel", "1")
        served = ("--kvstore", "dist_sync")
        whole = flags("whole", *sampled, *alone)
        assert run([*PYTHON, train.__file__, *whole])[0] == 0
        two = flags("part", *sampled, *served, "--devices", "cpu", "--max-steps", "5")
        code, output = run(launched(2, 2, [*PYTHON, train.__file__, *two], *SPLIT))
        assert code == 0, output[-3000:]
        assert "[worker 0] call reset()" in output
        assert "[worker 1] call reset()" not in output  # the first one tells
        one = flags("part", *sampled, *served, *alone, "--max-steps", "8", "--resume")
        code, output = run(launched(1, 3, [*PYTHON, train.__file__, *one]))
        assert code == 0, output[-3000:]
        assert "resumed with store" not in output
        part = flags("part", *sampled, *alone, "--resume")
        assert run([*PYTHON, train.__file__, *part])[0] == 0
        assert_same_bits(whole, part)

    @pytest.mark.parametrize(
        "changes",
        [
            pytest.param((), id=""),
            pytest.param(("--accumulate", "2"), id="micro-batches", marks=pytest.mark.slow),
            pytest.param(
                ("--teacher", "teacher,0", "--class-weights", "classes.npy"),
                id="teacher",
                marks=pytest.mark.slow,
            ),
        ],
    )
    def test_all_classes_split_over_workers(
        self, flags, tmp_path, monkeypatch, symbol_model, rng, changes
    ):
        """With Dropout, and class weights in the models, too."""
        monkeypatch.chdir(tmp_path)
        symbol_model("teacher")
        np.save("classes.npy", rng.normal(size=(12, 16)))
        config = tmp_path / "dropout.py"
        config.write_text(
            "from dsoftmax.recognition.config import *\nnetwork.tiny.net_output = 'E'\n"
            "config.ckpt_embedding = False\n"
        )
        common = ("--loss", "dsoftmax", "--config", config, *changes)
        whole = flags("whole", *common, "--devices", "cpu:2", "--class-parallel", "1")
        assert train.main(whole) == 0
        part = flags("part", *common, "--devices", "cpu", "--kvstore", "dist_sync")
        code, output = run(launched(2, 1, [*PYTHON, train.__file__, *part]))
        assert code == 0, output[-3000:]
        assert_same_bits(whole, part)
        one, other = (f"{parse(made).prefix}-0000.params" for made in (whole, part))
        saved, expected = nd.load(other), nd.load(one)
        assert expected["arg:fc7_weight"].shape == (12, 16)
        for key in expected:
            np.testing.assert_array_equal(saved[key].asnumpy(), expected[key].asnumpy())


def processes_of(text):
    """Return the role and number of each process whose command line holds a text."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if text.encode() not in (entry / "cmdline").read_bytes():
                continue
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # it has left
            continue
        variables = dict(line.decode().partition("=")[::2] for line in environment if line)
        role = variables.get("DMLC_ROLE", "launcher")
        found[int(entry.name)] = role + variables.get("DSOFTMAX_RANK", "")
    return found


def is_python(pid):
    """Say whether it is the process itself, not a shell that watches it."""
    return os.readlink(f"/proc/{pid}/exe") == os.readlink("/proc/self/exe")


class TestFaults:
    @pytest.mark.parametrize(
        ("victim", "code"),
        [
            ("worker1", 137),
            pytest.param("server", 137, marks=pytest.mark.slow),
            pytest.param("scheduler", 137, marks=pytest.mark.slow),
        ],
    )
    def test_kill_9(self, flags, tmp_path, victim, code):
        """The job ends within ten seconds, with its reason, and nobody is left behind."""
        sampled = ("--loss", "dsoftmax_k", "--sample-rate", "0.25", "--devices", "cpu")
        made = flags("job", *sampled, "--kvstore", "dist_sync", "--max-steps", "100000")
        made += ["--verbose", "2"]
        job = subprocess.Popen(
            launched(2, 2, [*PYTHON, train.__file__, *made]),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        text = str(tmp_path / "job")
        try:
            deadline = time.monotonic() + 90
            while not states_of(made) and time.monotonic() < deadline:
                time.sleep(0.1)
            pythons = [
                pid for pid, role in processes_of(text).items() if role == victim and is_python(pid)
            ]
            os.kill(pythons[0], signal.SIGKILL)
            killed = time.monotonic()
            output = job.communicate(timeout=60)[0]
            assert time.monotonic() - killed < 10
        finally:
            job.kill()
        assert job.returncode == code
        assert "was killed by SIGKILL" in output
        assert victim.rstrip("01") in output
        deadline = time.monotonic() + 5
        while processes_of(text) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert processes_of(text) == {}
        step = states.read_facts(states_of(made)[0])["step"]
        alone = flags("job", *sampled, "--max-steps", str(step + 2), "--resume")
        assert train.main(alone) == 0
        assert states_of(alone)[0].endswith(f"state-{step + 2:08d}")

    @pytest.mark.slow
    def test_a_signal_saves_and_leaves(self, flags):
        """The launcher hands it on to the workers, and they stop at the same step."""
        sampled = ("--loss", "dsoftmax_k", "--sample-rate", "0.25", "--devices", "cpu")
        made = flags("job", *sampled, "--kvstore", "dist_sync", "--max-steps", "100000")
        made += ["--verbose", "100000"]
        job = subprocess.Popen(
            launched(2, 2, [*PYTHON, train.__file__, *made]), stdout=subprocess.PIPE, text=True
        )
        try:
            for line in job.stdout:
                if "Epoch[" in line:
                    break
            job.terminate()
            output = job.communicate(timeout=60)[0]
        finally:
            job.kill()
        assert job.returncode == 143
        assert "stopped by signal 15: saving step" in output
        assert len(states_of(made)) == 1

    def test_an_exception_in_one_worker(self, flags, monkeypatch):
        """It would hang all others: the process must leave at once, and the launcher restart."""
        monkeypatch.setenv(faults.VARIABLE, "worker1 3 exception")
        made = flags("job", "--kvstore", "dist_sync", "--devices", "cpu", "--loss", "nsoftmax")
        made += ["--max-steps", "4", "--verbose", "2"]
        code, output = run(launched(2, 1, [*PYTHON, faults.__file__, *made], "--restart", "1"))
        assert code == 0, output[-3000:]
        assert "RuntimeError: a cosmic ray" in output
        assert "restart 1 of 1: worker 1 left with exit code 1" in output
        assert "state-00000002, step 2" in output
        assert states_of([*made, "--resume"])[0].endswith("state-00000004")

    def test_a_signal_in_a_verification(self, flags, faces, tmp_path, jpeg):
        """All processes stop at that step, and it is verified first when one goes on."""
        write_pack(faces / "val.bin", [jpeg() for _ in range(40)], [True, False] * 10)
        script = tmp_path / "job.py"
        script.write_text(
            "import os, signal, sys\n"
            "from dsoftmax.recognition.common.distributed.parameter_server import server\n"
            "from dsoftmax.recognition.common.distributed.role import is_worker\n"
            "if not is_worker():\n"
            "    server.serve()\n"
            "    sys.exit()\n"
            "from dsoftmax.recognition import models, train\n"
            "from dsoftmax.recognition.common.distributed import job\n"
            "verify = models.verify\n"
            "def verifying(*args, **options):\n"
            "    os.kill(os.getpid(), signal.SIGTERM)\n"
            "    return verify(*args, **options)\n"
            "models.verify = verifying\n"
            "job.leave(train.main(sys.argv[1:]))\n"
        )
        made = flags("job", "--loss", "nsoftmax", "--devices", "cpu", "--target", "val,val")
        made += ["--max-steps", "4", "--verbose", "2"]
        code, output = run(launched(2, 1, [*PYTHON, script, *made, "--kvstore", "dist_sync"]))
        assert code == 143, output[-3000:]
        assert "stopped by signal 15: saving step 2" in output
        assert [Path(path).name for path in states_of(made)] == ["state-00000002"]
        assert not os.path.exists(f"{parse(made).prefix}-0001.params")
        assert train.main([*made, "--resume"]) == 0
        with open(os.path.join(parse(made).folder, "verification.csv")) as file:
            steps = [line.split(",")[0] for line in file]
        assert steps == ["step", "2", "2", "4", "4"]


class TestRefusedJobs:
    """Whichever process is refused, and whenever: all end, with exit code 2 and its reason.

    They end in a moment or never: nobody is waited for any longer than the timeout of `run`.
    """

    @pytest.fixture
    def refused(self, flags, tmp_path):
        """Run a job on a folder that the name of each worker ends; return what it printed."""

        def run_on(folder, *more):
            made = flags("job", "--kvstore", "dist_sync", "--devices", "cpu", *more)
            words = [*PYTHON, train.__file__, *made, "--data-dir"]
            each = ["sh", "-c", 'exec "$@"$DSOFTMAX_RANK', "sh", *words, folder]
            code, output = run(launched(2, 1, each))
            assert code == 2, output[-3000:]
            assert processes_of(str(tmp_path / "job")) == {}
            return output

        return run_on

    @pytest.fixture
    def both(self, faces, tmp_path):
        """Give each worker its own copy of the dataset, /faces0 and /faces1; return the rest."""
        for rank in range(2):
            shutil.copytree(faces, tmp_path / f"faces{rank}")
        return tmp_path / "faces"

    def test_no_data_for_the_second_worker(self, refused, both):
        shutil.rmtree(f"{both}1")
        assert f"[worker 1] train: error: {both}1: there is no such" in refused(both)

    def test_a_damaged_pack(self, refused, both):
        Path(f"{both}0", "val.bin").write_bytes(b"no pickle")
        message = f"[worker 0] train: error: {both}0/val.bin: not a readable pickle"
        assert message in refused(both, "--target", "val")

    def test_a_second_start_without_resume(self, refused, both, flags):
        assert train.main(flags("job", "--devices", "cpu", "--max-steps", "1")) == 0
        assert "holds the states of an earlier run: go on with it by --resume" in refused(both)

    def test_a_worker_that_ends_too_early(self, tmp_path):
        """Without close() it can't end well, even where it believes so."""
        script = tmp_path / "job.py"
        script.write_text(
            "import sys\n"
            "from dsoftmax.recognition.common.distributed.parameter_server import server\n"
            "from dsoftmax.recognition.common.distributed.role import is_worker\n"
            "if not is_worker():\n"
            "    server.serve()\n"
            "    sys.exit()\n"
            "from dsoftmax.recognition.common.distributed import job\n"
            "group = job.join('dist_sync')\n"
            "if group.rank == 1:\n"
            "    sys.exit(0)\n"
            "group.barrier()\n"
        )
        code, output = run(launched(2, 1, [*PYTHON, script]))
        assert code == 1, output[-3000:]
        assert "[worker 1] this worker ends without close()" in output


class TestLeaving:
    @pytest.fixture
    def leave(self, monkeypatch):
        """Return what leaves, but tells the exit code instead of ending this process."""
        for watcher in ("gettrace", "getprofile"):
            monkeypatch.setattr(sys, watcher, lambda: None)
        codes = []
        monkeypatch.setattr(os, "_exit", codes.append)

        def leave(code):
            job.leave(code)
            return codes.pop()

        return leave

    @pytest.fixture
    def in_a_group(self, monkeypatch):
        group = Group()
        group.is_open = True
        monkeypatch.setattr(job, "_joined", group)
        return group

    @pytest.mark.parametrize("code", [0, 2, 143])
    def test_exit_code(self, leave, code):
        assert leave(code) == code

    def test_never_well_while_others_wait(self, leave, in_a_group, capsys):
        assert leave(0) == 1
        assert "others of its job depend on it" in capsys.readouterr().err
        assert leave(2) == 2
        in_a_group.is_open = False
        assert leave(0) == 0

    @pytest.mark.parametrize("error", [OSError("a full disk"), ValueError("closed")])
    def test_what_was_printed_can_not_be_flushed(self, leave, monkeypatch, error):
        class Stream:
            def flush(self):
                raise error

        monkeypatch.setattr(sys, "stdout", Stream())
        assert leave(2) == 2

    def test_a_profiler_may_report(self, leave, monkeypatch, in_a_group):
        monkeypatch.setattr(sys, "getprofile", lambda: "a profiler")
        assert leave(2) == 2  # others wait
        in_a_group.is_open = False
        with pytest.raises(SystemExit, match="2"):
            leave(2)

    def test_an_interpreter_that_would_never_end(self):
        """As MXNet's shutdown does, where an operator's thread does not come back."""
        program = (
            "import atexit, time\n"
            "from dsoftmax.recognition.common.distributed import job\n"
            "atexit.register(time.sleep, 1000)\n"
            "job.run(lambda: 1 / 0)\n"
        )
        code, output = run([*PYTHON, "-c", program])
        assert code == 1
        assert "ZeroDivisionError" in output


class TestRefusals:
    def test_servers_are_needed(self, monkeypatch):
        monkeypatch.delenv("DMLC_PS_ROOT_URI", raising=False)
        with pytest.raises(ValueError, match=r"start the job by tools/launch\.py"):
            job.join("dist_sync")

    def test_workers_of_a_job_do_not_train_alone(self, monkeypatch):
        monkeypatch.setenv("DMLC_PS_ROOT_URI", "127.0.0.1")
        with pytest.raises(ValueError, match="add --kvstore dist_sync"):
            job.join("device")

    def test_horovod_is_not_installed(self, monkeypatch):
        monkeypatch.setenv("HOROVOD_SIZE", "2")
        monkeypatch.setitem(sys.modules, "horovod.mxnet", None)
        with pytest.raises(ValueError, match="Horovod can't be imported here"):
            job.join("device")

    def test_all_classes_are_not_for_servers(self, flags, capsys):
        made = flags("job", "--loss", "dsoftmax", "--store", "server")
        assert train.main(made) == 2
        assert "choose a loss with sampled classes" in capsys.readouterr().err

    def test_servers_are_not_for_one_process(self, flags, capsys):
        made = flags("job", "--loss", "dsoftmax_k", "--store", "server")
        assert train.main(made) == 2
        assert "needs a group of MXNet's parameter server" in capsys.readouterr().err

    def test_processes_must_agree(self, flags):
        class Other(Group):
            size = 2

            def gather_json(self, name, content):
                return [content, {**content, "seed": 6}]

        with pytest.raises(ValueError, match="seed is 5 in process 0 and 6 in process 1"):
            plan.Plan(parse(flags("job", "--devices", "cpu")), Other())

    def test_processes_must_have_the_same_images(self, flags):
        class Other(Group):
            size = 2

            def gather_json(self, name, content):
                assert content["image_size"] == [32, 32]
                return [content, {**content, "checksum of the labels": 0}]

        with pytest.raises(ValueError, match="checksum of the labels"):
            plan.Plan(parse(flags("job", "--devices", "cpu")), Other())


class TestServerRows:
    @pytest.fixture
    def rows(self):
        made = ServerRows.__new__(ServerRows)
        made.shape, made._has_pushed, made._has_pulled = (10, 4), False, False
        return made

    @pytest.mark.parametrize("borders", [[0, 10], [0, 4, 10]])
    def test_a_pull_does_not_wait_for_its_rows(self, rows, borders, rng, monkeypatch):
        """They arrive while the network computes."""
        monkeypatch.setenv("DMLC_NUM_SERVER", "2")
        values = rng.normal(size=(10, 4)).astype(np.float32)
        ranges = dict(zip(map(weights_key, (0, 1)), zip(borders, borders[1:])))

        class Servers:
            def row_sparse_pull(self, key, out, row_ids):
                part = nd.array(values[slice(*ranges[key])])
                nd.sparse.retain(part.tostype("row_sparse"), row_ids, out=out)

        rows._group, rows._key_borders, rows._first_range = SimpleNamespace(), borders, 0
        rows._group.kv = Servers()
        with counted_waits() as waits:
            pulled = rows.pull(np.array([1, 3, 8]))
        assert {wait.split(",")[0] for wait in waits} == {"MXNDArraySyncCopyFromCPU"}, waits
        np.testing.assert_array_equal(pulled.asnumpy(), values[[1, 3, 8]])

    @pytest.mark.parametrize(
        ("numbers", "message"),
        [
            ([3, 1], "sorted and distinct"),
            ([1, 1], "sorted and distinct"),
            ([0, 10], "not within 0 to 9"),
            ([-1, 2], "not within 0 to 9"),
        ],
    )
    def test_what_would_crash_the_servers_is_refused(self, rows, numbers, message):
        for method in (rows.pull, lambda numbers: rows.push(numbers, None)):
            with pytest.raises(ValueError, match=message):
                method(np.array(numbers))


class TestUpdates:
    """What a server does, without one."""

    WEIGHTS, MOMENTA = FIRST_CLASS_KEY, FIRST_CLASS_KEY + 3

    @pytest.fixture(autouse=True)
    def three_servers(self, monkeypatch):
        monkeypatch.setenv("DMLC_NUM_SERVER", "3")

    def full(self, array):
        rows = nd.arange(len(array), dtype="int64")
        return nd.sparse.row_sparse_array((nd.array(array), rows), shape=array.shape)

    def test_keys(self):
        assert weights_of_momenta(self.WEIGHTS) is None
        assert weights_of_momenta(self.MOMENTA) == self.WEIGHTS
        assert weights_of_momenta(self.MOMENTA + 6) == self.WEIGHTS + 6

    def test_a_sum_replaces(self):
        array = nd.ones((3,))
        server.Updates()(0, nd.array([1, 2, 3]), array)
        assert array.asnumpy().tolist() == [1, 2, 3]

    def test_assigning_is_exact(self, rng):
        updates = server.Updates()
        updates.obey({"assigning": True})
        before, given = (rng.normal(size=(6, 4)).astype(np.float32) for _ in range(2))
        array = self.full(1e6 * before)
        pushed = nd.sparse.row_sparse_array((given[[1, 4]], [1, 4]), shape=(6, 4))
        updates(self.WEIGHTS, pushed, array)
        expected = (1e6 * before).astype(np.float32)
        expected[[1, 4]] = given[[1, 4]]
        np.testing.assert_array_equal(array.asnumpy(), expected)

    def test_momentum_of_the_rows_that_were_pushed(self, rng):
        sgd = {"lr": 0.1, "momentum": 0.9, "wd": 0.01, "rescale_grad": 0.5, "clip_gradient": -1.0}
        updates = server.Updates()
        updates.obey({"sgd": sgd})
        weight = rng.normal(size=(6, 4)).astype(np.float32)
        momentum = np.zeros_like(weight)
        array, momenta = self.full(weight), self.full(momentum)
        updates(self.MOMENTA, nd.sparse.zeros("row_sparse", (6, 4)), momenta)
        for rows in ([0, 3], [3, 5]):
            gradient = rng.normal(size=(2, 4)).astype(np.float32)
            pushed = nd.sparse.row_sparse_array((gradient, rows), shape=(6, 4))
            updates(self.WEIGHTS, pushed, array)
            momentum[rows] = 0.9 * momentum[rows] - 0.1 * (0.5 * gradient + 0.01 * weight[rows])
            weight[rows] += momentum[rows]
        np.testing.assert_allclose(array.asnumpy(), weight, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(momenta.asnumpy(), momentum, rtol=1e-5, atol=1e-6)

    def test_an_error_ends_the_server(self):
        """MXNet prints it and goes on without the update."""
        code = (
            "from dsoftmax.recognition.common.distributed.parameter_server import server\n"
            "server._leave_on_error(server.Updates())(1 << 20, None, None)\n"
        )
        environment = {**os.environ, "DMLC_NUM_SERVER": "1"}
        done = subprocess.run([*PYTHON, "-c", code], env=environment, stderr=subprocess.PIPE)
        assert done.returncode == 1
        assert b"KeyError" in done.stderr


def test_a_server_waits_for_nobody_when_mxnet_is_imported(monkeypatch):
    """MXNet serves when it is imported as one, by its own rules; our import does not."""
    code = (
        "import dsoftmax.recognition.common.distributed.parameter_server.server\n"
        "from dsoftmax.recognition.common.distributed.role import is_worker\n"
        "print(is_worker())"
    )
    environment = {**os.environ, "DMLC_ROLE": "server"}
    done = subprocess.run(
        [*PYTHON, "-c", code], env=environment, stdout=subprocess.PIPE, timeout=60, check=True
    )
    assert done.stdout == b"False\n"
