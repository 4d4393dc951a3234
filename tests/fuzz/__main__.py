"""Damage files of every format, and check that each is refused by a clear error, or read.

python -m tests.fuzz --mutants 20000
python -m tests.fuzz --formats symbol,params --mutants 500 --seed 7
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor

os.environ.setdefault("OMP_NUM_THREADS", "1")  # children are forks, which OpenMP's threads outlive

from tests.fuzz.campaign import run
from tests.fuzz.formats import FORMATS


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--mutants", type=int, default=1000, help="of all formats together")
    parser.add_argument("--formats", help="some of them, with commas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    names = args.formats.split(",") if args.formats else list(FORMATS)
    each = -(-args.mutants // len(names))
    failures = []
    with ThreadPoolExecutor(args.processes) as pool:
        jobs = {name: pool.submit(run, name, range(each), args.seed) for name in names}
        for name, job in jobs.items():
            outcome = job.result()
            failures += outcome.failures
            print(
                f"{name}: {each} mutants, {outcome.read} read, {outcome.refused} refused, "
                f"{len(outcome.failures)} not handled",
                flush=True,
            )
    for failure in failures:
        print(failure)
    print(f"{each * len(names)} mutants with the seed {args.seed}, {len(failures)} not handled")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
