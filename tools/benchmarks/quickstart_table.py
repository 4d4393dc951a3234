"""Lay out the quickstart's losses in one table: what they are worth and what they cost.

python -m dsoftmax.tools.benchmarks.quickstart_table verification.json loss_layer.json
"""

from __future__ import annotations

import json
import sys
from typing import Any, Sequence

NAMES = {"dsoftmax": "D-Softmax", "nsoftmax": "NormFace (nsoftmax)"}


def quickstart_table(verified: Sequence[dict[str, Any]], measured: Sequence[dict[str, Any]]) -> str:
    """Lay out one line per loss.

    Parameters
    ----------
    verified : sequence of dict
        The ``results`` of ``verification --json``, one per loss.
    measured : sequence of dict
        The ``results`` of ``bench_loss --json``, of the same losses in the same order.
    """
    if len(verified) != len(measured):
        raise ValueError(f"{len(verified)} losses were verified and {len(measured)} were measured")
    columns = ("accuracy", f"TAR at FAR {verified[0]['val']['far']:g}", "loss layer")
    names = [NAMES.get(cost["loss"], cost["loss"]) for cost in measured]
    width = max(map(len, names))
    lines = [" " * width + "".join(f"  {column:>16}" for column in columns)]
    for name, worth, cost in zip(names, verified, measured):
        cells = (
            f"{100 * worth['accuracy_flip']:.1f} %",
            f"{100 * worth['val']['tar']:.1f} %",
            f"{1000 * cost['seconds']:.1f} ms",
        )
        lines.append(f"{name:{width}}" + "".join(f"  {cell:>16}" for cell in cells))
    return "\n".join(lines)


def _results(path: str) -> list[dict[str, Any]]:
    with open(path, encoding="utf-8") as file:
        return json.load(file)["results"]


if __name__ == "__main__":
    print(quickstart_table(*map(_results, sys.argv[1:])))
