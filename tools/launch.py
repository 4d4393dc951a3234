r"""Start a training of many processes on MXNet's parameter server, here or on several hosts.

    python tools/launch.py -n 2 -s 2 -- python -u recognition/train.py --kvstore dist_sync
    python tools/launch.py -n 8 --hosts hosts.txt --restart 3 -- \
        python -u train.py --kvstore dist_sync

The command after -- runs once as the scheduler, once per server and once per worker; DMLC_ROLE
says which one a process is. If one of them dies, or if no worker gets any further, all are stopped.
"""

from __future__ import annotations

if not __package__:
    import require_dsoftmax

import argparse
import math
import shlex
import shutil
import sys
import time
from typing import Callable, Sequence

from dsoftmax.recognition.common.cli import command, make_parser
from dsoftmax.recognition.common.stopping import lasting_output
from dsoftmax.tools.launcher.hosts import (
    LOCAL,
    SSH_OPTIONS,
    Host,
    check_hosts,
    find_port,
    find_silent_hosts,
    read_hosts,
    root_address,
)
from dsoftmax.tools.launcher.job import SECONDS_BETWEEN_POLLS, Job, Signals, say
from dsoftmax.tools.launcher.layout import Layout
from dsoftmax.tools.launcher.process import Failure

REFUSED = (2, 126, 127)  # bad flags or data, or a command that can't run: it would fail again
SECONDS_TO_COME_BACK = 300  # for a lost host, before a restart
SECONDS_BETWEEN_TRIES = 5
MOST = 10_000  # workers or servers: a slip of the finger must not fill the memory with their places


def wait_for_hosts(names: Sequence[str], ssh: Sequence[str], signals: Signals) -> dict[str, str]:
    """Wait until lost hosts answer again, but not for long; return those that still don't."""
    until = time.monotonic() + SECONDS_TO_COME_BACK
    is_announced = False
    while not signals.first:
        silent = find_silent_hosts(names, ssh)
        if not silent or time.monotonic() > until:
            return silent
        if not is_announced:
            say(f"waiting up to {SECONDS_TO_COME_BACK:g} s: {'; '.join(silent.values())}")
        is_announced = True
        pause = time.monotonic() + SECONDS_BETWEEN_TRIES
        while time.monotonic() < pause and not signals.first:
            time.sleep(SECONDS_BETWEEN_POLLS)
    return {}


def lay_out_again(
    layout: Layout, failed: Failure, keeps_failing: bool, silent: dict[str, str]
) -> Layout:
    """Leave out what the job has lost, if it can go on with the rest.

    Parameters
    ----------
    layout : Layout
        As it was.
    failed : Failure
    keeps_failing : bool
        Whether the same process failed in the start before, too.
    silent : dict of str to str
        Hosts that are lost, each with the reason.

    Raises
    ------
    ValueError
        If a host is lost and the job can't do without it.
    """
    if silent:
        rest = layout.without_hosts(silent)
        if rest is None:
            raise ValueError(
                f"{'; '.join(silent.values())}; the job needs its first host and "
                f"{layout.fewest} workers"
            )
        left_out = f"host{'s' if len(silent) > 1 else ''} {', '.join(silent)}"
    else:
        rest = layout.without_worker(failed.place) if keeps_failing else None
        left_out = f"{failed.place}, which failed twice in a row"
    if rest is None:
        return layout
    say(f"going on with {rest.workers} of {layout.workers} workers, without {left_out}")
    return rest


def launch(args: argparse.Namespace, words: Sequence[str], signals: Signals) -> int:
    """Run a job, and again after a failure if the flags say so.

    Parameters
    ----------
    args : argparse.Namespace
        The flags.
    words : sequence of str
        The command.
    signals : Signals
        Signals that the launcher received.

    Returns
    -------
    int
        0, the exit code of the process that failed, 124 if the job stalled, or 128 plus the number
        of a signal.
    """
    hosts = read_hosts(args.hosts) if args.hosts else [Host("localhost")]
    address = root_address(hosts)
    layout = Layout(hosts, args.workers, args.servers, args.min_workers or args.workers)
    extra = dict(args.env)
    if layout.uses_this_host and not shutil.which(words[0], path=extra.get("PATH")):
        raise ValueError(f"{words[0]}: there is no such command here")
    ssh = [*shlex.split(args.ssh), *SSH_OPTIONS]
    interface = args.interface or ("" if layout.elsewhere else "lo")
    if interface:
        extra = {"DMLC_INTERFACE": interface, **extra}
    check_hosts(layout.elsewhere, ssh)
    restarts, failed_before = 0, None
    while True:
        if hosts[0].name in LOCAL:
            port = find_port(address, args.port)
        else:  # one that is free here is likely to be free there
            port = args.port or find_port("", None)
        environment = {
            "PYTHONUNBUFFERED": "1",
            **extra,
            "DMLC_PS_ROOT_URI": address,
            "DMLC_PS_ROOT_PORT": str(port),
            "DMLC_NUM_SERVER": str(layout.servers),
            "DMLC_NUM_WORKER": str(layout.workers),
        }
        patience = args.stall_timeout
        failed = Job(layout.places, words, environment, ssh, signals, args.grace, patience).run()
        if signals.first:
            return 128 + signals.first
        if failed is None:
            return 0
        if restarts == args.restart or failed.code in REFUSED:
            lines = "".join(f"\n  {line}" for line in failed.complaints)
            say(f"error: {failed.how}{'; its last lines on stderr:' if lines else ''}{lines}")
            return failed.code
        restarts += 1
        say(f"restart {restarts} of {args.restart}: {failed.how}")
        silent = wait_for_hosts(layout.elsewhere, ssh, signals)
        keeps_failing = failed.place is not None and failed.place == failed_before
        rest = lay_out_again(layout, failed, keeps_failing, silent)
        failed_before = failed.place if rest is layout else None
        layout = rest
        if "--resume" not in words:
            words = [*words, "--resume", "auto"]  # it may have failed before its first state


def whole(least: int, most: float = math.inf) -> Callable[[str], int]:
    """Make a parser of whole numbers in a range."""

    def parse(text: str) -> int:
        if text.isdecimal() and least <= int(text) <= most:
            return int(text)
        limits = f"of {least} or more" if most == math.inf else f"from {least} to {most}"
        raise argparse.ArgumentTypeError(f"a whole number {limits} is needed, not {text!r}")

    return parse


def pair(text: str) -> tuple[str, str]:
    """Parse a flag's ``NAME=VALUE``."""
    name, sign, value = text.partition("=")
    if not sign or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"NAME=VALUE is needed, not {text!r}")
    return name, value


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = make_parser("launch", __doc__, usage="%(prog)s [flags] -- command")
    job = parser.add_argument_group("job")
    job.add_argument(
        "-n", "--workers", type=whole(1, MOST), required=True, help="number of processes that train"
    )
    job.add_argument(
        "-s",
        "--servers",
        type=whole(1, MOST),
        help="number of processes that hold the parameters; by default as many as workers",
    )
    job.add_argument(
        "--restart",
        type=whole(0),
        default=0,
        metavar="N",
        help="after a failure, start again with --resume auto, up to N times",
    )
    job.add_argument(
        "--min-workers",
        type=whole(1),
        metavar="M",
        help="let restarts go on without lost hosts, and without a worker that failed twice in a "
        "row, while M workers are left; the first host must stay. By default all are needed",
    )
    job.add_argument(
        "--stall-timeout",
        type=whole(0),
        default=300,
        metavar="SECONDS",
        help="if no worker finishes a step or gets on with verifying, saving or loading for so "
        "long, say who holds the others up and stop all, as after a failure; 0: wait forever",
    )
    job.add_argument(
        "--grace",
        type=whole(0),
        default=60,
        metavar="SECONDS",
        help="time to save and leave after SIGTERM or Ctrl-C",
    )
    network = parser.add_argument_group("network")
    network.add_argument(
        "--hosts",
        metavar="FILE",
        help="one host per line, slots=K after it for at most K workers; without it all run here",
    )
    network.add_argument(
        "--ssh", default="ssh", metavar="COMMAND", help="how to reach them, as 'ssh -p 2222'"
    )
    network.add_argument(
        "--port", type=whole(1, 65535), help="the scheduler's; by default a free one"
    )
    network.add_argument(
        "--interface", metavar="NAME", help="the network interface; by default lo if all run here"
    )
    network.add_argument(
        "--env",
        type=pair,
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME=VALUE",
        help="environment variables for all processes; other hosts get no others",
    )
    return parser


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the flags before ``--``; ``args.command`` is what follows."""
    argv = sys.argv[1:] if argv is None else argv
    end = argv.index("--") if "--" in argv else len(argv)
    parser = build_parser()
    args = parser.parse_args(argv[:end])
    args.command = argv[end + 1 :]
    if not args.command:
        parser.error("the command to run is missing: it follows --")
    if args.min_workers and not args.restart:
        parser.error("--min-workers says how restarts go on: add --restart N")
    if args.min_workers and args.min_workers > args.workers:
        parser.error(f"--min-workers {args.min_workers} is more than --workers {args.workers}")
    return args


@command(parse=parse)
def main(args: argparse.Namespace) -> int:
    """Run the command."""
    with Signals() as signals, lasting_output():
        return launch(args, args.command, signals)


if __name__ == "__main__":
    sys.exit(main())
