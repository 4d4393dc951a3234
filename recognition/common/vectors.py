"""Arithmetic of many vectors at once."""

from __future__ import annotations

import numpy as np


def normalized(vectors: np.ndarray) -> np.ndarray:
    """Scale vectors (n, D) to length 1, leaving zeros as they are; refuse NaN and infinity."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    bad = np.flatnonzero(~np.isfinite(norms))
    if bad.size:
        raise ValueError(
            f"{bad.size} of {len(vectors)} embeddings hold NaN or infinite numbers; the first is "
            f"number {bad[0]}"
        )
    return vectors / np.where(norms > 0, norms, 1)
