"""Small programs in the place of a training, under the launcher, and an ssh that stays here."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
DOWN_WITHIN = 10

QUICK_TO_STOP = """\
import sys
from dsoftmax.tools import launch
from dsoftmax.tools.launcher import job
job.SECONDS_TO_STOP = {}
sys.exit(launch.main())
"""

# Begins every program: it leaves its environment and arguments in a file named by who it is.
PREAMBLE = """
import json, os, signal, subprocess, sys, time
folder = os.path.dirname(os.path.abspath(__file__))
role, rank = os.environ["DMLC_ROLE"], os.environ.get("DSOFTMAX_RANK", "")
def note(name, pid, found=None):
    path = os.path.join(folder, f"{name}-{pid}")
    with open(path + ".part", "w") as file:
        json.dump(found, file)
    os.rename(path + ".part", path + ".json")
note(role + rank, os.getpid(), {
    "environment": dict(os.environ), "arguments": sys.argv[1:], "folder": os.getcwd(),
    "port": os.environ["DMLC_PS_ROOT_PORT"]})
"""
SLEEP = "time.sleep(40)\n"
GRANDCHILD = """
child = subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(40)"])
note("grandchild", child.pid)
"""

# As ssh and sshd together: a session of its own for the command, whose stdin ends with ssh.
FAKE_SSH = f"""#!{sys.executable}
import glob, os, subprocess, sys, threading, time
words = sys.argv[1:]
lost = os.path.join(os.path.dirname(__file__), "lost-" + words[-2])
while words[0].startswith("-"):
    del words[:2]
if words[0] == os.environ.get("SILENT_HOST"):
    sys.exit("a banner\\nssh: connect to host " + words[0] + " port 22: No route to host\\n")
if words[1:] == ["true"]:
    if os.path.exists(lost):
        os.environ.get("COMES_BACK") and os.unlink(lost)
        sys.exit("ssh: connect to host " + words[0] + " port 22: No route to host")
    sys.exit()
if "MOST_LOG_INS" in os.environ:
    coming = __file__ + "." + words[0] + ".coming-"
    open(coming + str(os.getpid()), "w").close()
    if len(glob.glob(coming + "*")) > int(os.environ["MOST_LOG_INS"]):
        print("kex_exchange_identification: Connection reset by peer", file=sys.stderr)
        sys.exit(255)
    time.sleep(0.2)
    os.unlink(coming + str(os.getpid()))
with open(__file__ + "." + str(os.getpid()), "w") as file:
    file.write(words[0])
command = subprocess.Popen(["sh", "-c", " ".join(words[1:])], stdin=subprocess.PIPE,
    start_new_session=True, bufsize=0, cwd="/", env=dict(os.environ, FAKE_HOST=words[0]))
def copy():
    for line in sys.stdin.buffer:
        command.stdin.write(line)
    command.stdin.close()
threading.Thread(target=copy, daemon=True).start()
os._exit(command.wait())
"""


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_until(condition, seconds=10.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)


class Launched:
    """Programs under the launcher, and what they noted."""

    def __init__(self, folder):
        self.folder = folder
        self.ssh = folder / "ssh"
        self.process = None

    def command(self, program, *arguments):
        path = self.folder / "program.py"
        path.write_text(PREAMBLE + program)
        return [sys.executable, str(path), *arguments]

    def start(self, flags, program, *arguments, seconds_to_stop=None, **options):
        launcher = [str(REPOSITORY / "tools" / "launch.py")]
        if seconds_to_stop is not None:
            launcher = ["-c", QUICK_TO_STOP.format(seconds_to_stop)]
        words = [sys.executable, *launcher, *flags]
        self.process = subprocess.Popen(
            [*words, "--", *self.command(program, *arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # tests under nohup
            **{"cwd": self.folder, **options},
        )

    def end(self, seconds=DOWN_WITHIN):
        out, err = (text.decode() for text in self.process.communicate(timeout=seconds))
        return self.process.returncode, out, err

    def run(self, flags, program, *arguments, **options):
        self.start(flags, program, *arguments, **options)
        return self.end(20)

    def notes(self, name=""):
        return {
            int(path.stem.rpartition("-")[2]): json.loads(path.read_text())
            for path in sorted(self.folder.glob(f"{name}*-*.json"))
        }

    def wait_for(self, **counts):
        wait_until(lambda: all(len(self.notes(name)) == many for name, many in counts.items()))

    def pid(self, name):
        (pid,) = self.notes(name)
        return pid

    def left(self):
        return [pid for pid in self.notes() if is_running(pid)]

    def hosts(self, *lines):
        self.ssh.write_text(FAKE_SSH)
        self.ssh.chmod(0o755)
        (self.folder / "hosts").write_text("\n".join(lines) + "\n")
        return ["--hosts", str(self.folder / "hosts"), "--ssh", f"{self.ssh} -p 2222"]
