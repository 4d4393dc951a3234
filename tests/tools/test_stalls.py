"""Jobs that stand still, or lose hosts and workers; small programs take the place of a training."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dsoftmax.recognition.common.distributed import heartbeat
from dsoftmax.tools import launch
from dsoftmax.tools.launch import main
from dsoftmax.tools.launcher import job
from dsoftmax.tools.launcher.hosts import Host, Place
from dsoftmax.tools.launcher.layout import Layout
from tests import faults
from tests.small_jobs import SLEEP, wait_until

# All processes wait for each other in each step; a signal stops them after the same one.
IN_STEP = f"""
sys.path.insert(0, {str(Path(faults.__file__).parent)!r})
from faults import Fault
from dsoftmax.recognition.common.distributed.heartbeat import beat
fault = Fault.of_this_process()
names = [f"worker{{number}}" for number in range(int(os.environ["DMLC_NUM_WORKER"]))]
names += ["server", "scheduler"]
start = os.path.join(folder, "steps-" + os.environ["DMLC_PS_ROOT_PORT"])
os.makedirs(start, exist_ok=True)
received = []
def meet(step):
    with open(f"{{start}}/{{role}}{{rank}}-{{step}}.part", "w") as file:
        file.write(str(len(received)))
    os.rename(file.name, file.name[:-5])
    said = []
    for name in names:
        while not os.path.exists(f"{{start}}/{{name}}-{{step}}"):
            time.sleep(0.01)
        with open(f"{{start}}/{{name}}-{{step}}") as file:
            said.append(file.read())
    return said
def train(steps):
    signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
    for step in range(steps):
        if fault:
            fault.strike(step)
        if any(map(int, meet(step))):
            note("saved", os.getpid(), step)
            sys.exit(143)
        if rank:
            beat(f"after step {{step + 1}}")
        time.sleep(0.01)
"""

JOB = ["-n", "2", "-s", "1"]
SECONDS_TO_STOP = 0.5


def is_stopped(pid):
    return "State:\tT" in Path(f"/proc/{pid}/status").read_text()


@pytest.mark.parametrize(
    ("victim", "is_remote", "who"),
    [
        ("worker1", False, "worker 1"),
        ("server", False, "server 0"),
        ("worker1", True, "worker 1 on 10.0.0.2"),
    ],
)
def test_one_is_stopped(launched, monkeypatch, victim, is_remote, who):
    """It is named, with the last steps of all; the job is started again."""
    monkeypatch.setenv(faults.VARIABLE, f"{victim} 5 stop")
    flags = [*JOB, "--stall-timeout", "2", "--restart", "1"]
    flags += launched.hosts("10.0.0.1", "10.0.0.2") if is_remote else []
    code, out, err = launched.run(flags, IN_STEP + "train(10)\nif rank:\n print('done')\n")
    first, second = (" on 10.0.0.1", " on 10.0.0.2") if is_remote else ("", "")
    assert (code, err) == (
        0,
        f"launch: restart 1 of 1: {who} is stopped; no worker got any further in 2 s (last heard "
        f"of: worker 0{first} after step 5, worker 1{second} after step 5)\n",
    )
    assert sorted(out.splitlines()) == ["[worker 0] done", "[worker 1] done"]
    assert not launched.left()


def test_nobody_is_stopped_and_yet_all_stand_still(launched):
    program = IN_STEP + "if rank != '1':\n train(10)\nelse:\n beat('thinking')\n" + SLEEP
    flags = [*JOB, "--stall-timeout", "1"]
    code, _, err = launched.run(flags, program, seconds_to_stop=SECONDS_TO_STOP)
    assert (code, err) == (
        124,
        "launch: error: no worker got any further in 1 s (last heard of: worker 0 silent, "
        "worker 1 thinking)\n",
    )
    assert not launched.left()


@pytest.mark.slow
def test_a_host_does_not_even_answer(launched):
    """As if a host were frozen, but its connections stayed."""
    flags = [*JOB, "--stall-timeout", "1", *launched.hosts("10.0.0.1", "10.0.0.2")]
    launched.start(flags, IN_STEP + "train(10000)\n", seconds_to_stop=SECONDS_TO_STOP)
    wait_until(lambda: len(list(launched.folder.glob("steps-*/worker0-3"))) == 1)
    (ssh,) = (path for path in launched.folder.glob("ssh.*") if path.read_text() == "10.0.0.2")
    os.kill(launched.pid("worker1"), signal.SIGSTOP)
    os.kill(int(ssh.suffix[1:]), signal.SIGSTOP)
    code, _, err = launched.end(30)
    assert code == 124
    assert err.startswith("launch: error: worker 1 on 10.0.0.2 does not answer; no worker got")
    wait_until(lambda: not launched.left())


def test_who_is_busy_is_not_stalled(launched):
    """One worker works for longer than the timeout, and says so; the other waits in silence."""
    program = """
if rank == "0":
    for _ in range(13):
        beat("verifying step 1")
        time.sleep(0.2)
train(3)
"""
    assert launched.run([*JOB, "--stall-timeout", "2"], IN_STEP + program) == (0, "", "")


@pytest.mark.parametrize(
    ("flags", "program"),
    [
        (["--stall-timeout", "1"], "time.sleep(1.5)\n"),
        (["--stall-timeout", "0"], "if rank:\n beat()\n time.sleep(1.5)\n"),
    ],
    ids=["no heartbeat", "no limit"],
)
def test_who_is_not_watched(launched, flags, program):
    assert launched.run([*JOB, *flags], IN_STEP + program) == (0, "", "")


@pytest.mark.parametrize("victim", ["worker1", "server"])
def test_a_signal_while_one_is_stopped(launched, monkeypatch, victim):
    """It goes on, so that all can save."""
    monkeypatch.setenv(faults.VARIABLE, f"{victim} 5 stop")
    launched.start([*JOB, "--grace", "30"], IN_STEP + "train(10000)\n")
    launched.wait_for(worker=2, server=1)
    wait_until(lambda: is_stopped(launched.pid(victim)))
    launched.process.send_signal(signal.SIGTERM)
    code, _, err = launched.end(30)
    assert (code, err) == (143, "launch: SIGTERM: the workers have 30 s to save and leave\n")
    saved = launched.notes("saved")
    assert len(set(saved.values())) == 1
    assert set(launched.notes("worker")) <= set(saved)


def test_a_heartbeat_after_half_a_line(launched):
    program = "if rank:\n os.write(1, b'half')\n beat()\n print('whole')\n"
    code, out, _ = launched.run(["-n", "1", "-s", "1"], IN_STEP + program)
    assert (code, out) == (0, "[worker 0] half\n[worker 0] whole\n")


def test_only_a_launcher_hears_heartbeats(capfd, monkeypatch):
    monkeypatch.delenv(heartbeat.SWITCH, raising=False)
    heartbeat.beat("a test")
    assert capfd.readouterr().out == ""
    monkeypatch.setenv(heartbeat.SWITCH, "1")
    heartbeat.beat()
    assert capfd.readouterr().out == "launch: heartbeat: a test\n"


def test_a_heartbeat_that_nobody_reads():
    """It neither ends the worker nor prints a traceback."""
    program = "from dsoftmax.recognition.common.distributed.heartbeat import beat; beat('x')"
    reading, writing = os.pipe()
    os.close(reading)
    environment = {**os.environ, heartbeat.SWITCH: "1"}
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, stdout=writing, stderr=subprocess.PIPE, env=environment)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


class TestFewerWorkers:
    def test_a_host_stays_lost(self, launched, monkeypatch, capfd):
        monkeypatch.setattr(launch, "SECONDS_BETWEEN_TRIES", 0.1)
        monkeypatch.setattr(launch, "SECONDS_TO_COME_BACK", 0.3)
        monkeypatch.setattr(job, "SECONDS_TO_STOP", SECONDS_TO_STOP)
        monkeypatch.setenv(faults.VARIABLE, "worker1 5 kill")
        lost = launched.folder / "lost-10.0.0.2"
        command = launched.command(f"open({str(lost)!r}, 'w').close()\n" + IN_STEP + "train(10)\n")
        flags = ["-n", "4", "-s", "1", "--restart", "1", "--min-workers", "3"]
        flags += launched.hosts("10.0.0.1 slots=2", "10.0.0.2 slots=1", "10.0.0.3 slots=1")
        assert main([*flags, "--", *command]) == 0
        first, waiting, last = capfd.readouterr().err.splitlines()
        assert first == "launch: restart 1 of 1: worker 1 on 10.0.0.2 was killed by SIGKILL"
        assert waiting.startswith("launch: waiting up to 0.3 s: host 10.0.0.2 does not answer")
        assert last == "launch: going on with 3 of 4 workers, without host 10.0.0.2"
        again = [each for each in launched.notes("worker").values() if each["arguments"]]
        hosts = {each["environment"]["DSOFTMAX_RANK"]: each["environment"] for each in again}
        assert {rank: each["FAKE_HOST"] for rank, each in hosts.items()} == {
            "0": "10.0.0.1",
            "1": "10.0.0.3",
            "2": "10.0.0.1",
        }
        assert {each["DMLC_NUM_WORKER"] for each in hosts.values()} == {"3"}

    def test_a_worker_keeps_failing(self, launched, monkeypatch):
        monkeypatch.setenv(faults.VARIABLE, "worker2 1 kill always")
        flags = ["-n", "3", "-s", "1", "--restart", "2", "--min-workers", "1"]
        program = IN_STEP + "train(3)\n"
        code, _, err = launched.run(flags, program, seconds_to_stop=SECONDS_TO_STOP)
        killed = "worker 2 was killed by SIGKILL"
        assert code == 0
        assert err.splitlines() == [
            f"launch: restart 1 of 2: {killed}",
            f"launch: restart 2 of 2: {killed}",
            "launch: going on with 2 of 3 workers, without worker 2, which failed twice in a row",
        ]

    def test_not_too_few(self, launched, monkeypatch):
        monkeypatch.setenv(faults.VARIABLE, "worker1 1 kill always")
        flags = [*JOB, "--restart", "2", "--min-workers", "2"]
        program = IN_STEP + "train(3)\n"
        code, _, err = launched.run(flags, program, seconds_to_stop=SECONDS_TO_STOP)
        assert code == 137
        assert "going on" not in err
        assert len(launched.notes("worker1")) == 3

    def test_who_stays_where(self):
        layout = Layout([Host("a"), Host("b", 1), Host("c")], 4, None, fewest=2)
        rest = layout.without_hosts(["c"])
        assert (rest.workers, rest.servers) == (3, 3)
        assert rest.elsewhere == ["a", "b"]
        assert [place.host for place in rest.places if place.role == "worker"] == ["a", "b", "a"]
        fewer = rest.without_worker(Place("worker", 2, "a"))
        assert [str(place) for place in fewer.places][-2:] == ["worker 0", "worker 1"]
        assert [place.host for place in fewer.places][-2:] == ["a", "b"]
        assert fewer.without_worker(Place("worker", 1, "b")) is None  # too few
        assert layout.without_hosts(["a"]) is None  # it has the states
        assert layout.without_worker(Place("server", 0, "b")) is None

    def test_a_host_of_servers_alone_stays(self):
        layout = Layout([Host("a"), Host("b"), Host("c")], 2, 3, fewest=1)
        rest = layout.without_worker(Place("worker", 1, "b"))
        assert rest.elsewhere == ["a", "c"]
        assert [place.host for place in rest.places if place.role == "server"] == ["a", "c", "a"]

    @pytest.mark.parametrize(
        ("flags", "message"),
        [
            (["--min-workers", "1"], "--min-workers says how restarts go on: add --restart N"),
            (["--min-workers", "3", "--restart", "1"], "--min-workers 3 is more than --workers 2"),
            (["--stall-timeout", "-1"], "a whole number of 0 or more is needed, not '-1'"),
        ],
    )
    def test_bad_flags(self, capsys, flags, message):
        with pytest.raises(SystemExit):
            main(["-n", "2", *flags, "--", "true"])
        assert message in capsys.readouterr().err
