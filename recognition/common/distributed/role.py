"""Which part of a job this process is, by the environment its launcher gave it."""

from __future__ import annotations

import os


def is_worker() -> bool:
    """Say whether this process trains, rather than serves those that do."""
    return os.environ.get("DMLC_ROLE", "worker") == "worker"
