"""Ends a script with a sentence, in place of a traceback, if its Python has no dsoftmax.

Scripts import it first: Python looks for modules in the folder of a script before all others. The
folders `eval` and `recognition` link to it.
"""

import importlib.util
import sys

if importlib.util.find_spec("dsoftmax") is None:
    print(
        f"error: dsoftmax is not installed for {sys.executable}: run `. .venv/bin/activate` if "
        "`bash recognition/quickstart.sh` or `bash tests/run.sh` has made that environment, or "
        "install it: `pip install -e '.[cpu]'`.",
        file=sys.stderr,
    )
    sys.exit(2)
