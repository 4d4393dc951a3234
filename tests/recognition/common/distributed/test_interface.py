"""A job listens on the interface that it is given, and on no other."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from dsoftmax.recognition import train
from dsoftmax.tools import launch
from tests.small_jobs import FAKE_SSH

ADDRESS = "10.99.0.1"
# A machine of its own with a private network, and one that strangers reach.
NETWORKS = f"""
ip link set lo up
ip tuntap add dev private0 mode tun && ip addr add {ADDRESS}/24 dev private0
ip tuntap add dev public0 mode tun && ip addr add 192.0.2.7/24 dev public0
ip link set private0 up && ip link set public0 up
"""
IN_NETWORKS = ["unshare", "--map-root-user", "--net", "sh", "-ec", NETWORKS + 'exec "$@"', "sh"]
# Runs a command and prints all addresses of this machine at which somebody listened meanwhile.
WATCH = """
import json, socket, struct, subprocess, sys, time
job, found = subprocess.Popen(sys.argv[1:], stdout=sys.stderr), set()
while job.poll() is None:
    for path, is_any in (("/proc/net/tcp", False), ("/proc/net/tcp6", True)):
        for line in open(path).readlines()[1:]:
            local, _, state = line.split()[1:4]
            if state == "0A":
                number = struct.pack("<I", int(local.split(":")[0][:8], 16))
                found.add("IPv6" if is_any else socket.inet_ntoa(number))
    time.sleep(0.05)
print(json.dumps(sorted(found)))
sys.exit(job.returncode)
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_remote", [False, True])
def test_nobody_listens_elsewhere(is_remote, flags, tmp_path):
    if not shutil.which("unshare") or not shutil.which("ip"):
        pytest.skip("unshare and ip are not installed")
    if subprocess.run([*IN_NETWORKS, "true"], capture_output=True).returncode:
        pytest.skip("this machine allows no network namespaces")
    of_job, expected = [], ["127.0.0.1"]
    if is_remote:
        (tmp_path / "hosts").write_text(ADDRESS)
        (tmp_path / "ssh").write_text(FAKE_SSH)
        (tmp_path / "ssh").chmod(0o755)
        of_job = ["--hosts", tmp_path / "hosts", "--ssh", tmp_path / "ssh"]
        of_job += ["--interface", "private0", "--env", f"PATH={os.environ['PATH']}"]
        expected = [ADDRESS]
    command = [sys.executable, "-u", train.__file__]
    command += flags("models", "--loss", "dsoftmax_k", "--kvstore", "dist_sync")
    done = subprocess.run(
        [*IN_NETWORKS, sys.executable, "-c", WATCH, sys.executable, launch.__file__]
        + list(map(str, ["-n", "2", "-s", "1", *of_job, "--", *command])),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected
