"""The launcher with small programs in the place of a training."""

import os
import re
import signal
import socket
import time

import pytest

from dsoftmax.tools import launch
from dsoftmax.tools.launch import main
from dsoftmax.tools.launcher import hosts, job
from dsoftmax.tools.launcher.hosts import Host, check_hosts, deal, read_hosts, root_address
from dsoftmax.tools.launcher.process import Lines
from tests.small_jobs import DOWN_WITHIN, GRANDCHILD, SLEEP, is_running, wait_until


def test_environment_of_each_role(launched, monkeypatch):
    monkeypatch.setenv("SEEN_BY_ALL", "yes")
    flags = ["--workers", "2", "--servers", "3", "--env", "A=1", "B=x  y", "--env", "C="]
    assert launched.run(flags, "") == (0, "", "")
    found = [note["environment"] for note in launched.notes().values()]
    assert sorted((each["DMLC_ROLE"], each.get("DSOFTMAX_RANK")) for each in found) == [
        ("scheduler", None),
        *[("server", None)] * 3,
        ("worker", "0"),
        ("worker", "1"),
    ]
    same = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_NUM_SERVER": "3",
        "DMLC_NUM_WORKER": "2",
        "DMLC_INTERFACE": "lo",
        "PYTHONUNBUFFERED": "1",
        "SEEN_BY_ALL": "yes",
        "A": "1",
        "B": "x  y",
        "C": "",
    }
    for each in found:
        assert {name: each[name] for name in same} == same
    (port,) = {each["DMLC_PS_ROOT_PORT"] for each in found}
    assert 0 < int(port) < 65536


def test_port_and_interface_as_given(launched):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    flags = ["-n", "1", "--port", port, "--interface", "eth7"]
    assert launched.run(flags, "") == (0, "", "")
    assert len(launched.notes("server")) == 1  # as many as workers
    for note in launched.notes().values():
        assert note["port"] == port
        assert note["environment"]["DMLC_INTERFACE"] == "eth7"


def test_lines_are_prefixed_and_never_mixed(launched):
    program = """
who = (rank or role[1]).encode()
for _ in range(200):
    for piece in (who * 700, who * 900, who * 3 + b"\\n"):
        os.write(2 if rank == "1" else 1, piece)
os.write(1, b"no end")
"""
    code, out, err = launched.run(["-n", "3", "-s", "1"], program)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    prefixes = {f"worker {rank}": str(rank) for rank in range(3)}
    prefixes.update({"scheduler": "c", "server 0": "e"})
    for prefix, letter in prefixes.items():
        assert lines.count(f"[{prefix}] {letter * 1603}") == 200
        assert lines.count(f"[{prefix}] no end") == 1
    assert len(lines) == 5 * 201


def test_a_progress_bar_leaves_its_last_state(launched):
    program = """
for piece in (b"\\r 10%", b"\\r 50%\\r", b" 99%", b"\\r100%\\n", b"windows\\r", b"\\n", b"\\r7%"):
    os.write(2, piece)
    time.sleep(0.02)
"""
    code, out, _ = launched.run(
        ["-n", "1", "-s", "1"], "if rank:\n " + program.replace("\n", "\n ")
    )
    assert code == 0
    assert out == "[worker 0] 100%\n[worker 0] windows\n[worker 0] 7%\n"


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_lines_of_any_pieces(size):
    text = b"a\rbc\r\rdef\n\n\r\ngh\ri\r\n  \rj"
    lines = Lines()
    found = []
    for start in range(0, len(text), size):
        found += lines.add(text[start : start + size])
    assert found == [b"def", b"", b"", b"i"]
    assert lines.end() == [b"j"]
    assert lines.end() == []


def test_a_long_progress_bar_is_not_hoarded():
    lines = Lines()
    for percent in range(1000):
        assert lines.add(b"\r%d%%" % percent) == []
    assert len(lines._rest) < 10
    assert lines.add(b"\n") == [b"999%"]


def test_lines_are_passed_on_at_once(launched):
    program = """
if rank:
    print("now")
    while not os.path.exists(os.path.join(folder, "seen")):
        time.sleep(0.02)
"""
    launched.start(["-n", "1", "-s", "1"], program)
    assert launched.process.stdout.readline() == b"[worker 0] now\n"
    (launched.folder / "seen").touch()
    assert launched.end()[0] == 0


@pytest.mark.parametrize(
    ("name", "who"), [("worker1", "worker 1"), ("server", "server 0"), ("scheduler", "scheduler")]
)
def test_one_is_killed(launched, name, who):
    launched.start(["-n", "2", "-s", "1"], GRANDCHILD + SLEEP)
    launched.wait_for(scheduler=1, server=1, worker=2, grandchild=4)
    os.kill(launched.pid(name), signal.SIGKILL)
    code, out, err = launched.end()
    assert (code, out, err) == (137, "", f"launch: error: {who} was killed by SIGKILL\n")
    wait_until(lambda: not launched.left(), 5)


def test_an_exception_in_one_worker(launched):
    program = "if rank == '1':\n raise RuntimeError('bang')\n" + SLEEP
    code, out, err = launched.run(["-n", "2", "-s", "2"], program)
    assert code == 1
    assert err.startswith(
        "launch: error: worker 1 left with exit code 1; its last lines on stderr:"
    )
    assert err.endswith("\n  RuntimeError: bang\n")
    assert "[worker 1] RuntimeError: bang\n" in out
    assert not launched.left()


def test_only_the_last_lines_of_stderr(launched):
    program = "if rank:\n print(*range(30), sep='\\n', file=sys.stderr)\n sys.exit(7)\n" + SLEEP
    code, _, err = launched.run(["-n", "1", "-s", "1"], program)
    assert code == 7
    assert [line.strip() for line in err.splitlines()[1:]] == [str(n) for n in range(20, 30)]


def run_here(launched, monkeypatch, program, **seconds):
    for name, value in seconds.items():
        monkeypatch.setattr(job, name, value)
    return main(["-n", "2", "-s", "1", "--", *launched.command(program)])


@pytest.mark.parametrize(
    ("name", "who", "others"),
    [
        ("server", "server 0", "workers"),
        ("scheduler", "scheduler", "workers"),
        ("worker1", "worker 1", "other workers"),
    ],
)
def test_one_leaves_before_the_workers(launched, monkeypatch, capfd, name, who, others):
    program = f"if role + rank == {name!r}:\n sys.exit()\n" + SLEEP
    assert run_here(launched, monkeypatch, program, SECONDS_TO_FOLLOW=0.3) == 1
    message = f"launch: error: {who} left with exit code 0 before the {others} did\n"
    assert capfd.readouterr().err == message
    assert not launched.left()


def test_one_that_fails_is_not_waited_for(launched, monkeypatch, capfd):
    program = "if role == 'scheduler':\n sys.exit(5)\n" + SLEEP
    assert run_here(launched, monkeypatch, program, SECONDS_TO_FOLLOW=1000) == 5
    assert capfd.readouterr().err == "launch: error: scheduler left with exit code 5\n"
    assert not launched.left()


def test_workers_may_end_when_they_like(launched):
    program = "if rank:\n time.sleep(int(rank) * 0.6)\n print('done')\n"  # servers are gone by then
    code, out, err = launched.run(["-n", "2", "-s", "2"], program)
    assert (code, out, err) == (0, "[worker 0] done\n[worker 1] done\n", "")


def test_servers_that_do_not_leave_are_stopped(launched, monkeypatch, capfd):
    program = "if not rank:\n " + SLEEP
    started = time.monotonic()
    assert run_here(launched, monkeypatch, program, SECONDS_TO_LEAVE=0.5) == 0
    assert 0.5 < time.monotonic() - started < 20
    assert capfd.readouterr().err == ""
    assert not launched.left()


def test_what_a_worker_leaves_behind_is_killed(launched):
    assert launched.run(["-n", "1", "-s", "1"], GRANDCHILD)[0] == 0
    assert len(launched.notes("grandchild")) == 3
    wait_until(lambda: not launched.left(), 5)


def test_the_port_is_in_use(launched):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        code, out, err = launched.run(["-n", "1", "--port", str(port)], "")
    assert (code, out) == (2, "")
    assert err == (
        f"launch: error: port {port} of 127.0.0.1 can't be had (Address already in use): give "
        "another --port, or none and a free one is taken\n"
    )
    assert not launched.notes()


def test_the_command_does_not_exist(capfd):
    assert main(["-n", "1", "--", "no-such-program", "--flag"]) == 2
    message = "launch: error: no-such-program: there is no such command here\n"
    assert capfd.readouterr().err == message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-n", "1"], "it follows --"),
        (["-n", "1", "--"], "it follows --"),
        (["-n", "0", "--", "true"], "-n/--workers: a whole number from 1 to 10000 is needed, not"),
        (["-n", str(10**11), "--", "true"], "-n/--workers: a whole number from 1 to 10000 is"),
        (["-n", "1", "-s", str(10**11), "--", "true"], "a whole number from 1 to 10000 is needed"),
        (["-n", "1", "--port", "65536", "--", "true"], "from 1 to 65535 is needed, not '65536'"),
        (["-n", "1", "--env", "A", "--", "true"], "NAME=VALUE is needed, not 'A'"),
    ],
)
def test_bad_flags(words, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


# Fails the first time, in the middle of everything.
FAILS_ONCE = "if rank == '1' and '--resume' not in sys.argv:\n os.kill(os.getpid(), 9)\n"


def test_restart_resumes(launched):
    program = FAILS_ONCE + "if '--resume' not in sys.argv:\n " + SLEEP
    flags = ["-n", "2", "-s", "1", "--restart", "3"]
    code, _, err = launched.run(flags, program, "--lr", "0.1")
    assert (code, err) == (0, "launch: restart 1 of 3: worker 1 was killed by SIGKILL\n")
    found = [note["arguments"] for note in launched.notes("worker1").values()]
    assert sorted(found) == [["--lr", "0.1"], ["--lr", "0.1", "--resume", "auto"]]
    assert not launched.left()


def test_restarts_are_counted(launched):
    program = "if rank == '0':\n sys.exit(3)\n" + SLEEP
    flags = ["-n", "1", "-s", "1", "--restart", "2"]
    code, _, err = launched.run(flags, program, "--resume")
    assert code == 3
    assert err.splitlines() == [
        "launch: restart 1 of 2: worker 0 left with exit code 3",
        "launch: restart 2 of 2: worker 0 left with exit code 3",
        "launch: error: worker 0 left with exit code 3",
    ]
    found = [note["arguments"] for note in launched.notes("worker").values()]
    assert found == [["--resume"]] * 3


def test_a_refused_run_is_not_restarted(launched):
    program = "if rank == '0':\n print('no such flag', file=sys.stderr)\n sys.exit(2)\n" + SLEEP
    code, _, err = launched.run(["-n", "2", "-s", "1", "--restart", "3"], program)
    assert code == 2
    assert err == (
        "launch: error: worker 0 left with exit code 2; its last lines on stderr:\n  no such flag\n"
    )
    assert len(launched.notes("worker0")) == 1


# Workers save, for which they need the servers; nobody else may have got the signal by then.
SAVES = """
def leave(number, _):
    if rank:
        time.sleep(0.5)
        note("saved", rank, [name for name in os.listdir(folder) if name.startswith("stopped")])
    else:
        note("stopped", os.getpid())
    sys.exit(128 + number)
signal.signal(signal.SIGTERM, leave)
note("ready", os.getpid())
"""


@pytest.mark.parametrize(
    ("number", "is_remote"),
    [
        (signal.SIGTERM, False),
        (signal.SIGTERM, True),
        (signal.SIGINT, False),
        (signal.SIGHUP, False),
    ],
)
def test_a_signal_to_the_launcher(launched, number, is_remote):
    flags = ["-n", "2", "-s", "1", "--restart", "3"]
    if is_remote:
        flags += launched.hosts("10.0.0.1", "10.0.0.2")
    launched.start(flags, SAVES + SLEEP)
    launched.wait_for(ready=4)
    launched.process.send_signal(number)
    code, _, err = launched.end()
    message = f"launch: {number.name}: the workers have 60 s to save and leave\n"
    assert (code, err) == (128 + number, message)
    assert launched.notes("saved") == {0: [], 1: []}
    assert len(launched.notes("stopped")) == 2  # and then the others were told
    assert len(launched.notes("worker")) == 2
    assert not [pid for pid in launched.notes("ready") if is_running(pid)]


def test_the_signal_is_for_the_whole_process_group(launched):
    program = """
if rank:
    signal.signal(signal.SIGTERM, lambda *_: None)
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(40)"])
    note("ready", os.getpid())
    note("child", os.getpid(), child.wait())
    sys.exit()
"""
    launched.start(["-n", "1", "-s", "1", "--grace", "2"], program + SLEEP)
    launched.wait_for(ready=1)
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end()[0] == 143
    assert list(launched.notes("child").values()) == [-signal.SIGTERM]


def test_the_grace_ends_and_the_stubborn_are_killed(launched):
    program = "if rank:\n signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + GRANDCHILD
    launched.start(["-n", "1", "-s", "1", "--grace", "1"], program + SLEEP, seconds_to_stop=0.5)
    launched.wait_for(worker=1, grandchild=3)
    launched.process.send_signal(signal.SIGTERM)
    code, _, err = launched.end()
    assert (code, err) == (143, "launch: SIGTERM: the workers have 1 s to save and leave\n")
    wait_until(lambda: not launched.left(), 5)


@pytest.mark.parametrize("is_remote", [False, True])
def test_nobody_survives_the_launcher(launched, is_remote):
    flags = ["-n", "2", "-s", "1"]
    if is_remote:
        flags += launched.hosts("10.0.0.1", "10.0.0.2")
    launched.start(flags, GRANDCHILD + SLEEP)
    launched.wait_for(scheduler=1, server=1, worker=2, grandchild=4)
    launched.process.kill()
    wait_until(lambda: not launched.left(), 5)


def test_nobody_reads_any_more(launched):
    program = SAVES + "while True:\n print('still here')\n time.sleep(0.1)\n"
    launched.start(["-n", "2", "-s", "1"], program)
    launched.wait_for(ready=4)
    launched.process.stdout.close()
    launched.process.stderr.close()
    assert launched.process.wait(DOWN_WITHIN) == 143  # as by SIGTERM
    assert launched.notes("saved") == {0: [], 1: []}
    assert not [pid for pid in launched.notes("ready") if is_running(pid)]


def test_hosts_by_ssh(launched):
    flags = ["-n", "4", "-s", "2", "--env", "B=x  y"]
    flags += launched.hosts("10.0.0.1  # the first", "", "# none", "10.0.0.2 slots=1")
    program = "if rank:\n print('on', os.environ['FAKE_HOST'])\n"
    code, out, err = launched.run(flags, program)
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [
        "[worker 0] on 10.0.0.1",
        "[worker 1] on 10.0.0.2",
        "[worker 2] on 10.0.0.1",
        "[worker 3] on 10.0.0.1",
    ]
    for note in launched.notes().values():
        environment = note["environment"]
        assert environment["DMLC_PS_ROOT_URI"] == "10.0.0.1"
        assert environment["B"] == "x  y"
        assert environment["PYTHONUNBUFFERED"] == "1"
        assert "DMLC_INTERFACE" not in environment
        assert note["folder"] == str(launched.folder)


WORDS = ["two words", "it's", '"quoted"', "$HOME", "`id`", "a\\b", "*", "", "--", "a;b|c&d", "é\n!"]


@pytest.mark.parametrize("is_remote", [False, True])
def test_arguments_arrive_as_they_are(launched, is_remote):
    folder = launched.folder / "it's a $folder"
    folder.mkdir()
    flags = ["-n", "1", "-s", "1", *(launched.hosts("10.0.0.1") if is_remote else [])]
    code, _, err = launched.run([*flags, "--env", "A=$B 'c'"], "", *WORDS, cwd=folder)
    assert (code, err) == (0, "")
    assert len(launched.notes()) == 3
    for note in launched.notes().values():
        assert note["arguments"] == WORDS
        assert note["environment"]["A"] == "$B 'c'"
        assert note["folder"] == str(folder)


def test_ssh_is_killed(launched):
    flags = ["-n", "2", "-s", "1", *launched.hosts("10.0.0.1", "10.0.0.2")]
    launched.start(flags, GRANDCHILD + SLEEP)
    launched.wait_for(scheduler=1, server=1, worker=2, grandchild=4)
    (ssh,) = (path for path in launched.folder.glob("ssh.*") if path.read_text() == "10.0.0.2")
    os.kill(int(ssh.suffix[1:]), signal.SIGKILL)
    code, _, err = launched.end()
    message = "launch: error: worker 1 on 10.0.0.2 was killed by SIGKILL\n"
    assert (code, err) == (137, message)
    wait_until(lambda: not launched.left(), 5)


def test_a_remote_worker_is_killed(launched):
    flags = ["-n", "2", "-s", "1", *launched.hosts("10.0.0.1", "10.0.0.2")]
    launched.start(flags, GRANDCHILD + SLEEP)
    launched.wait_for(scheduler=1, server=1, worker=2, grandchild=4)
    os.kill(launched.pid("worker1"), signal.SIGSEGV)
    code, _, err = launched.end()
    message = "launch: error: worker 1 on 10.0.0.2 was killed by SIGSEGV\n"
    assert (code, err) == (139, message)
    wait_until(lambda: not launched.left(), 5)


def test_a_host_does_not_answer(launched, monkeypatch):
    monkeypatch.setenv("SILENT_HOST", "10.0.0.2")
    hosts = launched.hosts("10.0.0.1", "10.0.0.2")
    code, out, err = launched.run(["-n", "2", *hosts], SLEEP)
    assert (code, out) == (2, "")
    assert err == (
        f"launch: error: host 10.0.0.2 does not answer {launched.ssh}: "
        "ssh: connect to host 10.0.0.2 port 22: No route to host\n"
    )
    assert not launched.notes()


def test_sshd_lets_in_some_at_once(launched, monkeypatch):
    """As with its MaxStartups: who comes when ten others log in may be dropped."""
    monkeypatch.setenv("MOST_LOG_INS", "10")
    flags = ["-n", "10", "-s", "10", *launched.hosts("10.0.0.1", "10.0.0.2 slots=1")]
    code, out, err = launched.run(flags, "if rank:\n print('here')\n")
    assert (code, err) == (0, "")
    assert sorted(out.splitlines()) == [f"[worker {rank}] here" for rank in range(10)]
    assert len(launched.notes()) == 21


def test_one_fails_while_others_log_in(launched, monkeypatch, capfd):
    monkeypatch.setattr(job, "MOST_LOG_INS", 1)
    flags = ["-n", "2", "-s", "1", *launched.hosts("10.0.0.1")]
    launched.ssh.write_text('#!/bin/sh\nfor last; do :; done\n[ "$last" = true ] || exit 255\n')
    assert main([*flags, "--", "true"]) == 255
    message = "scheduler on 10.0.0.1 left with exit code 255, as ssh does if the host is lost"
    assert capfd.readouterr().err == f"launch: error: {message}\n"


# The host of worker 1 is lost with it.
LOSES_HOST = "if rank == '1':\n open(folder + '/lost-' + os.environ['FAKE_HOST'], 'w').close()\n"


def run_with_a_lost_host(launched, monkeypatch, **seconds):
    for name, value in seconds.items():
        monkeypatch.setattr(launch, name, value)
    command = launched.command(LOSES_HOST + FAILS_ONCE)
    hosts = launched.hosts("10.0.0.1", "10.0.0.2")
    return main(["-n", "2", "-s", "1", "--restart", "1", *hosts, "--", *command])


def test_a_lost_host_comes_back(launched, monkeypatch, capfd):
    monkeypatch.setenv("COMES_BACK", "1")
    assert run_with_a_lost_host(launched, monkeypatch, SECONDS_BETWEEN_TRIES=0.2) == 0
    first, second = capfd.readouterr().err.splitlines()
    assert first == "launch: restart 1 of 1: worker 1 on 10.0.0.2 was killed by SIGKILL"
    assert second.startswith("launch: waiting up to 300 s: host 10.0.0.2 does not answer")
    assert len(launched.notes("worker1")) == 2


def test_a_lost_host_stays_lost(launched, monkeypatch, capfd):
    seconds = {"SECONDS_BETWEEN_TRIES": 0.1, "SECONDS_TO_COME_BACK": 0.5}
    assert run_with_a_lost_host(launched, monkeypatch, **seconds) == 2
    *_, waiting, last = capfd.readouterr().err.splitlines()
    assert waiting.startswith("launch: waiting up to 0.5 s: host 10.0.0.2 does not answer")
    assert last.startswith("launch: error: host 10.0.0.2 does not answer")
    assert len(launched.notes("worker1")) == 1


def test_a_signal_while_a_host_is_lost(launched):
    hosts = launched.hosts("10.0.0.1", "10.0.0.2")
    launched.start(["-n", "2", "-s", "1", "--restart", "1", *hosts], LOSES_HOST + FAILS_ONCE)
    launched.wait_for(worker1=1)
    wait_until(lambda: not launched.left())
    time.sleep(1)
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end()[0] == 143
    assert len(launched.notes("worker1")) == 1


def test_a_host_takes_too_long(tmp_path, monkeypatch):
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nexec sleep 30\n")
    ssh.chmod(0o755)
    monkeypatch.setattr(hosts, "SECONDS_TO_LOG_IN", 0.3)
    with pytest.raises(ValueError, match=r"host a does not .* in 0\.3 s; host b does not"):
        check_hosts(["a", "b"], [str(ssh)])


def test_localhost_needs_no_ssh(launched):
    flags = ["-n", "2", "-s", "1", *launched.hosts("localhost", "127.0.0.1")]
    launched.ssh.unlink()
    assert launched.run(flags, "") == (0, "", "")
    for note in launched.notes().values():
        assert note["environment"]["DMLC_PS_ROOT_URI"] == "127.0.0.1"
        assert note["environment"]["DMLC_INTERFACE"] == "lo"


def test_a_host_that_can_be_no_name(tmp_path, capsys):
    path = tmp_path / "hosts"
    path.write_text("h" * 100)
    assert main(["-n", "1", "--hosts", str(path), "--", "true"]) == 2
    assert capsys.readouterr().err.startswith(f"launch: error: host {'h' * 100} has no address: ")


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("a\nb slots=x\n", "line 2"),
        ("a\n\n# c\nb 4\n", "line 4"),
        ("a slots=0", "line 1"),
        ("a slots=2 b", "line 1"),
        ("slots=2", "line 1"),
        ("-oProxyCommand=id", "line 1"),
        ("a\0b", "line 1"),
        ("# nothing\n\n", "there is no host in it"),
    ],
)
def test_bad_hosts_file(tmp_path, capsys, text, where):
    path = tmp_path / "hosts"
    path.write_text(text)
    assert main(["-n", "1", "--hosts", str(path), "--", "true"]) == 2
    err = capsys.readouterr().err
    assert re.match(rf"launch: error: {re.escape(str(path))}(, |: ){where}", err)
    assert err.count("\n") == 1


def test_read_hosts(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# all\nme@a slots=12 # big\n\n  b\n")
    assert read_hosts(path) == [Host("me@a", 12), Host("b")]


def test_workers_and_servers_are_dealt_out():
    places = deal([Host("a", 1), Host("b"), Host("c", 2)], servers=4, workers=6)
    assert [str(place) for place in places[:3]] == ["scheduler", "server 0", "server 1"]
    assert [place.host for place in places[:1]] == ["a"]
    assert [place.host for place in places[1:5]] == ["a", "b", "c", "a"]
    assert [place.host for place in places[5:]] == ["a", "b", "c", "b", "c", "b"]
    assert [place.rank for place in places[5:]] == list(range(6))


def test_too_few_slots():
    with pytest.raises(ValueError, match="slots for 3 workers, not for 4"):
        deal([Host("a", 1), Host("b", 2)], servers=1, workers=4)


@pytest.mark.parametrize("first", ["localhost", "127.0.0.1", "127.0.1.1"])
def test_the_first_host_must_be_reached(first):
    with pytest.raises(ValueError, match=f"the first host, {first}, .* that the other hosts reach"):
        root_address([Host(first), Host("10.0.0.2")])


def test_a_host_without_an_address():
    with pytest.raises(ValueError, match=r"host nowhere\.invalid has no address"):
        root_address([Host("nowhere.invalid")])
