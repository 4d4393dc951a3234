"""A job on two hosts: network namespaces of this machine, with sshd in each."""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from dsoftmax.losses import operators
from dsoftmax.recognition import train
from tests.recognition.common.distributed.jobs import (
    PYTHON,
    assert_same_bits,
    launched,
    states_of,
)

pytestmark = pytest.mark.slow

PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
TOOLS = ("ip", "mount", "ssh", "ssh-keygen", "sshd")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
TRAIN = (*PYTHON, train.__file__)
ROUND = ("--env", f"{operators.SWITCH}=0")  # as servers do
LOSS = ("--loss", "dsoftmax_k", "--sample-rate", "0.25")
SERVED = ("--devices", "cpu", "--kvstore", "dist_sync")
ALONE = ("--devices", "cpu:2", "--class-parallel", "1")

# Runs sshd, "$3"..., on a host whose folder "$1" is where all hosts have "$2".
SSHD = (
    'mount --bind "$1" "$2" && mount -t tmpfs none /run && mkdir -m 755 /run/sshd && shift 2 && '
    'exec "$@"'
)
SSHD_CONFIG = """
AuthorizedKeysFile {folder}/login.pub
HostKey {folder}/host
PasswordAuthentication no
PermitRootLogin prohibit-password
PidFile none
Port 22
StrictModes no
UsePAM no
"""
SSH_CONFIG = """
GlobalKnownHostsFile none
IdentitiesOnly yes
IdentityAgent none
IdentityFile {folder}/login
StrictHostKeyChecking yes
User root
UserKnownHostsFile {folder}/known_hosts
"""


def run_alone(command):
    """Train in one process that rounds as servers do; return its exit code."""
    return subprocess.run(
        command, env={**os.environ, operators.SWITCH: "0"}, stdout=subprocess.DEVNULL
    ).returncode


def call(*words):
    """Run a command; what it says is in the error if it fails."""
    done = subprocess.run(
        list(map(str, words)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=30,
    )
    if done.returncode:
        raise OSError(f"{shlex.join(map(str, words))}: {done.stdout.strip() or done.returncode}")
    return done.stdout


def wait_until(condition, seconds):
    """Say whether it came true in that time."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


class Network:
    """The launcher's namespace, which holds the bridge, and one for each host.

    The hosts share all files but the folder ``job``: that of the first is ``host1`` to others.
    Nothing is changed outside `folder` but the list of ``ip netns``.
    """

    def __init__(self, folder):
        self.folder = folder
        self.launcher = f"dsoftmax-{os.getpid()}"
        self.hosts = [f"{self.launcher}-{number}" for number in (1, 2)]
        self._sshds = []
        self._stack = contextlib.ExitStack()

    def lay(self):
        """Make the namespaces and join them, as far as this machine lets us."""
        for name in (self.launcher, *self.hosts):
            call("ip", "netns", "add", name)
            self._stack.callback(call, "ip", "netns", "del", name)
            self._stack.callback(self._kill_all, name)
            call("ip", "-n", name, "link", "set", "lo", "up")
        bridge = ("ip", "-n", self.launcher, "link")
        call(*bridge, "add", "bridge", "type", "bridge")
        call("ip", "-n", self.launcher, "address", "add", "10.77.0.254/24", "dev", "bridge")
        call(*bridge, "set", "bridge", "up")
        for name, address in zip(self.hosts, ADDRESSES):
            end = ("peer", "name", "eth0", "index", "10", "netns", name)
            call(*bridge, "add", f"port{address[-1]}", "type", "veth", *end)
            call(*bridge, "set", f"port{address[-1]}", "master", "bridge", "up")
            call("ip", "-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            call("ip", "-n", name, "link", "set", "eth0", "up")

    def start_sshd(self):
        """Start sshd on all hosts, with keys that are good for nothing else."""
        for name in ("login", "host"):
            call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self.folder / name)
        key = (self.folder / "host.pub").read_text()
        (self.folder / "known_hosts").write_text("".join(f"{one} {key}" for one in ADDRESSES))
        for name, text in (("sshd_config", SSHD_CONFIG), ("ssh_config", SSH_CONFIG)):
            (self.folder / name).write_text(text.format(folder=self.folder))
        (self.folder / "hosts").write_text("\n".join(ADDRESSES))
        (self.folder / "job").mkdir()
        sshd = [shutil.which("sshd", path=PATH), "-D", "-e", "-f", self.folder / "sshd_config"]
        for number, name in enumerate(self.hosts, 1):
            own = self.folder / f"host{number}"
            own.mkdir()
            inside = ["sh", "-c", SSHD, "sshd", own, self.folder / "job", *sshd]
            log = self.folder / f"sshd{number}.log"
            with open(log, "wb") as file:
                self._sshds.append(
                    subprocess.Popen(
                        list(map(str, ["ip", "netns", "exec", name, *inside])),
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=file,
                    )
                )
            assert wait_until(lambda log=log: "listening" in log.read_text(), 10), log.read_text()

    def log_in(self):
        """Log in to all hosts, as the launcher will."""
        for address in ADDRESSES:
            call(*self._here(), *self.ssh, address, "true")

    @property
    def ssh(self):
        return ["ssh", "-F", str(self.folder / "ssh_config"), "-o", "BatchMode=yes"]

    def _here(self):
        return ["ip", "netns", "exec", self.launcher]

    def start(self, command, *options, each=2):
        """Start a job of so many workers and servers, by default of one of each on a host."""
        options = ["--hosts", self.folder / "hosts", "--ssh", shlex.join(self.ssh), *options]
        return subprocess.Popen(
            [*self._here(), *launched(each, each, command, *ROUND, *map(str, options))],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, command, *options, **numbers):
        """Run a job; return its exit code and what it printed."""
        with self.start(command, *options, **numbers) as job:
            try:
                output = job.communicate(timeout=200)[0]
            finally:
                job.kill()
        return job.returncode, output

    def pids(self, name):
        """Return the processes of a namespace, but for the sshd that waits for us."""
        found = set(map(int, call("ip", "netns", "pids", name).split()))
        return found - {sshd.pid for sshd in self._sshds}

    def find(self, host, role):
        """Return the process of a role on a host."""
        for pid in self.pids(host):
            with contextlib.suppress(OSError):  # it has left
                is_python = os.readlink(f"/proc/{pid}/exe") == os.readlink("/proc/self/exe")
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if is_python and f"DMLC_ROLE={role}".encode() in environment:
                    return pid
        raise AssertionError(f"there is no {role} on {host}")

    def nobody_is_left(self):
        """Say whether all of the job have left all hosts, some time after the launcher."""
        names = (self.launcher, *self.hosts)
        return wait_until(lambda: not any(map(self.pids, names)), 10)

    def _kill_all(self, name):
        def kill():
            pids = call("ip", "netns", "pids", name).split()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            for sshd in self._sshds:
                sshd.poll()
            return not pids

        assert wait_until(kill, 10), f"processes of {name} can't be killed"

    def tear_down(self):
        """Kill all that runs in the namespaces, and remove them."""
        self._stack.close()
        for sshd in self._sshds:
            sshd.wait(10)


@pytest.fixture
def network(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", PATH)
    missing = [tool for tool in TOOLS if not shutil.which(tool)]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    if os.geteuid():
        pytest.skip("only root may make network namespaces")
    network = Network(tmp_path)
    try:
        try:
            network.lay()
        except OSError as error:
            pytest.skip(f"no network namespaces on this machine: {error}")
        network.start_sshd()
        try:
            network.log_in()
        except OSError as error:
            pytest.skip(f"root may not log in by ssh: {error}")
        yield network
    finally:
        network.tear_down()


def test_the_bits_of_one_process(network, flags):
    alone = flags("alone", *LOSS, *ALONE)
    assert run_alone([*TRAIN, *alone]) == 0
    code, output = network.run([*TRAIN, *flags("job", *LOSS, *SERVED)])
    assert code == 0, output[-3000:]
    assert network.nobody_is_left()
    assert_same_bits(alone, flags("host1", *LOSS))
    assert not os.listdir(network.folder / "host2")  # the first worker writes, on its host
    assert not os.listdir(network.folder / "job")


def test_another_network_comes_first(network, flags):
    """As Docker's: ps-lite would take it, though the same address is another host's too."""
    for name in network.hosts:
        call("ip", "-n", name, "link", "add", "other", "index", "5", "type", "bridge")
        call("ip", "-n", name, "address", "add", "172.17.0.1/16", "dev", "other")
        call("ip", "-n", name, "link", "set", "other", "up")
    made = flags("job", *LOSS, *SERVED, "--max-steps", "2")
    code, output = network.run([*TRAIN, *made])
    assert code == 0, output[-3000:]
    assert states_of(flags("host1", *LOSS))[0].endswith("state-00000002")
    assert network.nobody_is_left()


def test_more_than_sshd_lets_in_at_once(network):
    """It drops connections, with its own settings, when ten others log in."""
    command = ["sh", "-c", '[ "$DMLC_ROLE" = worker ] || exec sleep 30']
    code, output = network.run(command, each=16)
    assert (code, output) == (0, "")
    assert "MaxStartups" not in (network.folder / "sshd1.log").read_text()
    assert network.nobody_is_left()


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_remote_worker_is_killed(network, flags, restarts):
    """All leave both hosts; a restart ends with the bits of one process that nobody disturbed."""
    steps = 20 if restarts else 100_000
    made = flags("job", *LOSS, *SERVED, "--max-steps", str(steps), "--verbose", "2")
    with network.start([*TRAIN, *made], "--restart", restarts) as job:
        try:
            assert wait_until(lambda: states_of(flags("host1", *LOSS)), 90)
            os.kill(network.find(network.hosts[1], "worker"), signal.SIGKILL)
            output = job.communicate(timeout=120)[0]
        finally:
            job.kill()
    how = f"worker 1 on {ADDRESSES[1]} was killed by SIGKILL"
    assert network.nobody_is_left()
    if not restarts:
        assert (job.returncode, how in output) == (137, True), output[-3000:]
        return
    assert job.returncode == 0, output[-3000:]
    assert f"launch: restart 1 of 1: {how}" in output
    assert "[worker 0] resumed from" in output
    alone = flags("alone", *LOSS, *ALONE, "--max-steps", str(steps))
    assert run_alone([*TRAIN, *alone]) == 0
    assert_same_bits(alone, flags("host1", *LOSS))


def test_the_hosts_lose_each_other(network, flags):
    """But not the launcher, to which all seem to be well."""
    made = flags("job", *LOSS, *SERVED, "--max-steps", "100000", "--verbose", "2")
    with network.start([*TRAIN, *made], "--stall-timeout", 15) as job:
        try:
            assert wait_until(lambda: states_of(flags("host1", *LOSS)), 90)
            call("ip", "-n", network.hosts[0], "route", "add", "blackhole", f"{ADDRESSES[1]}/32")
            output = job.communicate(timeout=120)[0]
        finally:
            job.kill()
    assert job.returncode == 124, output[-3000:]
    assert "launch: error: no worker got any further in 15 s (last heard of: worker 0" in output
    assert network.nobody_is_left()
